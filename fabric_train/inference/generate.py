"""Generate text from a prompt with a checkpoint, an exported folder or a hub model."""

import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, TextStreamer

from fabric_train.cli.errors import InputError


@dataclass(frozen=True)
class GeneratedText:
    """The ids of the prompt, the new ids, the text of both, and the seconds that the new ids took."""

    prompt_ids: list[int]
    new_ids: list[int]
    text: str
    seconds: float


def generate(
    model: Any,
    tokenizer: Any,
    prompt: str,
    *,
    num_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    stream: bool = False,
) -> GeneratedText:
    """Continue ``prompt`` by at most ``num_tokens`` tokens, or until the model ends the text.

    Args:
        model: a causal language model in evaluation mode.
        tokenizer: the model's tokenizer; BOS comes before the prompt once, whether or not the tokenizer adds it.
        prompt: text, not empty.
        num_tokens: largest number of new tokens.
        temperature: 0 takes the most likely token each time; above 0 samples.
        top_p: sample from the most likely tokens that together have this probability.
        seed: seed of the sampling; the same seed gives the same text on the same device.
        stream: print prompt and text as they are generated.

    Raises:
        InputError: prompt and ``num_tokens`` exceed the model's positions, or an id of the prompt its vocabulary.
    """
    prompt_ids = encode_prompt(tokenizer, prompt)
    _check_prompt(model, prompt_ids, num_tokens)
    torch.manual_seed(seed)
    # the model's own generation_config may sample, apply top_k or penalize repetition, which the user did not ask for
    sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0} if temperature else {}
    ends = _end_ids(model, tokenizer)
    model.generation_config = GenerationConfig(
        max_new_tokens=num_tokens, eos_token_id=ends, pad_token_id=ends[0] if ends else 0, **sampling
    )
    streamer = TextStreamer(tokenizer, skip_special_tokens=True) if stream else None
    input_ids = torch.tensor([prompt_ids], device=model.device)
    start = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), streamer=streamer)
    seconds = time.perf_counter() - start
    ids = output[0].tolist()
    return GeneratedText(prompt_ids, ids[len(prompt_ids) :], tokenizer.decode(ids, skip_special_tokens=True), seconds)


def encode_prompt(tokenizer: Any, prompt: str) -> list[int]:
    """Return the prompt's ids after exactly one BOS, as at the start of a document in training."""
    ids: list[int] = tokenizer.encode(prompt, add_special_tokens=False)
    bos = tokenizer.bos_token_id
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]


def _end_ids(model: Any, tokenizer: Any) -> list[int]:
    """Return the ids that end a text: those of the model's generation_config and the tokenizer's EOS."""
    own = model.generation_config.eos_token_id if model.generation_config else None
    ids = own if isinstance(own, list) else [own]
    return sorted({id_ for id_ in (*ids, tokenizer.eos_token_id) if id_ is not None})


def _check_prompt(model: Any, prompt_ids: list[int], num_tokens: int) -> None:
    if not prompt_ids:
        raise InputError("--prompt has no tokens: give some text")
    vocab_size = model.get_input_embeddings().weight.shape[0]
    if max(prompt_ids) >= vocab_size:
        raise InputError(
            f"the prompt has token id {max(prompt_ids)}, but the model's vocabulary ends at {vocab_size - 1}: "
            "use the model's own tokenizer"
        )
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and len(prompt_ids) + num_tokens > positions:
        raise InputError(
            f"the prompt's {len(prompt_ids)} tokens and --num_tokens {num_tokens} exceed the model's {positions} "
            "positions: shorten the prompt or give a smaller --num_tokens"
        )
