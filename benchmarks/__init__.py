"""The memory and runtime benchmarks: python -m benchmarks."""
