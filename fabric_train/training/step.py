"""One optimizer step: count, accumulate the gradient of a window, clip, check, update the parameters.

The loss of a window is the mean over all that its objective counts (the supervised tokens) on all ranks, counted before
the first backward pass. So loss and gradient do not depend on how the window is split.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from lightning import Fabric

from fabric_train.checkpoint.manager import CheckpointManager
from fabric_train.data.step_sampler import Window
from fabric_train.distributed.gradients import average_replicated, clip_grad_norm
from fabric_train.distributed.ranks import (
    StepSync,
    data_ranks,
    gather_over_data_ranks,
    sum_over_data_ranks,
    to_device_async,
)
from fabric_train.distributed.signals import Heartbeat, StepPhase, stop_signals
from fabric_train.distributed.xla import seed_xla
from fabric_train.model.context_parallel import place_batch
from fabric_train.model.flops import ModelFlops
from fabric_train.optim.optimizer import Schedules, set_learning_rate
from fabric_train.training.objective import CrossEntropy, Objective, WindowLoss, by_piece, counts_pieces, sum_by_source
from fabric_train.training.statistics import SpikeRule

if TYPE_CHECKING:
    from fabric_train.arguments import TrainArguments

_LISTED_ROWS = 64
_MARKS_OF_STEP = 4  # both ends of what precedes the first exchange, and of the passes


@dataclass(frozen=True)
class TakenStep:
    """One optimizer step: taken, or left out because of a fault or because the window has no targets."""

    check: "StepCheck"
    report: "StepReport"
    learning_rate: float


@dataclass(frozen=True)
class Stepper:
    """What takes the steps of a run, on all ranks together. The losses of ``num_sources`` are told apart, none if 0."""

    fabric: Fabric
    model: Any
    optimizer: Any
    objective: Objective
    arguments: "TrainArguments"
    schedules: Schedules
    guard: "StepGuard"
    checkpoints: CheckpointManager
    heartbeat: Heartbeat
    flops: ModelFlops
    num_sources: int
    own_time: "OwnTime"

    def take_step(self, window: Window) -> TakenStep:
        """Compute the gradient of a window, clip and check it, and take the step.

        The optimizer does not step if the check finds a fault, or if the objective counts nothing in the window: the
        gradient is zero then, and momentum and weight decay alone would move the weights.

        Raises:
            RunStopped: The ranks have agreed to stop before one of the micro-batches.
        """
        fabric = self.fabric
        given = self.arguments
        seed_step(given.data.seed, window.step, data_ranks(fabric).gradient, fabric.device)
        rate = self.schedules.rate(window.step)
        set_learning_rate(self.optimizer, rate)
        reduces_each = given.fsdp.gradient_reduction == "micro_batch"
        loss = backpropagate(
            fabric, self.model, window, self.objective, self.heartbeat, reduces_each, self.num_sources, self.own_time
        )
        self.heartbeat.enter(StepPhase.OPTIMIZER)
        grad_norm = clip_grad_norm(fabric, self.model, self.optimizer, given.training.grad_clip)
        lengths = [length for batch in window.batches for length in batch.lengths]
        work = (sum(lengths), self.flops.count(lengths), self.own_time.seconds)
        report = exchange_step(fabric, loss, grad_norm, *work, own_flags(self.checkpoints))
        self.own_time.restart()
        if report.count == 0:
            check = StepCheck(loss=None, grad_norm=None, fault=None)
        else:
            losses = partial(gather_losses, fabric, loss)
            check = self.guard.check(window, report.loss, report.grad_norm, report.of_pieces, losses)
        if check.is_taken:
            started = time.monotonic()
            self.checkpoints.wait_until_copied()
            self.heartbeat.count_as(StepPhase.SAVING, time.monotonic() - started)
            self.optimizer.step()
        else:
            self.guard.leave_out()
        self.optimizer.zero_grad()
        return TakenStep(check, report, rate)


def seed_step(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seed the random streams (dropout) from seed, step and rank, so that a resumed run draws the same numbers."""
    number = int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0])
    torch.default_generator.manual_seed(number)  # torch.manual_seed takes 3 ms: it formats stacks for devices in no use
    if device.type == "cuda":
        torch.cuda.manual_seed(number)
    if device.type == "xla":
        seed_xla(number)


def own_flags(checkpoints: CheckpointManager) -> StepSync:
    """Return this rank's flags for the per-step all-reduce."""
    return StepSync(stop_signals.received, is_saving=checkpoints.is_writing, save_failed=checkpoints.has_failed)


class OwnTime:
    """Measures how long a rank takes for what it does in a step without the others.

    Ranks wait for each other, so a step takes all of them the same time. A rank's own time is from the exchange of a
    step to the first one of the next (optimizer, logging, waiting for data), and from there to the last backward pass,
    in which gradients are averaged. With sharded weights the ranks also wait for each other in each layer: own times
    then differ by less than the ranks do. On a GPU events are recorded, and read when the device has passed them.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds = 0.0
        """Own time of the step before, 0 as long as none is complete."""
        self._device = device
        self._marks = list[Any]()

    def mark(self) -> None:
        """Begin or end a part of the step that is this rank's own."""
        if self._device.type == "cuda":
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def restart(self) -> None:
        """End a step, after the exchange in which the host has waited for the device; the next one begins."""
        if len(self._marks) == _MARKS_OF_STEP:  # not after the first step
            parts = zip(self._marks[::2], self._marks[1::2], strict=True)
            on_gpu = self._device.type == "cuda"
            self.seconds = sum(first.elapsed_time(last) / 1e3 if on_gpu else last - first for first, last in parts)
        self._marks.clear()
        self.mark()


@dataclass(frozen=True)
class LocalLoss:
    """The losses of this rank's micro-batches of a window.

    ``summed``, fp64, and ``counts``, int64, are [micro-batches]. ``count``, int64 [], is the sum over all ranks.
    ``metrics``, fp64, are sums of the objective's. ``of_pieces``, fp64 [P], are the losses of all pieces, on the CPU
    with XLA. ``of_sources``, fp64 [sources], sums them by source, and ``tokens_of_sources``, fp64 on the CPU, counts
    their supervised tokens, or their pieces if the objective does; both are empty if sources are not told apart.
    ``metrics_of_sources``, fp64 [metrics, sources], are of an objective of pieces, else [0, sources].
    """

    summed: torch.Tensor
    counts: torch.Tensor
    count: torch.Tensor
    metrics: torch.Tensor
    of_pieces: torch.Tensor
    of_sources: torch.Tensor
    tokens_of_sources: torch.Tensor
    metrics_of_sources: torch.Tensor


def backpropagate(
    fabric: Fabric,
    model: Any,
    window: Window,
    objective: Objective,
    heartbeat: Heartbeat | None = None,
    reduces_each: bool = False,
    num_sources: int = 0,
    own_time: OwnTime | None = None,
) -> LocalLoss:
    """Add the gradient of the window's mean loss to the parameters.

    All ranks call this together, each with its own micro-batches of the window. They average their gradients, hence the
    factor of their number: with ``reduces_each`` after every micro-batch, instead of once a window. The losses of
    ``num_sources`` are told apart, none if 0. RunStopped if the ranks have agreed to stop before a micro-batch.
    """
    if heartbeat:
        heartbeat.enter(StepPhase.COMPUTING)  # before the first wait for the other ranks
        heartbeat.stop_border.enter(window.step, 0)
    own_counts = torch.stack([objective.count(batch) for batch in window.batches])
    if own_time:
        own_time.mark()
    count = sum_over_data_ranks(fabric, own_counts.sum())
    if own_time:
        own_time.mark()
    scale = data_ranks(fabric).num_gradients / count.clamp(min=1).double()
    losses = []
    of_batches = []
    last = len(window.batches) - 1
    metrics = torch.zeros(len(objective.metric_names), dtype=torch.float64, device=fabric.device)
    for index, batch in enumerate(window.batches):
        if heartbeat and index:
            heartbeat.enter(StepPhase.COMPUTING, index)
            heartbeat.stop_border.enter(window.step, index)
        # every backward pass is inside the context: FSDP2's leaves synchronization off for those after it
        with fabric.no_backward_sync(model, enabled=index < last and not reduces_each):
            loss = objective.loss(model, place_batch(fabric, batch), scale)
            if own_time and index == (0 if reduces_each else last):
                own_time.mark()
            fabric.backward(loss.total * scale)
        losses.append(loss.total.detach())
        if loss.metrics is not None:
            metrics += loss.metrics
        if (values := by_piece(loss, batch)) is not None:
            of_batches.append(values)
    average_replicated(model)
    summed = torch.stack(losses)
    as_wholes = counts_pieces(objective)
    of_pieces = torch.cat(of_batches, dim=1) if of_batches else summed[None, :0]
    of_sources = summed.new_zeros(1 + len(metrics) * as_wholes, num_sources)
    tokens_of_sources = torch.zeros(num_sources).double()
    if of_batches and num_sources:
        pieces = [batch.pieces for batch in window.batches if batch.pieces is not None]
        sources = torch.cat([part.sources for part in pieces])
        of_sources = sum_by_source(of_pieces, sources, num_sources).to(fabric.device)
        counted = torch.stack([part.count_by_source(num_sources, counts_pieces=as_wholes) for part in pieces])
        tokens_of_sources = counted[:, 0].sum(dim=0)
    return LocalLoss(summed, own_counts, count, metrics, of_pieces[0], of_sources[0], tokens_of_sources, of_sources[1:])


def accumulate(fabric: Fabric, model: Any, window: Window, objective: Objective | None = None) -> WindowLoss:
    """Do as :func:`backpropagate` does, by default for cross entropy, and return the losses of all ranks."""
    loss = backpropagate(fabric, model, window, objective or CrossEntropy())
    return gather_losses(fabric, loss)


def gather_losses(fabric: Fabric, loss: LocalLoss) -> WindowLoss:
    """Return the losses of all micro-batches of all ranks, which grow with them, so a usual step does without."""
    return WindowLoss(gather_over_data_ranks(fabric, loss.summed), gather_over_data_ranks(fabric, loss.counts))


@dataclass(frozen=True)
class StepReport:
    """What all ranks know of a step before the optimizer takes it. Tensors are on the CPU.

    ``count`` is the number of things that the loss sums over in the window, such as supervised tokens, and
    ``counted_of_sources`` the same by source. ``loss``, fp64 [], is the mean over them; 0 if there are none.
    ``metrics`` are the means of the objective's metrics over the window, ``of_sources`` the mean losses of the sources,
    None for one without supervised tokens, and ``metrics_of_sources`` their means of an objective of pieces, NaN for
    such a source. ``of_pieces``, fp64 [P], are the losses of the pieces on this rank. ``grad_norm``, fp64 [], is the
    norm before clipping. ``num_tokens`` are without padding, and take ``flops`` of the model. ``own_seconds`` are of
    each rank in the step before, see :class:`OwnTime`.
    """

    count: int
    loss: torch.Tensor
    metrics: list[float]
    of_pieces: torch.Tensor
    of_sources: list[float | None]
    counted_of_sources: list[int]
    grad_norm: torch.Tensor
    num_tokens: int
    flops: float
    sync: StepSync
    metrics_of_sources: list[list[float]]
    own_seconds: list[float]


def exchange_step(
    fabric: Fabric,
    loss: LocalLoss,
    grad_norm: torch.Tensor,
    num_tokens: int,
    flops: float,
    own_seconds: float,
    own: StepSync,
) -> StepReport:
    """Exchange this rank's numbers with the other ranks'. The host waits for the device, which it does once a step.

    ``grad_norm``, fp64 [] on the device, is the same on all ranks. The other numbers are this rank's.
    """
    # first what the ranks that read different rows sum up, then flags, and two numbers of each rank
    num_sources = len(loss.of_sources)
    further = loss.metrics_of_sources
    by_rank = torch.zeros(fabric.world_size, 2, dtype=torch.float64)
    by_rank[fabric.global_rank] = torch.tensor([own_seconds, own.stop_signal], dtype=torch.float64)
    on_device = torch.cat([loss.summed.sum()[None], loss.of_sources, loss.metrics, further.flatten()])
    on_host = torch.cat([loss.tokens_of_sources, torch.tensor([num_tokens, flops], dtype=torch.float64)])
    if fabric.global_rank % data_ranks(fabric).group_size:
        on_device = torch.zeros_like(on_device)
        on_host = torch.zeros_like(on_host)
    flags = torch.tensor([own.is_saving, own.save_failed], dtype=torch.float64)
    on_host = torch.cat([on_host, flags, by_rank.flatten()])
    summed = torch.cat([on_device, to_device_async(on_host, fabric.device)])
    if fabric.world_size > 1:
        dist.all_reduce(summed)
    is_there = loss.of_pieces.device == grad_norm.device
    of_pieces = loss.of_pieces if is_there else grad_norm.new_zeros(0)
    parts = [summed, loss.count.double()[None], grad_norm.reshape(1), of_pieces]
    numbers = torch.cat(parts).cpu()  # the only place in a step where the host waits for the device
    summed, count, norm, of_pieces = numbers.split([part.numel() for part in parts])
    sizes = [1, num_sources, len(loss.metrics), further.numel(), num_sources, 2, 2, by_rank.numel()]
    total, nats, metrics, further, tokens, work, flags, by_rank = summed.split(sizes)
    all_tokens, all_flops = work.tolist()
    own_times, signals = by_rank.view(-1, 2).T.tolist()
    is_saving, save_failed = (flags > 0).tolist()
    return StepReport(
        count=int(count),
        loss=(total / count.clamp(min=1))[0],
        metrics=(metrics / count.clamp(min=1)).tolist(),
        of_pieces=of_pieces if is_there else loss.of_pieces,
        of_sources=[
            each / number if number else None for each, number in zip(nats.tolist(), tokens.tolist(), strict=True)
        ],
        counted_of_sources=[int(number) for number in tokens.tolist()],
        grad_norm=norm[0],
        num_tokens=int(all_tokens),
        flops=all_flops,
        sync=StepSync(int(max(signals)), is_saving, save_failed),
        metrics_of_sources=(further.view(loss.metrics_of_sources.shape) / tokens).T.tolist(),
        own_seconds=own_times,
    )


@dataclass(frozen=True)
class StepCheck:
    """A window's mean ``loss`` and ``grad_norm``; ``fault`` says why its step must not be taken, None if it may.

    Loss and norm are None if the objective counts nothing in the window, such as no supervised token.
    """

    loss: float | None
    grad_norm: float | None
    fault: str | None

    @property
    def has_targets(self) -> bool:
        """Whether the objective counts something in the window."""
        return self.loss is not None

    @property
    def is_taken(self) -> bool:
        """Whether the optimizer takes the step."""
        return self.fault is None and self.has_targets


class StepGuard:
    """Checks the loss and the gradient norm of every step. All ranks call it together and get the same result."""

    def __init__(
        self,
        fabric: Fabric,
        data: str,
        warn: Callable[[str], None],
        row_name: Callable[[int], str] = str,
        worst: Callable[[Window, torch.Tensor], str] = lambda *_: "",
    ) -> None:
        """``data`` and ``row_name`` name the rows in messages; ``warn`` shows the user a line, once for all ranks.

        ``worst`` names the documents with the highest losses (``WorstDocuments.describe``).
        """
        self._fabric = fabric
        self._data = data
        self._warn = warn
        self._row_name = row_name
        self._worst = worst
        self._scaler = getattr(fabric.strategy.precision, "scaler", None)
        self._spikes = SpikeRule()

    def check(
        self,
        window: Window,
        loss: torch.Tensor,
        grad_norm: torch.Tensor,
        of_pieces: torch.Tensor,
        losses: Callable[[], WindowLoss],
    ) -> StepCheck:
        """Check a step; the tensors are on the CPU, so that the host does not wait for the device.

        ``loss``, fp64 [], is the mean of the window, and ``losses`` gathers its micro-batches' from all ranks.
        An fp16 gradient that overflows while the loss is finite is not a fault: the scaler skips such a step itself.
        """
        mean, norm = torch.stack([loss, grad_norm.to(loss)]).tolist()
        if not math.isfinite(mean):
            wrong = (~losses().summed.isfinite()).nonzero().tolist()
            fault = f"step {window.step}: the loss is {mean}, from {self._place(window, wrong)}"
            return StepCheck(mean, norm, fault + self._worst(window, of_pieces))
        if not math.isfinite(norm) and self._scaler is None:
            what = f"the gradient norm is {norm} and every loss finite"
            return StepCheck(mean, norm, f"step {window.step}: {what}; the window is {self._window(window)}")
        usual = self._spikes.usual_before_spike(mean)
        if usual is not None:
            of_all = losses()
            means = of_all.summed / of_all.counts.clamp(min=1)
            rank, batch = divmod(int(means.argmax()), means.shape[1])
            self._warn(
                f"step {window.step}: loss {mean:.4f}, where the last steps' median is {usual:.4f}; highest in "
                f"{self._place(window, [(rank, batch)])}; the window is {self._window(window)}"
                + self._worst(window, of_pieces)
            )
        return StepCheck(mean, norm, None)

    def leave_out(self) -> None:
        """Prepare an fp16 gradient scaler for the next step after one that is left out."""
        if self._scaler is not None:
            self._scaler.update(self._scaler.get_scale())

    def _window(self, window: Window) -> str:
        ranks = range(data_ranks(self._fabric).size)
        return self._place(window, itertools.product(ranks, range(len(window.batches))))

    def _place(self, window: Window, micro_batches: Iterable[tuple[int, int]]) -> str:
        names = self._names(window)
        by_rank: dict[int, list[str]] = {}
        for rank, batch in micro_batches:
            rows = window.rows_of(batch, data_ranks(self._fabric).size, rank)
            by_rank.setdefault(rank, []).extend(names[row] for row in rows)
        left = _LISTED_ROWS
        parts = []
        for rank, named in by_rank.items():
            if named:
                more = f" and {len(named) - left} more" if len(named) > left else ""
                parts.append(f"{', '.join(named[:left])}{more} (rank {rank})")
                left = max(left - len(named), 0)
        return f"rows {', '.join(parts)} of {self._data}"

    def _names(self, window: Window) -> dict[int, str]:
        """Name every row of the window: by its index, or in a stream by its lane and the document after it."""
        if window.cursors is None:
            return {row: self._row_name(row) for row in window.rows.tolist()}
        own = torch.from_numpy(window.cursors).to(self._fabric.device)
        cursors = gather_over_data_ranks(self._fabric, own).flatten(0, -2).tolist()
        return {lane: f"{lane} up to document {document} of pass {epoch}" for lane, epoch, document, *_ in cursors}
