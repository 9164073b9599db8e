"""Benchmarks: each `bench_*.py` prints a table and ends with one JSON line (`result.py`)."""
