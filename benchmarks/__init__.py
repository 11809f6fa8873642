"""Benchmarks of the programs against the usual tools for the same work. See README.md."""
