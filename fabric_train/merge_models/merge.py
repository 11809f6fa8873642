"""Merge models into a Hugging Face folder, a block of a tensor at a time; verify it like an export, and describe it.

``python -m fabric_train.merge_models.merge FOLDER DTYPE RECIPE`` is the process that verifies: it opens the models
and computes each tensor again. ``RECIPE`` is the :class:`MergeRecipe` in JSON.
"""

import copy
import json
import math
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import huggingface_hub
import safetensors
import torch
import transformers
import xxhash
from huggingface_hub import ModelCard, ModelCardData
from transformers import PretrainedConfig

from fabric_train.checkpoint import read_trainer_json, run_of
from fabric_train.checkpoint.base_weights import fingerprint
from fabric_train.cli.errors import InputError, note, run_program
from fabric_train.cli.output import number_ranges, redact
from fabric_train.export import model_card
from fabric_train.export.convert import write_model
from fabric_train.export.model_card import CardFacts, has_chat_template, licence_metadata
from fabric_train.export.source import ExportSource
from fabric_train.export.verification import verify_in_fresh_process, write_report
from fabric_train.export.verification_report import VerificationReport
from fabric_train.files.atomic_folder import check_not_inside, complete_folder
from fabric_train.files.requirements import check_room
from fabric_train.files.typed_json import parse_json
from fabric_train.merge_models.models import (
    is_checkpoint,
    note_on_rounding,
    tokenizer_files,
    tokenizer_of,
)
from fabric_train.merge_models.tensors import METHODS, MergedModels, MergeRecipe
from fabric_train.model.hf_model import ModelShape
from fabric_train.model.origin import ModelOrigin, find_origin, legal_files
from fabric_train.pages.markdown import SHOWN_DIGITS, Markdown, code, last_part, link, render

_CARD = Path(model_card.__file__).with_name("templates") / "merge_card.md.j2"


@dataclass(frozen=True)
class ModelMerge(ExportSource):
    """A merge as the source of an export; ``checkpoint`` is the folder of the first model."""

    recipe: MergeRecipe = field(kw_only=True)

    @classmethod
    def from_recipe(cls, recipe: MergeRecipe) -> "ModelMerge":
        """Return the merge of a recipe."""
        return cls(Path(recipe.models[0]), recipe=recipe)

    @property
    def is_adapter(self) -> bool:
        return False

    @property
    def tokenizer(self) -> Path:
        return tokenizer_of(self.checkpoint)

    def tokenizer_files(self) -> dict[str, Path]:
        if is_checkpoint(self.checkpoint):
            return super().tokenizer_files()
        return tokenizer_files(self.checkpoint)

    @cached_property
    def merged(self) -> MergedModels:
        """The tensors, opened once."""
        return MergedModels(self.recipe)

    def read_shape(self) -> ModelShape:
        kept = self.merged.kept_layers
        return kept.shape if kept else super().read_shape()

    def read_config(self) -> PretrainedConfig:
        kept = self.merged.kept_layers
        return copy.deepcopy(kept.config) if kept else super().read_config()

    def open_tensors(self) -> MergedModels:
        return self.merged

    def open_reference(self) -> MergedModels:
        return self.merged

    def identity(self) -> str:
        """Return a hash of the recipe and of the weights of the models, see ``fingerprint``."""
        recipe = self.recipe
        digest = xxhash.xxh3_128(f"{recipe.method} {recipe.weights} {recipe.density} {recipe.seed}".encode())
        digest.update(json.dumps(recipe.layers).encode())
        for tensors in self.merged.opened.tensors:
            digest.update(fingerprint(tensors).encode())
        return digest.hexdigest()

    def describe(self) -> str:
        """Describe the merge, such as "ties merge of 3 models"."""
        if self.recipe.layers:
            return f"{len(self.recipe.layers)} layers of a model"
        return f"{self.recipe.method} merge of {len(self.recipe.models)} models"

    def verification_command(self) -> list[str]:
        return [__spec__.name, json.dumps(asdict(self.recipe))]


def merge(source: ModelMerge, target: Path, dtype: torch.dtype, max_shard_size: str) -> VerificationReport:
    """Write the merge as the Hugging Face folder ``target``, which exists only if a fresh process verified it.

    Raises:
        InputError: the models do not fit together, or ``target`` is taken or in a model's folder.
        VerificationError: the fresh process computes other values than were written.
    """
    model_dirs = source.recipe.folders()
    for folder in model_dirs:
        check_not_inside(target, folder)
    merged = source.open_tensors()  # reports what does not fit before anything is written
    rounding = note_on_rounding(model_dirs, dtype)
    if rounding:
        note(rounding)
    kept = merged.kept_layers
    shape = kept.shape if kept else merged.opened.first_model.shape_of_model
    check_room(target, shape.num_parameters * dtype.itemsize, "the merged model")
    with complete_folder(target) as folder:
        write_model(source, folder, dtype, max_shard_size, f"writing {source.describe()}")
        for model_dir in model_dirs:
            for file in legal_files(model_dir):
                if not (folder / file.name).exists():  # of two files of one name, the first model's
                    shutil.copyfile(file, folder / file.name)
        write_merge_card(source.merged, folder, CardFacts(target.absolute().name), dtype)
        return verify_in_fresh_process(folder, source, dtype)


@dataclass(frozen=True)
class ModelName:
    """What a card calls a model."""

    label: str
    """Its run and step, its name on the hub, or the last part of its path."""
    origin: ModelOrigin | None
    """The model that the run of a checkpoint began with."""
    is_run: bool


@dataclass(frozen=True)
class MeasuredModel:
    """A model of a merge, or its base, whose weight is None."""

    name: ModelName
    weight: float | None
    difference: float
    """The norm of its difference from the base (without one, from the first model), divided by the norm of that
    model."""
    kept_share: float | None
    """The share of the values of the difference that were not dropped; None if none could be."""


def measure_models(merged: MergedModels) -> list[MeasuredModel]:
    """Return the models of a merge, the base last; all tensors must have been read before."""
    recipe = merged.recipe
    changes = merged.changes.values()  # of each tensor; a length is that of all tensors as one vector
    num_values = sum(change.values for change in changes)
    reference_length = math.sqrt(sum(change.base_square for change in changes))
    models = []
    for index, (folder, weight) in enumerate(zip(recipe.models, recipe.weights, strict=True)):
        difference_length = math.sqrt(sum(change.difference_squares[index] for change in changes))
        difference = difference_length / reference_length if reference_length else 0.0
        kept_share = None
        if METHODS[recipe.method].drops:
            num_kept = sum(change.num_kept[index] for change in changes)
            kept_share = num_kept / max(num_values, 1)
        name = _name_model(Path(folder))
        models.append(MeasuredModel(name, weight=weight, difference=difference, kept_share=kept_share))
    if recipe.base:
        name = _name_model(Path(recipe.base))
        models.append(MeasuredModel(name, weight=None, difference=0.0, kept_share=None))
    return models


def describe_conflicts(merged: MergedModels) -> str:
    """Describe for how many values the models disagree about the sign; empty unless the method is ties."""
    changes = merged.changes.values()
    num_shared = sum(change.shared for change in changes)
    if merged.recipe.method != "ties" or not num_shared:
        return ""
    share = sum(change.in_conflict for change in changes) / num_shared
    return f"Of {num_shared:,} values changed by more than one model, {share:.1%} have conflicting signs."


def describe_vocabularies(merged: MergedModels) -> Iterator[str]:
    """Yield a sentence for each model whose tokens are not in the same rows as the first model's."""
    for folder, matched in merged.opened.matched.items():
        label = _name_model(folder).label
        missing = f"; the other {matched.missing:,} keep the first model's rows" if matched.missing else ""
        left_out = f"; {matched.left_out:,} of its tokens are left out" if matched.left_out else ""
        yield f"{label}: its vocabulary has {matched.common:,} of the first model's tokens{missing}{left_out}."


def describe_layers(merged: MergedModels) -> str:
    """Describe which layers were kept, such as "28 of 32 layers, in this order: 0–11, 16–31"; empty if all were."""
    kept = merged.kept_layers
    if kept is None:
        return ""
    ranges: list[str] = []
    run: list[int] = []
    for layer in kept.layers:
        if run and layer != run[-1] + 1:
            ranges.append(number_ranges(run))
            run = []
        run.append(layer)
    ranges.append(number_ranges(run))
    return f"{len(kept.layers)} of {kept.num_layers} layers, in this order: {', '.join(ranges)}"


def _name_model(folder: Path) -> ModelName:
    """Return what a card calls the model in a folder: a checkpoint, or a Hugging Face folder."""
    if is_checkpoint(folder):
        saved = read_trainer_json(folder)
        label = f"{last_part(str(run_of(folder)))}, step {saved.state.step:,}"
        return ModelName(label, saved.base_model, is_run=True)
    origin, _ = find_origin(str(folder))
    return ModelName(origin.repository or last_part(str(folder)), origin, is_run=False)


def write_merge_card(merged: MergedModels, folder: Path, facts: CardFacts, dtype: torch.dtype) -> None:
    """Write the model card ``README.md`` into the folder of a merge, whose other files are already written."""
    recipe = merged.recipe
    models = measure_models(merged)

    # The licence, if all models have the same.
    licences = {_licence(model.name.origin) for model in models}
    origin = models[0].name.origin if len(licences) == 1 else None
    metadata = licence_metadata(origin, folder)

    # passthrough has no weights, and its one model has no difference
    columns = ["model", "began with, or revision", "licence"]
    settings: dict[str, str] = {"method": recipe.method}
    if merged.kept_layers is None:
        columns[2:2] = ["weight", "difference", "kept"]
        settings["weights"] = ", ".join(f"{weight:g}" for weight in recipe.weights)
    if METHODS[recipe.method].drops:
        settings["density"] = f"{recipe.density:g}"
    if recipe.method == "dare":
        settings["seed"] = str(recipe.seed)
    text = render(
        _CARD,
        title=facts.name,
        facts=facts,
        method=METHODS[recipe.method],
        number=len(recipe.models),
        rows=[_table_row(model, columns) for model in models],
        columns=columns,
        layers=describe_layers(merged),
        reference="the base" if recipe.base else "the first model",
        conflicts=describe_conflicts(merged),
        vocabularies=list(describe_vocabularies(merged)),
        licence=metadata.get("license_name") or metadata.get("license"),
        legal_files=Markdown(", ".join(link(file.name, file.name) for file in legal_files(folder))),
        is_adapter=False,
        has_chats=None,
        has_chat_template=has_chat_template(tokenizer_of(Path(recipe.models[0]))),
        settings=list(settings.items()),
        dtype=str(dtype).removeprefix("torch."),
        versions=[
            (library.__name__, library.__version__) for library in (torch, transformers, huggingface_hub, safetensors)
        ],
    )
    repositories: list[str] = []
    for model in models:
        repository = model.name.origin.repository if model.name.origin else None
        if repository and repository not in repositories:
            repositories.append(repository)
    data = ModelCardData(
        base_model=repositories or None,
        base_model_relation="merge" if repositories else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["fabric-train", "merge"],
        **metadata,  # type: ignore[arg-type]
    )
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{redact(text)}\n").save(folder / "README.md")


def _licence(origin: ModelOrigin | None) -> tuple[str | None, ...]:
    """Return a value that is equal for two models if they have the same licence."""
    if origin is None:
        return (None,)
    return (origin.license, origin.license_name, origin.license_link)


def _table_row(model: MeasuredModel, columns: list[str]) -> list[Any]:
    """Return the row of a model in the card's table with these columns."""
    origin = model.name.origin
    identity = None
    if origin is not None:
        identity = origin.name if model.name.is_run else (origin.revision or "")[:SHOWN_DIGITS]
    cells = {
        "model": code(model.name.label),
        "began with, or revision": code(identity) if identity else None,
        "weight": "base" if model.weight is None else f"{model.weight:g}",
        "difference": f"{model.difference:.3g}",
        "kept": None if model.kept_share is None else f"{model.kept_share:.1%}",
        "licence": origin.license if origin else None,
    }
    return [cells[column] for column in columns]


def main() -> None:
    """Verify a merge."""
    if len(sys.argv) != 4:
        raise InputError(f"usage: python -m {__spec__.name} FOLDER float32|bfloat16|float16 RECIPE")
    folder, dtype, recipe = sys.argv[1:]
    source = ModelMerge.from_recipe(parse_json(recipe, MergeRecipe))
    source.merged.measures = False
    write_report(Path(folder), source, dtype)


if __name__ == "__main__":
    run_program(main)
