"""An export is the base of another run of our own, which begins with the validation loss that the first ended with."""

from pathlib import Path

import pytest

from tests.support.downstream_uses import OPTIONS, Checked
from tests.support.exports import convert_run
from tests.support.forked_runs import ForkedRuns
from tests.support.short_runs import argv, metrics

pytestmark = [pytest.mark.slow, pytest.mark.downstream]


def test_next_run_begins_with_the_loss_that_the_first_ended_with(
    tmp_path: Path, run: Path, forked_runs: ForkedRuns, checked: Checked
) -> None:
    base = convert_run(forked_runs, tmp_path / "base", "--checkpoint", run, "--dtype", "float32")
    options = {**OPTIONS, "max_step": 1, "eval_at_start": "true", "save_step_interval": 1000}
    forked_runs.start(argv(base, run.parent / "tokens", tmp_path / "next", **options), 1).finish(900)
    ended = metrics(run)[-1]
    begun = metrics(tmp_path / "next")[0]
    assert (ended[0], begun[0]) == (str(OPTIONS["max_step"]), "0")
    assert begun[3] == ended[3]  # val_loss, to the last digit
    what = "fp32 export as `--model_name`: the first validation loss is bit-identical to the exported run's last one"
    checked("Fabric Train", "this version", what)
