"""The paper's three tasks: `python -m benchmarks train` runs one, `python -m benchmarks accuracy` all tables."""
