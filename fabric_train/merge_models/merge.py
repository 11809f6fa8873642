"""Merge models into a Hugging Face folder, a block of a tensor at a time, and verify it like an export.

``python -m fabric_train.merge_models.merge FOLDER DTYPE RECIPE`` is the process that verifies: it opens the models
and computes each tensor again. ``RECIPE`` is the :class:`MergeRecipe` in JSON.
"""

import json
import shutil
import sys
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

import torch
import xxhash

from fabric_train.checkpoint.adapter_folder import fingerprint
from fabric_train.cli.errors import InputError, run_program
from fabric_train.export.convert import write_model
from fabric_train.export.model_card import CardFacts
from fabric_train.export.source import ExportSource
from fabric_train.export.verification import VerificationReport, verify_in_fresh_process, write_report
from fabric_train.files.atomic_folder import check_not_inside, complete_folder
from fabric_train.files.regular_file import parse_json
from fabric_train.merge_models.models import is_checkpoint, tokenizer_files, tokenizer_of
from fabric_train.merge_models.summary import write_merge_card
from fabric_train.merge_models.tensors import MergedModels, MergeRecipe
from fabric_train.model.origin import legal_files


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
    source.open_tensors()  # reports what does not fit before anything is written
    with complete_folder(target) as folder:
        write_model(source, folder, dtype, max_shard_size, f"merging {len(source.recipe.models)} models")
        for file in (file for model in source.recipe.folders() for file in legal_files(model)):
            if not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)
        write_merge_card(source.merged, folder, CardFacts(target.absolute().name), dtype)
        return verify_in_fresh_process(folder, source, dtype)


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
