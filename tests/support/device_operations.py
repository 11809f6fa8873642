"""Count the operations of a GPU and the bytes that they move, on meta tensors, which stand for its memory."""

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class DeviceOperations(TorchDispatchMode):
    """A mode that counts the operations on meta tensors by name, except views, and the bytes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        touched = [each for each in tree_leaves((args, kwargs, out)) if isinstance(each, torch.Tensor)]
        if any(each.device.type == "meta" for each in touched) and not func.is_view and "empty" not in func.__name__:
            self.add(func.__name__, sum({id(each): each.nbytes for each in touched}.values()))
        return out

    def add(self, name: str, num_bytes: int) -> None:
        """Count one launch."""
        self.launches[name] += 1
        self.bytes += num_bytes
