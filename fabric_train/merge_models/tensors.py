"""Compute the tensors of a merge from those of the models, in fp32 and block by block, with the methods' formulas.

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
from fabric_train.merge_models.models import KeptTensors, open_models
from fabric_train.model.layer_settings import KeptLayers, keep_layers
from fabric_train.model.weight_files import StoredTensors

Method = Literal["linear", "slerp", "ties", "dare", "task_arithmetic", "passthrough"]
_ALMOST_PARALLEL = 0.9995  # as in mergekit: beyond it the angle is too small to divide by its sine
_SMALLEST_NORM = 1e-8


@dataclass(frozen=True)
class MethodFacts:
    """What a card says about a method, and what the method does."""

    title: str
    source: str
    result: str
    """A description of the result."""
    from_base: bool = False
    """Whether it adds differences from a base."""
    drops: bool = False
    """Whether it drops values of the differences."""


METHODS: dict[Method, MethodFacts] = {
    "linear": MethodFacts("Linear", "arXiv:2203.05482", "the weighted mean of the models"),
    "slerp": MethodFacts(
        "SLERP",
        "https://en.wikipedia.org/wiki/Slerp",
        "a point on the arc from the first to the second model, with each tensor as one vector",
    ),
    "ties": MethodFacts(
        "TIES",
        "arXiv:2306.01708",
        "the base plus, for each value, the mean of the differences whose sign agrees with their sum; only the "
        "largest differences of each tensor are used",
        from_base=True,
        drops=True,
    ),
    "dare": MethodFacts(
        "DARE",
        "arXiv:2311.03099",
        "the base plus the weighted sum of the differences from it; random differences are dropped and the others "
        "scaled up",
        from_base=True,
        drops=True,
    ),
    "task_arithmetic": MethodFacts(
        "Task arithmetic",
        "arXiv:2212.04089",
        "the base plus the weighted sum of the models' differences from it",
        from_base=True,
    ),
    "passthrough": MethodFacts("Passthrough", "arXiv:2403.17887", "some of the decoder layers of a model, unchanged"),
}


def slerp_factors(first_norm: float, second_norm: float, dot: float, share: float) -> tuple[float, float]:
    """Return factors for two vectors, whose weighted sum is ``share`` of the way from the first vector to the second.

    The way is an arc, and a straight line if the vectors are almost parallel. ``dot`` is their dot product. With the
    angle Ω between them, the factors are sin((1 - share) Ω) / sin Ω and sin(share Ω) / sin Ω.
    """
    first_norm = first_norm if first_norm > _SMALLEST_NORM else 1.0
    second_norm = second_norm if second_norm > _SMALLEST_NORM else 1.0
    cosine = dot / first_norm / second_norm
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


@dataclass(frozen=True)
class AgreedSum:
    """The result of :func:`add_agreeing`."""

    merged: torch.Tensor
    num_shared: int
    """The number of values that more than one difference changes."""
    num_in_conflict: int
    """How many of these values have differences of both signs."""


def add_agreeing(base: torch.Tensor, differences: Sequence[torch.Tensor], weights: Sequence[float]) -> AgreedSum:
    """Return the base plus the mean of the differences that have the elected sign (arXiv:2306.01708).

    The elected sign of a value is the sign of the weighted sum of its differences, which are 0 where they were dropped.
    ``differences`` have the shape of the base, and there is a weight for each.
    """
    # elect a sign for each value: that of the weighted sum of all differences
    weighted = torch.stack([difference * weight for difference, weight in zip(differences, weights, strict=True)])
    signs = weighted.sign()  # [models, *shape]
    elected = torch.where(weighted.sum(dim=0) >= 0, 1.0, -1.0)  # [*shape]

    # the weighted mean of the differences with that sign
    agrees = signs == elected
    model_weights = torch.tensor(weights).view(-1, *(1 for _ in base.shape))  # [models, 1, …, 1]
    weight_sum = (model_weights * agrees).sum(dim=0)
    divisor = torch.where(weight_sum == 0, 1.0, weight_sum)
    merged = base + (weighted * agrees).sum(dim=0) / divisor

    # counts for the card
    is_shared = (signs != 0).sum(dim=0) > 1
    is_in_conflict = (signs.amin(dim=0) < 0) & (signs.amax(dim=0) > 0)
    return AgreedSum(merged, int(is_shared.sum()), int(is_in_conflict.sum()))


def find_largest(difference: torch.Tensor, density: float) -> torch.Tensor:
    """Return which values of a tensor have the largest magnitudes: the share ``density`` of them, at least one.

    Of equal values at the border the first ones count, so that the number is exact. The result is bool, of the shape of
    ``difference``.
    """
    shape = difference.shape
    num_values = difference.numel()
    num_kept = max(1, int(density * num_values))
    if num_kept >= num_values:
        return torch.ones(shape, dtype=torch.bool)
    sizes = difference.abs().flatten()
    del difference  # its memory is free now, if the caller has not kept it
    partitioned = sizes.numpy().copy()
    partitioned.partition(num_values - num_kept)  # linear in the number of values, as sorting is not
    border = float(partitioned[num_values - num_kept])  # the smallest of the largest
    is_kept = sizes > border
    if border > 0:  # a difference of 0 changes nothing
        at_border = (sizes == border).nonzero().flatten()
        num_missing = num_kept - int(is_kept.count_nonzero())
        is_kept[at_border[:num_missing]] = True
    return is_kept.view(shape)


def draw_kept(shape: Sequence[int], density: float, seed: int, name: str, model_index: int) -> torch.Tensor:
    """Draw which values of a tensor are kept, each with the probability ``density``: bool [*shape].

    The draw depends only on the seed, the name of the tensor and the index of the model.
    """
    digest = hashlib.sha256(f"{seed} {model_index} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.rand(tuple(shape), generator=generator) < density


@dataclass(frozen=True)
class MergeRecipe:
    """A method and its arguments: folders of models, one weight for each, and a base for methods that need one.

    ``layers`` has the numbers of the decoder layers that the result has, in its order; empty means all.
    """

    method: Method
    models: list[str]
    weights: list[float]
    base: str | None = None
    density: float = 1.0
    seed: int = 0
    layers: list[int] = field(default_factory=list)

    def folders(self) -> list[Path]:
        """Return the folders of the models, and of the base after them if there is one."""
        folders = [Path(model) for model in self.models]
        if self.base:
            folders.append(Path(self.base))
        return folders


@dataclass
class TensorChanges:
    """Sums of squares, and counts, over the values of a tensor."""

    values: int = 0
    base_square: float = 0.0
    """The sum of the squares of the base; without a base, of the first model."""
    difference_squares: list[float] = field(default_factory=list)
    """The sum of the squares of each model's difference from the base, or from the first model."""
    num_kept: list[int] = field(default_factory=list)
    """How many values of each model's difference were not dropped."""
    shared: int = 0
    """How many values more than one model changes with a difference that was kept."""
    in_conflict: int = 0
    """How many of the shared values are changed in both directions."""


class MergedModels(CombinedTensors):
    """The tensors of a merge; each is computed on request, in the same way in every process.

    While tensors are read, ``changes`` gets an entry for each; if ``measures`` is false, without squares.
    """

    measures = True

    def __init__(self, recipe: MergeRecipe) -> None:
        self.recipe = recipe
        self.opened = open_models(recipe.folders())
        self.kept_layers: KeptLayers | None = None
        if recipe.layers:
            self.kept_layers = keep_layers(self.opened.first_model.shape_of_model, recipe.layers)
            tensors = KeptTensors(self.opened.first_model, self.kept_layers)
            super().__init__([tensors], tensors)
        else:
            super().__init__(self.opened.tensors, self.opened.first_model)
        self.changes: dict[str, TensorChanges] = {}
        # a tensor is read in blocks, one tensor after the other, so what it takes to compute one is found once
        self._factors = lru_cache(maxsize=1)(self._find_factors)
        self._kept_values = lru_cache(maxsize=1)(self._choose_kept)

    def _combine(self, name: str, offsets: Sequence[int], blocks: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return the merge of the models' blocks, fp32, that begin at ``offsets`` of the tensor ``name``."""
        recipe = self.recipe
        models = list(blocks)  # the base last, if there is one
        base = models.pop() if recipe.base else models[0]
        differences = [model - base for model in models]
        changes = self._record(name, offsets, base, differences)

        # Methods without dropped values.
        if recipe.method == "passthrough":
            return base
        if recipe.method == "linear":
            return weighted_mean(models, recipe.weights)
        if recipe.method == "slerp":
            first_factor, second_factor = self._factors(name)
            return models[0] * first_factor + models[1] * second_factor
        if recipe.method == "task_arithmetic":
            return add_differences(base, differences, recipe.weights)

        # TIES and DARE: drop values of the differences, then add what is left of them.
        block = tuple(slice(begin, begin + size) for begin, size in zip(offsets, base.shape, strict=True))
        for index, is_kept in enumerate(self._kept_values(name)):
            changes.num_kept[index] += int(is_kept[block].count_nonzero())
            differences[index] *= is_kept[block]
        if recipe.method == "dare":  # the kept values are scaled up, so that their expected sum stays
            weights = [weight / recipe.density for weight in recipe.weights]
            return add_differences(base, differences, weights)
        agreed = add_agreeing(base, differences, recipe.weights)
        changes.shared += agreed.num_shared
        changes.in_conflict += agreed.num_in_conflict
        return agreed.merged

    def _record(
        self, name: str, offsets: Sequence[int], base: torch.Tensor, differences: Sequence[torch.Tensor]
    ) -> TensorChanges:
        """Add a block to the changes of its tensor, and return these."""
        num_models = len(differences)
        if not any(offsets):  # the first block; a tensor may be read several times
            self.changes[name] = TensorChanges(difference_squares=[0.0] * num_models, num_kept=[0] * num_models)
        changes = self.changes[name]
        if self.measures:
            changes.values += base.numel()
            changes.base_square += _square(base)
            for index, difference in enumerate(differences):
                changes.difference_squares[index] += _square(difference)
        return changes

    def _find_factors(self, name: str) -> tuple[float, float]:
        """Return the factors of the two models' tensors for an interpolation on the sphere."""
        first_model, second_model = self._models
        first_square = 0.0
        second_square = 0.0
        dot = 0.0
        shape = self.shape(name)
        first_blocks = blocks_of(first_model, name, shape)
        second_blocks = blocks_of(second_model, name, shape)
        for first_block, second_block in zip(first_blocks, second_blocks, strict=True):
            first_square += _square(first_block)
            second_square += _square(second_block)
            dot += float(torch.dot(first_block.double().flatten(), second_block.double().flatten()))
        share = self.recipe.weights[1] / sum(self.recipe.weights)
        return slerp_factors(first_square**0.5, second_square**0.5, dot, share)

    def _choose_kept(self, name: str) -> list[torch.Tensor]:
        """Return for each model which values of its difference from the base are kept, bool like the tensor."""
        recipe = self.recipe
        if recipe.method == "dare":
            shape = self.shape(name)
            num_models = len(recipe.models)
            return [draw_kept(shape, recipe.density, recipe.seed, name, index) for index in range(num_models)]
        *models, base = self._models
        return [find_largest(self._read_difference(name, model, base), recipe.density) for model in models]

    def _read_difference(self, name: str, model: StoredTensors, base: StoredTensors) -> torch.Tensor:
        """Return the difference of two full tensors, read in blocks, fp32."""
        shape = self.shape(name)
        difference = torch.empty(shape)
        flat = difference.view(-1)
        begin = 0
        for model_block, base_block in zip(blocks_of(model, name, shape), blocks_of(base, name, shape), strict=True):
            end = begin + model_block.numel()
            flat[begin:end] = (model_block - base_block).flatten()
            begin = end
        return difference


def _square(block: torch.Tensor) -> float:
    """Return the sum of the squares of a tensor."""
    return float(torch.linalg.vector_norm(block)) ** 2
