"""The tensors of a merge: the formulas of the methods, and each tensor from the models' ones, in fp32, block by block.

A task vector is the difference of a model from its base (arXiv:2212.04089). Two methods drop values of task vectors
first: TIES (arXiv:2306.01708) the smallest ones of each tensor, DARE (arXiv:2311.03099) random ones.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch

from fabric_train.export.average import CombinedTensors, weighted_mean
from fabric_train.export.hub_format import blocks as blocks_of
from fabric_train.merge_models.models import open_models
from fabric_train.model.weight_files import StoredTensors

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
    cosine = dot / norms[0] / norms[1]
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
    signs = weighted.sign()
    elected = torch.where(weighted.sum(dim=0) >= 0, 1.0, -1.0)
    agrees = signs == elected
    share = (torch.tensor(weights).view(-1, *[1] * base.dim()) * agrees).sum(dim=0)
    merged = base + (weighted * agrees).sum(dim=0) / torch.where(share == 0, 1.0, share)
    shared = (signs != 0).sum(dim=0) > 1
    in_conflict = (signs.amin(dim=0) < 0) & (signs.amax(dim=0) > 0)
    return merged, int(shared.sum()), int(in_conflict.sum())


def largest(difference: torch.Tensor, density: float) -> torch.Tensor:
    """Return which values of a tensor are its largest ones, a share ``density`` of them, at least one.

    Of equal values at the border the first ones count, so that the number is exact.
    """
    shape = difference.shape
    number = difference.numel()
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


@dataclass(frozen=True)
class MergeRecipe:
    """A method and its arguments: folders of models, one weight for each, and a base for methods that need one."""

    method: Method
    models: list[str]
    weights: list[float]
    base: str | None = None
    density: float = 1.0
    seed: int = 0

    def folders(self) -> list[Path]:
        """Return the folders of the models, and of the base after them if there is one."""
        return [Path(folder) for folder in (*self.models, *([self.base] if self.base else []))]


@dataclass
class TensorChanges:
    """Sums over the values of a tensor: of squares, and counts."""

    values: int = 0
    of_base: float = 0.0  # the sum of the base's squares, without one of the first model's
    of_models: list[float] = field(default_factory=list)  # of each model's difference from it
    kept: list[int] = field(default_factory=list)  # differences that were not dropped
    shared: int = 0  # values that more than one model changes, as far as their differences were kept
    in_conflict: int = 0  # of these, the ones that models change in both directions


class MergedModels(CombinedTensors):
    """The tensors of a merge; each is computed on request, in the same way in every process.

    While tensors are read, ``changes`` gets an entry for each; if ``watches`` is false, without lengths.
    """

    watches = True

    def __init__(self, recipe: MergeRecipe) -> None:
        self.recipe = recipe
        self.opened = open_models(recipe.folders())
        super().__init__(self.opened.tensors, self.opened.first)
        self.changes: dict[str, TensorChanges] = {}
        self._factors = lru_cache(maxsize=1)(self._find_factors)
        self._kept = lru_cache(maxsize=1)(self._choose_kept)

    def _combine(self, name: str, offsets: Sequence[int], blocks: Iterable[torch.Tensor]) -> torch.Tensor:
        recipe, (*models, last) = self.recipe, blocks
        base, models = (last, models) if recipe.base else (models[0], [*models, last])
        differences = [model - base for model in models]
        changes = self._watch(name, offsets, base, differences)
        if recipe.method == "linear":
            return weighted_mean(models, recipe.weights)
        if recipe.method == "slerp":
            first, second = self._factors(name)
            return models[0] * first + models[1] * second
        if recipe.method == "task_arithmetic":
            return add_differences(base, differences, recipe.weights)
        block = tuple(slice(begin, begin + size) for begin, size in zip(offsets, base.shape, strict=True))
        for number, kept in enumerate(self._kept(name)):
            changes.kept[number] += int(kept[block].count_nonzero())
            differences[number] *= kept[block]
        if recipe.method == "dare":
            weights = [weight / recipe.density for weight in recipe.weights]
            return add_differences(base, differences, weights)
        merged, shared, in_conflict = add_agreeing(base, differences, recipe.weights)
        changes.shared += shared
        changes.in_conflict += in_conflict
        return merged

    def _watch(
        self, name: str, offsets: Sequence[int], base: torch.Tensor, differences: Sequence[torch.Tensor]
    ) -> TensorChanges:
        """Add a block to the changes of its tensor; return them."""
        if not any(offsets):  # the first block; a tensor may be read several times
            self.changes[name] = TensorChanges(of_models=[0.0] * len(differences), kept=[0] * len(differences))
        changes = self.changes[name]
        if self.watches:
            changes.values += base.numel()
            changes.of_base += _square(base)
            for number, difference in enumerate(differences):
                changes.of_models[number] += _square(difference)
        return changes

    def _find_factors(self, name: str) -> tuple[float, float]:
        """Return the factors of the two models' tensors for an interpolation on the sphere."""
        first, second = self._models
        squares = [0.0, 0.0]
        dot = 0.0
        shape = self.shape(name)
        for one, other in zip(blocks_of(first, name, shape), blocks_of(second, name, shape), strict=True):
            squares = [squares[0] + _square(one), squares[1] + _square(other)]
            dot += float(torch.dot(one.double().flatten(), other.double().flatten()))
        share = self.recipe.weights[1] / sum(self.recipe.weights)
        return slerp_factors(squares[0] ** 0.5, squares[1] ** 0.5, dot, share)

    def _choose_kept(self, name: str) -> list[torch.Tensor]:
        """Return for each model which values of its difference from the base are kept."""
        recipe = self.recipe
        shape = self.shape(name)
        if recipe.method == "dare":
            return [drawn(shape, recipe.density, recipe.seed, name, i) for i in range(len(recipe.models))]
        *models, base = self._models
        return [largest(self._difference(name, model, base), recipe.density) for model in models]

    def _difference(self, name: str, model: StoredTensors, base: StoredTensors) -> torch.Tensor:
        """Return the difference of two whole tensors, read in blocks."""
        difference = torch.empty(self.shape(name))
        rest = difference.view(-1)
        begin = 0
        for one, other in zip(*(blocks_of(each, name, self.shape(name)) for each in (model, base)), strict=True):
            rest[begin : begin + one.numel()] = (one - other).flatten()
            begin += one.numel()
        return difference


def _square(block: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(block)) ** 2
