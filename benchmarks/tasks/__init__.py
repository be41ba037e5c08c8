"""The paper's three tasks end to end: `python -m benchmarks train` runs one, `python -m benchmarks accuracy` all tables."""
