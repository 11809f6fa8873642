"""Choose which activations of a decoder layer are kept for the backward pass; the others are recomputed.

A layer's ``forward`` is replaced in place, so names in the state dict stay the same. FSDP gathers the layer's weights
around ``forward``, so they are also there for the recomputation.
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
"""An operation, and the index of this call among the operation's calls in a layer's forward pass."""


def checkpoint_layers(layers: Iterable[nn.Module], budget: float = 0.0, offloads: bool = False) -> None:
    """Make each layer keep only part of its activations and recompute the others in the backward pass.

    The results of matrix products and attention are candidates to keep. Those with the most FLOPs per byte come first.

    Args:
        layers: of the model, all of one class, before they are sharded.
        budget: bytes to keep, as a share of what a layer keeps without checkpointing; 0 keeps only the layer's input.
        offloads: keep the input in pinned host memory; only with budget 0.
    """
    plan = _SelectivePlan(budget)
    for layer in layers:
        layer.forward = _checkpointed(layer.forward, plan if budget else None, offloads)


def _checkpointed(forward: Forward, plan: "_SelectivePlan | None", offloads: bool) -> Forward:
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
        with save_on_cpu(pin_memory=True):  # applies to what the checkpoint itself keeps
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return checkpointed


@dataclass
class _SelectivePlan:
    """The calls whose results are kept; made in the first layer's first forward pass, which keeps all activations."""

    budget: float
    is_made: bool = False
    kept: frozenset[Call] = field(default_factory=frozenset)

    def make(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """Run a layer without recomputation, make the plan from what it saves, and return the layer's output."""
        inputs = {_storage_id(tensor): tensor.nbytes for tensor in _tensors((args, kwargs)) if tensor.requires_grad}
        recorder = _OperationRecorder(inputs)
        with saved_tensors_hooks(recorder.record_saved, lambda tensor: tensor), recorder:
            output = forward(*args, **kwargs)
        left = self.budget * sum(recorder.saved_bytes.values()) - sum(inputs.values())
        kept = []
        for operation in sorted(recorder.operations, key=lambda operation: -operation.flops / operation.num_bytes):
            # torch stops the recomputation at the last saved tensor, so later operations never run again
            if operation.num_bytes <= left and operation.num_saved_before < recorder.num_saved:
                kept.append(operation.call)
                left -= operation.num_bytes
        self.kept, self.is_made = frozenset(kept), True
        return output

    def contexts(self) -> Any:
        """Return the context managers of a forward pass and of its recomputation."""
        counters: dict[bool, Counter[Any]] = {False: Counter(), True: Counter()}

        def policy(context: SelectiveCheckpointContext, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
            counter = counters[context.is_recompute]
            call = (operation, counter[operation])
            counter[operation] += 1
            return CheckpointPolicy.MUST_SAVE if call in self.kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)


@dataclass(frozen=True)
class _RecordedOperation:
    """A matrix product or attention; ``num_saved_before`` tensors had been saved when it ran."""

    call: Call
    flops: int
    num_bytes: int
    num_saved_before: int


class _OperationRecorder(TorchDispatchMode):
    """Record the matrix products and attentions that run in it, and the bytes that autograd saves.

    Args:
        inputs: storage ids of the layer's own inputs. Other tensors that the layer gets, such as weights and what all
            layers share, do not count as saved: they exist in any case.
    """

    def __init__(self, inputs: Iterable[int]) -> None:
        super().__init__()
        self.operations: list[_RecordedOperation] = []
        self.saved_bytes: dict[int, int] = {}
        self.num_saved = 0
        self._calls: Counter[Any] = Counter()
        self._own_storages = set(inputs)

    def record_saved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Record a tensor that autograd saves for the backward pass, and return it."""
        if _storage_id(tensor) in self._own_storages:
            self.saved_bytes[_storage_id(tensor)] = tensor.untyped_storage().nbytes()
        self.num_saved += 1
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self._own_storages |= {_storage_id(tensor) for tensor in _tensors(output)} - {
            _storage_id(tensor) for tensor in _tensors(args)
        }
        call = (func, self._calls[func])
        self._calls[func] += 1
        flops = _flops(func, args, kwargs or {}, output)
        if flops:
            num_bytes = sum(tensor.nbytes for tensor in _tensors(output))
            self.operations.append(_RecordedOperation(call, flops, num_bytes, self.num_saved))
        return output


def _flops(func: Any, args: Any, kwargs: Any, output: Any) -> int:
    """Return the floating-point operations of a matrix product or attention, 0 for other operations."""
    if func.overloadpacket in flop_registry:
        return flop_registry[func.overloadpacket](*args, **kwargs, out_val=output)
    if "scaled_dot_product" in func.name():  # the CPU's attention, which torch does not count
        query, key = args[:2]
        return 4 * query.numel() * key.shape[-2]
    return 0


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage_id(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage, which its views share. A fake tensor has one as well."""
    return tensor.untyped_storage()._cdata
