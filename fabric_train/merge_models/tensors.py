"""The tensors of a merge: each is computed from the models' tensors, in fp32 and a block of rows at a time."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch

from fabric_train.export.hub_format import blocks as blocks_of
from fabric_train.export.source import CombinedTensors, weighted_mean
from fabric_train.merge_models import methods
from fabric_train.merge_models.models import open_models
from fabric_train.model.weight_files import StoredTensors


@dataclass(frozen=True)
class MergeRecipe:
    """A method and its arguments: folders of models, one weight for each, and a base for methods that need one."""

    method: methods.Method
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
            return methods.add_differences(base, differences, recipe.weights)
        block = tuple(slice(begin, begin + size) for begin, size in zip(offsets, base.shape, strict=True))
        for number, kept in enumerate(self._kept(name)):
            changes.kept[number] += int(kept[block].count_nonzero())
            differences[number] *= kept[block]
        if recipe.method == "dare":
            weights = [weight / recipe.density for weight in recipe.weights]
            return methods.add_differences(base, differences, weights)
        merged, shared, in_conflict = methods.add_agreeing(base, differences, recipe.weights)
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
        squares, dot = [0.0, 0.0], 0.0
        shape = self.shape(name)
        for one, other in zip(blocks_of(first, name, shape), blocks_of(second, name, shape), strict=True):
            squares = [squares[0] + _square(one), squares[1] + _square(other)]
            dot += float(torch.dot(one.double().flatten(), other.double().flatten()))
        share = self.recipe.weights[1] / sum(self.recipe.weights)
        return methods.slerp_factors(squares[0] ** 0.5, squares[1] ** 0.5, dot, share)

    def _choose_kept(self, name: str) -> list[torch.Tensor]:
        """Return for each model which values of its difference from the base are kept."""
        recipe, shape = self.recipe, self.shape(name)
        if recipe.method == "dare":
            return [methods.drawn(shape, recipe.density, recipe.seed, name, i) for i in range(len(recipe.models))]
        *models, base = self._models
        return [methods.largest(self._difference(name, model, base), recipe.density) for model in models]

    def _difference(self, name: str, model: StoredTensors, base: StoredTensors) -> torch.Tensor:
        """Return the difference of two whole tensors, read in blocks."""
        difference = torch.empty(self.shape(name))
        rest, begin = difference.view(-1), 0
        for one, other in zip(*(blocks_of(each, name, self.shape(name)) for each in (model, base)), strict=True):
            rest[begin : begin + one.numel()] = (one - other).flatten()
            begin += one.numel()
        return difference


def _square(block: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(block)) ** 2
