# PYTHON_ARGCOMPLETE_OK
"""Merge models into one: ``python -m fabric_train.merge_models --method METHOD --models A B --output_dir DIR``."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from fabric_train.cli.argument_types import (
    NonNegativeInt64,
    NumberRange,
    PositiveShare,
    counted,
    given_twice,
    parse_ranges,
    parse_size,
)
from fabric_train.cli.errors import run_program
from fabric_train.cli.parser import parse_arguments

if TYPE_CHECKING:
    from fabric_train.export.verification_report import VerificationReport
    from fabric_train.merge_models.tensors import MergedModels

_DENSITY = 0.5
Weight = Annotated[float, NumberRange("a number", -1e6, 1e6)]


@dataclass(frozen=True)
class MergeModelsArguments:
    """Merge models into one Hugging Face folder, and verify it like an export

    PROGRAM --method linear --models runs/1 runs/2 --output_dir merged/mean
    PROGRAM --method task_arithmetic --models runs/ours models/instruct --base models/base --output_dir merged/chat
    PROGRAM --method passthrough --models models/llama-3-8b --layers 0-11,16-31 --output_dir models/pruned
    """

    method: Literal["linear", "slerp", "ties", "dare", "task_arithmetic", "passthrough"]
    """linear computes the weighted mean; slerp interpolates two models along an arc. Three methods add differences
    from --base: task_arithmetic all of them, ties the largest ones that agree in sign, dare a random selection,
    rescaled. passthrough keeps some decoder layers of one model, and changes nothing else.
    """
    models: list[str]
    """Models: RUN (its newest checkpoint), RUN/best, RUN/latest, RUN/step-500, a checkpoint's folder, a Hugging Face
    folder, or a hub name. The result has the first model's settings, tokenizer and chat template.
    """
    output_dir: str
    """Folder to write."""
    weights: list[Weight] | None = None
    """Weights of the models, in the same order; default: 1 for each. For linear and slerp, only the ratios matter."""
    base: str | None = None
    """With ties, dare and task_arithmetic: the model that all of --models were trained from."""
    density: PositiveShare | None = None
    """With ties and dare: share of the differences to keep; default: 0.5."""
    layers: str | None = None
    """With passthrough: the decoder layers to keep, in this order, as numbers from 0 and ranges with both ends, such as
    0-11,16-31."""
    seed: NonNegativeInt64 = 0
    """With dare: seed of the random choice."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Data type of the written weights, which are computed in float32."""
    max_shard_size: str = "5GB"
    """Maximum size of a safetensors file."""

    def faults(self) -> list[str]:
        """Return what is wrong with the arguments: the number of models or weights, and arguments of other methods."""
        needs_base = self.method in ("ties", "dare", "task_arithmetic")
        takes_density = self.method in ("ties", "dare")
        num_models = len(self.models)
        faults = [f"--models: {fault}" for _, fault in given_twice(self.models)]

        # arguments that do not depend on the number of models
        if self.density is not None and not takes_density:
            faults.append(f"--density only applies to --method ties and dare, not {self.method}")
        if parse_size(self.max_shard_size) is None:
            faults.append(f"--max_shard_size: expected a size such as 5GB or 500MB, got {self.max_shard_size!r}")
        if self.method == "passthrough":
            return faults + self._passthrough_faults()
        if self.layers is not None:
            faults.append(f"--layers only applies to --method passthrough, not {self.method}")

        # the number of models and of weights
        min_models = 1 if needs_base else 2
        if self.method == "slerp" and num_models != 2:
            faults.append(f"--method slerp merges 2 models, but --models has {num_models}")
        elif num_models < min_models:
            faults.append(f"--method {self.method} merges {min_models} or more models, but --models has {num_models}")
        weights = self.weights or []
        if self.weights is not None and len(weights) != num_models:
            weight_count = counted(len(weights), "number")
            model_count = counted(num_models, "model")
            faults.append(f"--weights has {weight_count} for {model_count} in --models; give one for each")
        elif weights and not needs_base and (min(weights) < 0 or not sum(weights)):
            faults.append(f"--method {self.method} needs --weights of 0 or more that are not all 0")

        # the base
        if self.base is None and needs_base:
            faults.append(f"--method {self.method} needs --base, the model that all of --models were trained from")
        if self.base is not None:
            if not needs_base:
                faults.append(
                    f"--base does not apply to --method {self.method}; leave out --base, or list the model in --models"
                )
            real_base = os.path.realpath(self.base)
            if any(os.path.realpath(model) == real_base for model in self.models):
                faults.append(
                    f"--base {self.base} is also in --models, where it has no effect; remove it from --models"
                )
        return faults

    def _passthrough_faults(self) -> list[str]:
        """Return what is wrong with the arguments of passthrough."""
        faults = []
        if len(self.models) != 1:
            faults.append(f"--method passthrough keeps layers of 1 model, but --models has {len(self.models)}")
        if self.layers is None:
            faults.append("--method passthrough needs --layers, the decoder layers to keep, such as 0-11,16-31")
        elif parse_ranges(self.layers) is None:
            faults.append(f"--layers: expected layers and ascending ranges such as 0-11,16-31, got {self.layers!r}")
        for name, value in (("--weights", self.weights), ("--base", self.base)):
            if value is not None:
                faults.append(f"{name} does not apply to --method passthrough; leave it out")
        return faults


def main(argv: list[str] | None = None) -> None:
    """Merge, verify, and print how far the models are apart."""
    arguments = parse_arguments(MergeModelsArguments, argv)

    import torch  # slow, like those below

    from fabric_train.files.atomic_folder import check_not_taken
    from fabric_train.merge_models.merge import ModelMerge, merge
    from fabric_train.merge_models.models import find_folder, find_layers
    from fabric_train.merge_models.tensors import MergeRecipe
    from fabric_train.model.hf_model import quiet_transformers

    target = Path(arguments.output_dir)
    check_not_taken(target)
    quiet_transformers()
    models = [str(find_folder(name).absolute()) for name in arguments.models]
    base = None
    if arguments.base:
        base = str(find_folder(arguments.base, "--base").absolute())
    layers = []
    if arguments.layers:
        layers = find_layers(parse_ranges(arguments.layers) or [], Path(models[0]))
    default_density = _DENSITY if arguments.method in ("ties", "dare") else 1.0
    recipe = MergeRecipe(
        method=arguments.method,
        models=models,
        weights=arguments.weights or [1.0] * len(models),
        base=base,
        density=arguments.density or default_density,
        seed=arguments.seed,
        layers=layers,
    )
    source = ModelMerge.from_recipe(recipe)
    report = merge(source, target, getattr(torch, arguments.dtype), arguments.max_shard_size)
    print_summary(source.merged, report, target)


def print_summary(merged: "MergedModels", report: "VerificationReport", target: Path) -> None:
    """Print the models with their differences, the tokens that they have in common, and the verification.

    For passthrough, print the kept layers instead of differences.
    """
    from rich.table import Table

    from fabric_train.cli.output import open_console
    from fabric_train.merge_models.merge import (
        describe_conflicts,
        describe_layers,
        describe_vocabularies,
        measure_models,
    )
    from fabric_train.merge_models.tensors import METHODS

    if merged.kept_layers:
        print(f"kept {describe_layers(merged)}")
        _print_verification(report, target)
        return

    columns = ["model", "weight", "difference"]
    shows_kept_share = METHODS[merged.recipe.method].drops
    if shows_kept_share:
        columns.append("kept")
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for model in measure_models(merged):
        cells = [
            model.name.label,
            "base" if model.weight is None else f"{model.weight:g}",
            f"{model.difference:.3g}",
        ]
        if shows_kept_share:
            cells.append("" if model.kept_share is None else f"{model.kept_share:.1%}")
        table.add_row(*cells)
    open_console().print(table)
    reference = "base" if merged.recipe.base else "first model"
    print(f"difference: norm of the difference from the {reference}, relative to the norm of the {reference}")
    conflicts = describe_conflicts(merged)
    if conflicts:
        print(conflicts)
    for line in describe_vocabularies(merged):
        print(line)
    _print_verification(report, target)


def _print_verification(report: "VerificationReport", target: Path) -> None:
    logits = f"; largest difference of a logit: {report.logits.max_difference:g}" if report.logits else ""
    print(f"verified by a separate process: {report.tensors.compared} tensors are bit-identical{logits}")
    print(f"written to {target}")


if __name__ == "__main__":
    run_program(main)
