"""The forked ranks of the benchmarks, for the tests."""

from benchmarks.forked_runs import ROOT, ForkedRun, ForkedRuns

__all__ = ["ROOT", "ForkedRun", "ForkedRuns"]
