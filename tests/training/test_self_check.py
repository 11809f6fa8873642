"""``--self_check true`` on real ranks: it holds where the loop is right, and finds a loop that is wrong."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fabric_train.data.batch import IGNORED_LABEL
from fabric_train.training.self_check import SplitResult, _disagreements, _Row
from tests.support import short_runs
from tests.support.forked_runs import ForkedRuns
from tests.support.unequal_rows import argv, write_model, write_rows

pytestmark = pytest.mark.slow

MEAN_OF_MICRO_BATCHES = """
from fabric_train.training import step
from fabric_train.training import self_check

def wrong(fabric, model, window, objective):
    \"\"\"What weighs every micro-batch the same.\"\"\"
    whole = step.accumulate(fabric, model, window, objective)
    means = whole.summed / whole.counts.clamp(min=1)
    return step.WindowLoss(means, (whole.counts > 0).long())

self_check.accumulate = wrong
"""


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("self-check") / "tokens")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("self-check") / "model")


def test_self_check_holds_where_a_new_adapters_matrices_get_no_gradient(
    forked_runs: ForkedRuns, tmp_path: Path, model: Path, tokens: Path
) -> None:
    run = forked_runs.start(argv(model, tokens, tmp_path / "run", self_check="true", lora_rank=2))
    run.finish()
    check = json.loads((tmp_path / "run" / "self_check.json").read_text())
    assert check["faults"] == []


@pytest.mark.parametrize(
    ("parallelism", "num_ranks", "precision", "tolerance"),
    [
        ("single", 1, "32-true", 1e-5),
        ("fsdp", 2, "32-true", 1e-5),
        ("fsdp2", 2, "32-true", 1e-5),
        ("ddp", 2, "32-true", 1e-5),
        ("fsdp", 2, "bf16-mixed", 2**-8),
        ("ddp", 2, "bf16-true", 2**-7),
        ("fsdp2 context", 2, "32-true", 1e-5),
    ],
)
def test_the_check_holds_and_reports_its_figures(
    forked_runs: ForkedRuns,
    tmp_path: Path,
    model: Path,
    tokens: Path,
    parallelism: str,
    num_ranks: int,
    precision: str,
    tolerance: float,
) -> None:
    options: dict[str, Any] = {"devices": num_ranks, "precision": precision, "self_check": "true"}
    options["parallelism"] = parallelism
    if parallelism == "fsdp2 context":
        options |= {"parallelism": "fsdp2", "context_parallel_size": num_ranks}
    run = forked_runs.start(argv(model, tokens, tmp_path / "run", **options), num_ranks)
    run.finish()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["self_check.json"]
    check = json.loads((tmp_path / "run" / "self_check.json").read_text())
    cuts = [
        "1 row per micro-batch",
        "2 rows per micro-batch",
        "4 rows per micro-batch",
        "4 rows, dealt by their labels",
    ]
    named = [figure["cut"] for figure in check["figures"]]
    assert named[:4] == cuts
    assert named[4].endswith("documents alone")
    num_rows = 4 * num_ranks // int(options.get("context_parallel_size", 1))
    assert (len(check["rows"]), check["tolerance"], check["faults"]) == (num_rows, tolerance, [])
    losses = [figure["loss"] for figure in check["figures"]]
    assert losses == pytest.approx([losses[0]] * 5, rel=tolerance)
    said = " ".join(run.stdout().split())
    assert "passed: loss and gradient agree" in said
    assert f"{losses[0]:.8g}" in said


def test_a_loop_that_weighs_micro_batches_instead_of_tokens_is_found(
    forked_runs: ForkedRuns, tmp_path: Path, model: Path, tokens: Path
) -> None:
    options = {"parallelism": "fsdp", "devices": 2, "self_check": "true"}
    run = forked_runs.start(argv(model, tokens, tmp_path / "run", **options), 2, before=MEAN_OF_MICRO_BATCHES)
    assert run.wait() == [1, 1]
    assert not run.stderr()
    assert "failed:" in run.stdout()
    faults = json.loads((tmp_path / "run" / "self_check.json").read_text())["faults"]
    assert any(fault.startswith("4 rows per micro-batch: loss ") for fault in faults)


def test_a_wrong_loop_is_found_on_rows_with_equal_numbers_of_labels(
    forked_runs: ForkedRuns, tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path
) -> None:
    """Every token of these rows is a label: the check leaves some out, or all means would be the same."""
    words = short_runs.argv(tiny_model_dir, tiny_tokens_dir, tmp_path / "run", self_check="true", loggers=None)
    assert forked_runs.start(words, 1, before=MEAN_OF_MICRO_BATCHES).wait() == [1]
    faults = json.loads((tmp_path / "run" / "self_check.json").read_text())["faults"]
    assert any(fault.startswith("4 rows per micro-batch: loss ") for fault in faults)


@pytest.mark.parametrize(("first", "second"), [(math.nan, math.nan), (math.nan, 2.0), (2.0, math.nan)])
def test_a_loss_that_is_no_number_is_a_fault(first: float, second: float) -> None:
    of_losses = _disagreements([SplitResult("a", first, 1.0), SplitResult("b", second, 1.0)], tolerance=0.1)
    of_norms = _disagreements([SplitResult("a", 1.0, first), SplitResult("b", 1.0, second)], tolerance=0.1)
    assert of_losses[-1].startswith("b: loss ")
    assert of_norms[-1].startswith("b: gradient norm ")
    assert all("nan" in fault for fault in (*of_losses, *of_norms))


def test_weights_that_are_not_finite_are_named(forked_runs: ForkedRuns, tmp_path: Path, tokens: Path) -> None:
    spoiled = write_model(tmp_path / "spoiled", spoiled_token=2)  # which no row holds
    run = forked_runs.start(
        argv(spoiled, tokens, tmp_path / "run", parallelism="fsdp2", devices=2, self_check="true"), 2
    )
    assert run.wait() == [1, 1]
    (fault,) = json.loads((tmp_path / "run" / "self_check.json").read_text())["faults"]
    assert fault.startswith("1 of 21 parameters hold values that are not finite: model.embed_tokens.weight")


def test_a_stream_is_refused_in_a_line(forked_runs: ForkedRuns, tmp_path: Path, tiny_model_dir: Path) -> None:
    (tmp_path / "texts.txt").write_text("some text\n")
    line = ["--model_name", tiny_model_dir, "--streaming_dataset", tmp_path / "texts.txt", "--max_step", 1]
    run = forked_runs.start([*line, "--output_dir", tmp_path / "run", "--self_check", "true"], 1)
    assert run.wait() == [2]
    (said,) = run.stderr().splitlines()
    assert said.startswith("error: --self_check true needs a token dataset, not --streaming_dataset")
    assert not (tmp_path / "run").exists()


def test_equal_figures_do_not_differ_even_if_they_are_not_finite() -> None:
    here = SplitResult("one", math.inf, 2.0)
    there = SplitResult("two", math.inf, 1.0)
    assert here.differences(there) == (0.0, 1.0)


def test_a_thinned_row_keeps_the_first_quarter_of_its_targets() -> None:
    row = _Row(np.arange(9), np.arange(100, 109), np.zeros(1, np.int64))
    kept = row.thinned().labels
    assert kept.tolist() == [100, 101, 102, *[IGNORED_LABEL] * 6]  # the first label is no target
    assert row.labels.tolist() == [*range(100, 109)]
