"""Helpers of the tests and the benchmarks: tiny models and datasets, fast starts of real ranks, chosen kills."""
