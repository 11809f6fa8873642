"""The formulas of the merge methods, for tensors in fp32 that have one shape.

A task vector is the difference of a model from its base (arXiv:2212.04089). Two methods drop values of task vectors
first: TIES (arXiv:2306.01708) the smallest ones of each tensor, DARE (arXiv:2311.03099) random ones.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Method = Literal["linear", "slerp", "ties", "dare", "task_arithmetic"]
_ALMOST_PARALLEL = 0.9995  # as in mergekit: beyond it the angle is too small to divide by its sine
_SMALLEST_NORM = 1e-8


@dataclass(frozen=True)
class MethodFacts:
    """What a method is called in a card, where it is from, and what its result is in words."""

    title: str
    source: str
    result: str
    from_base: bool = False
    drops: bool = False


METHODS: dict[Method, MethodFacts] = {
    "linear": MethodFacts("Linear", "arXiv:2203.05482", "the mean of the models, each with its weight"),
    "slerp": MethodFacts(
        "SLERP",
        "https://en.wikipedia.org/wiki/Slerp",
        "the point on the arc from the first to the second model, for each tensor as one vector",
    ),
    "ties": MethodFacts(
        "TIES",
        "arXiv:2306.01708",
        "the base and, for each value, the mean of the differences that have the sign of their sum; only the largest "
        "differences of each tensor count",
        from_base=True,
        drops=True,
    ),
    "dare": MethodFacts(
        "DARE",
        "arXiv:2311.03099",
        "the base and the weighted sum of the differences from it; random ones are dropped, the others scaled up",
        from_base=True,
        drops=True,
    ),
    "task_arithmetic": MethodFacts(
        "Task arithmetic",
        "arXiv:2212.04089",
        "the base and the weighted sum of the differences of the models from it",
        from_base=True,
    ),
}


def slerp_factors(first_norm: float, second_norm: float, dot: float, share: float) -> tuple[float, float]:
    """Return the factors of two vectors whose sum is ``share`` of the way from the first to the second one.

    The way is an arc, and a straight line if the vectors are almost parallel. ``dot`` is their dot product.
    """
    norms = [norm if norm > _SMALLEST_NORM else 1.0 for norm in (first_norm, second_norm)]
    cosine = max(-1.0, min(1.0, dot / norms[0] / norms[1]))
    if abs(cosine) > _ALMOST_PARALLEL:
        return 1 - share, share
    angle = math.acos(cosine)
    return math.sin((1 - share) * angle) / math.sin(angle), math.sin(share * angle) / math.sin(angle)


def add_differences(base: torch.Tensor, differences: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return the base plus the weighted sum of differences from it (arXiv:2212.04089)."""
    total = torch.zeros_like(base)
    for difference, weight in zip(differences, weights, strict=True):
        total += difference * weight
    return base + total


def add_agreeing(
    base: torch.Tensor, differences: Sequence[torch.Tensor], weights: Sequence[float]
) -> tuple[torch.Tensor, int, int]:
    """Return the base plus the mean of the differences that have the elected sign (arXiv:2306.01708).

    Each value's elected sign is the one of the weighted sum of its differences, which are 0 where they were dropped.

    Returns:
        the merged tensor, the number of values that more than one difference changes, and how many of these have
        differences of both signs.
    """
    weighted = torch.stack([difference * weight for difference, weight in zip(differences, weights, strict=True)])
    signs, elected = weighted.sign(), torch.where(weighted.sum(dim=0) >= 0, 1.0, -1.0)
    agrees = signs == elected
    share = (torch.tensor(weights).view(-1, *[1] * base.dim()) * agrees).sum(dim=0)
    merged = base + (weighted * agrees).sum(dim=0) / torch.where(share == 0, 1.0, share)
    shared, in_conflict = (signs != 0).sum(dim=0) > 1, (signs.amin(dim=0) < 0) & (signs.amax(dim=0) > 0)
    return merged, int(shared.sum()), int(in_conflict.sum())


def largest(difference: torch.Tensor, density: float) -> torch.Tensor:
    """Return which values of a tensor are its largest ones, a share ``density`` of them, at least one.

    Of equal values at the border the first ones count, so that the number is exact.
    """
    shape, number = difference.shape, difference.numel()
    count = max(1, int(density * number))
    if count >= number:
        return torch.ones(shape, dtype=torch.bool)
    sizes = difference.abs().flatten()
    del difference  # its memory is free now, if the caller has not kept it
    in_order = sizes.numpy().copy()
    in_order.partition(number - count)
    border = float(in_order[number - count])
    kept = sizes > border
    if border > 0:  # a difference of 0 changes nothing
        kept[(sizes == border).nonzero().flatten()[: count - int(kept.count_nonzero())]] = True
    return kept.view(shape)


def drawn(shape: Sequence[int], density: float, seed: int, name: str, model: int) -> torch.Tensor:
    """Return which values of a tensor are kept by chance, each with the probability ``density``.

    The draw depends on the seed, the name of the tensor and the number of the model alone.
    """
    digest = hashlib.sha256(f"{seed} {model} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.rand(tuple(shape), generator=generator) < density
