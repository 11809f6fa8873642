"""No step is taken on a loss or gradient that is not finite, and the user is told the step, the ranks and the rows."""

import json
import re
from pathlib import Path

import pytest
from forked_runs import ForkedRuns
from safetensors.torch import load_file
from unequal_rows import NUM_ROWS, ROWS_PER_WINDOW, argv, metrics, write_model, write_rows

from fabric_train.batches import WindowOrder

pytestmark = pytest.mark.slow

SPOILED_TOKEN = 1  # its embedding is infinite
ORDER = WindowOrder(NUM_ROWS, ROWS_PER_WINDOW, 1, world_size=2, rank=0, seed=0)
WITHOUT_LABELS, WITH_ALL_LABELS = 0, 2  # rows by their number modulo 4


def window(step: int) -> list[int]:
    """The rows of a step, in their order."""
    return ORDER.rows_in(*divmod(step - 1, ORDER.windows_per_epoch)).tolist()


def rows_of_kind(step: int, kind: int) -> tuple[int, ...]:
    return tuple(row for row in window(step) if row % 4 == kind)


def rank_of(step: int, row: int) -> int:
    """Which of two ranks has a row, in micro-batches of one."""
    return window(step).index(row) % 2


def tensors(run: Path, step: int) -> dict[str, bytes]:
    """The bits of a checkpoint's weights and moments."""
    files = sorted((run / "checkpoints" / f"step-{step:08d}").rglob("*.safetensors"))
    return {
        f"{file.name} {name}": tensor.numpy().tobytes() for file in files for name, tensor in load_file(file).items()
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("spoiled") / "model", SPOILED_TOKEN)


@pytest.mark.parametrize("parallelism", ["fsdp", "ddp"])
def test_a_run_stops_before_the_step_with_a_loss_that_is_not_finite_and_has_saved_the_state_before_it(
    forked_runs: ForkedRuns, tmp_path: Path, model: Path, parallelism: str
) -> None:
    rows = rows_of_kind(3, WITH_ALL_LABELS)
    tokens = write_rows(tmp_path / "tokens", rows, SPOILED_TOKEN)
    run, good = tmp_path / "run", tmp_path / "good"
    options = {"parallelism": parallelism, "devices": 2, "lr_schedule": "constant"}
    ended = forked_runs.start(argv(model, tokens, run, max_step=6, **options), 2)
    without = forked_runs.start(argv(model, tokens, good, max_step=2, **options), 2)
    assert ended.wait() == [1, 1]
    without.finish()
    (said,) = ended.stderr(0).splitlines()
    assert said.startswith("error: step 3: the loss is nan, from rows ")
    named = re.findall(r"([\d, ]+) \(rank (\d)\)", said)
    assert {(int(row), int(rank)) for listed, rank in named for row in listed.strip(", ").split(", ")} == {
        (row, rank_of(3, row)) for row in rows
    }
    assert str(run / "checkpoints" / "step-00000002") in said
    assert not ended.stderr(1)
    assert [row["step"] for row in metrics(run)] == ["1", "2"]
    assert tensors(run, 2) == tensors(good, 2)


def test_at_the_first_step_there_is_nothing_to_save(forked_runs: ForkedRuns, tmp_path: Path, model: Path) -> None:
    rows = rows_of_kind(1, WITH_ALL_LABELS)[:1]
    tokens = write_rows(tmp_path / "tokens", rows, SPOILED_TOKEN)
    run = forked_runs.start(argv(model, tokens, tmp_path / "run", max_step=2), 1)
    assert run.wait() == [1]
    assert run.stderr().splitlines() == [
        f"error: step 1: the loss is nan, from rows {rows[0]} (rank 0) of {tokens / 'train'}; "
        "no step was taken before it, so nothing is saved"
    ]
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_gradient_alone_that_is_not_finite_names_the_windows_rows(
    forked_runs: ForkedRuns, tmp_path: Path, model: Path
) -> None:
    # a row without labels costs nothing, and its gradient is 0 times infinity
    tokens = write_rows(tmp_path / "tokens", rows_of_kind(2, WITHOUT_LABELS)[:1], SPOILED_TOKEN)
    run = forked_runs.start(argv(model, tokens, tmp_path / "run", max_step=3), 1)
    assert run.wait() == [1]
    (said,) = run.stderr().splitlines()
    rows = ", ".join(map(str, window(2)))
    wanted = f"error: step 2: the gradient norm is nan and every loss finite; the window is rows {rows} (rank 0) of "
    assert said.startswith(wanted)
    assert (tmp_path / "run" / "checkpoints" / "step-00000001").is_dir()


def test_a_step_left_out_touches_no_weight_and_is_counted_and_the_run_resumes_exactly(
    forked_runs: ForkedRuns, tmp_path: Path, model: Path
) -> None:
    tokens = write_rows(tmp_path / "tokens", rows_of_kind(3, WITH_ALL_LABELS)[:1], SPOILED_TOKEN)
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    options = {"parallelism": "fsdp2", "devices": 2, "max_step": 6, "save_step_interval": 1, "on_nonfinite": "skip"}
    run = forked_runs.start(argv(model, tokens, whole, **options), 2)
    run.finish()
    assert tensors(whole, 3) == tensors(whole, 2) != tensors(whole, 4)
    assert [row["skipped_steps"] for row in metrics(whole)] == ["0", "0", "1", "1", "1", "1"]
    assert metrics(whole)[2]["train_loss"] == "nan"
    state = json.loads((whole / "checkpoints" / "step-00000006" / "trainer.json").read_text())
    assert (state["step"], state["skipped_steps"]) == (6, 1)
    (warning,) = [line for line in run.stdout().splitlines() if line.startswith("warning: step 3: the loss is nan")]
    assert warning.endswith("the step is left out")
    assert "1 step, whose loss" in " ".join(run.stdout().split())

    checkpoint = whole / "checkpoints" / "step-00000003"
    forked_runs.start(argv(model, tokens, resumed, **options, checkpoint=checkpoint), 2).finish()
    names = ("step", "train_loss", "grad_norm", "num_tokens", "skipped_steps")
    assert [[row[name] for name in names] for row in metrics(resumed)] == [
        [row[name] for name in names] for row in metrics(whole)[3:]
    ]
    assert tensors(resumed, 6) == tensors(whole, 6)
