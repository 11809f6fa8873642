"""Count the operations of a training step on CUDA tensors, real or fake, by the part of the step that runs them.

The part of an operation is told from the Python function that runs it. A backward pass runs no Python function of the
model, so there an operation has the part of the forward operation whose gradient it computes.
"""

import os
import traceback
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.kernels import Kernel, kernels_of, tensor_bytes

PRODUCTS = "matrix products"
COLLECTIVES = "collectives"
ADAPTER = "adapter"
NORMS_OF_DORA = "norms of DoRA"
DEQUANTIZATION = "dequantization"
COMPILED = "compiled kernels"
TEACHER = "teacher"
TEACHERS_HEAD = "teacher's head"
OF_TEACHER = " of the teacher"
"""The end of the names of a teacher's collectives."""
OTHERS = "others"
PARTS = (
    "attention",
    PRODUCTS,
    "norm",
    "rotary",
    "mlp",
    ADAPTER,
    NORMS_OF_DORA,
    DEQUANTIZATION,
    COMPILED,
    "residual",
    "embedding",
    "head",
    TEACHER,
    TEACHERS_HEAD,
    "casts and copies of FSDP",
    "clip",
    "optimizer",
    COLLECTIVES,
    OTHERS,
)
"""``attention`` is without its four products. ``head`` is with its products and the loss, ``adapter`` and the norms of
DoRA are with their products. ``compiled kernels`` are those that Inductor makes of all other operations of a layer.
``teacher`` is the whole forward pass of a distillation's teacher up to its head.
"""

_PART_OF_FILE = {
    "/fabric_train/model/lm_head_loss.py": "head",
    "/fabric_train/optim/": "optimizer",
    "/torch/optim/": "optimizer",
    "/torch/distributed/fsdp/": "casts and copies of FSDP",
    "/torch/nn/attention/": "attention",
    "/transformers/masking_utils.py": "attention",
    "/transformers/integrations/": "attention",
    "/fabric_train/data/": OTHERS,
    "/fabric_train/training/": OTHERS,
    "/fabric_train/distributed/": OTHERS,
}
_PART_OF_CLASS = {
    "Adapted": ADAPTER,
    "Norm": "norm",
    "Rotary": "rotary",
    "Attention": "attention",
    "MLP": "mlp",
    "Embedding": "embedding",
    "Linear": PRODUCTS,
    "Layer": "residual",
}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "gemm_4bit"}
_WITH_PRODUCTS = ("head", "clip", "optimizer", ADAPTER, NORMS_OF_DORA)
_NO_KERNELS = {"_unsafe_view", "resize_", "set_", "record_stream", "_local_scalar_dense"}  # and empty*, and views
_WAIT = {"nonzero", "masked_select", "_unique2", "equal", "barrier"}
_BLOCK = 512  # CUDA's allocator rounds up to it


@dataclass
class Work:
    """Kernels that CUDA launches, or collectives, and the bytes of the tensors that they read and write.

    ``least_seconds`` is the time that all of these kernels need at least on an H100, see ``kernels``.
    """

    number: int = 0
    read: int = 0
    written: int = 0
    flops: float = 0.0
    least_seconds: float = 0.0


@dataclass(frozen=True)
class StepCounts:
    """The counts of a step.

    Attributes:
        parts: kernels by part; an operation on a list of tensors counts as one kernel.
        collectives: by name, and those of a teacher apart. ``read`` is the bytes of this rank's inputs, ``written`` the
            bytes of its outputs.
        host_waits: how often the host waits for the device, by the function of this project that makes it wait.
        peak_bytes: the most memory that tensors on the device take at once.
        peak_kinds: of it, the bytes by the part that made the tensor.
    """

    parts: dict[str, Work]
    collectives: dict[str, Work]
    host_waits: dict[str, int]
    peak_bytes: int
    peak_kinds: dict[str, int]


@dataclass
class _Counts:
    parts: dict[str, Work] = field(default_factory=lambda: defaultdict(Work))
    collectives: dict[str, Work] = field(default_factory=lambda: defaultdict(Work))
    waits: Counter[str] = field(default_factory=Counter)


class LiveBytes:
    """The bytes of the storages that were added and are still alive, now and at the peak.

    An allocation takes a multiple of ``block`` bytes.
    """

    def __init__(self, block: int) -> None:
        self.now = self.most = 0
        self.most_kinds: dict[str, int] = {}
        """The bytes at the peak by kind."""
        self._block = block
        self._kinds: Counter[str] = Counter()
        self._live: dict[int, tuple[int, str]] = {}

    def add(self, storage: torch.UntypedStorage, kind: str) -> None:
        key = storage._cdata
        if key not in self._live:
            self._live[key] = (0, kind)
            weakref.finalize(storage, self._free, key)
            self._resize(key, storage.nbytes())

    def resized(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._live:
            self._resize(storage._cdata, storage.nbytes())

    def restart(self) -> None:
        self.most = self.now
        self.most_kinds = dict(self._kinds)

    def _resize(self, key: int, size: int) -> None:
        size = -(-size // self._block) * self._block
        before, kind = self._live[key]
        self._live[key] = (size, kind)
        self.now += size - before
        self._kinds[kind] += size - before
        if self.now > self.most:
            self.restart()

    def _free(self, key: int) -> None:
        size, kind = self._live.pop(key)
        self.now -= size
        self._kinds[kind] -= size


class StepCounter(TorchDispatchMode):
    """Count operations until :meth:`take`."""

    def __init__(self) -> None:
        super().__init__()
        self.live = LiveBytes(_BLOCK)
        self.pinned: list[torch.UntypedStorage] = []
        """Page-locked memory. A copy from other host memory makes the host wait."""
        self.is_paused = False
        """Whether operations are not counted, because they are only traced."""
        self._counts = _Counts()
        self._codes: dict[CodeType, str | None] = {}
        self._part_of_node: dict[int, str] = {}
        self._outer_part: str | None = None
        self._patches = ExitStack()

    def __enter__(self) -> "StepCounter":
        resize = torch.UntypedStorage.resize_

        def resize_and_count(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            resize(storage, size)
            self.live.resized(storage)  # FSDP frees and allocates gathered weights so
            return storage

        self._patches.enter_context(patch.object(torch.UntypedStorage, "resize_", resize_and_count))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def know_modules(self, model: nn.Module) -> None:
        """Tell parts of the model by the classes of its modules."""
        classes: set[type] = set()
        for module in model.modules():
            classes.update(type(module).__mro__)
        for kind in classes:
            forward = vars(kind).get("forward")
            parts = [part for word, part in _PART_OF_CLASS.items() if word in kind.__name__]
            if forward is not None and parts:
                self._codes[forward.__code__] = parts[0]

    @contextmanager
    def counted_as(self, part: str) -> Iterator[None]:
        """Count all operations as those of a part, whatever functions run them."""
        outer_part = self._outer_part
        self._outer_part = part
        try:
            yield
        finally:
            self._outer_part = outer_part

    def take(self) -> StepCounts:
        """Return the counts since the last call, and begin again."""
        counts = self._counts
        self._counts = _Counts()
        taken = StepCounts(
            dict(counts.parts), dict(counts.collectives), dict(counts.waits), self.live.most, self.live.most_kinds
        )
        self.live.restart()
        self._part_of_node.clear()
        return taken

    def note_wait(self, what: str) -> None:
        """Count that the host waits for the device here."""
        files = [frame for frame in traceback.extract_stack() if "/fabric_train/" in frame.filename]
        place = f"{os.path.basename(files[-1].filename)}, {files[-1].name}" if files else "elsewhere"
        self._counts.waits[f"{what} in {place}"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back with the local tensors
        kwargs = kwargs or {}
        if self.is_paused or func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if name == "_local_scalar_dense" and isinstance(args[0], FakeTensor):
            if _on_device(given):
                self.note_wait("item")
            return 0.0 if args[0].dtype.is_floating_point else 0  # also on the host: a fake copy has no content
        if (name in _WAIT and _on_device(given)) or name == "barrier":
            self.note_wait(name)
        result = func(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if name in ("_to_copy", "copy_"):
            self._note_copy(name, args, kwargs, result)
        if _on_device([*given, *results]):
            self._count(func, name, args, kwargs, result, results)
        return result

    def _note_copy(self, name: str, args: Any, kwargs: Any, result: torch.Tensor) -> None:
        source, positional = (args[1], args[2:3]) if name == "copy_" else (args[0], ())
        if is_cuda(source) == is_cuda(result):
            return
        non_blocking = kwargs.get("non_blocking", positional == (True,))
        host = result if is_cuda(source) else source
        is_pinned = any(host.untyped_storage()._cdata == storage._cdata for storage in self.pinned)
        if not (non_blocking and is_pinned):
            self.note_wait("copy from the device" if is_cuda(source) else "copy from unpinned memory")

    def _count(self, func: Any, name: str, args: Any, kwargs: Any, result: Any, results: list[torch.Tensor]) -> None:
        part = self._part(name)
        for tensor in results:
            if is_cuda(tensor):
                self.live.add(tensor.untyped_storage(), part)
        if func.namespace in ("c10d", "_c10d_functional"):
            if name not in ("barrier", "wait_tensor"):
                suffix = OF_TEACHER if self._outer_part == TEACHER else ""
                _add_collective(self._counts.collectives[name.strip("_") + suffix], name, args, results)
            return
        if name in _NO_KERNELS or "empty" in name:
            return
        for kernel in kernels_of(func, args, kwargs, result, is_cuda):
            # a weight that is dequantized for its norms is part of them
            self.add_kernel(part if part == NORMS_OF_DORA else kernel.part or part, kernel)

    def add_kernel(self, part: str, kernel: Kernel) -> None:
        """Count a kernel."""
        work = self._counts.parts[part]
        work.number = work.number + 1
        work.read = work.read + kernel.read
        work.written = work.written + kernel.written
        work.flops = work.flops + kernel.flops
        work.least_seconds = work.least_seconds + kernel.least_seconds

    def _part(self, name: str) -> str:
        if self._outer_part is not None:
            return self._outer_part
        node = torch._C._current_autograd_node()
        part = self._part_of_frames()
        if node is None:
            # the first operation since the last node made that node; others, such as views of frozen weights, make none
            self._part_of_node.setdefault(torch.autograd._get_sequence_nr() - 1, part)
        elif part == OTHERS:
            part = self._part_of_node.get(node._sequence_nr(), OTHERS)
        if part in _WITH_PRODUCTS:
            return part
        if name in _PRODUCTS:
            return PRODUCTS
        return "attention" if "attention" in name or "varlen_attn" in name else part

    def _part_of_frames(self) -> str:
        """Return the part of the innermost function that belongs to one."""
        frame: FrameType | None = traceback.sys._getframe(3)  # type: ignore[attr-defined]
        while frame is not None:
            code = frame.f_code
            if code not in self._codes:
                self._codes[code] = _part_of_code(code)
            part = self._codes[code]
            if part is not None:
                return part
            frame = frame.f_back
        return OTHERS


def _part_of_code(code: CodeType) -> str | None:
    if "/transformers/models/" in code.co_filename:
        return "rotary" if "rotary" in code.co_name else None
    if "/fabric_train/model/adapter.py" in code.co_filename and code.co_name == "_row_norms":
        return NORMS_OF_DORA
    if "/fabric_train/distributed/gradients.py" in code.co_filename:
        return "clip"
    return next((part for path, part in _PART_OF_FILE.items() if path in code.co_filename), None)


def _on_device(tensors: Iterable[torch.Tensor]) -> bool:
    return any(map(is_cuda, tensors))


def is_cuda(tensor: torch.Tensor) -> bool:
    device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device  # a fake one's is an operation
    return device.type == "cuda"


def _add_collective(work: Work, name: str, args: Any, results: list[torch.Tensor]) -> None:
    tensors = [sum(map(tensor_bytes, _tensors(value))) for value in args[:2] if _tensors(value)]
    # c10d's operations take outputs first, then inputs; an all-reduce takes one list
    written = tensors[0]
    read = tensors[-1]
    if name.startswith(("all_gather_into_tensor", "reduce_scatter_tensor")):  # functional ones take inputs alone
        written = sum(map(tensor_bytes, results))
    work.number = work.number + 1
    work.read = work.read + read
    work.written = work.written + written


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
