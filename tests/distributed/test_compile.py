"""Compiled layers compute the same as uncompiled ones: for any length, under every parallelism, after a kill."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM

from fabric_train.data.batch import Batch, isolate
from fabric_train.distributed.decoder_layers import compile_layers
from fabric_train.model.attention import VARLEN
from fabric_train.model.hf_model import read_shape
from fabric_train.model.load_weights import load_model
from fabric_train.model.weight_files import CheckpointTensors, open_weights
from fabric_train.training.objective import CrossEntropy
from tests.support.compiler_backend import NO_CODE, RANKS_WITHOUT_CODE
from tests.support.forked_runs import ForkedRuns
from tests.support.kills import RunTimes, Training, train_uninterrupted, train_with_kills
from tests.support.plain_training import GRAD_CLIP, LR, WEIGHT_DECAY, plain_pytorch
from tests.support.rounding import assert_same_checkpoint, num_sums_of_gradient, rounding_tolerance
from tests.support.run_comparison import differences
from tests.support.unequal_rows import LENGTH, ROWS_PER_WINDOW, metrics, write_model, write_rows
from tests.support.varlen_kernel import varlen_kernel_on_cpu

pytestmark = pytest.mark.slow

LENGTHS = (24, 17, 40, 9, 33)
# the third window is short and ends the epoch
NUM_ROWS = 19
NUM_STEPS = 4
SETTINGS = {
    "accelerator": "cpu",
    "precision": "32-true",
    "number_epochs": 99,
    "max_step": NUM_STEPS,
    "total_batch_size": ROWS_PER_WINDOW,
    "micro_batch_size": 1,
    "eval_batch_size": 1,
    "eval_iters": 2,
    "save_step_interval": 2,
    "keep_checkpoints": 2,
    "lr": LR,
    "grad_clip": GRAD_CLIP,
    "weight_decay": WEIGHT_DECAY,
    "num_workers": 0,
    "eval_at_start": "false",
    "loggers": "csv",
}


@pytest.mark.usefixtures("settings_as_they_were")
def test_layers_are_compiled_once_for_rows_of_many_lengths(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=NO_CODE))
    model: Any = load_model(read_shape(str(tiny_model_dir)), torch.float32).train()
    batches = []
    for length in LENGTHS:
        ids = torch.randint(3, 1000, (2, length), generator=torch.Generator().manual_seed(0))
        batches.append(Batch(ids, ids))
    expected = [loss_and_gradients(model, batch) for batch in batches]

    compile_layers(model.model.layers, any_length=True, budget=0.3)
    counters.clear()
    num_graphs = []  # compiled so far, after each batch
    for batch, expected_results in zip(batches, expected, strict=True):
        assert_close(loss_and_gradients(model, batch), expected_results)
        num_graphs.append(counters["stats"]["unique_graphs"])
    assert num_graphs[0] > 0
    assert num_graphs[-1] == num_graphs[0]


@pytest.mark.usefixtures("settings_as_they_were")
def test_all_layers_and_any_documents_share_one_compilation(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=NO_CODE))
    model: Any = load_model(read_shape(str(tiny_model_dir), attention=VARLEN), torch.float32).train()
    assert len(model.model.layers) > 1
    ids = np.random.default_rng(0).integers(3, 1000, (2, 24))
    batches = []
    for first_starts, second_starts in (([0, 3, 12], [7]), ([0], [10]), ([0, 1, 2, 3, 20], [3, 4, 5, 23])):
        isolated = isolate(ids, ids.copy(), [np.array(first_starts), np.array(second_starts)])
        # all tokens are targets
        batches.append(Batch(isolated.input_ids, isolated.input_ids, isolated.documents))
    with varlen_kernel_on_cpu():
        expected = [loss_and_gradients(model, batch) for batch in batches]
        compile_layers(model.model.layers, any_length=False)
        counters.clear()
        for batch, expected_results in zip(batches, expected, strict=True):
            assert_close(loss_and_gradients(model, batch), expected_results)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@dataclass(frozen=True)
class Derived:
    """The sum of a batch's losses, and its gradient by parameter."""

    loss: float
    gradients: dict[str, torch.Tensor]


def loss_and_gradients(model: Any, batch: Batch) -> Derived:
    model.zero_grad()
    loss = CrossEntropy().loss(model, batch).total
    loss.backward()
    return Derived(loss.item(), {name: weight.grad.clone() for name, weight in model.named_parameters()})


def assert_close(derived: Derived, expected: Derived) -> None:
    assert derived.loss == pytest.approx(expected.loss, rel=1e-6)
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(derived.gradients[name], gradient, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------- whole runs
# All rows have one shape and are packed: their kernels are compiled once, and then come from torch's cache.


class CompiledRuns:
    """Runs of a small model, compiled or not, which are compared with plain PyTorch and with each other."""

    def __init__(self, folder: Path, runs: ForkedRuns) -> None:
        self.folder = folder
        self.runs = runs
        self.model = write_model(folder / "model")
        self.tokens = write_rows(folder / "rows", num_rows=NUM_ROWS, packed_every=1)
        rows = datasets.load_from_disk(folder / "rows")["train"]
        splits = {"train": rows, "validation": rows.select(range(1, 4))}
        datasets.DatasetDict(splits).save_to_disk(str(folder / "with-validation"))

    def training(self, num_ranks: int, **options: object) -> Training:
        """Return a run without evaluation."""
        arguments = {"model_name": self.model, "train_data_dir": self.tokens, "compile": "true", **SETTINGS, **options}
        return Training(arguments, num_ranks)

    def of_one_device(self, **options: object) -> Training:
        return self.training(1, parallelism="single", **options)

    def evaluated(self, num_ranks: int, **options: object) -> Training:
        """Return a run that is evaluated at the end of each epoch."""
        return self.training(num_ranks, train_data_dir=self.folder / "with-validation", **options)

    def assert_equals_plain_pytorch(self, run: Path) -> None:
        losses, norms = plain_pytorch(self.model, self.tokens, ROWS_PER_WINDOW, NUM_STEPS)
        assert [float(row["train_loss"]) for row in metrics(run)] == pytest.approx(losses, rel=1e-5)
        assert [float(row["grad_norm"]) for row in metrics(run)] == pytest.approx(norms, rel=1e-5)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory, forked_runs: ForkedRuns) -> Iterator[CompiledRuns]:
    runs = forked_runs.with_imports(tmp_path_factory.mktemp("runs"), ["tests.support.warm_compiler"])
    yield CompiledRuns(tmp_path_factory.mktemp("compiled"), runs)
    runs.close()


@pytest.fixture(scope="module")
def on_one_device(compiled: CompiledRuns) -> tuple[Path, RunTimes]:
    """A run whose layers are C++, and how long it took."""
    run = compiled.folder / "single"
    return run, train_uninterrupted(compiled.runs, compiled.of_one_device(), run)


@pytest.fixture(scope="module")
def uncompiled(compiled: CompiledRuns) -> Path:
    """A run on one device, with evaluations."""
    run = compiled.folder / "uncompiled"
    train_uninterrupted(compiled.runs, compiled.evaluated(1, parallelism="single", compile="false"), run)
    return run


def last_tensors(run: Path) -> dict[str, torch.Tensor]:
    """Return weights and optimizer states of the last checkpoint."""
    checkpoint = run / "checkpoints" / f"step-{NUM_STEPS:08d}"
    optimizer = CheckpointTensors(sorted((checkpoint / "optimizer").glob("*.safetensors")))
    return {name: tensors.read(name) for tensors in (open_weights(checkpoint), optimizer) for name in tensors}


def test_compiled_run_has_the_metrics_and_checkpoint_of_an_uncompiled_one(
    compiled: CompiledRuns, on_one_device: tuple[Path, RunTimes], uncompiled: Path
) -> None:
    run, _ = on_one_device
    compiled.assert_equals_plain_pytorch(run)
    ours = last_tensors(run)
    expected_tensors = last_tensors(uncompiled)
    num_sums = num_sums_of_gradient(AutoConfig.from_pretrained(compiled.model), LENGTH, ROWS_PER_WINDOW * LENGTH)
    assert_same_checkpoint(ours, expected_tensors, LR, NUM_STEPS, rounding_tolerance(num_sums))
    checkpoint = run / "checkpoints" / f"step-{NUM_STEPS:08d}"
    weights = open_weights(checkpoint)
    for name, tensor in AutoModelForCausalLM.from_pretrained(checkpoint).state_dict().items():
        assert torch.equal(tensor, weights.read(name))


def test_killed_compiled_run_resumes_bit_for_bit(
    compiled: CompiledRuns, on_one_device: tuple[Path, RunTimes], tmp_path: Path
) -> None:
    whole, course = on_one_device
    moments = ["optimizer step, half the parameters changed"]
    kills = train_with_kills(
        compiled.runs, compiled.of_one_device(), tmp_path / "run", moments, random.Random(0), course
    )
    assert len(kills) == 1
    assert differences(tmp_path / "run", whole) == []


def train_ranks(compiled: CompiledRuns, training: Training, run: Path) -> None:
    """Train on two ranks, and compare with plain PyTorch."""
    compiled.runs.start(training.line(run, resume=False), 2, before=RANKS_WITHOUT_CODE).finish()
    compiled.assert_equals_plain_pytorch(run)
    expected = open_weights(compiled.model)
    weights = open_weights(run / "checkpoints" / f"step-{NUM_STEPS:08d}")
    assert {name: weights.shape(name) for name in weights} == {name: expected.shape(name) for name in expected}


@pytest.mark.parametrize(
    "options",
    [
        {"parallelism": "fsdp"},
        {"parallelism": "fsdp2", "state_dict_type": "sharded"},
        {"parallelism": "fsdp2", "tensor_parallel_size": 2},
        {"parallelism": "fsdp2", "context_parallel_size": 2},
    ],
    ids=["fsdp", "fsdp2", "tensor parallel", "context parallel"],
)
def test_compiled_ranks_equal_plain_pytorch(compiled: CompiledRuns, tmp_path: Path, options: dict[str, object]) -> None:
    train_ranks(compiled, compiled.training(2, **options), tmp_path / "run")


def test_compiled_replicas_have_the_losses_of_pytorch_and_no_compiler(
    compiled: CompiledRuns, uncompiled: Path, tmp_path: Path
) -> None:
    train_ranks(compiled, compiled.evaluated(2, parallelism="ddp"), tmp_path / "run")
    found, expected = ([row["val_loss"] for row in metrics(run)] for run in (tmp_path / "run", uncompiled))
    assert any(expected)
    assert [float(loss or 0) for loss in found] == pytest.approx([float(loss or 0) for loss in expected], rel=1e-5)
