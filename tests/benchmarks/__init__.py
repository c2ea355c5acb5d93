"""Tests of the benchmarks themselves, on a CPU and a tiny model."""
