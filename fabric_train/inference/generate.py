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
    """Print the text after a single prompt while ``generate`` runs, without the texts in ``stop``, and a line break."""

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), *, shows_prompt: bool = False) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._shows_prompt = shows_prompt
        self._prompt_ids: list[int] | None = None
        self._new_ids: list[int] = []
        self._num_printed = 0  # characters

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt's ids [1, T] first, and then each new id [1]."""
        # the first call has the prompt
        if self._prompt_ids is None:
            self._prompt_ids = value[0].tolist()
            if self._shows_prompt:
                print(self._tokenizer.decode(self._prompt_ids, skip_special_tokens=True), end="", flush=True)
            return
        self._new_ids += value.tolist()
        text = continuation(self._tokenizer, self._prompt_ids, self._new_ids)
        end = find_stop(text, self._stop)
        if end is None:
            # hold back what the next token may change: half a character, or the beginning of a stop text
            end = len(text.rstrip(_INCOMPLETE)) - _longest_stop_prefix(text, self._stop)
        if end > self._num_printed:
            print(text[self._num_printed : end], end="", flush=True)
            self._num_printed = end

    def end(self) -> None:
        """Print the text that was held back, and a line break."""
        text = continuation(self._tokenizer, self._prompt_ids or [], self._new_ids)
        end = find_stop(text, self._stop)
        print(text[self._num_printed : end], flush=True)


def _longest_stop_prefix(text: str, stop: Sequence[str]) -> int:
    """Return how many characters at the end of a text may be the beginning of a stop text."""
    longest = 0
    for stop_text in stop:
        for size in range(1, len(stop_text)):
            if text.endswith(stop_text[:size]):
                longest = max(longest, size)
    return longest


def continuation(tokenizer: Any, prompt_ids: list[int], new_ids: list[int]) -> str:
    """Return the text of new ids after a prompt; decoded alone, some tokenizers would drop its leading space."""
    prompt = tokenizer.decode(prompt_ids, skip_special_tokens=True)
    prompt_and_text: str = tokenizer.decode([*prompt_ids, *new_ids], skip_special_tokens=True)
    return prompt_and_text.removeprefix(prompt)


def find_stop(text: str, stop: Sequence[str]) -> int | None:
    """Return the index in a text at which the first stop text begins; None if there is none."""
    indices = [text.index(stop_text) for stop_text in stop if stop_text in text]
    return min(indices, default=None)


@dataclass(frozen=True)
class GeneratedText:
    """The text that a model generated after a prompt."""

    new_ids: list[int]
    text: str
    """The text without the stop text or token that ended it."""
    ended_by: Literal["stop", "length", "interrupt"]
    """Why the text ended; ``stop`` means a token or a text at which it ends."""
    seconds: float
    """The time for the entire batch."""


@torch.inference_mode()
def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    settings: GenerateArguments,
    *,
    end_ids: Sequence[int] = (),
    prompt_numbers: Sequence[int] | None = None,
    printer: TextPrinter | None = None,
    is_interrupted: Callable[[], bool] = lambda: False,
) -> list[GeneratedText]:
    """Continue prompts, in one batch, until the model, which is in evaluation mode, ends each text.

    A sampled text depends on its prompt and prompt number, and not on the other prompts of the batch: noise from its
    own random stream is added to the scores (the Gumbel-max trick, arXiv:1411.0030).

    Args:
        model: a causal language model of transformers.
        tokenizer: the model's tokenizer.
        prompts: ids of each prompt, at least one; see ``prompts.encode_prompts``.
        settings: how to choose the tokens, and how many.
        end_ids: tokens that end a text, in addition to the tokenizer's EOS and the ones in ``model.generation_config``.
        prompt_numbers: with the seed, these choose the random stream of each prompt; default: the index in the batch.
        printer: prints the text while it is generated; only for a single prompt.
        is_interrupted: called after each token; True ends the generation.
    """
    # The model's own generation_config may sample, apply top_k or penalize repetition, which the user did not ask for.
    stop_ids = _all_stop_ids(model, tokenizer, end_ids)
    config = GenerationConfig(
        max_new_tokens=settings.num_tokens,
        eos_token_id=stop_ids,
        pad_token_id=stop_ids[0] if stop_ids else 0,
        repetition_penalty=settings.repetition_penalty,
    )

    # Prompts are padded at their beginning, [batch, longest]. The padding is masked; it is the prompt's first token,
    # which has a repetition penalty anyway.
    encoded = [list(prompt_ids) for prompt_ids in prompts]
    longest = max(map(len, encoded))
    padded_rows: list[list[int]] = []
    masks: list[list[int]] = []
    for prompt_ids in encoded:
        num_padding = longest - len(prompt_ids)
        padded_rows.append([prompt_ids[0]] * num_padding + prompt_ids)
        masks.append([0] * num_padding + [1] * len(prompt_ids))

    # The device of the first layer; of a model that is spread, weights that wait in host memory are on no device.
    device_map = getattr(model, "hf_device_map", None)
    device = next(iter(device_map.values())) if device_map else model.device
    interruption = _Interruption(is_interrupted)
    stop_arguments = {"stop_strings": list(settings.stop), "tokenizer": tokenizer} if settings.stop else {}
    model_config = model.generation_config
    model.generation_config = config
    start = time.perf_counter()
    try:
        output = model.generate(
            torch.tensor(padded_rows).to(device),
            attention_mask=torch.tensor(masks).to(device),
            logits_processor=_score_processors(settings, prompt_numbers or range(len(encoded))),
            stopping_criteria=[interruption],
            streamer=printer,
            **stop_arguments,
        )
    finally:
        model.generation_config = model_config
    seconds = time.perf_counter() - start

    texts = []
    for prompt_ids, row in zip(encoded, output.tolist(), strict=True):
        ended = _cut_at_end(tokenizer, prompt_ids, row[longest:], settings.stop, stop_ids)
        ended_by: Literal["stop", "length", "interrupt"] = "length"
        if ended.has_end:
            ended_by = "stop"
        elif interruption.happened:
            ended_by = "interrupt"
        texts.append(GeneratedText(ended.new_ids, ended.text, ended_by, seconds))
    return texts


def _all_stop_ids(model: Any, tokenizer: Any, end_ids: Sequence[int]) -> list[int]:
    """Return the ids of tokens that end a text, ascending: the model's, the tokenizer's and ``end_ids``."""
    model_ids = model.generation_config.eos_token_id if model.generation_config else None
    if not isinstance(model_ids, list):
        model_ids = [model_ids]
    token_ids = {*model_ids, tokenizer.eos_token_id, *end_ids}
    return sorted(token_id for token_id in token_ids if token_id is not None)


def _score_processors(settings: GenerateArguments, prompt_numbers: Sequence[int]) -> LogitsProcessorList:
    """Return the processors that change the scores so that the highest one is the token to take; none if greedy."""
    if not settings.temperature:
        return LogitsProcessorList()
    processors: list[Any] = [TemperatureLogitsWarper(settings.temperature)]
    if settings.top_k:
        processors.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1:
        processors.append(TopPLogitsWarper(settings.top_p))
    if settings.min_p:
        processors.append(MinPLogitsWarper(settings.min_p))
    return LogitsProcessorList([*processors, GumbelNoise(settings.seed, prompt_numbers)])


class GumbelNoise(LogitsProcessor):
    """Add noise to scores so that the highest one is a sample from their softmax, with one random stream for each row.

    The numbers are drawn on the CPU, so they are the same on every device.
    """

    def __init__(self, seed: int, prompt_numbers: Sequence[int]) -> None:
        self._streams = []
        for prompt_number in prompt_numbers:
            sequence = np.random.SeedSequence([seed, prompt_number])
            stream_seed = int(sequence.generate_state(1)[0])
            self._streams.append(torch.Generator().manual_seed(stream_seed))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores [B, V] with the noise of the next token."""
        vocab_size = scores.shape[1]
        draws = [torch.empty(vocab_size).exponential_(generator=stream) for stream in self._streams]
        # argmax(scores - log E) is a sample of softmax(scores) if E is exponential: -log E has a Gumbel distribution
        exponential = torch.stack(draws)  # [B, V]
        return scores.float() - exponential.log().to(scores.device)


class _Interruption(StoppingCriteria):
    """End every text of a batch when a function returns True."""

    def __init__(self, is_interrupted: Callable[[], bool]) -> None:
        self._is_interrupted = is_interrupted
        self.happened = False

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Return whether each text of the batch ends, bool [B]."""
        self.happened = self.happened or self._is_interrupted()
        return torch.full((input_ids.shape[0],), self.happened, device=input_ids.device)


@dataclass(frozen=True)
class _EndedText:
    """New ids and their text up to where it ends; ``has_end`` is False if no token and no stop text ended it."""

    new_ids: list[int]
    text: str
    has_end: bool


def _cut_at_end(
    tokenizer: Any, prompt_ids: list[int], row: list[int], stop: Sequence[str], stop_ids: Sequence[int]
) -> _EndedText:
    """Cut a row of new ids after the first end token, or before the first stop text.

    The new ids include the token that completes a stop text, but the text has nothing of the stop text.
    """
    # up to the first end token, which belongs to the new ids
    has_end_token = False
    new_ids = row
    for index, token_id in enumerate(row):
        if token_id in stop_ids:
            has_end_token = True
            new_ids = row[: index + 1]
            break
    text = continuation(tokenizer, prompt_ids, new_ids)
    stop_index = find_stop(text, stop)
    if stop_index is None:
        return _EndedText(new_ids, text, has_end_token)

    # A stop text may begin within a token, so its tokens are found by decoding: by bisection, as decoding is slow.
    def has_stop(num_tokens: int) -> bool:
        return find_stop(continuation(tokenizer, prompt_ids, new_ids[:num_tokens]), stop) is not None

    num_tokens = bisect_left(range(len(new_ids)), True, key=has_stop)  # the fewest tokens with a stop text
    return _EndedText(new_ids[:num_tokens], text[:stop_index], has_end=True)
