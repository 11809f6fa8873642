"""Merge models into a Hugging Face folder, a block of a tensor at a time; verify it like an export, and describe it.

``python -m fabric_train.merge_models.merge FOLDER DTYPE RECIPE`` is the process that verifies: it opens the models
and computes each tensor again. ``RECIPE`` is the :class:`MergeRecipe` in JSON.
"""

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

from fabric_train.checkpoint import read_trainer_json, run_of
from fabric_train.checkpoint.base_weights import fingerprint
from fabric_train.cli.errors import InputError, note, run_program
from fabric_train.cli.output import redact
from fabric_train.export import model_card
from fabric_train.export.convert import write_model
from fabric_train.export.model_card import CardFacts, has_chat_template, licence_metadata
from fabric_train.export.source import ExportSource
from fabric_train.export.verification import verify_in_fresh_process, write_report
from fabric_train.export.verification_report import VerificationReport
from fabric_train.files.atomic_folder import check_not_inside, complete_folder
from fabric_train.files.regular_file import parse_json
from fabric_train.files.requirements import check_room
from fabric_train.merge_models.models import (
    Matched,
    is_checkpoint,
    note_on_rounding,
    tokenizer_files,
    tokenizer_of,
)
from fabric_train.merge_models.tensors import METHODS, MergedModels, MergeRecipe
from fabric_train.model.origin import ModelOrigin, find_origin, legal_files
from fabric_train.pages.markdown import SHOWN_DIGITS, Markdown, code, last_part, link, render

_CARD = Path(model_card.__file__).with_name("templates") / "merge_card.md.j2"


@dataclass(frozen=True)
class ModelMerge(ExportSource):
    """A merge as the source of an export; ``checkpoint`` is the folder of the first model."""

    recipe: MergeRecipe = field(kw_only=True)

    @classmethod
    def of(cls, recipe: MergeRecipe) -> "ModelMerge":
        return cls(Path(recipe.models[0]), recipe=recipe)

    @property
    def is_adapter(self) -> bool:
        return False

    @property
    def tokenizer(self) -> Path:
        return tokenizer_of(self.checkpoint)

    def tokenizer_files(self) -> dict[str, Path]:
        return super().tokenizer_files() if is_checkpoint(self.checkpoint) else tokenizer_files(self.checkpoint)

    @cached_property
    def merged(self) -> MergedModels:
        """The tensors, opened once."""
        return MergedModels(self.recipe)

    def open_tensors(self) -> MergedModels:
        return self.merged

    def open_reference(self) -> MergedModels:
        return self.merged

    def identity(self) -> str:
        """Return a hash of the recipe and of the weights of the models, see ``fingerprint``."""
        recipe = self.recipe
        digest = xxhash.xxh3_128(f"{recipe.method} {recipe.weights} {recipe.density} {recipe.seed}".encode())
        for tensors in self.merged.opened.tensors:
            digest.update(fingerprint(tensors).encode())
        return digest.hexdigest()

    def describe(self) -> str:
        """Return the method and the number of models in words."""
        return f"{self.recipe.method} merge of {len(self.recipe.models)} models"

    def verification_command(self) -> list[str]:
        return [__spec__.name, json.dumps(asdict(self.recipe))]


def merge(source: ModelMerge, target: Path, dtype: torch.dtype, max_shard_size: str) -> VerificationReport:
    """Write the merge as the Hugging Face folder ``target``, which exists only if a fresh process verified it.

    Raises:
        InputError: the models do not fit together, or ``target`` is taken or in a model's folder.
        VerificationError: the fresh process computes something else than was written.
    """
    for folder in source.recipe.folders():
        check_not_inside(target, folder)
    opened = source.open_tensors().opened  # reports what does not fit before anything is written
    if line := note_on_rounding(source.recipe.folders(), dtype):
        note(line)
    check_room(target, opened.first.shape_of_model.num_parameters * dtype.itemsize, "the merged model")
    with complete_folder(target) as folder:
        write_model(source, folder, dtype, max_shard_size, f"merging {len(source.recipe.models)} models")
        for file in (file for model in source.recipe.folders() for file in legal_files(model)):
            if not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)
        write_merge_card(source.merged, folder, CardFacts(target.absolute().name), dtype)
        return verify_in_fresh_process(folder, source, dtype)


@dataclass(frozen=True)
class MergedPart:
    """A model of a merge, or its base, whose weight is None.

    ``difference`` is the length of its difference from the base (or from the first model), by the length of that one.
    ``kept`` is the share of the values of the difference that were not dropped; None if none could be.
    """

    label: str  # run and step, name on the hub, or the last part of a path
    origin: ModelOrigin | None  # of a checkpoint, the model that its run began with
    is_run: bool
    weight: float | None
    difference: float
    kept: float | None


def parts_of(merged: MergedModels) -> list[MergedPart]:
    """Return the models of a merge, the base last, after all of its tensors were read."""
    recipe = merged.recipe
    changes = merged.changes.values()
    length = math.sqrt(sum(one.of_base for one in changes))
    values = sum(one.values for one in changes)
    parts = []
    for number, (folder, weight) in enumerate(zip(recipe.models, recipe.weights, strict=True)):
        difference = math.sqrt(sum(one.of_models[number] for one in changes))
        kept = sum(one.kept[number] for one in changes) / max(values, 1) if METHODS[recipe.method].drops else None
        parts.append(MergedPart(*_name(Path(folder)), weight, difference / length if length else 0.0, kept))
    return [*parts, MergedPart(*_name(Path(recipe.base)), None, 0.0, None)] if recipe.base else parts


def conflicts_of(merged: MergedModels) -> str:
    """Return in words for how many values the models disagree about the sign; empty for other methods than ties."""
    shared = sum(one.shared for one in merged.changes.values())
    if merged.recipe.method != "ties" or not shared:
        return ""
    in_conflict = sum(one.in_conflict for one in merged.changes.values())
    return f"Of {shared:,} values that more than one model changes, {in_conflict / shared:.1%} have both signs."


def vocabularies_of(merged: MergedModels) -> Iterator[str]:
    """Yield a sentence for each model whose tokens are not in the same rows as the first model's."""
    for folder, matched in merged.opened.matched.items():
        yield _describe(_name(folder)[0], matched)


def _describe(label: str, matched: Matched) -> str:
    taken = f"; the other {matched.missing:,} have the first model's rows" if matched.missing else ""
    left_out = f"; {matched.left_out:,} of its own are left out" if matched.left_out else ""
    return f"{label}: {matched.common:,} of the first model's tokens are in its vocabulary{taken}{left_out}."


def _name(folder: Path) -> tuple[str, ModelOrigin | None, bool]:
    if is_checkpoint(folder):
        saved = read_trainer_json(folder)
        return f"{last_part(str(run_of(folder)))}, step {saved.state.step:,}", saved.base_model, True
    origin, _ = find_origin(str(folder))
    return (origin.repository or last_part(str(folder))), origin, False


def write_merge_card(merged: MergedModels, folder: Path, facts: CardFacts, dtype: torch.dtype) -> None:
    """Write the model card ``README.md`` into the folder of a merge, which has its other files already."""
    recipe = merged.recipe
    parts = parts_of(merged)
    tokenizer = tokenizer_of(Path(recipe.models[0]))
    licences = {_licence(part.origin) for part in parts}
    origin = parts[0].origin if len(licences) == 1 else None
    metadata = licence_metadata(origin, folder)
    repositories = [part.origin.repository for part in parts if part.origin and part.origin.repository]
    settings = {"method": recipe.method, "weights": ", ".join(f"{weight:g}" for weight in recipe.weights)}
    settings |= {"density": f"{recipe.density:g}"} if METHODS[recipe.method].drops else {}
    settings |= {"seed": str(recipe.seed)} if recipe.method == "dare" else {}
    text = render(
        _CARD,
        title=facts.name,
        facts=facts,
        method=METHODS[recipe.method],
        number=len(recipe.models),
        rows=[*map(_row, parts)],
        columns=["model", "began with, or revision", "weight", "difference", "kept", "licence"],
        reference="the base" if recipe.base else "the first model",
        conflicts=conflicts_of(merged),
        vocabularies=[*vocabularies_of(merged)],
        licence=metadata.get("license_name") or metadata.get("license"),
        legal_files=Markdown(", ".join(link(file.name, file.name) for file in legal_files(folder))),
        is_adapter=False,
        has_chats=None,
        has_chat_template=has_chat_template(tokenizer),
        settings=[*settings.items()],
        dtype=str(dtype).removeprefix("torch."),
        versions=[(one.__name__, one.__version__) for one in (torch, transformers, huggingface_hub, safetensors)],
    )
    data = ModelCardData(
        base_model=list(dict.fromkeys(repositories)) or None,
        base_model_relation="merge" if repositories else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["fabric-train", "merge"],
        **metadata,  # type: ignore[arg-type]
    )
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{redact(text)}\n").save(folder / "README.md")


def _licence(origin: ModelOrigin | None) -> tuple[str | None, ...]:
    return (origin.license, origin.license_name, origin.license_link) if origin else (None,)


def _row(part: MergedPart) -> tuple[Any, ...]:
    origin = part.origin
    identity = None if origin is None else origin.name if part.is_run else (origin.revision or "")[:SHOWN_DIGITS]
    return (
        code(part.label),
        code(identity) if identity else None,
        "base" if part.weight is None else f"{part.weight:g}",
        f"{part.difference:.3g}",
        None if part.kept is None else f"{part.kept:.1%}",
        origin.license if origin else None,
    )


def main() -> None:
    """Verify a merge."""
    if len(sys.argv) != 4:
        raise InputError(f"usage: python -m {__spec__.name} FOLDER float32|bfloat16|float16 RECIPE")
    folder, dtype, recipe = sys.argv[1:]
    source = ModelMerge.of(parse_json(recipe, MergeRecipe))
    source.merged.watches = False
    write_report(Path(folder), source, dtype)


if __name__ == "__main__":
    run_program(main)
