"""Evaluate a run: metrics over the validation split, and samples from prompts.

``prompt_validation.py`` evaluates held-out prompts by the rewards of their completions instead.

Every supervised token on all ranks has the same weight, however rows are split among ranks and batches.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from lightning import Fabric

from fabric_train.checkpoint import Evaluation, TokenLoss
from fabric_train.cli.tables import METRICS
from fabric_train.data.batch import SUM_OF_HASHES, Batch, hash_supervised
from fabric_train.distributed.packed_tensors import PackedTensors
from fabric_train.distributed.ranks import StepSync, sum_over_data_ranks, sync_step
from fabric_train.distributed.signals import Heartbeat, StepPhase, stop_signals
from fabric_train.distributed.xla import run_pending
from fabric_train.model.context_parallel import place_batch
from fabric_train.training.logger import Sample
from fabric_train.training.objective import (
    CrossEntropy,
    Objective,
    counts_answers,
    counts_pieces,
    is_likelihood,
    metrics_by_source,
    name_metrics,
    prepare_window,
)
from fabric_train.training.sampling import SamplePrompts, generate_samples
from fabric_train.training.source_losses import (
    losses_by_piece,
    select_target_losses,
    sum_by_piece,
    sum_by_source,
)


@dataclass(frozen=True)
class Metric:
    """A figure of an evaluation in addition to loss, perplexity and bits per byte, for all tokens and each source.

    Its column in metrics.csv is ``val_NAME``.
    """

    token_values: Callable[[torch.Tensor], torch.Tensor]
    """A function of some tokens' losses in nats, fp32 [N], that returns what each token adds to the sum, [N], any
    dtype."""
    figure: Callable[[TokenLoss], float | None] = lambda sums: sums.loss
    """A function that computes the figure from the sum (``nats``), the number of tokens and the UTF-8 bytes of their
    text (None if not known). The default is the mean over the tokens.
    """


def select_metrics(names: Iterable[str]) -> dict[str, Metric]:
    """Return the metrics of these names. Loss, perplexity and bits per byte are figures of every ``TokenLoss``."""
    return {name: METRICS[name] for name in names}


class _EvaluationSums:
    """The sums of an evaluation over this rank's batches, for all tokens or pieces and for each source.

    S is the number of sources. All sums are fp64 on the device, except the counts of sources.
    """

    def __init__(self, fabric: Fabric, objective: Objective, num_sources: int, metrics: Mapping[str, Metric]) -> None:
        self._fabric = fabric
        self._objective = objective
        self._num_sources = num_sources
        self._metrics = metrics
        self._counts_pieces = counts_pieces(objective)
        self._row_hash = 0

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=fabric.device)

        self._loss_sum = zeros()
        self._count = zeros()
        self._objective_sums = zeros(len(objective.metric_names))
        self._metric_sums = zeros(len(metrics))
        # For each source: the loss, the objective's metrics that are known by source, and the metrics of tokens.
        self._objective_metrics_by_source = metrics_by_source(objective)
        num_source_metrics = len(self._objective_metrics_by_source)
        if not self._counts_pieces:
            num_source_metrics += len(metrics)
        self._source_sums = zeros(1 + num_source_metrics, num_sources)
        self._source_counts = torch.zeros(2, num_sources, dtype=torch.float64)  # tokens or pieces, and bytes; on CPU

    def add(self, model: Any, batch: Batch) -> None:
        """Compute the loss of a batch, and add it."""
        self._row_hash += hash_supervised(batch.input_ids, batch.labels)
        placed_batch = place_batch(self._fabric, batch)
        loss = self._objective.loss(model, placed_batch)
        self._loss_sum += loss.total
        self._count += self._objective.count(placed_batch)
        if loss.metrics is not None:
            self._objective_sums += loss.metrics

        if loss.token_losses is None:
            self._metric_sums += torch.nan  # metrics of tokens are not known
            piece_values = losses_by_piece(loss, batch)
            if piece_values is not None:
                self._add_by_source(batch, piece_values)
            return

        token_values = [loss.token_losses]
        if loss.token_metrics is not None:
            token_values += loss.token_metrics
        for index, metric in enumerate(self._metrics.values()):
            values = metric.token_values(select_target_losses(loss.token_losses, batch))
            self._metric_sums[index] += values.sum(dtype=torch.float64)
            token_values.append(values)
        if batch.pieces is not None:
            piece_values = torch.stack([sum_by_piece(values, batch) for values in token_values])
            self._add_by_source(batch, piece_values)

    def _add_by_source(self, batch: Batch, piece_values: torch.Tensor) -> None:
        """Add values of the batch's pieces, fp64 [1 + metrics, pieces], to the sums of their sources."""
        if batch.pieces is None or self._num_sources == 0:
            return
        sums = sum_by_source(piece_values, batch.pieces.sources, self._num_sources)
        self._source_sums += sums.to(self._fabric.device)
        self._source_counts += batch.pieces.count_by_source(self._num_sources, counts_pieces=self._counts_pieces)

    def reduce(self, source_names: Sequence[str]) -> Evaluation:
        """Sum over the ranks, which call this together, and return the evaluation."""
        # One all-reduce for all sums; the host waits for the device here.
        device = self._fabric.device
        packed = PackedTensors(
            {
                "loss": self._loss_sum,
                "count": self._count,
                "row_hash": torch.tensor(self._row_hash % SUM_OF_HASHES, dtype=torch.float64, device=device),
                "objective": self._objective_sums,
                "metrics": self._metric_sums,
                "sources": self._source_sums,
                "source_counts": self._source_counts.to(device),
            }
        )
        sums = packed.unpack(sum_over_data_ranks(self._fabric, packed.vector).cpu())

        # The sources that the split has tokens of.
        sources = {}
        counts, num_bytes = sums["source_counts"].tolist()
        for index, name in enumerate(source_names):
            if counts[index]:
                loss_sum, *metric_sums = sums["sources"][:, index].tolist()
                known_bytes = None if math.isnan(num_bytes[index]) else num_bytes[index]
                sources[name] = self._source_loss(loss_sum, int(counts[index]), known_bytes, metric_sums)

        # The whole split.
        loss_sum = float(sums["loss"])
        count = int(sums["count"])
        objective_sums = sums["objective"].tolist()
        row_hash = f"{int(sums['row_hash']) % SUM_OF_HASHES:010x}"
        if self._counts_pieces:
            whole = self._pair_loss(loss_sum, count, objective_sums)
        else:
            whole = self._token_loss(loss_sum, count, _total_bytes(sources), sums["metrics"].tolist())
            whole = replace(whole, further=whole.further | self._objective_means(objective_sums, count))
        return Evaluation(whole, sources, rows=row_hash)

    def _source_loss(self, loss_sum: float, count: int, num_bytes: float | None, sums: Sequence[float]) -> TokenLoss:
        if self._counts_pieces:
            return self._pair_loss(loss_sum, count, sums)
        num_objective_metrics = len(self._objective_metrics_by_source)
        token_loss = self._token_loss(loss_sum, count, num_bytes, sums[num_objective_metrics:])
        if num_objective_metrics == 0:
            return token_loss
        means = self._objective_means(sums[:num_objective_metrics], count)
        return replace(token_loss, further=token_loss.further | means)

    def _token_loss(
        self, loss_sum: float, num_tokens: int, num_bytes: float | None, metric_sums: Sequence[float]
    ) -> TokenLoss:
        """Return the loss of some tokens, and the metrics' figures, whose sums are NaN if not known."""
        figures = {}
        for (name, metric), total in zip(self._metrics.items(), metric_sums, strict=True):
            if not math.isnan(total):
                figures[name] = metric.figure(TokenLoss(total, num_tokens, num_bytes))
        has_own_unit = not is_likelihood(self._objective)
        return TokenLoss(loss_sum, num_tokens, num_bytes, figures, has_own_unit=has_own_unit)

    def _pair_loss(self, loss_sum: float, count: int, objective_sums: Sequence[float]) -> TokenLoss:
        means = self._objective_means(objective_sums, count)
        is_of_answers = counts_answers(self._objective)
        return TokenLoss(loss_sum, num_tokens=count, further=means, of_pairs=True, of_answers=is_of_answers)

    def _objective_means(self, sums: Sequence[float], count: int) -> dict[str, float | None]:
        means = [total / max(count, 1) for total in sums]
        return name_metrics(self._objective, means, count)


def _total_bytes(sources: Mapping[str, TokenLoss]) -> float | None:
    """Return the UTF-8 bytes of all sources; None if a source's are not known, or if there is no source."""
    num_bytes = []
    for source in sources.values():
        if source.num_bytes is None:
            return None
        num_bytes.append(source.num_bytes)
    return math.fsum(num_bytes) if num_bytes else None


@torch.no_grad()
def evaluate(
    fabric: Fabric,
    model: Any,
    batches: Iterable[Batch],
    source_names: Sequence[str] = (),
    *,
    objective: Objective | None = None,
    metrics: Mapping[str, Metric] | None = None,
    is_interrupted: Callable[[int], bool] = lambda _: False,
) -> Evaluation | None:
    """Evaluate on this rank's batches and sum over the ranks; return None if ``is_interrupted`` returned True.

    All ranks call this together, with the same number of batches.

    Args:
        fabric: The run's Fabric, whose ranks evaluate together.
        model: The model that ``setup_model`` returned; it is in training mode afterwards.
        batches: This rank's batches.
        source_names: Names of the sources to distinguish, by their index in ``Batch.pieces``.
        objective: The loss; cross entropy by default.
        metrics: Metrics of tokens, by name.
        is_interrupted: Called with the index of each batch before it is computed; returns the same on all ranks.
    """
    if objective is None:
        objective = CrossEntropy()
    sums = _EvaluationSums(fabric, objective, len(source_names), metrics or {})
    model.eval()  # no dropout
    prepared_batches = prepare_window(objective, fabric, model, batches, is_interrupted)
    if prepared_batches is None:
        model.train()
        return None
    for index, batch in enumerate(prepared_batches):
        if is_interrupted(index):
            model.train()
            return None
        sums.add(model, batch)  # the host does not wait for the device
        run_pending(fabric.device)
    model.train()
    return sums.reduce(source_names)


class Evaluator(Protocol):
    """What evaluates the model of a run. All ranks call its methods together."""

    def evaluate(self, step: int) -> Evaluation | None:
        """Return the evaluation of the model after ``step``; None if a signal stops the run."""

    def close(self) -> None:
        """Free what the evaluator holds, such as processes. It must not be used afterwards."""


@dataclass(frozen=True)
class RowEvaluator:
    """The ``Evaluator`` of the rows of a validation split."""

    fabric: Fabric
    model: Any
    objective: Objective
    metrics: Mapping[str, Metric]
    batches: Iterable[Batch]
    """This rank's batches of the validation split."""
    source_names: tuple[str, ...]
    heartbeat: Heartbeat

    def evaluate(self, step: int) -> Evaluation | None:
        """Return the evaluation of the model after ``step``; None if a signal stops the run."""
        evaluation = evaluate(
            self.fabric,
            self.model,
            self.batches,
            self.source_names,
            objective=self.objective,
            metrics=self.metrics,
            is_interrupted=partial(_is_stopped, self.fabric, self.heartbeat, StepPhase.VALIDATION),
        )
        if evaluation is None:
            return None
        return replace(evaluation, step=step)

    def close(self) -> None:
        """Do nothing: the data workers end with the run."""


@dataclass(frozen=True)
class Validation:
    """The evaluations and samples of a run, which all ranks compute together with the model of a step."""

    fabric: Fabric
    model: Any
    evaluator: Evaluator
    prompts: SamplePrompts | None
    heartbeat: Heartbeat

    def evaluate(self, step: int = 0) -> Evaluation | None:
        """Return the evaluation of the model after ``step``; None if a signal stops the run."""
        return self.evaluator.evaluate(step)

    def sample(self, step: int) -> list[Sample] | None:
        """Return the samples of the model after ``step``, empty without prompts; None if a signal stops the run."""
        if self.prompts is None:
            return []
        is_interrupted = partial(_is_stopped, self.fabric, self.heartbeat, StepPhase.SAMPLING)
        return generate_samples(self.fabric, self.model, self.prompts, step, is_interrupted)

    def close(self) -> None:
        """Free what the evaluations hold; the run has ended."""
        self.evaluator.close()


def _is_stopped(fabric: Fabric, heartbeat: Heartbeat, phase: StepPhase, index: int) -> bool:
    """Record that the ranks begin part ``index`` of a phase, and return whether any of them has a stop signal."""
    heartbeat.enter(phase, index)
    return sync_step(fabric, StepSync(stop_signal=stop_signals.received)).stop_signal > 0
