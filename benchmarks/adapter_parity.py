"""Compare LoRA and QLoRA, eager and compiled, with plain transformers and peft on a GPU; print the differences as JSON.

The model is small, and its rows have documents that do not see each other. Its losses of single tokens and the
gradients of its adapter are compared in two dtypes.

- In fp32 with those of transformers and peft in fp32. The allowed difference is what two orders of the same sums may
  differ by.
- In bf16 with the same reference. Rounding to bf16 takes them away from it, and also transformers and peft in bf16. The
  distance may be at most twice as large as theirs: rounding errors add up in their squares, so that is what four times
  as many of them would do.

The reference has the values that weights in 4 bits stand for.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import peft
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.peers.huggingface_gpu import lora_config
from fabric_train.cli.errors import run_program
from fabric_train.data.batch import Batch, isolate
from fabric_train.distributed.decoder_layers import compile_layers
from fabric_train.model.adapter import Adapter, is_adapter_parameter
from fabric_train.model.attention import VARLEN
from fabric_train.model.lm_head_loss import compute_loss_in_head
from fabric_train.model.nf4 import NF4Linear
from fabric_train.training.objective import CrossEntropy
from tests.support.adapted_llama import adapted_llama, adapter_gradients
from tests.support.plain_training import document_losses
from tests.support.rounding import num_sums_of_gradient, rounding_tolerance

RANK = 16
ADAPTERS = {
    "LoRA": Adapter("lora", RANK, alpha=2.0 * RANK),
    "QLoRA": Adapter("lora", RANK, alpha=2.0 * RANK, base_weights="nf4"),
}
LENGTH = 128
DOCUMENT_STARTS = ([0, 50], [0, 3, 100])  # of two rows
TIMES_PLAIN = 2.0
"""How many times as far from the reference in fp32 as transformers and peft a result in bf16 may be."""
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Result:
    """The losses of the supervised tokens, fp32 [N], and the adapter's gradients by name."""

    token_losses: torch.Tensor
    gradients: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Difference:
    """The difference of a result from the reference, and the largest one that is allowed."""

    losses: float
    gradients: float
    allowed_losses: float
    allowed_gradients: float

    @property
    def is_allowed(self) -> bool:
        """Return whether losses and gradients are near enough; a difference that is not a number is not."""
        return self.losses <= self.allowed_losses and self.gradients <= self.allowed_gradients


def main() -> None:
    """Print a difference for each adapter, dtype and way to compute."""
    differences: dict[str, Difference] = {}
    for name, adapter in ADAPTERS.items():
        differences |= {f"{name}, fp32, {way}": found for way, found in compare_in_fp32(adapter).items()}
        differences |= {f"{name}, bf16, {way}": found for way, found in compare_in_bf16(adapter).items()}
    print(json.dumps({name: {**asdict(found), "is_allowed": found.is_allowed} for name, found in differences.items()}))


def compare_in_fp32(adapter: Adapter) -> dict[str, Difference]:
    """Return the largest differences in fp32, relative to the largest element of each tensor."""
    model = _model(adapter, torch.float32)
    reference = _plain_result(_plain_model(model, torch.float32))
    num_sums = num_sums_of_gradient(_config(), LENGTH, len(DOCUMENT_STARTS) * LENGTH)
    allowed = rounding_tolerance(num_sums)
    differences: dict[str, Difference] = {}
    for way, result in _our_results(model).items():
        losses = _largest_difference(result.token_losses, reference.token_losses)
        gradients = max(
            _largest_difference(result.gradients[name], expected) for name, expected in reference.gradients.items()
        )
        differences[way] = Difference(losses, gradients, allowed, allowed)
    return differences


def compare_in_bf16(adapter: Adapter) -> dict[str, Difference]:
    """Return the distances of results in bf16 from fp32, relative to the norm of all losses and of all gradients."""
    model = _model(adapter, torch.bfloat16)
    reference = _plain_result(_plain_model(model, torch.float32))
    plain = _plain_result(_plain_model(model, torch.bfloat16))
    allowed_losses = TIMES_PLAIN * _distance([plain.token_losses], [reference.token_losses])
    allowed_gradients = TIMES_PLAIN * _distance_of_gradients(plain, reference)
    differences: dict[str, Difference] = {}
    for way, result in _our_results(model).items():
        losses = _distance([result.token_losses], [reference.token_losses])
        gradients = _distance_of_gradients(result, reference)
        differences[way] = Difference(losses, gradients, allowed_losses, allowed_gradients)
    return differences


def _config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )


def _model(adapter: Adapter, dtype: torch.dtype) -> Any:
    """Return an adapted model on the device, with the attention and the head that a run on a GPU has."""
    has_kernel = dtype == torch.bfloat16 and torch.backends.cuda.is_flash_attention_available()
    model = adapted_llama(_config(), adapter, VARLEN if has_kernel else "sdpa", dtype)
    compute_loss_in_head(model)
    return model.to(DEVICE)


def _input_ids() -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return rows of token ids, int64 [rows, LENGTH]."""
    return np.random.default_rng(0).integers(3, _config().vocab_size, (len(DOCUMENT_STARTS), LENGTH))


def _our_results(model: Any) -> dict[str, Result]:
    """Return the results of a model before and after its layers are compiled."""
    eager = _our_result(model)
    compile_layers(model.model.layers, any_length=False)
    return {"eager": eager, "compiled": _our_result(model)}


def _our_result(model: Any) -> Result:
    ids = _input_ids()
    isolated = isolate(ids, ids.copy(), [np.array(starts) for starts in DOCUMENT_STARTS])
    batch = Batch(isolated.input_ids, isolated.labels, isolated.documents).to(DEVICE)
    model.zero_grad()
    loss = CrossEntropy().loss(model, batch)
    loss.total.backward()
    assert loss.token_losses is not None
    return Result(loss.token_losses, adapter_gradients(model))


def _plain_model(model: Any, dtype: torch.dtype) -> nn.Module:
    """Return transformers' and peft's model in a dtype, with the weights and the adapter of ours."""
    with torch.device(DEVICE):
        plain: Any = LlamaForCausalLM(_config())
    plain.to(dtype)
    plain.load_state_dict(_plain_weights(model))
    adapted: nn.Module = peft.get_peft_model(plain, lora_config(RANK)).train()
    adapter_weights = {name: weight for name, weight in model.named_parameters() if is_adapter_parameter(name)}
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(adapter_weights[_our_name(name)])
    return adapted


def _plain_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights of the base of an adapted model by their names in transformers; those in 4 bits in fp32."""
    weights = {name: weight for name, weight in model.state_dict().items() if not is_adapter_parameter(name)}
    for name, module in model.named_modules():
        if isinstance(module, NF4Linear):
            del weights[f"{name}.weight_scales"]
            weights[f"{name}.weight"] = module.dequantized()
    return weights


def _our_name(name: str) -> str:
    """Return the name of an adapter's parameter in our model from its name in peft's."""
    return name.removeprefix("base_model.model.").replace(".default.", ".")


def _plain_result(model: nn.Module) -> Result:
    """Return the result of a plain loop, with a forward pass for each document."""
    losses = []
    with torch.device(DEVICE):
        for ids, starts in zip(_input_ids().tolist(), DOCUMENT_STARTS, strict=True):
            losses.append(document_losses(model, {"input_ids": ids, "labels": ids, "document_starts": starts}))
    token_losses = torch.cat(losses)
    token_losses.sum().backward()
    gradients = adapter_gradients(model)
    return Result(token_losses.detach(), {_our_name(name): gradient for name, gradient in gradients.items()})


def _largest_difference(tensor: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference of an element, relative to the largest element that is expected."""
    return float((tensor - expected).abs().max() / expected.abs().max())


def _distance_of_gradients(result: Result, reference: Result) -> float:
    return _distance([result.gradients[name] for name in reference.gradients], reference.gradients.values())


def _distance(tensors: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> float:
    """Return the norm of the difference of tensors, relative to the norm of the expected ones."""
    elements = torch.cat([tensor.double().flatten() for tensor in tensors])
    expected_elements = torch.cat([tensor.double().flatten() for tensor in expected])
    return float((elements - expected_elements).norm() / expected_elements.norm())


if __name__ == "__main__":
    run_program(main)
