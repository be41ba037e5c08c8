"""The memory and runtime benchmarks: python -m benchmarks."""

import os

# The profiler that measures memory logs each start and stop, across the progress display; torch reads this on import.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
