"""The same window gives the same loss and gradient norm however it is cut: every cut against plain PyTorch."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from fabric_train.data.batch import IGNORED_LABEL
from fabric_train.data.token_dataset import open_dataset
from tests.support.forked_runs import ForkedRuns
from tests.support.plain_training import GRAD_CLIP, LR, plain_pytorch
from tests.support.two_nodes import on_nodes
from tests.support.unequal_rows import argv, metrics, write_model, write_rows

pytestmark = pytest.mark.slow

NUM_ROWS = 160  # that a run trains on, more than two epochs
TOLERANCE = 1e-5  # relative, in fp32


@dataclass(frozen=True)
class Cut:
    """How a window of ``num_data_ranks * micro_batch_size * accumulation`` rows is cut."""

    parallelism: str
    num_ranks: int
    micro_batch_size: int
    accumulation: int
    num_nodes: int = 1
    tensor_parallel_size: int = 1
    compiled: bool = False
    gradient_reduction: str = "step"

    def __str__(self) -> str:
        text = f"{self.parallelism}-{self.num_ranks}x{self.micro_batch_size}x{self.accumulation}"
        text += "-each" * (self.gradient_reduction == "micro_batch")
        text += "-hybrid" * (self.num_nodes > 1) + "-compiled" * self.compiled
        return text + f"-tensor{self.tensor_parallel_size}" * (self.tensor_parallel_size > 1)

    @property
    def rows(self) -> int:
        return self.num_ranks // self.tensor_parallel_size * self.micro_batch_size * self.accumulation

    @property
    def steps(self) -> int:
        return NUM_ROWS // self.rows


CUTS = [
    Cut("single", 1, 1, 8),
    Cut("single", 1, 2, 4),
    Cut("single", 1, 8, 1),
    Cut("fsdp", 1, 2, 4),
    Cut("fsdp", 2, 1, 4),
    Cut("fsdp", 2, 2, 2),
    Cut("fsdp", 4, 1, 2),
    Cut("fsdp", 4, 2, 1),
    Cut("fsdp2", 1, 1, 8),
    Cut("fsdp2", 2, 1, 4),
    Cut("fsdp2", 2, 2, 2),
    Cut("fsdp2", 4, 2, 1),
    Cut("fsdp", 2, 1, 4, gradient_reduction="micro_batch"),
    Cut("fsdp2", 2, 1, 4, gradient_reduction="micro_batch"),
    Cut("ddp", 2, 1, 4),
    Cut("ddp", 2, 2, 2),
    Cut("ddp", 4, 1, 2),
    # other windows, for the accumulations and micro-batches that do not make 8 rows
    Cut("single", 1, 1, 5),
    Cut("fsdp", 2, 1, 3),
    Cut("ddp", 2, 1, 7),
    Cut("fsdp2", 2, 2, 6),
    Cut("fsdp", 2, 8, 1),
    Cut("fsdp2", 4, 8, 1),
    Cut("fsdp", 4, 1, 2, num_nodes=2),
    Cut("fsdp2", 4, 1, 2, num_nodes=2),
    Cut("fsdp2", 2, 2, 4, tensor_parallel_size=2),
    Cut("fsdp2", 4, 2, 2, tensor_parallel_size=2),
    Cut("fsdp2", 4, 2, 2, tensor_parallel_size=2, num_nodes=2),
    # of one shape, which is compiled once and then taken from torch's cache
    Cut("single", 1, 1, 8, compiled=True),
    Cut("fsdp", 2, 1, 4, compiled=True),
    Cut("fsdp2", 2, 1, 4, compiled=True),
    Cut("ddp", 2, 1, 4, compiled=True),
    Cut("fsdp2", 2, 1, 8, tensor_parallel_size=2, compiled=True),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("invariance") / "model")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("invariance") / "tokens")


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_however_a_window_is_cut_its_loss_and_gradient_norm_are_those_of_plain_pytorch(
    forked_runs: ForkedRuns, tmp_path: Path, model: Path, tokens: Path, cut: Cut
) -> None:
    given = {
        "parallelism": cut.parallelism,
        "gradient_reduction": cut.gradient_reduction,
        "sharding_strategy": "HYBRID_SHARD" if cut.num_nodes > 1 else "FULL_SHARD",
        "tensor_parallel_size": cut.tensor_parallel_size,
        "compile": str(cut.compiled).lower(),
        "devices": cut.num_ranks // cut.num_nodes,
        "num_nodes": cut.num_nodes,
        "micro_batch_size": cut.micro_batch_size,
        "total_batch_size": cut.rows,
        "max_step": cut.steps,
        "lr": LR,
        "grad_clip": GRAD_CLIP,
    }
    before = on_nodes(cut.num_ranks // cut.num_nodes) if cut.num_nodes > 1 else ""
    forked_runs.start(argv(model, tokens, tmp_path / "run", **given), cut.num_ranks, before=before).finish(300)
    losses, norms = plain_pytorch(model, tokens, cut.rows, cut.steps)
    logged = metrics(tmp_path / "run")
    assert [float(row["train_loss"]) for row in logged] == pytest.approx(losses, rel=TOLERANCE)
    assert [float(row["grad_norm"]) for row in logged] == pytest.approx(norms, rel=TOLERANCE)
    assert sum(norm > GRAD_CLIP for norm in norms) > cut.steps / 2  # it does clip


def test_the_windows_that_are_compared_are_hard_to_weigh(tokens: Path) -> None:
    rows = open_dataset(str(tokens)).train
    counts = [int((rows.__getitems__([row]).labels[:, 1:] != IGNORED_LABEL).sum()) for row in range(len(rows))]
    assert {0, 1, 23} <= set(counts)  # rows with no supervised token, with one and with all
    assert any(len(starts) > 1 for starts in rows.split["document_starts"])
    assert len(rows) % CUTS[0].rows  # the last window of an epoch is short
    assert 2 * len(rows) < NUM_ROWS
