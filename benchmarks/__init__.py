"""Benchmarks: per op, per decode step, end to end. Results are kept in benchmarks/results."""
