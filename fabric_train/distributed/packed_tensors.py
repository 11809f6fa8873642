"""Pack named tensors into one vector and unpack them again, for a single all-reduce or copy."""

from collections.abc import Mapping

import torch


class PackedTensors:
    """Named tensors in one fp64 vector, so that a single all-reduce or a single copy moves all of them."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """All tensors are on one device; counts below 2^53 are exact in fp64."""
        self.vector = torch.cat([tensor.flatten().double() for tensor in tensors.values()])
        self._shapes = {name: tensor.shape for name, tensor in tensors.items()}

    def unpack(self, vector: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Return the tensors by name, as views of the vector, or of a reduced or copied ``vector`` of the same size."""
        if vector is None:
            vector = self.vector
        sizes = [shape.numel() for shape in self._shapes.values()]
        slices = zip(self._shapes.items(), vector.split(sizes), strict=True)
        return {name: numbers.view(shape) for (name, shape), numbers in slices}
