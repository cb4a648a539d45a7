"""Benchmarks for anyone: ``python -m analysis.bench PART``."""
