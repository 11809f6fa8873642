"""What of a decoder layer's activations is kept for the backward pass, and where.

A layer's ``forward`` is changed in place, so that names in the state dict stay, and FSDP, which gathers the layer's
weights around it, gathers them for what is recomputed too.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import flop_registry

Forward = Callable[..., Any]
Call = tuple[Any, int]
"""An operation, and the how manieth call of it in a layer's forward pass this is."""


def checkpoint_layers(layers: Iterable[nn.Module], budget: float = 0.0, offloads: bool = False) -> None:
    """Have each layer keep only a part of its activations, and recompute the others in the backward pass.

    Args:
        layers: of the model, before they are sharded; all of one kind.
        budget: what may be kept, as a share of what would be without; 0 keeps the layer's input alone. Chosen are
            results of matrix products and of attention, by the operations they cost for each byte.
        offloads: whether the input waits in pinned host memory.
    """
    plan = _Plan(budget)
    for layer in layers:
        layer.forward = _checkpointed(layer.forward, plan if budget else None, offloads)


def _checkpointed(forward: Forward, plan: "_Plan | None", offloads: bool) -> Forward:
    @wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if plan and not plan.is_made:
            return plan.make(forward, *args, **kwargs)
        if plan:
            return checkpoint(forward, *args, use_reentrant=False, context_fn=plan.contexts, **kwargs)
        if not offloads:
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        with save_on_cpu(pin_memory=True):  # what the checkpoint itself keeps
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return checkpointed


@dataclass
class _Plan:
    """Which calls of a layer's forward pass keep their results; made in the first one, whose activations all stay."""

    budget: float
    is_made: bool = False
    kept: frozenset[Call] = field(default_factory=frozenset)

    def make(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """Run a layer without recomputation, and plan by what it saves."""
        inputs = {_place(tensor): tensor.nbytes for tensor in _tensors((args, kwargs)) if tensor.requires_grad}
        record = _Record(inputs)
        with saved_tensors_hooks(record.saved, lambda tensor: tensor), record:
            output = forward(*args, **kwargs)
        left = self.budget * sum(record.saved_bytes.values()) - sum(inputs.values())
        kept = []
        for product in sorted(record.products, key=lambda product: -product.num_operations / product.num_bytes):
            # nothing is saved after the last one, so that the recomputation ends before it
            if product.num_bytes <= left and product.num_saved_before < record.num_saved:
                kept.append(product.call)
                left -= product.num_bytes
        self.kept, self.is_made = frozenset(kept), True
        return output

    def contexts(self) -> Any:
        """Return the contexts of a forward pass and of its recomputation."""
        counters: dict[bool, Counter[Any]] = {False: Counter(), True: Counter()}

        def policy(context: SelectiveCheckpointContext, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
            counter = counters[context.is_recompute]
            call = (operation, counter[operation])
            counter[operation] += 1
            return CheckpointPolicy.MUST_SAVE if call in self.kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)


@dataclass(frozen=True)
class _Product:
    """A matrix product or attention; ``num_saved_before`` is how many tensors had been saved when it ran."""

    call: Call
    num_operations: int
    num_bytes: int
    num_saved_before: int


class _Record(TorchDispatchMode):
    """Notes the products that run in it, and the bytes of the storages that autograd saves."""

    def __init__(self, inputs: Iterable[int]) -> None:
        """``inputs`` are the places of the layer's own; weights, and what all layers share, are there anyway."""
        super().__init__()
        self.products: list[_Product] = []
        self.saved_bytes: dict[int, int] = {}
        self.num_saved = 0
        self._calls: Counter[Any] = Counter()
        self._of_layer = set(inputs)

    def saved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take note of a tensor that is saved for the backward pass."""
        if _place(tensor) in self._of_layer:
            self.saved_bytes[_place(tensor)] = tensor.untyped_storage().nbytes()
        self.num_saved += 1
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self._of_layer |= {_place(tensor) for tensor in _tensors(output)} - {
            _place(tensor) for tensor in _tensors(args)
        }
        call = (func, self._calls[func])
        self._calls[func] += 1
        num_operations = _num_operations(func, args, kwargs or {}, output)
        if num_operations:
            num_bytes = sum(tensor.nbytes for tensor in _tensors(output))
            self.products.append(_Product(call, num_operations, num_bytes, self.num_saved))
        return output


def _num_operations(func: Any, args: Any, kwargs: Any, output: Any) -> int:
    """Multiplications and additions of a matrix product or attention, 0 for other operations."""
    if func.overloadpacket in flop_registry:
        return flop_registry[func.overloadpacket](*args, **kwargs, out_val=output)
    if "scaled_dot_product" in func.name():  # on the CPU, which torch does not count
        query, key = args[:2]
        return 4 * query.numel() * key.shape[-2]
    return 0


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _place(tensor: torch.Tensor) -> int:
    """Where a tensor's memory is: the same for its views."""
    return tensor.untyped_storage().data_ptr()
