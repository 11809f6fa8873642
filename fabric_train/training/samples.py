"""Texts that the model writes for ``--sample_prompts`` at each validation: RUN/samples.jsonl and the loggers."""

import inspect
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning import Fabric

from fabric_train.cli.errors import InputError
from fabric_train.distributed.collectives import gather_over_ranks
from fabric_train.files.regular_file import check_no_link, open_to_write, write_atomically
from fabric_train.files.typed_json import parse_json
from fabric_train.inference.text_printer import continuation
from fabric_train.model.packed_forward import forward


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
