"""Compile decoder layers, and choose which of their activations are kept for the backward pass or recomputed.

A layer's ``forward`` is replaced in place, so names in the state dict stay the same. FSDP gathers the layer's weights
around ``forward``, so they are also available for the recomputation.
"""

import importlib
import os
import shutil
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry

from fabric_train.cli.errors import InputError

if TYPE_CHECKING:
    from fabric_train.arguments import FSDPArguments

Forward = Callable[..., Any]
Call = tuple[Any, int]
"""An operation, and the index of this call among the operation's calls in a layer's forward pass."""
MAX_STATIC_LENGTHS = 4
"""The most row lengths for which layers are compiled separately; with more, they are compiled once for any length."""
_RECOMPILE_LIMIT = 64
"""The most compilations of a layer, for shapes in training and evaluation; beyond it, torch does not compile."""
_DOCUMENT_BORDERS = r"L\['kwargs'\]\['(cu_seq_lens|max_length)_[qk]'\]"
"""torch's names for the arguments by which transformers passes document borders to a layer; see ``packed_forward``."""


def shares_kept(fsdp: "FSDPArguments") -> tuple[float, float | None]:
    """Return the shares of a layer's activations that checkpointing and the compiler keep; None if it is not compiled.

    A share is 1 without checkpointing and 0 if only the layer's input is kept. In a compiled layer the compiler itself
    chooses what selective checkpointing keeps; with full checkpointing the whole compiled layer runs again.
    """
    share = {"full": 0.0, "selective": fsdp.activation_memory_budget}.get(fsdp.activation_checkpointing, 1.0)
    if fsdp.compile is not True:
        return share, None
    is_selective = 0 < share < 1
    if is_selective:
        return 1.0, share
    return share, 1.0


def checkpoint_layers(layers: Iterable[nn.Module], budget: float = 0.0, *, offloads: bool = False) -> None:
    """Make each layer keep only part of its activations and recompute the others in the backward pass.

    The layers must not be sharded yet.

    Args:
        layers: Decoder layers; their ``forward`` is replaced.
        budget: The bytes to keep, as a share of what a layer keeps without checkpointing. Only the results of matrix
            products and attention are candidates, those with the most FLOPs per byte first. 0 keeps only the input.
        offloads: Whether the layer's input is kept in pinned host memory; needs a budget of 0.
    """
    plan = _SelectivePlan(budget) if budget else None
    offload = _Offload() if offloads else None
    for layer in layers:
        layer.forward = _checkpointed(layer.forward, plan, offload)


def _checkpointed(forward: Forward, plan: "_SelectivePlan | None", offload: "_Offload | None") -> Forward:
    """Return ``forward`` with selective checkpointing by a ``plan``, or with full checkpointing if ``plan`` is None.

    Full checkpointing stores the layer's input in host memory if there is an ``offload``.
    """

    @wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if plan and not plan.is_made:
            return plan.make(forward, *args, **kwargs)
        if plan:
            return checkpoint(forward, *args, use_reentrant=False, context_fn=plan.contexts, **kwargs)
        if offload is None:
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        # these hooks see only what checkpoint itself saves: the layer's input
        with saved_tensors_hooks(offload.to_host, offload.to_device):
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return checkpointed


@dataclass
class _HostCopy:
    """A saved tensor in pinned host memory."""

    in_host: torch.Tensor
    device: torch.device
    previous: Callable[[], "_HostCopy | None"]
    """A reference to the tensor saved before this one, which the backward pass needs next; None once that is freed."""
    on_device: torch.Tensor | None = None
    """The tensor on the device, as soon as the copy back has begun."""
    copied_back: torch.cuda.Event | None = None
    """The event that the copy back is complete."""


class _Offload:
    """Copy saved tensors to host memory and back on a separate CUDA stream, in parallel with the computation.

    In the forward pass a layer's input is copied while the layer computes. In the backward pass the input of the
    previous layer is copied back while a layer computes. The host never waits.
    """

    def __init__(self) -> None:
        self._copy_stream: torch.cuda.Stream | None = None
        self._last_copy: Callable[[], _HostCopy | None] = lambda: None
        # The tensor that is being copied to the host, and the event of its copy. The reference is held until the
        # computation has waited for the event: only then may the allocator use the tensor's memory again.
        self._tensor_being_copied: torch.Tensor | None = None
        self._copied_to_host: torch.cuda.Event | None = None

    def to_host(self, tensor: torch.Tensor) -> "_HostCopy | torch.Tensor":
        """Begin to copy a tensor to the host, and return the copy; return a tensor that is already there unchanged."""
        if not tensor.is_cuda:
            return tensor
        if self._copy_stream is None:
            self._copy_stream = torch.cuda.Stream(tensor.device)
        compute_stream = torch.cuda.current_stream(tensor.device)
        if self._copied_to_host is not None:  # then the reference to the tensor before may be dropped, see __init__
            compute_stream.wait_event(self._copied_to_host)
        self._copy_stream.wait_stream(compute_stream)  # which may not have computed the tensor yet
        in_host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        with torch.cuda.stream(self._copy_stream):
            in_host.copy_(tensor, non_blocking=True)
        self._tensor_being_copied = tensor
        self._copied_to_host = self._copy_stream.record_event()
        copy = _HostCopy(in_host, tensor.device, previous=self._last_copy)
        self._last_copy = weakref.ref(copy)
        return copy

    def to_device(self, saved: "_HostCopy | torch.Tensor") -> torch.Tensor:
        """Return a saved tensor on its device, and begin to copy back the tensor that was saved before it."""
        if isinstance(saved, torch.Tensor):
            return saved
        self._begin_copy_back(saved)
        previous = saved.previous()
        if previous is not None:
            self._begin_copy_back(previous)
        assert saved.copied_back is not None
        assert saved.on_device is not None
        torch.cuda.current_stream(saved.device).wait_event(saved.copied_back)
        return saved.on_device

    def _begin_copy_back(self, saved: _HostCopy) -> None:
        """Begin to copy a tensor to its device, unless this has begun already."""
        if saved.on_device is not None:
            return
        assert self._copy_stream is not None
        saved.on_device = torch.empty_like(saved.in_host, device=saved.device)
        # the computation may still use the memory that the allocator has just given out again
        self._copy_stream.wait_stream(torch.cuda.current_stream(saved.device))
        with torch.cuda.stream(self._copy_stream):
            saved.on_device.copy_(saved.in_host, non_blocking=True)
        saved.copied_back = self._copy_stream.record_event()


@dataclass
class _SelectivePlan:
    """The calls whose results are kept, the same in every layer.

    The plan is made in the first forward pass of the first layer that has a backward pass. That one pass keeps all
    activations.
    """

    budget: float
    """Bytes to keep, as a share of what a layer keeps without checkpointing."""
    is_made: bool = False
    saved_calls: frozenset[Call] = frozenset()

    def make(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """Run a layer without recomputation, make the plan from what it saves, and return the layer's output."""
        # run the layer, and record what autograd saves
        input_bytes = {}
        for tensor in _tensors((args, kwargs)):
            if tensor.requires_grad:
                input_bytes[_storage_id(tensor)] = tensor.nbytes
        recorder = _OperationRecorder(input_bytes)
        with saved_tensors_hooks(recorder.record_saved, lambda tensor: tensor), recorder:
            output = forward(*args, **kwargs)

        # fill the budget greedily; the layer's inputs are kept in any case
        budget_bytes = self.budget * sum(recorder.saved_bytes.values()) - sum(input_bytes.values())
        saved_calls = []
        for operation in sorted(recorder.operations, key=lambda operation: -operation.flops / operation.num_bytes):
            # torch stops the recomputation at the last saved tensor, so later operations never run again
            is_recomputed = operation.num_saved_before < recorder.num_saved
            if is_recomputed and operation.num_bytes <= budget_bytes:
                saved_calls.append(operation.call)
                budget_bytes -= operation.num_bytes
        self.saved_calls = frozenset(saved_calls)

        # a frozen first layer saves nothing: the next layer makes the plan
        self.is_made = recorder.num_saved > 0
        return output

    def contexts(self) -> Any:
        """Return the context managers of the forward pass and of the recomputation, for ``checkpoint``."""
        # by whether it is the recomputation: how often each operation has been called
        call_counts: dict[bool, Counter[Any]] = {False: Counter(), True: Counter()}

        def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
            call_count = call_counts[context.is_recompute]
            call = (operation, call_count[operation])
            call_count[operation] += 1
            if call in self.saved_calls:
                return CheckpointPolicy.MUST_SAVE
            return CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)


@dataclass(frozen=True)
class _RecordedOperation:
    """A matrix product or attention."""

    call: Call
    flops: int
    num_bytes: int
    """The bytes of its results."""
    num_saved_before: int
    """The number of tensors that autograd had saved when the operation ran."""


class _OperationRecorder(TorchDispatchMode):
    """Record the matrix products and attentions that run in this context, and the bytes that autograd saves.

    Only the layer's inputs, whose storage ids are ``input_storages``, and what the layer computes count as saved.
    Weights and tensors that all layers share exist anyway.
    """

    def __init__(self, input_storages: Iterable[int]) -> None:
        super().__init__()
        self.operations: list[_RecordedOperation] = []
        self.saved_bytes: dict[int, int] = {}
        """By storage id, so views of one tensor count once."""
        self.num_saved = 0
        self._call_counts: Counter[Any] = Counter()
        self._counted_storages = set(input_storages)

    def record_saved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Record a tensor that autograd saves for the backward pass, and return it."""
        storage_id = _storage_id(tensor)
        if storage_id in self._counted_storages:
            self.saved_bytes[storage_id] = tensor.untyped_storage().nbytes()
        self.num_saved += 1
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record its output; if its result is a candidate for keeping, record the call too."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)

        # a view of a weight is no activation: it has the storage of an argument
        argument_storages = {_storage_id(tensor) for tensor in _tensors(args)}
        output_storages = {_storage_id(tensor) for tensor in _tensors(output)}
        self._counted_storages |= output_storages - argument_storages

        call = (func, self._call_counts[func])
        self._call_counts[func] += 1
        flops = _count_flops(func, args, kwargs, output)
        if flops:
            num_bytes = sum(tensor.nbytes for tensor in _tensors(output))
            self.operations.append(_RecordedOperation(call, flops, num_bytes, self.num_saved))
        return output


def _count_flops(func: Any, args: Any, kwargs: Any, output: Any) -> int:
    """Return the floating-point operations of a matrix product or attention, 0 for other operations."""
    if "_varlen_attn" in func.name():
        # an upper bound: torch's own count reads the document borders, for which the host waits for the device
        query = args[0]
        max_length = args[6]
        return 4 * query.numel() * max_length
    if "scaled_dot_product" in func.name():
        # torch does not count the CPU's attention, nor grouped heads before torch 2.12
        query, key = args[:2]  # [batch, heads, length, head size]
        return 4 * query.numel() * key.shape[-2]
    if func.overloadpacket in flop_registry:
        return flop_registry[func.overloadpacket](*args, **kwargs, out_val=output)
    return 0


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage_id(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage, which its views share; fake tensors have a storage as well."""
    return tensor.untyped_storage()._cdata


def check_compiler(argument: str, alternative: str) -> None:
    """Check for the C++ compiler that torch needs for ``argument``; ``alternative`` says what to do without it."""
    compiler = missing_compiler()
    if compiler:
        raise InputError(f"{argument} compiles code at run time but finds no {compiler}; install g++, or {alternative}")


def missing_compiler() -> str | None:
    """Return "compiler NAME" if the C++ compiler that torch would use is not installed, and otherwise None."""
    compiler = os.environ.get("CXX", "g++")
    return None if shutil.which(compiler) else f"compiler {compiler}"


def compile_layers(layers: Iterable[nn.Module], *, any_length: bool, budget: float = 1.0) -> None:
    """Compile each layer's ``forward`` when it is first called; names in the state dict stay the same.

    Compiling ``forward`` instead of the module keeps FSDP's hooks, which gather the weights, outside the graph. torch
    stores the compilation with ``forward``'s code and takes weights as arguments, so all layers share it.

    Args:
        layers: Decoder layers; their ``forward`` is replaced.
        any_length: Compile once for rows of any length, instead of once for each shape. A kernel for one shape is
            faster, and it does not depend on earlier shapes, which exact resume relies on.
        budget: Share of the activations to keep for the backward pass; the compiler chooses which.
    """
    _remove_unfinished_builds()

    dynamo_config: Any = importlib.import_module("torch._dynamo.config")
    dynamo_config.recompile_limit = _RECOMPILE_LIMIT
    dynamo_config.optimize_ddp = False  # else the graph is split at DDP's buckets, which span several layers

    # compile once for any number and length of documents; only the attention kernel gets these arguments
    compiler_config: Any = importlib.import_module("torch.compiler.config")
    dynamic_sources = [source for source in compiler_config.dynamic_sources.split(",") if source]
    if _DOCUMENT_BORDERS not in dynamic_sources:
        dynamic_sources.append(_DOCUMENT_BORDERS)
    compiler_config.dynamic_sources = ",".join(dynamic_sources)

    functorch_config: Any = importlib.import_module("torch._functorch.config")
    functorch_config.activation_memory_budget = budget

    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=any_length)


def _remove_unfinished_builds() -> None:
    """Remove libraries that a killed process left half-built in torch's cache, since torch would use them.

    During a build, torch holds a lock and keeps a folder next to the library.
    """
    from torch._inductor.codecache import get_lock_dir
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    from torch.utils._filelock import FileLock

    for build_dir in Path(cache_dir()).glob("*/*_CxxBuild"):
        library = build_dir.name.removesuffix("_CxxBuild")
        key = build_dir.name.partition(".")[0]
        lock_path = Path(get_lock_dir()) / f"{key}.lock"
        # a TimeoutError means that another process is building
        with suppress(TimeoutError), FileLock(str(lock_path), timeout=0):
            build_dir.with_name(f"{library}.so").unlink(missing_ok=True)
            shutil.rmtree(build_dir, ignore_errors=True)
