"""Count the operations of a GPU and the bytes that they move, on meta tensors, which stand for its memory."""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class DeviceOperations(TorchDispatchMode):
    """A dispatch mode that counts the operations on meta tensors, and the bytes that they read and write.

    Attributes:
        launches: number of operations by name. Views and allocations are none: a GPU starts no kernel for them.
        bytes: of all tensors that these operations read or write.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.bytes = 0

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        output = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, output)) if isinstance(leaf, torch.Tensor)]
        is_on_device = any(tensor.device.type == "meta" for tensor in tensors)
        if is_on_device and not func.is_view and "empty" not in func.__name__:
            # an operation in place has one tensor as input and output, which counts once
            bytes_by_tensor = {id(tensor): tensor.nbytes for tensor in tensors}
            self.add(func.__name__, sum(bytes_by_tensor.values()))
        return output

    def add(self, name: str, num_bytes: int) -> None:
        """Count one launch."""
        self.launches[name] += 1
        self.bytes += num_bytes
