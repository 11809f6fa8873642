"""No step uses a loss or gradient that is not finite, and a loss far above the others is reported in one line with its
step, ranks and rows.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from lightning import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from safetensors.torch import load_file
from transformers.modeling_outputs import CausalLMOutput

from fabric_train.data.batch import Batch
from fabric_train.data.step_sampler import Window, WindowOrder
from fabric_train.data.stream_batches import LaneCursor, TextPosition
from fabric_train.distributed.gradients import clip_grad_norm
from fabric_train.training.objective import WindowLoss
from fabric_train.training.statistics import SpikeRule
from fabric_train.training.step import accumulate
from fabric_train.training.step_guard import StepGuard
from tests.support.bigram import Bigram
from tests.support.forked_runs import ForkedRuns
from tests.support.token_datasets import tokenize, write_jsonl
from tests.support.unequal_rows import LENGTH, NUM_ROWS, ROWS_PER_WINDOW, argv, metrics, write_model, write_rows

pytestmark = pytest.mark.slow

SPOILED_TOKEN = 1  # its embedding is infinite
ORDER = WindowOrder(NUM_ROWS, ROWS_PER_WINDOW, 1, world_size=2, rank=0, seed=0)
# rows by their number modulo 4
WITHOUT_LABELS = 0
WITH_ALL_LABELS = 2


def window(step: int) -> list[int]:
    """The rows of a step, in their order."""
    return ORDER.rows_of(step).tolist()


def rows_of_kind(step: int, kind: int) -> tuple[int, ...]:
    return tuple(row for row in window(step) if row % 4 == kind)


def rank_of(step: int, row: int) -> int:
    """Which of two ranks has a row, in micro-batches of one."""
    return window(step).index(row) % 2


def tensors(run: Path, step: int) -> dict[str, bytes]:
    """The bits of a checkpoint's weights and moments, by the names of file and tensor."""
    bits = {}
    for file in (run / "checkpoints" / f"step-{step:08d}").rglob("*.safetensors"):
        for name, tensor in load_file(file).items():
            bits[f"{file.name} {name}"] = tensor.numpy().tobytes()
    return bits


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("spoiled") / "model", SPOILED_TOKEN)


@pytest.mark.parametrize("parallelism", ["fsdp", "ddp"])
def test_run_stops_before_a_nonfinite_step_and_saves_the_state_before(
    forked_runs: ForkedRuns, tmp_path: Path, model: Path, parallelism: str
) -> None:
    rows = rows_of_kind(3, WITH_ALL_LABELS)
    tokens = write_rows(tmp_path / "tokens", rows, SPOILED_TOKEN)
    failed_dir = tmp_path / "failed"
    short_dir = tmp_path / "short"
    options = {"parallelism": parallelism, "devices": 2, "lr_schedule": "constant"}
    failed_run = forked_runs.start(argv(model, tokens, failed_dir, max_step=6, **options), 2)
    short_run = forked_runs.start(argv(model, tokens, short_dir, max_step=2, **options), 2)
    assert failed_run.wait() == [1, 1]
    short_run.finish()

    # one line of rank 0 names the rows and the ranks that have them, such as "3, 7 (rank 0), 5 (rank 1)"
    (line,) = failed_run.stderr(0).splitlines()
    assert line.startswith("error: step 3: the loss is nan, from rows ")
    assert not failed_run.stderr(1)
    ranks_by_row = {}
    for listed_rows, rank in re.findall(r"([\d, ]+) \(rank (\d)\)", line):
        for row in listed_rows.strip(", ").split(", "):
            ranks_by_row[int(row)] = int(rank)
    assert ranks_by_row == {row: rank_of(3, row) for row in rows}

    # the checkpoint is that of a run that ends before this step
    assert str(failed_dir / "checkpoints" / "step-00000002") in line
    assert [row["step"] for row in metrics(failed_dir)] == ["1", "2"]
    assert tensors(failed_dir, 2) == tensors(short_dir, 2)


def test_at_the_first_step_there_is_nothing_to_save(forked_runs: ForkedRuns, tmp_path: Path, model: Path) -> None:
    rows = rows_of_kind(1, WITH_ALL_LABELS)[:1]
    tokens = write_rows(tmp_path / "tokens", rows, SPOILED_TOKEN)
    run = forked_runs.start(argv(model, tokens, tmp_path / "run", max_step=2), 1)
    assert run.wait() == [1]
    assert run.stderr().splitlines() == [
        f"error: step 1: the loss is nan, from rows {rows[0]} (rank 0) of {tokens / 'train'}; no step was taken "
        "before it, so nothing was saved"
    ]
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_gradient_alone_that_is_not_finite_names_the_windows_rows(
    forked_runs: ForkedRuns, tmp_path: Path, model: Path
) -> None:
    # a row without labels costs nothing, and its gradient is 0 times infinity
    tokens = write_rows(tmp_path / "tokens", rows_of_kind(2, WITHOUT_LABELS)[:1], SPOILED_TOKEN)
    run = forked_runs.start(argv(model, tokens, tmp_path / "run", max_step=3), 1)
    assert run.wait() == [1]
    (line,) = run.stderr().splitlines()
    rows = ", ".join(map(str, window(2)))
    expected = (
        f"error: step 2: the gradient norm is nan, although every loss is finite; the window is rows {rows} (rank 0) "
        "of "
    )
    assert line.startswith(expected)
    assert (tmp_path / "run" / "checkpoints" / "step-00000001").is_dir()


def test_skipped_step_changes_no_weight_and_resumes_exactly(
    forked_runs: ForkedRuns, tmp_path: Path, model: Path
) -> None:
    tokens = write_rows(tmp_path / "tokens", rows_of_kind(3, WITH_ALL_LABELS)[:1], SPOILED_TOKEN)
    whole = tmp_path / "whole"
    resumed = tmp_path / "resumed"
    options = {"parallelism": "fsdp2", "devices": 2, "max_step": 4, "save_step_interval": 1, "on_nonfinite": "skip"}
    run = forked_runs.start(argv(model, tokens, whole, **options), 2)
    run.finish()
    assert tensors(whole, 3) == tensors(whole, 2) != tensors(whole, 4)
    assert [row["skipped_steps"] for row in metrics(whole)] == ["0", "0", "1", "1"]
    assert metrics(whole)[2]["train_loss"] == "nan"
    tokens_per_step = ROWS_PER_WINDOW * LENGTH  # those of the step that is left out count too
    assert [int(row["num_tokens"]) for row in metrics(whole)] == [step * tokens_per_step for step in range(1, 5)]
    state = json.loads((whole / "checkpoints" / "step-00000004" / "trainer.json").read_text())
    assert (state["step"], state["skipped_steps"]) == (4, 1)
    (warning,) = [line for line in run.lines() if line.startswith("warning: step 3: the loss is nan")]
    assert warning.endswith("the step is skipped")
    assert "1 step with a loss" in " ".join(run.stdout().split())

    # resumed after it, the last step is the same
    checkpoint = whole / "checkpoints" / "step-00000003"
    forked_runs.start(argv(model, tokens, resumed, **options, checkpoint=checkpoint), 2).finish()
    (resumed_row,) = metrics(resumed)
    whole_row = metrics(whole)[3]
    for column in ("step", "train_loss", "grad_norm", "num_tokens", "skipped_steps"):
        assert resumed_row[column] == whole_row[column]
    assert tensors(resumed, 4) == tensors(whole, 4)


def test_loss_spike_is_reported_with_its_rows_and_changes_nothing(forked_runs: ForkedRuns, tmp_path: Path) -> None:
    # all rows are the same, which is soon known by heart, but for one in step 45
    order = WindowOrder(num_rows=100, rows_per_window=2, micro_batch_size=1, world_size=2, rank=0, seed=0)
    strange_row = int(order.rows_of(45)[1])
    random = np.random.default_rng(0)
    rows = [random.integers(3, 300, 24).tolist()] * 100
    rows[strange_row] = random.integers(3, 300, 24).tolist()
    tokens = tmp_path / "tokens"
    model = write_model(tmp_path / "model")
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"input_ids": rows})}).save_to_disk(str(tokens))
    options = {"parallelism": "ddp", "devices": 2, "total_batch_size": 2, "max_step": 48, "lr": 1e-2}
    run = forked_runs.start(argv(model, tokens, tmp_path / "run", **options), 2)
    run.finish()
    (warning,) = [line for line in run.lines() if line.startswith("warning:")]
    loss = float(metrics(tmp_path / "run")[44]["train_loss"])
    assert warning.startswith(f"warning: step 45: loss {loss:.4f}, while the median of the last steps is ")
    assert f"highest in rows {strange_row} (rank 1) of {tokens / 'train'}" in warning
    assert [row["step"] for row in metrics(tmp_path / "run")] == [str(step) for step in range(1, 49)]
    assert metrics(tmp_path / "run")[-1]["skipped_steps"] == "0"


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_no_spike_and_a_jump_is_one_however_long_it_lasts(seed: int) -> None:
    # losses that fall from 6 to 2 with noise are no spikes
    steps = np.arange(1000)
    noise = np.random.default_rng(seed).normal(0, 0.2, 1000)
    falling_losses = 2 + 4 * np.exp(-steps / 100) + noise
    rule = SpikeRule()
    for loss in falling_losses:
        assert rule.usual_before_spike(loss) is None

    # a jump is a spike at its first step alone, and after it has ended, the next one is
    assert rule.usual_before_spike(6.0) == pytest.approx(2.0, abs=0.2)
    assert rule.usual_before_spike(7.0) is None
    assert rule.usual_before_spike(6.5) is None
    assert rule.usual_before_spike(2.1) is None
    assert rule.usual_before_spike(6.0) is not None


def test_rows_of_a_stream_are_named_by_lane_and_document() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    ids = torch.tensor([[0, 1, 2]])
    position = TextPosition(epoch=3, document=17)
    cursors = np.array([[lane, *LaneCursor(position, position, "0" * 32, (5, 7)).numbers()] for lane in range(2)])
    window = Window(
        step=4,
        epoch=3,
        ends_epoch=False,
        rows=np.arange(2),
        micro_batch_size=1,
        batches=[Batch(ids, ids)] * 2,
        cursors=cursors,
    )
    losses = WindowLoss(torch.tensor([[1.0, math.nan]], dtype=torch.float64), torch.tensor([[2, 2]]))
    guard = StepGuard(fabric, "the stream", print)
    verdict = guard.check(window, losses.mean, torch.tensor(1.0), losses.summed[0], lambda: losses)
    assert verdict.fault == "step 4: the loss is nan, from rows 1 up to document 17 of pass 3 (rank 0) of the stream"


def test_fp16_overflow_is_left_to_the_scaler_an_infinite_loss_is_not() -> None:
    class Steep(Bigram):
        """Its first gradients are so large that they overflow with a scale that is a number itself."""

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> CausalLMOutput:
            return CausalLMOutput(logits=16 * self.table(input_ids))

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    precision = MixedPrecision("16-mixed", "cpu", scaler)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[precision])
    model = fabric.setup_module(Steep())
    optimizer: Any = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1.0))
    guard = StepGuard(fabric, "rows", print)
    ids = torch.tensor([[0, 1, 2]])
    window = Window(step=1, epoch=0, ends_epoch=False, rows=np.arange(1), micro_batch_size=1, batches=[Batch(ids, ids)])

    def step() -> str | None:
        """Take a step, or leave it out and return why."""
        loss = accumulate(fabric, model, window)
        grad_norm = clip_grad_norm(fabric, model, optimizer, 1.0)
        verdict = guard.check(window, loss.mean, grad_norm, torch.zeros(0), lambda: loss)
        if verdict.fault is None:
            optimizer.step()
        else:
            guard.leave_out()
        optimizer.zero_grad()
        return verdict.fault

    # an overflow halves the scale and changes no weight
    assert step() is None
    assert not model.table.weight.any()
    assert scaler.get_scale() == 2.0**126

    # an infinite loss is a fault
    scaler.update(1024.0)
    with torch.no_grad():
        model.table.weight[0] = torch.tensor([0, -torch.inf, 0, 0, 0])
    fault = step()
    assert fault is not None
    assert "the loss is inf" in fault
    assert scaler.get_scale() == 1024.0  # a step that is not taken says nothing of the scale

    # a finite one is not
    with torch.no_grad():
        model.table.weight.zero_()
    assert step() is None
    assert model.table.weight.any()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_documents_with_the_highest_losses_are_named_at_a_spike(
    forked_runs: ForkedRuns, tmp_path: Path, tiny_model_dir: Path, num_ranks: int
) -> None:
    texts = ["the same words again and again"] * 60
    texts[17] = "Zx9 qq vv"
    texts[40] = "jj0 ## kk"
    source = f"es={write_jsonl(tmp_path / 'es.jsonl', texts)}"
    tokenize(tmp_path / "tokens", tiny_model_dir, source, validation_split=0, packing="best_fit")
    options: dict[str, Any] = {"parallelism": "ddp", "devices": num_ranks, "max_step": 3, "lr": 1e-2}
    options |= {"total_batch_size": 64, "micro_batch_size": 4, "eval_at_start": "false"}
    words = argv(tiny_model_dir, tmp_path / "tokens", tmp_path / "run", **options)
    run = forked_runs.start(words, num_ranks, before=SPIKES_AT_STEP_3)
    run.finish()
    (warning,) = [line for line in run.lines() if line.startswith("warning:")]
    documents = warning.partition("; highest mean losses: ")[2]
    lines_and_texts = re.findall(rf"es: {re.escape(str(tmp_path))}/es.jsonl:(\d+) “(.+?)…?”", documents)
    assert len(lines_and_texts) == 3
    assert set(lines_and_texts[:2]) == {("18", "Zx9 qq vv"), ("41", "jj0 ## kk")}


SPIKES_AT_STEP_3 = """
from fabric_train.training.statistics import SpikeRule

def usual_before_spike(self, loss):
    self._recent.append(loss)
    return 1.0 if len(self._recent) == 3 else None

SpikeRule.usual_before_spike = usual_before_spike
"""
