"""The same window gives the same loss and gradient norm however it is split: every split against plain PyTorch.

Compiled layers are in ``tests/distributed/test_compile.py``.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest

from fabric_train.data.batch import IGNORED_LABEL
from fabric_train.data.token_dataset import open_dataset
from tests.support.forked_runs import ForkedRuns
from tests.support.plain_training import GRAD_CLIP, LR, WEIGHT_DECAY, plain_pytorch
from tests.support.two_nodes import on_nodes
from tests.support.unequal_rows import argv, metrics, write_model, write_rows

pytestmark = pytest.mark.slow

ROWS_PER_EPOCH = 11  # the last window of an epoch is short, whatever the number of rows in a window
NUM_ROWS = 24  # that a run trains on at most, two epochs
TOLERANCE = 1e-5  # relative, in fp32


@dataclass(frozen=True)
class Split:
    """How a window of ``num_data_ranks * micro_batch_size * accumulation`` rows is split."""

    parallelism: str
    num_ranks: int
    micro_batch_size: int
    accumulation: int
    num_nodes: int = 1
    sharding: str = "FULL_SHARD"
    tensor_parallel_size: int = 1
    gradient_reduction: str = "step"
    context_parallel_size: int = 1

    def __str__(self) -> str:
        text = f"{self.parallelism}-{self.num_ranks}x{self.micro_batch_size}x{self.accumulation}"
        if self.gradient_reduction == "micro_batch":
            text += "-each"
        if self.sharding == "HYBRID_SHARD":
            text += "-hybrid"
        elif self.sharding == "_HYBRID_SHARD_ZERO2":
            text += "-hybrid zero2"
        if self.tensor_parallel_size > 1:
            text += f"-tensor{self.tensor_parallel_size}"
        if self.context_parallel_size > 1:
            text += f"-context{self.context_parallel_size}"
        return text

    @property
    def rows(self) -> int:
        ranks_per_row = self.tensor_parallel_size * self.context_parallel_size
        num_data_ranks = self.num_ranks // ranks_per_row
        return num_data_ranks * self.micro_batch_size * self.accumulation

    @property
    def steps(self) -> int:
        return NUM_ROWS // self.rows


SPLITS = [
    Split("single", 1, 8, 1),
    Split("fsdp", 1, 2, 4),
    Split("fsdp", 2, 2, 2),
    Split("fsdp2", 1, 1, 8),
    Split("fsdp2", 2, 4, 1),
    Split("fsdp", 2, 1, 4, gradient_reduction="micro_batch"),
    Split("fsdp2", 2, 1, 4, gradient_reduction="micro_batch"),
    Split("ddp", 2, 2, 2),
    # other windows, for the accumulations and micro-batches that do not make 8 rows
    Split("single", 1, 1, 5),
    Split("ddp", 2, 1, 7),
    Split("fsdp2", 2, 1, 6),
    Split("fsdp", 2, 8, 1),
    Split("fsdp", 4, 1, 2, num_nodes=2, sharding="HYBRID_SHARD"),
    Split("fsdp", 4, 1, 2, num_nodes=2, sharding="_HYBRID_SHARD_ZERO2"),
    Split("fsdp2", 4, 1, 2, num_nodes=2, sharding="HYBRID_SHARD"),
    Split("fsdp2", 4, 2, 2, tensor_parallel_size=2),
    Split("fsdp2", 2, 1, 8, context_parallel_size=2),
    Split("fsdp2", 3, 2, 4, context_parallel_size=3),
    Split("fsdp2", 4, 2, 2, context_parallel_size=2),
    Split("fsdp2", 4, 8, 1, context_parallel_size=2, tensor_parallel_size=2),
    Split("fsdp2", 4, 4, 1, num_nodes=2, sharding="HYBRID_SHARD", context_parallel_size=2),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("invariance") / "model")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("invariance") / "tokens", num_rows=ROWS_PER_EPOCH)


@pytest.mark.numerical
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_every_split_of_a_window_equals_plain_pytorch(
    forked_runs: ForkedRuns, tmp_path: Path, model: Path, tokens: Path, split: Split
) -> None:
    ranks_per_node = split.num_ranks // split.num_nodes
    options = {
        "parallelism": split.parallelism,
        "gradient_reduction": split.gradient_reduction,
        "sharding_strategy": split.sharding,
        "tensor_parallel_size": split.tensor_parallel_size,
        "context_parallel_size": split.context_parallel_size,
        "devices": ranks_per_node,
        "num_nodes": split.num_nodes,
        "micro_batch_size": split.micro_batch_size,
        "total_batch_size": split.rows,
        "max_step": split.steps,
        "lr": LR,
        "grad_clip": GRAD_CLIP,
        "weight_decay": WEIGHT_DECAY,
    }
    before = on_nodes(ranks_per_node) if split.num_nodes > 1 else ""
    forked_runs.start(argv(model, tokens, tmp_path / "run", **options), split.num_ranks, before=before).finish(300)
    losses, norms = plain_pytorch(model, tokens, split.rows, split.steps)
    logged_rows = metrics(tmp_path / "run")
    assert [float(row["train_loss"]) for row in logged_rows] == pytest.approx(losses, rel=TOLERANCE)
    assert [float(row["grad_norm"]) for row in logged_rows] == pytest.approx(norms, rel=TOLERANCE)
    assert sum(norm > GRAD_CLIP for norm in norms) > split.steps / 2  # it does clip


def test_the_compared_windows_are_hard_to_weigh(tokens: Path) -> None:
    rows = open_dataset(str(tokens)).train
    num_targets = set()
    for row in range(len(rows)):
        labels = rows.__getitems__([row]).labels[:, 1:]  # the first token of a row is never a target
        num_targets.add(int((labels != IGNORED_LABEL).sum()))
    assert {0, 1, 23} <= num_targets  # rows with no supervised token, with one and with all
    assert any(len(starts) > 1 for starts in rows.split["document_starts"])
    assert len(rows) % SPLITS[0].rows  # the last window of an epoch is short
    assert 2 * len(rows) < NUM_ROWS
