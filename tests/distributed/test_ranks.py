"""All ranks raise an error that only one of them has met."""

import json

import pytest

from tests.support.forked_runs import ForkedRuns


@pytest.mark.slow
def test_all_ranks_raise_the_error_of_the_rank_that_failed(forked_runs: ForkedRuns) -> None:
    run = forked_runs.start([], 2, program="tests.support.failing_actions")
    run.finish()
    for rank in range(2):
        assert json.loads(run.stdout(rank).splitlines()[-1]) == [
            ["RunError", "no room"],
            ["InputError", "a fault", "another one"],
            ["ServerFailedError", "it ended"],
            None,
        ]
