"""Generate text for prompts with a checkpoint, an exported folder, a hub model or an adapter."""

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria
from transformers.generation import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.streamers import BaseStreamer

from fabric_train.inference.arguments import GenerateArguments

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # some bytes of a character; the next token has the others


class TextPrinter(BaseStreamer):
    """Print the text of a single prompt while ``generate`` runs, without the texts in ``stop``, and a line break."""

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), shows_prompt: bool = False) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._shows_prompt = shows_prompt
        self._prompt_ids: list[int] | None = None
        self._new_ids: list[int] = []
        self._num_printed = 0

    def put(self, value: Any) -> None:
        """Take the prompt's ids [1, T] first, and then each new id [1]."""
        if self._prompt_ids is None:
            self._prompt_ids = value[0].tolist()
            if self._shows_prompt:
                print(self._tokenizer.decode(self._prompt_ids, skip_special_tokens=True), end="", flush=True)
            return
        self._new_ids += value.tolist()
        text = continuation(self._tokenizer, self._prompt_ids, self._new_ids)
        end = find_stop(text, self._stop)
        if end is None:  # the rest may change with the next token
            begun = (size for stop in self._stop for size in range(1, len(stop)) if text.endswith(stop[:size]))
            end = len(text.rstrip(_INCOMPLETE)) - max(begun, default=0)
        if end > self._num_printed:
            print(text[self._num_printed : end], end="", flush=True)
            self._num_printed = end

    def end(self) -> None:
        """Print the text that was held back, and a line break."""
        text = continuation(self._tokenizer, self._prompt_ids or [], self._new_ids)
        print(text[self._num_printed : find_stop(text, self._stop)], flush=True)


def continuation(tokenizer: Any, prompt_ids: list[int], new_ids: list[int]) -> str:
    """Return the text of new ids after a prompt; without it, some tokenizers drop a space at the beginning."""
    prompt = tokenizer.decode(prompt_ids, skip_special_tokens=True)
    whole: str = tokenizer.decode([*prompt_ids, *new_ids], skip_special_tokens=True)
    return whole.removeprefix(prompt)


def find_stop(text: str, stop: Sequence[str]) -> int | None:
    """Return where the first stop string of a text begins; None without one."""
    return min((place for place in (text.find(one) for one in stop) if place >= 0), default=None)


@dataclass(frozen=True)
class GeneratedText:
    """The new ids after a prompt, and their text; "stop" is that a token ended it, or a text, which it lacks."""

    new_ids: list[int]
    text: str
    ended_by: Literal["stop", "length", "interrupt"]
    seconds: float


@torch.inference_mode()
def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    settings: GenerateArguments,
    *,
    end_ids: Sequence[int] = (),
    numbers: Sequence[int] | None = None,
    printer: TextPrinter | None = None,
    is_interrupted: Callable[[], bool] = lambda: False,
) -> list[GeneratedText]:
    """Continue prompts, in one batch, until the model, which is in evaluation mode, ends each text.

    A sampled text depends on its own prompt and number and not on the other prompts of the batch: noise of a random
    stream of its own is added to the scores (the Gumbel-max trick, arXiv:1411.0030).

    Args:
        prompts: ids of each prompt, at least one; see ``prompts.encode_prompts``.
        end_ids: tokens that end a text, too, beside the tokenizer's EOS and the ones in ``model.generation_config``.
        numbers: of the prompts, which with the seed choose their random streams; default: their places in the batch.
        printer: prints the text as it is generated; for a single prompt.
        is_interrupted: called after each token; True ends the generation.
    """
    encoded = [list(ids) for ids in prompts]
    own = model.generation_config
    ends = _all_ends(model, tokenizer, end_ids)
    # the model's own generation_config may sample, apply top_k or penalize repetition, which the user did not ask for
    config = GenerationConfig(
        max_new_tokens=settings.num_tokens,
        eos_token_id=ends,
        pad_token_id=ends[0] if ends else 0,
        repetition_penalty=settings.repetition_penalty,
    )
    longest = max(map(len, encoded))
    # the padding is masked; a prompt's own first token has a repetition penalty anyway
    rows = torch.tensor([[ids[0]] * (longest - len(ids)) + ids for ids in encoded])
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in encoded])
    interrupted = _Interrupted(is_interrupted)
    stops = {"stop_strings": list(settings.stop), "tokenizer": tokenizer} if settings.stop else {}
    places = getattr(model, "hf_device_map", None)  # weights that wait in host memory are on no device
    device = next(iter(places.values())) if places else model.device  # of the first layer
    start = time.perf_counter()
    model.generation_config = config
    try:
        output = model.generate(
            rows.to(device),
            attention_mask=mask.to(device),
            logits_processor=_processors(settings, numbers or range(len(encoded))),
            stopping_criteria=[interrupted],
            streamer=printer,
            **stops,
        )
    finally:
        model.generation_config = own
    seconds = time.perf_counter() - start
    new = [row[longest:] for row in output.tolist()]
    unfinished: Literal["interrupt", "length"] = "interrupt" if interrupted.happened else "length"
    cut = (_cut(tokenizer, ids, row, settings.stop, ends) for ids, row in zip(encoded, new, strict=True))
    return [GeneratedText(ids, text, "stop" if ended else unfinished, seconds) for ids, text, ended in cut]


def _all_ends(model: Any, tokenizer: Any, more: Sequence[int]) -> list[int]:
    own = model.generation_config.eos_token_id if model.generation_config else None
    ids = own if isinstance(own, list) else [own]
    return sorted({id_ for id_ in (*ids, tokenizer.eos_token_id, *more) if id_ is not None})


def _processors(settings: GenerateArguments, numbers: Sequence[int]) -> LogitsProcessorList:
    """Return what changes the scores so that the highest one is the token to take; none for greedy decoding."""
    if not settings.temperature:
        return LogitsProcessorList()
    processors: list[Any] = [TemperatureLogitsWarper(settings.temperature)]
    if settings.top_k:
        processors.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1:
        processors.append(TopPLogitsWarper(settings.top_p))
    if settings.min_p:
        processors.append(MinPLogitsWarper(settings.min_p))
    return LogitsProcessorList([*processors, _GumbelNoise(settings.seed, numbers)])


class _GumbelNoise(LogitsProcessor):
    """Add noise to scores, so that the highest one is a sample of their softmax; one random stream for each row.

    The numbers are drawn on the CPU, so they are the same on every device.
    """

    def __init__(self, seed: int, numbers: Sequence[int]) -> None:
        sequences = (np.random.SeedSequence([seed, number]) for number in numbers)
        self._streams = [torch.Generator().manual_seed(int(one.generate_state(1)[0])) for one in sequences]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores [B, V] with the noise of the next token."""
        exponential = torch.stack([torch.empty(scores.shape[1]).exponential_(generator=one) for one in self._streams])
        return scores.float() - exponential.log().to(scores.device)


class _Interrupted(StoppingCriteria):
    """End every text of a batch when a function returns True."""

    def __init__(self, is_interrupted: Callable[[], bool]) -> None:
        self._is_interrupted = is_interrupted
        self.happened = False

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Return bool [B]."""
        self.happened = self.happened or self._is_interrupted()
        return torch.full((input_ids.shape[0],), self.happened, device=input_ids.device)


def _cut(
    tokenizer: Any, prompt_ids: list[int], row: list[int], stop: Sequence[str], ends: Sequence[int]
) -> tuple[list[int], str, bool]:
    """Cut a row of new ids where its text ends; return them, the text, and whether a token or a text ended it."""
    end = next((place for place, id_ in enumerate(row, 1) if id_ in ends), None)
    new_ids = row[:end]
    text = continuation(tokenizer, prompt_ids, new_ids)
    if (place := find_stop(text, stop)) is None:
        return new_ids, text, end is not None

    def has_stop(count: int) -> bool:
        return find_stop(continuation(tokenizer, prompt_ids, new_ids[:count]), stop) is not None

    return new_ids[: bisect_left(range(len(new_ids)), True, key=has_stop)], text[:place], True
