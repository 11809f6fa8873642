"""Compute a model's loss for each predicted token of a text, part by part, and keep finished parts on disk."""

import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fabric_train.cli.errors import RunError
from fabric_train.cli.output import open_console
from fabric_train.data.batch import Batch
from fabric_train.evaluation.compared_model import ComparedModel
from fabric_train.evaluation.texts import EncodedText, ScoredPart
from fabric_train.inference.load_model import load_for_inference
from fabric_train.model.lm_head_loss import compute_loss_in_head
from fabric_train.tokenization.workers import ThrottledLog
from fabric_train.training.objective import CrossEntropy

ShowScored = Callable[[str, int], None]  # the model, and further tokens scored
FOLDER = "token_losses"


@contextmanager
def scoring_progress(total: int) -> Iterator[ShowScored]:
    """Yield the function that shows the progress; ``total`` are the tokens to score."""
    with _bar(total) if sys.stderr.isatty() else _lines(total) as show:
        yield show


@contextmanager
def _bar(total: int) -> Iterator[ShowScored]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=open_console(stderr=True)) as bar:
        task = bar.add_task("starting", total=total)
        yield lambda model, tokens: bar.update(task, advance=tokens, description=model)


@contextmanager
def _lines(total: int) -> Iterator[ShowScored]:
    log, started, scored = ThrottledLog(), time.monotonic(), 0

    def show(model: str, tokens: int) -> None:
        nonlocal scored
        scored += tokens
        left = (time.monotonic() - started) * (total - scored) / scored if scored else 0
        log(f"scoring {model}: {scored:,} of {total:,} tokens, about {max(left, 0):.0f} s left")

    yield show


class LossCache:
    """Finished parts in ``folder``: one file of fp32 losses for each part of a text and model."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._device = device_kind()

    def has(self, model: ComparedModel, part: ScoredPart) -> bool:
        """Return whether a part is finished."""
        return self._file(model, part).is_file()

    def read(self, model: ComparedModel, part: ScoredPart) -> np.ndarray | None:
        """Return the losses of a part, fp32 [its tokens]; None if it is not finished."""
        try:
            losses = np.load(self._file(model, part), allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return None
        is_whole = isinstance(losses, np.ndarray) and losses.dtype == np.float32 and losses.shape == (len(part.tokens),)
        return losses if is_whole else None

    def write(self, model: ComparedModel, part: ScoredPart, losses: np.ndarray) -> None:
        """Keep the losses of a part; the file is complete or absent."""
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._file(model, part)
        unfinished = file.with_suffix(f".{os.getpid()}")
        with unfinished.open("wb") as opened:
            np.save(opened, losses, allow_pickle=False)
        unfinished.replace(file)

    def _file(self, model: ComparedModel, part: ScoredPart) -> Path:
        key = f"{model.identity}\n{part.content}\n{self._device}"
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.npy"


def device_kind() -> str:
    """Return the kind of device that models are evaluated on, which decides the precision."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def score_texts(
    model: ComparedModel, texts: Sequence[EncodedText], cache: LossCache, batch_tokens: int, show: ShowScored
) -> list[np.ndarray]:
    """Return the loss of each predicted token of some texts in nats, fp32 [N] for each.

    The model is loaded when the first part comes that is not finished.

    Args:
        model: the model.
        texts: in its tokens.
        cache: of finished parts.
        batch_tokens: tokens of a forward pass.
        show: called after each forward pass.

    Raises:
        InputError: the model's weights are damaged.
        RunError: a loss is not finite.
    """
    loaded = None
    of_texts = []
    for text in texts:
        of_parts = [np.zeros(0, dtype=np.float32)]
        for part in text.parts():
            losses = cache.read(model, part)
            if losses is None:
                loaded = loaded or load_to_score(model)
                losses = score_part(loaded, text, part, batch_tokens, partial(show, model.name))
                _check_finite(model, text, part, losses)
                cache.write(model, part, losses)
            of_parts.append(losses)
        of_texts.append(np.concatenate(of_parts))
    return of_texts


def load_to_score(model: ComparedModel) -> Any:
    """Load a model so that its logits are fp32: all in fp32 on a CPU; on a GPU the layers are in bfloat16.

    The head of a model that is spread over devices, or that ``compute_loss_in_head`` leaves alone, stays as it is.
    """
    loaded, _ = load_for_inference(model.source)
    if loaded.device.type == "cpu":
        loaded = loaded.float()
    is_spread = hasattr(loaded, "hf_device_map")  # there, accelerate moves the head's input in its forward
    if not is_spread and compute_loss_in_head(loaded):
        loaded.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))
    return loaded


@torch.no_grad()
def score_part(
    model: Any, text: EncodedText, part: ScoredPart, batch_tokens: int, advance: Callable[[int], None]
) -> np.ndarray:
    """Return the loss of each predicted token of a part in nats, fp32 [its tokens].

    Args:
        model: from ``load_to_score``.
        text: that the part is of.
        part: its documents or rows.
        batch_tokens: tokens of a forward pass.
        advance: called with the number of tokens of each finished forward pass.
    """
    losses = np.zeros(len(part.tokens), dtype=np.float32)
    for batch in text.batches(part, batch_tokens):
        input_ids = batch.input_ids.to(model.device)
        documents = batch.documents and batch.documents.to(model.device)
        # labels are not read where the targets are given
        there = Batch(input_ids, input_ids, documents, batch.targets.to(model.device))
        of_tokens = CrossEntropy().loss(model, there).of_tokens
        assert of_tokens is not None
        losses[batch.places - part.tokens.start] = of_tokens.float().cpu().numpy()
        advance(len(batch.places))
    return losses


def _check_finite(model: ComparedModel, text: EncodedText, part: ScoredPart, losses: np.ndarray) -> None:
    is_finite = np.isfinite(losses)
    if not is_finite.all():
        place = text.place(int(text.owners[part.tokens.start + int(np.argmin(is_finite))]))
        raise RunError(
            f"--models {model.name}: the loss of a token of {place} is not finite; its weights are damaged or overflow"
        )
