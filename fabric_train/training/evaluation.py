"""The evaluation of a run: its metrics over the validation split, samples of prompts, and early stopping.

Every supervised token of all ranks has the same weight, however rows are split into ranks and batches.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from lightning import Fabric

from fabric_train.checkpoint import Evaluation, LossProgress, TokenLoss, TrainerState
from fabric_train.cli.tables import METRICS
from fabric_train.data.batch import SUM_OF_HASHES, Batch, hash_supervised
from fabric_train.distributed.ranks import StepSync, gather_over_ranks, sum_over_data_ranks, sync_step
from fabric_train.distributed.signals import Heartbeat, StepPhase, stop_signals
from fabric_train.distributed.xla import run_pending
from fabric_train.inference.generate import continuation
from fabric_train.model.attention import forward
from fabric_train.model.context_parallel import place_batch
from fabric_train.training.loggers import Sample
from fabric_train.training.objective import (
    CrossEntropy,
    Objective,
    by_piece,
    counts_pieces,
    is_likelihood,
    losses_of_targets,
    sum_by_piece,
    sum_by_source,
)

_PATIENCE = 3


@dataclass(frozen=True)
class EarlyStopping:
    """``--early_stopping``: a run ends after ``patience`` evaluations without a new best loss of ``source``."""

    source: str
    patience: int

    def after(self, before: LossProgress | None, evaluation: Evaluation) -> LossProgress:
        """Return the progress after an evaluation; with another source than before, counting starts at 0."""
        if before is None or before.source != self.source:
            before = LossProgress(self.source)
        return before.after(evaluation)

    def ends(self, state: TrainerState) -> bool:
        progress = state.progress
        return progress is not None and progress.source == self.source and progress.num_since >= self.patience

    def describe(self, state: TrainerState) -> str:
        assert state.progress is not None
        name = "the validation loss" if self.source == "all" else f"the validation loss of {self.source}"
        first = state.first_evaluation
        is_metric = first is not None and self.source.partition("/")[0] in first.whole.further
        name = f"the validation's {self.source}" if is_metric else name
        best = state.progress.best
        step = state.progress.best_step
        passed = "risen above" if first is not None and first.sign_of(self.source) < 0 else "fallen below"
        lowest = "is not finite" if best is None else f"has not {passed} {best:.4f}, its value at step {step},"
        return (
            f"early stopping after step {state.step}: {name} {lowest} in {state.progress.num_since} evaluations; "
            "a larger patience continues with --resume true"
        )


def parse_early_stopping(given: str, names: Sequence[str]) -> EarlyStopping:
    """Return what ``SOURCE[:patience]`` means; ``names`` are the sources, which may have a colon in their names."""
    found = None if given in names else re.fullmatch(r"(.+):([1-9][0-9]{0,8})", given)
    return EarlyStopping(found[1], int(found[2])) if found else EarlyStopping(given, _PATIENCE)


@dataclass(frozen=True)
class Metric:
    """A figure of an evaluation beside loss, perplexity and bits per byte, of all tokens and of each source.

    ``of_tokens`` gets the losses of some tokens in nats, fp32 [N], and returns what each token adds, [N] of any dtype.
    ``figure`` makes the figure of the sum, the number of tokens and the UTF-8 bytes of their text (None if not known);
    by default it is the mean over the tokens. It is the column ``val_NAME`` of metrics.csv.
    """

    of_tokens: Callable[[torch.Tensor], torch.Tensor]
    figure: Callable[[TokenLoss], float | None] = lambda sums: sums.loss


def select_metrics(names: Iterable[str]) -> dict[str, Metric]:
    """Return the metrics of these names. Loss, perplexity and bits per byte are figures of every ``TokenLoss``."""
    return {name: METRICS[name] for name in names}


class _Sums:
    """What an evaluation adds up: of all tokens, of the objective's metrics, and of each source.

    Of a source there are the sums of ``metrics``, or of the objective's metrics if that sums over pieces.
    """

    def __init__(self, fabric: Fabric, objective: Objective, num_sources: int, metrics: Mapping[str, Metric]) -> None:
        self._fabric = fabric
        device = fabric.device
        self._of_tokens = metrics

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        self._objective = objective
        self._num_sources = num_sources
        self._hashed = 0
        self._totals = zeros(2)  # loss, and what it counts
        self._metrics = zeros(len(objective.metric_names))
        self._as_wholes = counts_pieces(objective)
        of_source = len(objective.metric_names if self._as_wholes else metrics)
        self._of_metrics = zeros(len(metrics))
        self._of_sources = zeros(1 + of_source, num_sources)
        self._counts = torch.zeros(2, num_sources, dtype=torch.float64)  # supervised tokens or pieces, bytes
        self._device = device

    def add(self, model: Any, batch: Batch) -> None:
        self._hashed += hash_supervised(batch.input_ids, batch.labels)
        there = place_batch(self._fabric, batch)
        loss = self._objective.loss(model, there)
        self._totals[0] += loss.total
        self._totals[1] += self._objective.count(there)
        if loss.metrics is not None:
            self._metrics += loss.metrics
        if loss.of_tokens is None:
            self._of_metrics += torch.nan  # there are no tokens to tell apart
            if (of_pieces := by_piece(loss, batch)) is not None:
                self._add_by_source(batch, of_pieces)
            return
        values = [loss.of_tokens]
        for number, metric in enumerate(self._of_tokens.values()):
            values.append(metric.of_tokens(losses_of_targets(loss.of_tokens, batch)))
            self._of_metrics[number] += values[-1].sum(dtype=torch.float64)
        if batch.pieces is not None:
            self._add_by_source(batch, torch.stack([sum_by_piece(of_tokens, batch) for of_tokens in values]))

    def _add_by_source(self, batch: Batch, of_pieces: torch.Tensor) -> None:
        if batch.pieces is None or not self._num_sources:
            return
        self._of_sources += sum_by_source(of_pieces, batch.pieces.sources, self._num_sources).to(self._device)
        self._counts += batch.pieces.count_by_source(self._num_sources, counts_pieces=self._as_wholes)

    def over_ranks(self, fabric: Fabric, source_names: Sequence[str]) -> Evaluation:
        """Return the evaluation of what all ranks have added."""
        hashed = torch.tensor([self._hashed % SUM_OF_HASHES], dtype=torch.float64, device=self._device)
        parts = [self._totals, hashed, self._metrics, self._of_metrics, self._of_sources, self._counts.to(self._device)]
        row = sum_over_data_ranks(fabric, torch.cat([part.flatten() for part in parts])).cpu()
        totals, hashed, metrics, of_metrics, of_sources, counts = row.split([part.numel() for part in parts])
        nats_of_sources = of_sources.view(self._of_sources.shape).T.tolist()
        columns = zip(source_names, *counts.view(2, -1).tolist(), nats_of_sources, strict=True)
        sources = {
            name: self._loss_of(nats, int(tokens), None if math.isnan(num_bytes) else num_bytes, further)
            for name, tokens, num_bytes, (nats, *further) in columns
            if tokens
        }
        known = [source.num_bytes for source in sources.values() if source.num_bytes is not None]
        num_bytes = math.fsum(known) if sources and len(known) == len(sources) else None
        nats, count = totals.tolist()
        rows = f"{int(hashed) % SUM_OF_HASHES:010x}"
        if self._as_wholes:
            return Evaluation(self._loss_of(nats, int(count), None, metrics.tolist()), sources, rows=rows)
        whole = self._loss_of(nats, int(count), num_bytes, of_metrics.tolist())
        means = dict(zip(self._objective.metric_names, (metrics / max(count, 1)).tolist(), strict=True))
        return Evaluation(replace(whole, further=whole.further | means), sources, rows=rows)

    def _loss_of(self, nats: float, count: int, num_bytes: float | None, sums: Sequence[float]) -> TokenLoss:
        if not self._as_wholes:
            loss = _token_loss(nats, count, num_bytes, self._of_tokens, sums)
            return replace(loss, has_own_unit=not is_likelihood(self._objective))
        means = {name: total / max(count, 1) for name, total in zip(self._objective.metric_names, sums, strict=True)}
        return TokenLoss(nats, count, None, dict(means), of_pairs=True)


def _token_loss(
    nats: float, num_tokens: int, num_bytes: float | None, metrics: Mapping[str, Metric], sums: Sequence[float]
) -> TokenLoss:
    """Return the loss of some tokens with the figures of ``metrics``; ``sums`` has a sum for each, NaN for none."""
    further = {
        name: metric.figure(TokenLoss(total, num_tokens, num_bytes))
        for (name, metric), total in zip(metrics.items(), sums, strict=True)
        if not math.isnan(total)
    }
    return TokenLoss(nats, num_tokens, num_bytes, further)


@torch.no_grad()
def evaluate(
    fabric: Fabric,
    model: Any,
    batches: Iterable[Batch],
    source_names: Sequence[str] = (),
    *,
    objective: Objective | None = None,
    metrics: Mapping[str, Metric] | None = None,
    interrupted: Callable[[int], bool] = lambda _: False,
) -> Evaluation | None:
    """Evaluate on this rank's batches and sum over the ranks; return None if ``interrupted`` returned True.

    All ranks call this together, with the same number of batches; the model is in training mode afterwards.
    ``interrupted`` gets the index of each batch before it, and returns the same on all ranks.
    """
    model.eval()
    sums = _Sums(fabric, objective or CrossEntropy(), len(source_names), metrics or {})
    for index, batch in enumerate(batches):
        if interrupted(index):
            model.train()
            return None
        sums.add(model, batch)
        run_pending(fabric.device)
    model.train()
    return sums.over_ranks(fabric, source_names)


@dataclass(frozen=True)
class SamplePrompts:
    """The texts of ``--sample_prompts`` and their ids, which ``end_ids`` end after ``num_tokens`` new ones at most."""

    tokenizer: Any
    texts: list[str]
    input_ids: list[list[int]]
    end_ids: frozenset[int]
    num_tokens: int


@torch.no_grad()
def generate_samples(
    fabric: Fabric, model: Any, prompts: SamplePrompts, step: int, interrupted: Callable[[int], bool] = lambda _: False
) -> list[Sample] | None:
    """Continue the prompts by the most likely tokens; return None if ``interrupted`` returned True, see ``evaluate``.

    All ranks compute all prompts together, because none has the whole model. Each token takes a forward pass as in an
    evaluation, over rows of one length that are padded at the end. So no attention, mask or cache is used that
    training does not use; with sharded weights a cache would save little. Layers run uncompiled, and no random number
    is drawn.
    """
    count = len(prompts.input_ids)
    longest = max(map(len, prompts.input_ids))
    padded = [ids + [0] * (longest + prompts.num_tokens - len(ids)) for ids in prompts.input_ids]
    rows = torch.tensor(padded, device=fabric.device)
    ends = torch.tensor([len(ids) for ids in prompts.input_ids], device=fabric.device)
    each = torch.arange(count, device=fabric.device)
    keeps = "logits_to_keep" in inspect.signature(model.module.forward).parameters
    new: list[list[int]] = []
    model.eval()
    with torch.compiler.set_stance("force_eager"):
        for index in range(prompts.num_tokens):
            if interrupted(index):
                model.train()
                return None
            # the logits of all positions would take count × longest × vocabulary × 4 bytes
            last: dict[str, Any] = {"logits_to_keep": ends - 1} if keeps else {}
            logits = forward(model, rows, None, **last).logits
            likeliest = logits[each, each if keeps else ends - 1].argmax(-1)
            chosen = gather_over_ranks(fabric, likeliest)[0]  # rank 0's, so that all ranks end at the same token
            rows[each, ends] = chosen
            ends += 1
            new.append(chosen.tolist())
            if all(prompts.end_ids.intersection(ids) for ids in zip(*new, strict=True)):
                break
    model.train()
    samples = []
    for text, ids, new_ids in zip(prompts.texts, prompts.input_ids, zip(*new, strict=True), strict=True):
        until_end = list(takewhile(lambda id_: id_ not in prompts.end_ids, new_ids))
        samples.append(Sample(step, text, continuation(prompts.tokenizer, ids, until_end)))
    return samples


@dataclass(frozen=True)
class Validation:
    """What all ranks do together with the model of a step. ``batches`` are this rank's."""

    fabric: Fabric
    model: Any
    objective: Objective
    metrics: Mapping[str, Metric]
    batches: Iterable[Batch]
    source_names: tuple[str, ...]
    prompts: SamplePrompts | None
    heartbeat: Heartbeat

    def evaluate(self, step: int = 0) -> Evaluation | None:
        """Return the evaluation of the model after ``step``; None if a signal stops the run."""
        found = evaluate(
            self.fabric,
            self.model,
            self.batches,
            self.source_names,
            objective=self.objective,
            metrics=self.metrics,
            interrupted=partial(self._is_stopped, StepPhase.VALIDATION),
        )
        return found and replace(found, step=step)

    def sample(self, step: int) -> list[Sample] | None:
        """Return the samples of the model after ``step``, none without prompts; None if a signal stops the run."""
        if self.prompts is None:
            return []
        interrupted = partial(self._is_stopped, StepPhase.SAMPLING)
        return generate_samples(self.fabric, self.model, self.prompts, step, interrupted)

    def _is_stopped(self, phase: StepPhase, index: int) -> bool:
        self.heartbeat.enter(phase, index)
        return sync_step(self.fabric, StepSync(stop_signal=stop_signals.received)).stop_signal > 0
