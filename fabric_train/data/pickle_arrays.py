"""What data workers make goes through a pipe: for each tensor torch would share a file, which takes a socket, a
millisecond or two, and room in the machine's shared memory.
"""

from dataclasses import fields
from typing import Any

import numpy as np
import torch


class SentAsArrays:
    """Base of dataclasses with CPU tensors, which are pickled as arrays, by value."""

    def __reduce__(self) -> tuple[Any, tuple[type, list[Any]]]:
        values = [getattr(self, field.name) for field in fields(self)]  # type: ignore[arg-type]
        return _rebuild, (type(self), [value.numpy() if isinstance(value, torch.Tensor) else value for value in values])


def _rebuild(kind: type, values: list[Any]) -> Any:
    return kind(*(torch.from_numpy(value) if isinstance(value, np.ndarray) else value for value in values))
