"""Count what the ranks tell each other in a step and in a save beside weights and gradients, and model its latency."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.scale.series import Point, Series
from fabric_train.distributed.gradients import clip_grad_norm
from fabric_train.distributed.ranks import StepSync, first_text, sum_over_data_ranks, sync_step
from fabric_train.training.source_losses import SourceLosses
from fabric_train.training.step import gather_losses
from fabric_train.training.step_exchange import LocalLoss, RankReport, exchange_step

_SIZES = (16, 128, 1024, 8192)
_MICRO_BATCHES = 8
_SOURCES = 100
_RANKS_OF_MACHINE = 8
# microseconds of NCCL 2.30.7, src/graph/tuning.cc, protocol LL: a start, a step by NVLink, a step between machines
_TREE = (6.8, 0.6, 5.0)
_RING = (6.6, 0.6, 2.7)
_BYTES_PER_MICROSECOND = 10_000.0  # assumed for LL, which moves half as many bytes as it could
_SIMULATED = (
    f"all ranks but one are torch's fake process group, the batch is empty, with {_SOURCES} sources and "
    f"{_MICRO_BATCHES} micro-batches a rank; latency is NCCL's own model, with {_RANKS_OF_MACHINE} GPUs a machine"
)
_REAL = (
    "the functions of training/step.py, distributed/ranks.py and distributed/gradients.py; the collectives are counted "
    "where torch runs them"
)


def measure(work: Path) -> list[Series]:
    """Return numbers, bytes and modelled latency of the collectives."""
    found: dict[tuple[str, str], list[Point]] = {}
    for size in _SIZES:
        with _rank_0_of(size) as fabric:
            step, fault, save = (_sent(partial(act, fabric)) for act in (_step, _find_fault, _save))
        for quantity, unit, value in (
            ("collectives of a step", "number", len(step)),
            ("bytes of these collectives", "B", sum(step)),
            ("modelled latency of these collectives", "µs", sum(_latency(size, sent) for sent in step)),
            ("bytes of a save's messages", "B", sum(save)),
            ("bytes to find the rows of a step with a fault", "B", sum(fault)),
        ):
            found.setdefault((quantity, unit), []).append(Point(size, value))
    series = partial(Series, part="collectives", sizes_of="ranks", simulated=_SIMULATED, real=_REAL)
    return [series(quantity=quantity, unit=unit, points=tuple(points)) for (quantity, unit), points in found.items()]


def _step(fabric: Any) -> None:
    """Do what every step does beside computing: count, clip, exchange."""
    sum_over_data_ranks(fabric, _loss().counts.sum())
    model = nn.Linear(1, 1, bias=False)
    model.weight.grad = torch.ones(1, 1)
    norm = clip_grad_norm(fabric, model, None, 1.0)
    dist.all_reduce(norm)  # of a model whose parameters are sharded; this one is whole
    report = RankReport(_loss(), num_tokens=1, flops=1.0, own_seconds=1.0, sync=StepSync())
    exchange_step(fabric, report, norm)


def _find_fault(fabric: Any) -> None:
    gather_losses(fabric, _loss())


def _save(fabric: Any) -> None:
    """Exchange what a background save does without a fault: make the folder, write, complete."""
    for _ in range(3):
        first_text(fabric, None)
    sync_step(fabric, StepSync())


def _loss() -> LocalLoss:
    counts = torch.ones(_MICRO_BATCHES, dtype=torch.int64)
    numbers = torch.ones(_MICRO_BATCHES, dtype=torch.float64)
    nothing = numbers[:0]
    source_losses = torch.ones(_SOURCES, dtype=torch.float64)
    sources = SourceLosses(
        piece_losses=nothing,
        losses=source_losses,
        metrics=numbers.new_zeros(0, _SOURCES),
        counts=torch.ones(_SOURCES, dtype=torch.float64),
    )
    return LocalLoss(
        summed=numbers,
        counts=counts,
        window_count=counts.sum(),
        metrics=nothing,
        sources=sources,
        document_lengths=(),
    )


class _Sent(TorchDispatchMode):
    """Notes the bytes of each collective."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.num_bytes.append(sum(tensor.nbytes for tensor in args[0]))
        return func(*args, **(kwargs or {}))


def _sent(act: Callable[[], None]) -> list[int]:
    with _Sent() as sent:
        act()
    return sent.num_bytes


@contextmanager
def _rank_0_of(num_ranks: int) -> Iterator[Any]:
    """Yield what the program's functions use of Fabric, for rank 0 in a process group without communication."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    precision = SimpleNamespace(unscale_gradients=lambda _: None)
    device = torch.device("cpu")
    strategy = SimpleNamespace(precision=precision)
    yield SimpleNamespace(world_size=num_ranks, global_rank=0, device=device, strategy=strategy)
    dist.destroy_process_group()


def _latency(num_ranks: int, num_bytes: int) -> float:
    """Return the microseconds that NCCL expects of an all-reduce by its faster algorithm (``ncclTopoGetAlgoTime``)."""
    machines = num_ranks // _RANKS_OF_MACHINE
    start, inside, between = _TREE
    tree = start + 2 * ((_RANKS_OF_MACHINE - 1) * inside + int(math.log2(machines)) * between)
    start, inside, between = _RING
    steps = 2 * (num_ranks - 1)
    steps_between = 2 * machines
    ring = start + (steps - steps_between) * inside + steps_between * between
    return min(tree, ring) + num_bytes / _BYTES_PER_MICROSECOND
