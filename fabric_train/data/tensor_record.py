"""A base class for the records of tensors in a batch, which data workers send to the process that trains."""

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from typing_extensions import Self


class TensorRecord:
    """A base class for dataclasses of tensors. On the CPU, they are pickled by value, as NumPy arrays.

    Data workers send batches through a pipe. For each tensor, torch would share a file instead, which takes a socket,
    one or two milliseconds, and shared memory.
    """

    def __reduce__(self) -> tuple[Any, tuple[type, list[Any]]]:
        return _record_of_arrays, (type(self), self._converted_values(torch.Tensor.numpy))

    def _converted_values(self, convert: Callable[[torch.Tensor], Any]) -> list[Any]:
        """Return the values of all fields in order, with each tensor converted."""
        values = []
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, torch.Tensor):
                value = convert(value)
            values.append(value)
        return values

    def pin_memory(self) -> "Self":
        """Return a copy in page-locked memory; the DataLoader calls this for each batch."""
        return type(self)(*self._converted_values(torch.Tensor.pin_memory))

    def to(self, device: torch.device) -> "Self":
        """Return a copy on a device; the host does not wait for page-locked memory."""
        return type(self)(*self._converted_values(lambda tensor: tensor.to(device, non_blocking=True)))


def _record_of_arrays(record_type: type, values: list[Any]) -> Any:
    """Return a ``TensorRecord`` whose tensors were pickled as arrays."""
    tensors_and_values = []
    for value in values:
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value)
        tensors_and_values.append(value)
    return record_type(*tensors_and_values)
