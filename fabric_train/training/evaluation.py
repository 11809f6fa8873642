"""Validation loss: the mean over the supervised tokens of all ranks, each token with the same weight."""

import inspect
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning import Fabric

from fabric_train.checkpoint import Evaluation, LossProgress, TokenLoss, TrainerState
from fabric_train.cli.errors import InputError
from fabric_train.data.batch import SUM_OF_HASHES, Batch, count_supervised, hash_supervised
from fabric_train.distributed.collectives import gather_over_ranks, sum_over_data_ranks
from fabric_train.distributed.xla import run_pending
from fabric_train.files.regular_file import check_no_link, open_to_write, write_atomically
from fabric_train.files.typed_json import parse_json
from fabric_train.inference.generate import continuation
from fabric_train.model.attention import forward
from fabric_train.training.loss import sum_by_piece, sum_by_source, summed_loss

_PATIENCE = 3


@dataclass(frozen=True)
class EarlyStopping:
    """``--early_stopping``: a run ends after ``patience`` evaluations in which the loss of ``source`` is no new lowest.

    ``source`` is "all" for the whole. The count is in the trainer state, so a resumed run ends at the same step.
    """

    source: str
    patience: int

    def after(self, before: LossProgress | None, evaluation: Evaluation) -> LossProgress:
        """Return the progress after an evaluation; with another source than before, counting starts at 0."""
        if before is None or before.source != self.source:
            before = LossProgress(self.source)
        return before.after(evaluation)

    def ends(self, state: TrainerState) -> bool:
        """Return whether the run ends after the state's step."""
        progress = state.progress
        return progress is not None and progress.source == self.source and progress.num_since >= self.patience

    def describe(self, state: TrainerState) -> str:
        """Return why the run ends after the state's step."""
        assert state.progress is not None
        name = "the validation loss" if self.source == "all" else f"the validation loss of {self.source}"
        best, step = state.progress.best, state.progress.best_step
        lowest = "is not finite" if best is None else f"has not fallen below {best:.4f}, that of step {step},"
        return (
            f"early stopping after step {state.step}: {name} {lowest} in {state.progress.num_since} evaluations; "
            "a larger patience continues with --resume true"
        )


def parse_early_stopping(given: str, names: Sequence[str]) -> EarlyStopping:
    """Return what ``SOURCE[:patience]`` means; ``names`` are the sources, which may have a colon in their names."""
    found = None if given in names else re.fullmatch(r"(.+):([1-9][0-9]{0,8})", given)
    return EarlyStopping(found[1], int(found[2])) if found else EarlyStopping(given, _PATIENCE)


@torch.no_grad()
def evaluate(
    fabric: Fabric,
    model: Any,
    batches: Iterable[Batch],
    source_names: Sequence[str] = (),
    *,
    interrupted: Callable[[int], bool] = lambda _: False,
) -> Evaluation | None:
    """Evaluate on this rank's batches and sum over the ranks.

    Args:
        fabric: that the model is set up with; all ranks call this together.
        model: is in training mode afterwards.
        batches: of this rank; every rank has the same number.
        source_names: the sources that the pieces of the batches count.
        interrupted: called with the index of each batch before it; returns the same on all ranks.

    Returns:
        None if ``interrupted`` returned True.
    """
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=fabric.device)  # summed loss, supervised tokens
    nats = torch.zeros(len(source_names), dtype=torch.float64, device=fabric.device)
    counts = torch.zeros(2, len(source_names), dtype=torch.float64)  # supervised tokens, bytes
    hashed = 0
    for index, batch in enumerate(batches):
        if interrupted(index):
            model.train()
            return None
        hashed += hash_supervised(batch.input_ids, batch.labels)
        there = batch.to(fabric.device)
        loss = summed_loss(model, there.input_ids, there.labels, there.documents, there.targets)
        totals[0] += loss.total
        totals[1] += count_supervised(there.labels)
        if batch.pieces is not None and len(source_names):
            of_pieces = sum_by_piece(loss.of_tokens, batch)
            nats += sum_by_source(of_pieces, batch.pieces.sources, len(source_names)).to(fabric.device)
            counts += batch.pieces.count_by_source(len(source_names))
        run_pending(fabric.device)
    model.train()
    of_rows = torch.tensor([hashed % SUM_OF_HASHES], dtype=torch.float64, device=fabric.device)
    row = torch.cat([totals, of_rows, nats, counts.flatten().to(fabric.device)])
    summed, num_tokens, hashed, *of_sources = sum_over_data_ranks(fabric, row).tolist()
    by_source = zip(source_names, *torch.tensor(of_sources, dtype=torch.float64).view(3, -1).tolist(), strict=True)
    return replace(_evaluation(summed, int(num_tokens), by_source), rows=f"{int(hashed) % SUM_OF_HASHES:010x}")


def _evaluation(nats: float, num_tokens: int, by_source: Iterable[tuple[str, float, float, float]]) -> Evaluation:
    """Return the evaluation; ``by_source`` has name, nats, tokens and bytes, which are NaN if they are not known."""
    sources = {
        name: TokenLoss(summed, int(tokens), None if math.isnan(num_bytes) else num_bytes)
        for name, summed, tokens, num_bytes in by_source
        if tokens
    }
    known = [source.num_bytes for source in sources.values() if source.num_bytes is not None]
    num_bytes = math.fsum(known) if sources and len(known) == len(sources) else None
    return Evaluation(TokenLoss(nats, num_tokens, num_bytes), sources)


@dataclass(frozen=True)
class SamplePrompts:
    """The prompts of ``--sample_prompts``: their texts (of a chat as its template renders it) and token ids.

    ``end_ids`` are the tokens that end a text, ``num_tokens`` is the largest number of new ones.
    """

    tokenizer: Any
    texts: list[str]
    input_ids: list[list[int]]
    end_ids: frozenset[int]
    num_tokens: int


@dataclass(frozen=True)
class Sample:
    """A line of samples.jsonl: the prompt, and the text with which the model of a step continues it."""

    step: int
    prompt: str
    text: str


@torch.no_grad()
def generate_samples(
    fabric: Fabric, model: Any, prompts: SamplePrompts, step: int, interrupted: Callable[[int], bool] = lambda _: False
) -> list[Sample] | None:
    """Continue the prompts by the most likely tokens.

    All ranks compute all prompts together, because none has the whole model. Each token takes a forward pass like those
    of an evaluation, over rows of one length that are padded at the end. So no attention, mask or cache is used that
    training does not use. With sharded weights a cache would save little: each pass gathers all weights. Layers run
    uncompiled, and no random number is drawn.

    Args:
        fabric: that the model is set up with; all ranks call this together.
        model: is in training mode afterwards.
        prompts: the same on all ranks.
        step: of the model.
        interrupted: called with the index of each new token before it; returns the same on all ranks.

    Returns:
        None if ``interrupted`` returned True.
    """
    count, longest = len(prompts.input_ids), max(map(len, prompts.input_ids))
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
    return [
        Sample(step, text, continuation(prompts.tokenizer, ids, _until_end(new_ids, prompts.end_ids)))
        for text, ids, new_ids in zip(prompts.texts, prompts.input_ids, zip(*new, strict=True), strict=True)
    ]


def _until_end(new_ids: Sequence[int], end_ids: frozenset[int]) -> list[int]:
    end = next((place for place, id_ in enumerate(new_ids) if id_ in end_ids), None)
    return list(new_ids[:end])


class SampleFile:
    """RUN/samples.jsonl: a line for each step and prompt.

    Args:
        path: of the file; it need not exist.
        last_step: the run continues after it. Later lines, which an interrupted run wrote, are removed.

    Attributes:
        past: the samples up to ``last_step``.

    Raises:
        InputError: the file is a link, or a line is damaged.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        self._path = path
        self.past: list[Sample] = []
        check_no_link(path)
        if not path.exists():
            return
        content = path.read_bytes()
        for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), 1):
            try:
                sample = parse_json(line, Sample)
            except ValueError as error:
                raise InputError(f"{path}, line {number}: damaged ({error}); move the file away") from None
            if sample.step > last_step:
                break
            self.past.append(sample)
        kept = "".join(map(_line, self.past))
        if kept.encode() != content:
            write_atomically(path, kept)

    def log(self, samples: Sequence[Sample]) -> None:
        """Append samples, and wait until they are on the disk."""
        with open_to_write(self._path, "a", newline="") as file:
            file.writelines(map(_line, samples))
            file.flush()
            os.fsync(file.fileno())


def _line(sample: Sample) -> str:
    return json.dumps(asdict(sample), ensure_ascii=False) + "\n"
