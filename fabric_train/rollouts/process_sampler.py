"""Sample completions in the processes that train, with transformers' ``generate``.

One device and ddp sample with the model in training itself. Under fsdp and fsdp2, no rank has all weights, so each rank
samples with a full copy of the model, which takes over the weights before each step.

This is for small models, CPUs and tests: an engine made for inference samples many times as fast.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from lightning import Fabric
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from fabric_train.distributed.ranks import gather_over_ranks
from fabric_train.distributed.sharded_parameters import named_parameters, original_name
from fabric_train.model.attention import VARLEN
from fabric_train.model.evaluation_mode import evaluation_mode
from fabric_train.rollouts.sampler import Completion, FinishReason, SampleRequest, SamplingSettings


class ProcessSampler:
    """A ``Sampler`` that runs the model in this process.

    The tokens of a completion depend on the weights, its prompt and its seed, and but for rounding not on the other
    completions of its batch.
    """

    def __init__(
        self,
        fabric: Fabric,
        settings: SamplingSettings,
        batch_size: int,
        open_copy: Callable[[], Any],
        on_batch: Callable[[], None],
    ) -> None:
        """Set up the sampler.

        Args:
            fabric: The run's Fabric.
            settings: How to sample.
            batch_size: The most completions that are sampled at once.
            open_copy: Returns another model with the same parameters and buffers, on this rank's device, whose values
                do not matter; called once, and only if the model in training is sharded.
            on_batch: Called before each batch is sampled, equally often on all ranks.
        """
        self._fabric = fabric
        self._settings = settings
        self._batch_size = batch_size
        self._open_copy = open_copy
        self._on_batch = on_batch
        self._model: Any = None

    def update_weights(self, model: Any, step: int) -> None:
        """Take over the weights of the model, see ``Sampler.update_weights``; every rank gathers all of them."""
        if not is_sharded(model):
            self._model = model.module
            return
        if self._model is None:
            self._model = self._open_copy()
        copy_weights(model, self._model)

    def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """Return a completion for each request, see ``Sampler.sample``."""
        # Prompts of similar lengths together: shorter ones are padded.
        order = sorted(range(len(requests)), key=lambda index: len(requests[index].prompt_ids))
        # All ranks count the same batches, because they may stop only between the same ones.
        most_requests = int(gather_over_ranks(self._fabric, torch.tensor(len(requests))).max())
        completions: dict[int, Completion] = {}
        with _for_sampling(self._model):
            for batch_index in range(math.ceil(most_requests / self._batch_size)):
                self._on_batch()
                start = batch_index * self._batch_size
                indices = order[start : start + self._batch_size]
                if indices:
                    batch = [requests[index] for index in indices]
                    completions.update(zip(indices, self._sample_batch(batch), strict=True))
        return [completions[index] for index in range(len(requests))]

    def close(self) -> None:
        """Free the copy of the model."""
        self._model = None

    @torch.no_grad()
    def _sample_batch(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """Sample one completion for each request, in one batch."""
        model = self._model
        settings = self._settings
        device = self._fabric.device

        # Prompts are padded at their beginning, [requests, longest]; the padding is masked.
        longest = max(len(request.prompt_ids) for request in requests)
        input_ids = torch.zeros(len(requests), longest, dtype=torch.int64)
        mask = torch.zeros_like(input_ids)
        for row, request in enumerate(requests):
            input_ids[row, longest - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            mask[row, longest - len(request.prompt_ids) :] = 1

        drawing = _Drawing(settings, [request.seed for request in requests], device)
        config = GenerationConfig(
            max_new_tokens=settings.max_new_tokens, eos_token_id=list(settings.end_ids), pad_token_id=0
        )
        model_config = model.generation_config
        model.generation_config = config  # the model's own would change the distribution
        try:
            with self._fabric.autocast():
                output = model.generate(
                    input_ids.to(device),
                    attention_mask=mask.to(device),
                    logits_processor=LogitsProcessorList([drawing]),
                )
        finally:
            model.generation_config = model_config
        new_ids = output[:, longest:].cpu().numpy()
        log_probabilities = torch.stack(drawing.log_probabilities, dim=1).cpu().numpy()  # [requests, new tokens]
        completions = []
        for row in range(len(requests)):
            completions.append(_cut_at_end(new_ids[row], log_probabilities[row], settings.end_ids))
        return completions


class _Drawing(LogitsProcessor):
    """Draw the next tokens, with one random stream for each row, and keep their log-probabilities.

    A token is drawn by inversion: it is the first one up to which the probabilities add up to more than a random
    number. So a token needs one number, and not one for each row of the head, which would take longer to draw than the
    model's pass: the streams are on the CPU, to be the same on every device.
    """

    def __init__(self, settings: SamplingSettings, seeds: Sequence[int], device: torch.device) -> None:
        self._temperature = settings.temperature
        streams = []
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            streams.append(torch.rand(settings.max_new_tokens, dtype=torch.float64, generator=generator))
        # one copy to the device for all tokens, fp64 [new tokens, rows], from 0 to 1
        self._numbers = torch.stack(streams, dim=1).to(device)
        self.log_probabilities: list[torch.Tensor] = []
        """The log-probabilities of each row's next token, fp32 [rows], for each token."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores [rows, V] whose highest one is the drawn token."""
        logits = scores.float()
        if self._temperature != 1:
            logits = logits / self._temperature
        log_probabilities = torch.log_softmax(logits, dim=1)
        # fp32 sums of a large vocabulary would round away the unlikely tokens
        cumulative = log_probabilities.double().exp_().cumsum_(dim=1)  # [rows, V]
        num_drawn = len(self.log_probabilities)
        numbers = self._numbers[num_drawn, :, None]  # [rows, 1]
        # A number is at most 1 - 2⁻⁵³, so its product with the sum of the probabilities, which is not exactly 1, is
        # below the sum, and a token with a probability is drawn.
        drawn = torch.searchsorted(cumulative, numbers * cumulative[:, -1:], right=True)  # [rows, 1]
        self.log_probabilities.append(log_probabilities.gather(1, drawn)[:, 0])
        return scores.scatter_(1, drawn, torch.inf)


def _cut_at_end(new_ids: np.ndarray, log_probabilities: np.ndarray, end_ids: Sequence[int]) -> Completion:
    """Return a completion up to the first token that ends it, and with this token."""
    reason: FinishReason = "length"
    length = len(new_ids)
    end_positions = np.flatnonzero(np.isin(new_ids, end_ids))
    if len(end_positions):
        reason = "stop"
        length = int(end_positions[0]) + 1
    return Completion(new_ids[:length].astype(np.int64), log_probabilities[:length], reason)


@contextmanager
def _for_sampling(model: Any) -> Iterator[None]:
    """Put a model into evaluation mode, with attention that takes padded prompts; restore both afterwards."""
    attention = model.config._attn_implementation
    if attention == VARLEN:  # it knows documents, but no padding
        model.config._attn_implementation = "sdpa"
    try:
        with evaluation_mode(model):
            yield
    finally:
        model.config._attn_implementation = attention


def is_sharded(model: Any) -> bool:
    """Return whether no rank has all weights of a model that ``setup_model`` returned."""
    return any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules())


@torch.no_grad()
def copy_weights(model: Any, target: Any) -> None:
    """Copy all parameters and buffers of a sharded model into an unsharded one. All ranks call this together.

    Args:
        model: The model that ``setup_model`` returned, under fsdp or fsdp2.
        target: A model whose parameters and buffers have the same names and full shapes, in any dtype.
    """
    targets = dict(target.named_parameters(remove_duplicate=False))
    targets.update(target.named_buffers(remove_duplicate=False))
    is_fsdp1 = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    gathered = FullyShardedDataParallel.summon_full_params(model, writeback=False) if is_fsdp1 else nullcontext()
    with gathered:
        for name, tensor in (*named_parameters(model), *model.named_buffers()):
            # fsdp2 gathers one parameter at a time
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            targets[original_name(name)].copy_(full)
