"""Continue the texts of ``--sample_prompts`` with the model after a step."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from lightning import Fabric

from fabric_train.distributed.ranks import gather_over_ranks
from fabric_train.inference.generate import continuation
from fabric_train.model.attention import forward
from fabric_train.training.logger import Sample

_PADDING_ID = 0  # no token sees the padding: it comes after the text


@dataclass(frozen=True)
class SamplePrompts:
    """The texts of ``--sample_prompts``, and how to continue them."""

    tokenizer: Any
    texts: list[str]
    input_ids: list[list[int]]
    """The token ids of each text."""
    end_ids: frozenset[int]
    """The tokens that end a continuation."""
    num_tokens: int
    """The most tokens of a continuation."""


@torch.no_grad()
def generate_samples(
    fabric: Fabric,
    model: Any,
    prompts: SamplePrompts,
    step: int,
    is_interrupted: Callable[[int], bool] = lambda _: False,
) -> list[Sample] | None:
    """Continue the prompts with the most likely tokens; return None if ``is_interrupted`` returned True.

    All ranks compute all prompts together, because none has the full model. Each token takes a forward pass as in an
    evaluation, over rows of the same length that are padded at the end. So no attention, mask or cache is used that
    training does not use; with sharded weights, a cache would save little. Layers run uncompiled, and no random number
    is drawn.

    Args:
        fabric: The run's Fabric, whose ranks compute together.
        model: The model that ``setup_model`` returned; it is in training mode afterwards.
        prompts: The texts.
        step: The step of the model.
        is_interrupted: Called with the index of each new token before it is computed; returns the same on all ranks.
    """
    num_prompts = len(prompts.input_ids)
    longest = max(len(input_ids) for input_ids in prompts.input_ids)
    row_length = longest + prompts.num_tokens
    padded = [input_ids + [_PADDING_ID] * (row_length - len(input_ids)) for input_ids in prompts.input_ids]
    rows = torch.tensor(padded, device=fabric.device)  # [prompts, row_length]
    lengths = torch.tensor([len(input_ids) for input_ids in prompts.input_ids], device=fabric.device)  # [prompts]
    row_indices = torch.arange(num_prompts, device=fabric.device)
    selects_logits = "logits_to_keep" in inspect.signature(model.module.forward).parameters

    new_tokens: list[list[int]] = []  # one of each prompt, for each pass
    model.eval()
    with torch.compiler.set_stance("force_eager"):
        for index in range(prompts.num_tokens):
            if is_interrupted(index):
                model.train()
                return None
            last_positions = lengths - 1
            if selects_logits:
                # The logits of all positions would take prompts × longest × vocabulary × 4 bytes. The head keeps these
                # positions of every row: [prompts, prompts, vocab]; only the diagonal is needed.
                logits = forward(model, rows, None, logits_to_keep=last_positions).logits
                next_logits = logits[row_indices, row_indices]
            else:
                logits = forward(model, rows, None).logits
                next_logits = logits[row_indices, last_positions]
            likeliest = next_logits.argmax(-1)  # [prompts]
            tokens = gather_over_ranks(fabric, likeliest)[0]  # rank 0's, so that all ranks end at the same token
            rows[row_indices, lengths] = tokens
            lengths += 1
            new_tokens.append(tokens.tolist())
            continuations = zip(*new_tokens, strict=True)
            if all(prompts.end_ids.intersection(token_ids) for token_ids in continuations):
                break
    model.train()

    samples = []
    continuations = zip(*new_tokens, strict=True)
    for text, input_ids, token_ids in zip(prompts.texts, prompts.input_ids, continuations, strict=True):
        before_end = list(takewhile(lambda token_id: token_id not in prompts.end_ids, token_ids))
        samples.append(Sample(step, text, continuation(prompts.tokenizer, input_ids, before_end)))
    return samples
