"""A step whose rows have nothing to predict changes no weight, and a validation without targets is refused."""

import json
import shutil
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fabric_train.checkpoint import read_trainer_json
from fabric_train.data.batch import IGNORED_LABEL
from fabric_train.data.step_sampler import WindowOrder
from fabric_train.training.metrics import read_metrics
from tests.support import short_runs
from tests.support.forked_runs import ForkedRuns
from tests.support.programs import option_words
from tests.support.unequal_rows import LENGTH, VOCABULARY, argv, write_model

NUM_ROWS = 40
ROWS_PER_WINDOW = 4
LAST_STEP = 8
OPTIONS = {
    "total_batch_size": ROWS_PER_WINDOW,
    "max_step": LAST_STEP,
    "save_step_interval": 1,
    "weight_decay": 0.5,
    "lr": 0.01,
    "loggers": "tensorboard",
}
NOTE = "note: step "


def write_rows(folder: Path, supervised: list[int], validation: list[int] | None = None) -> Path:
    """Write a token dataset in which only the rows of these numbers have labels; each row holds one document."""
    input_ids = np.random.default_rng(0).integers(3, VOCABULARY, (NUM_ROWS, LENGTH))
    splits = {}
    for name, rows_with_labels in (("train", supervised), ("validation", validation)):
        if rows_with_labels is not None:
            labels = np.full_like(input_ids, IGNORED_LABEL)
            labels[rows_with_labels] = input_ids[rows_with_labels]
            columns = {"input_ids": input_ids.tolist(), "labels": labels.tolist()}
            splits[name] = datasets.Dataset.from_dict(columns)
    datasets.DatasetDict(splits).save_to_disk(str(folder))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token dataset of which the windows of the steps 1, 4 and 5 have no targets."""
    order = WindowOrder(NUM_ROWS, ROWS_PER_WINDOW, 1, world_size=1, rank=0, seed=0)
    without_targets = {row for step in (1, 4, 5) for row in order.rows_of(step).tolist()}
    supervised = [row for row in range(NUM_ROWS) if row not in without_targets]
    return write_rows(tmp_path_factory.mktemp("rows") / "tokens", supervised)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, forked_runs: ForkedRuns, model: Path, tokens: Path) -> Path:
    """The folder of a run on one rank that was not interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    line = argv(model, tokens, folder, **OPTIONS, parallelism="single", report="true")
    forked_runs.start(line, 1).finish()
    return folder


def tensors(run: Path, step: int) -> dict[str, torch.Tensor]:
    folder = run / "checkpoints" / f"step-{step:08d}"
    return load_file(folder / "model.safetensors") | load_file(folder / "optimizer" / "optimizer.safetensors")


def losses(run: Path) -> list[float | None]:
    return [row.train_loss for row in read_metrics(run / "metrics.csv", LAST_STEP)]


def check_steps(run: Path) -> None:
    """Check that the steps 1, 4 and 5 changed nothing and say so, and that the others did."""
    rows = read_metrics(run / "metrics.csv", LAST_STEP)
    assert [row.step for row in rows if row.train_loss is None] == [1, 4, 5]
    assert [row.step for row in rows if row.grad_norm is None] == [1, 4, 5]
    assert all(row.learning_rate and row.num_tokens == row.step * ROWS_PER_WINDOW * LENGTH for row in rows)
    for step in range(2, LAST_STEP + 1):
        before = tensors(run, step - 1)
        after = tensors(run, step)
        changed = any(not torch.equal(after[name], before[name]) for name in before)
        assert changed == (step not in (4, 5)), step
    lines = (run / "run.log").read_text().splitlines()
    (note,) = [line for line in lines if NOTE in line]
    assert "step 1: " in note
    assert any("not taken" in line and "3 steps" in line for line in lines)


def test_a_step_without_targets_changes_nothing_and_is_counted(whole: Path) -> None:
    check_steps(whole)
    assert (whole / "report.html").is_file()


@pytest.mark.parametrize(
    ("parallelism", "num_ranks"),
    [("fsdp2", 2), *(pytest.param(name, 2, marks=pytest.mark.matrix) for name in ("ddp", "fsdp"))],
)
def test_ranks_leave_out_the_same_steps(
    forked_runs: ForkedRuns,
    tmp_path: Path,
    model: Path,
    tokens: Path,
    whole: Path,
    parallelism: str,
    num_ranks: int,
) -> None:
    run = forked_runs.start(argv(model, tokens, tmp_path / "run", **OPTIONS, parallelism=parallelism), num_ranks)
    run.finish()
    check_steps(tmp_path / "run")
    for loss, expected in zip(losses(tmp_path / "run"), losses(whole), strict=True):
        assert loss == (expected and pytest.approx(expected, rel=1e-5))


@pytest.mark.parametrize("step", [1, 4])
def test_a_run_resumes_bit_for_bit_after_such_a_step(
    forked_runs: ForkedRuns, tmp_path: Path, model: Path, tokens: Path, whole: Path, step: int
) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    for later in range(step + 1, LAST_STEP + 1):
        shutil.rmtree(run / "checkpoints" / f"step-{later:08d}")
    line = argv(model, tokens, run, **OPTIONS, parallelism="single", resume="true")
    resumed = forked_runs.start(line, 1)
    resumed.finish()
    assert losses(run) == losses(whole)
    expected = tensors(whole, LAST_STEP)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors(run, LAST_STEP).items())
    assert not [line for line in resumed.lines() if NOTE in line]  # the start before has it
    assert read_trainer_json(run / "checkpoints" / f"step-{LAST_STEP:08d}").state.steps_without_targets == 3


def test_such_steps_are_replayed(forked_runs: ForkedRuns, whole: Path) -> None:
    words = [str(whole), "--steps", f"1:{LAST_STEP}", "--devices", "1"]
    replay = forked_runs.start(words, 1, program="fabric_train.replay")
    replay.finish()
    assert "passed: every compared value is reproduced" in replay.stdout()


@pytest.mark.parametrize("eval_only", ["false", "true"])
@pytest.mark.parametrize(("supervised", "eval_iters"), [([], None), ([NUM_ROWS - 1], 1)])
def test_a_validation_without_targets_is_refused_before_the_start(
    forked_runs: ForkedRuns, tmp_path: Path, model: Path, supervised: list[int], eval_iters: int | None, eval_only: str
) -> None:
    folder = write_rows(tmp_path / "tokens", list(range(NUM_ROWS)), supervised)
    options = OPTIONS | {"eval_only": eval_only} | ({"eval_iters": eval_iters} if eval_iters else {})
    run = forked_runs.start(argv(model, folder, tmp_path / "run", **options), 1)
    assert run.wait() == [2]
    (line,) = run.stderr(0).splitlines()
    assert ("--eval_iters 1" in line) == bool(eval_iters)
    assert "supervised token" in line
    assert not (tmp_path / "run").exists()


def test_a_stream_of_long_prompts_leaves_steps_out(forked_runs: ForkedRuns, tmp_path: Path, chatml_dir: Path) -> None:
    """Rows of 16 tokens cut each chat: most have its prompt alone."""
    chats = tmp_path / "chats.jsonl"
    row = {"prompt": "Please count up for me: " + "one two three " * 20, "completion": " No."}
    chats.write_text((json.dumps(row) + "\n") * 20)
    model = write_model(tmp_path / "model")
    for file in chatml_dir.iterdir():
        shutil.copy(file, tmp_path / "model")
    given = {**short_runs.SETTINGS, "model_name": chatml_dir, "output_dir": tmp_path / "run", "max_length": 16}
    sizes = {"hidden_width": 32, "num_layers": 1, "num_heads": 2, "intermediate_size": 32, "vocab_size": 2100}
    given |= {"streaming_dataset": chats, "total_batch_size": 1, "micro_batch_size": 1, "save_step_interval": 8}
    given |= {**sizes, "max_context_width": 16, "eval_iters": "null", "parallelism": "single"}
    assert model.is_dir()
    run = forked_runs.start(option_words(given), 1)
    run.finish()
    assert None in losses(tmp_path / "run")
    assert len([line for line in run.lines() if NOTE in line]) == 1
