"""Compile decoder layers, and choose which of their activations are kept for the backward pass and which recomputed.

A layer's ``forward`` is replaced in place, so names in the state dict stay the same. FSDP gathers the layer's weights
around ``forward``, so they are also there for the recomputation.
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
"""Up to so many row lengths, layers are compiled for each length separately; for more, once for any length."""
_RECOMPILE_LIMIT = 64
"""Compilations of a layer, in training and evaluation, for each shape; beyond, torch runs the layer uncompiled."""
_DOCUMENT_BORDERS = r"L\['kwargs'\]\['(cu_seq_lens|max_length)_[qk]'\]"
"""torch's names of the arguments with which transformers passes document borders to a layer; see ``packed_forward``."""


def shares_kept(fsdp: "FSDPArguments") -> tuple[float, float | None]:
    """Return the shares of a layer's activations that checkpointing and the compiler keep; None: it is not compiled.

    A share is 1 without checkpointing and 0 for the layer's input only. In a compiled layer the compiler itself chooses
    what selective checkpointing keeps; with full checkpointing the whole compiled layer runs again.
    """
    share = {"full": 0.0, "selective": fsdp.activation_memory_budget}.get(fsdp.activation_checkpointing, 1.0)
    if fsdp.compile is not True:
        return share, None
    return (1.0, share) if 0 < share < 1 else (share, 1.0)


def checkpoint_layers(layers: Iterable[nn.Module], budget: float = 0.0, offloads: bool = False) -> None:
    """Make each layer keep only part of its activations and recompute the others in the backward pass.

    The results of matrix products and attention are candidates to keep, those with the most FLOPs per byte first.
    ``budget`` are the bytes to keep, as a share of what a layer keeps without checkpointing; 0 keeps only the layer's
    input, with ``offloads`` in pinned host memory. The layers are not sharded yet.
    """
    plan = _SelectivePlan(budget) if budget else None
    offload = _Offload() if offloads else None
    for layer in layers:
        layer.forward = _checkpointed(layer.forward, plan, offload)


def _checkpointed(forward: Forward, plan: "_SelectivePlan | None", offload: "_Offload | None") -> Forward:
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
        with saved_tensors_hooks(offload.to_host, offload.to_device):  # of what the checkpoint itself keeps
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return checkpointed


@dataclass
class _HostCopy:
    """A saved tensor in pinned host memory; ``on_device`` once it is being copied back.

    ``before`` is the tensor saved before it, so the one that the backward pass needs next, if it has not had it yet.
    """

    in_host: torch.Tensor
    device: torch.device
    before: Callable[[], "_HostCopy | None"]
    on_device: torch.Tensor | None = None
    arrived: Any = None


class _Offload:
    """Copies saved tensors to host memory and back on a stream of its own, beside the computation.

    The device goes on with a layer while it copies the input of the layer before, in the backward pass of the layer
    after. The host never waits. A tensor is kept until the computation has waited for its copy. Without that, the
    allocator would not use its memory again as long as the host is ahead of the device.
    """

    def __init__(self) -> None:
        self._stream: Any = None
        self._last: Callable[[], _HostCopy | None] = lambda: None
        self._leaving: tuple[torch.Tensor, Any] | None = None  # the tensor that is being copied, and the copy's event

    def to_host(self, tensor: torch.Tensor) -> "_HostCopy | torch.Tensor":
        """Begin to copy a tensor to the host. A tensor that is there already is returned."""
        if not tensor.is_cuda:
            return tensor
        self._stream = self._stream or torch.cuda.Stream(tensor.device)
        computation = torch.cuda.current_stream(tensor.device)
        if self._leaving is not None:
            computation.wait_event(self._leaving[1])
        self._stream.wait_stream(computation)
        in_host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        with torch.cuda.stream(self._stream):
            in_host.copy_(tensor, non_blocking=True)
        self._leaving = tensor, self._stream.record_event()
        copy = _HostCopy(in_host, tensor.device, self._last)
        self._last = weakref.ref(copy)
        return copy

    def to_device(self, saved: "_HostCopy | torch.Tensor") -> torch.Tensor:
        """Return a saved tensor on its device, and begin to copy back the one that was saved before it."""
        if isinstance(saved, torch.Tensor):
            return saved
        self._begin(saved)
        before = saved.before()
        if before is not None:
            self._begin(before)
        torch.cuda.current_stream(saved.device).wait_event(saved.arrived)
        assert saved.on_device is not None
        return saved.on_device

    def _begin(self, saved: _HostCopy) -> None:
        if saved.on_device is None:
            saved.on_device = torch.empty_like(saved.in_host, device=saved.device)
            self._stream.wait_stream(torch.cuda.current_stream(saved.device))  # which may still use that memory
            with torch.cuda.stream(self._stream):
                saved.on_device.copy_(saved.in_host, non_blocking=True)
            saved.arrived = self._stream.record_event()


@dataclass
class _SelectivePlan:
    """The calls whose results are kept.

    It is made in the first forward pass of the first layer that has a backward pass; that pass keeps all activations.
    """

    budget: float
    is_made: bool = False
    kept: frozenset[Call] = frozenset()

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
        # a frozen first layer saves nothing
        self.kept = frozenset(kept)
        self.is_made = recorder.num_saved > 0
        return output

    def contexts(self) -> Any:
        counters: dict[bool, Counter[Any]] = {False: Counter(), True: Counter()}

        def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
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

    ``inputs`` are storage ids of the layer's own inputs. Other tensors that the layer gets, such as weights and what
    all layers share, do not count as saved: they exist in any case.
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
        self._own_storages |= {*map(_storage_id, _tensors(output))} - {*map(_storage_id, _tensors(args))}
        call = (func, self._calls[func])
        self._calls[func] += 1
        flops = _flops(func, args, kwargs or {}, output)
        if flops:
            num_bytes = sum(tensor.nbytes for tensor in _tensors(output))
            self.operations.append(_RecordedOperation(call, flops, num_bytes, self.num_saved))
        return output


def _flops(func: Any, args: Any, kwargs: Any, output: Any) -> int:
    """Return the floating-point operations of a matrix product or attention, 0 for other operations."""
    if "_varlen_attn" in func.name():  # at most; torch's own count reads the borders, and waits for the device
        query = args[0]
        longest = args[6]
        return 4 * query.numel() * longest
    if "scaled_dot_product" in func.name():  # torch does not count the CPU's, nor grouped heads before torch 2.12
        query, key = args[:2]
        return 4 * query.numel() * key.shape[-2]
    if func.overloadpacket in flop_registry:
        return flop_registry[func.overloadpacket](*args, **kwargs, out_val=output)
    return 0


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage_id(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage, which its views share. A fake tensor has one as well."""
    return tensor.untyped_storage()._cdata


def check_compiler(argument: str, alternative: str) -> None:
    """Check for the C++ compiler that torch needs for ``argument``; ``alternative`` says what to do without it."""
    missing = missing_compiler()
    if missing:
        raise InputError(f"{argument} is compiled at run time and finds no {missing}; install g++, or {alternative}")


def missing_compiler() -> str | None:
    """Return the C++ compiler that torch would use, if it is not there, as "compiler NAME"; else None."""
    compiler = os.environ.get("CXX", "g++")
    return None if shutil.which(compiler) else f"compiler {compiler}"


def compile_layers(layers: Iterable[nn.Module], any_length: bool, budget: float = 1.0) -> None:
    """Compile each layer's ``forward`` when it is first called; names in the state dict stay the same.

    Compiling ``forward`` instead of the module keeps FSDP's hooks, which gather the weights, outside the graph. torch
    stores the compilation with ``forward``'s code and takes weights as arguments, so all layers share it. With
    ``any_length``, compile once for rows of any length, else for each shape: a kernel for one shape is faster and does
    not depend on earlier shapes, which exact resume relies on. ``budget`` is the share of activations to keep.
    """
    _remove_unfinished_builds()
    config: Any = importlib.import_module("torch._dynamo.config")
    config.recompile_limit = _RECOMPILE_LIMIT
    # once for any number and length of documents; only attention's own kernel gets these arguments
    compiler: Any = importlib.import_module("torch.compiler.config")
    sources = [*filter(None, compiler.dynamic_sources.split(",")), _DOCUMENT_BORDERS]
    compiler.dynamic_sources = ",".join(dict.fromkeys(sources))
    config.optimize_ddp = False  # else the graph is split at DDP's buckets, which span several layers
    partitioner: Any = importlib.import_module("torch._functorch.config")
    partitioner.activation_memory_budget = budget
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=any_length)


def _remove_unfinished_builds() -> None:
    """Remove libraries that a killed process left half-built in torch's cache: torch would take them for finished.

    Until a build is done, a lock is held and a folder exists next to the library.
    """
    from torch._inductor.codecache import get_lock_dir
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    from torch.utils._filelock import FileLock

    for folder in Path(cache_dir()).glob("*/*_CxxBuild"):
        library = folder.name.removesuffix("_CxxBuild")
        key = folder.name.partition(".")[0]
        with suppress(TimeoutError), FileLock(str(Path(get_lock_dir()) / f"{key}.lock"), timeout=0):
            folder.with_name(f"{library}.so").unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
