# PYTHON_ARGCOMPLETE_OK
"""Convert a checkpoint to a verified Hugging Face folder:  fabric-train convert --checkpoint RUN --output_dir DIR"""

import os
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fabric_train.cli.argument_types import PositiveShare
from fabric_train.cli.errors import FAILURE, InputError, RunError, describe_os_error, print_errors, run_program
from fabric_train.cli.parser import parse_arguments
from fabric_train.cli.push_arguments import REPOSITORY, PushArguments, not_language_codes

if TYPE_CHECKING:
    from fabric_train.export.hub import PushRequest
    from fabric_train.export.source import ExportSource
    from fabric_train.export.verification_report import VerificationReport


@dataclass(frozen=True)
class ConvertArguments(PushArguments):
    """Convert checkpoints to verified Hugging Face folders

    PROGRAM --checkpoint runs/1/best --output_dir exports/1 --push_to_hub OWNER/NAME
    PROGRAM --checkpoint runs/1/all --dtype float32 --output_dir exports/all
    PROGRAM --checkpoint runs/1 --average last:5 --output_dir exports/average
    """

    checkpoint: list[str]
    """Checkpoints to export: RUN (its newest checkpoint), RUN/best (by validation loss), RUN/latest, RUN/step-500, or a
    checkpoint's folder; RUN/all exports every checkpoint of the run.
    """
    output_dir: str
    """Folder to write. With several checkpoints, it gets one subfolder for each, named step-...; subfolders from an
    earlier command are kept.
    """
    average: str | None = None
    """Export one model with averaged weights. last:5 averages the 5 newest checkpoints of a run, without those saved
    because of a signal. all averages the checkpoints listed in --checkpoint, or all checkpoints of the run it names.
    """
    average_decay: PositiveShare = 1.0
    """Weight of each checkpoint in --average relative to the next newer one (or the next in the list), such as 0.8; 1
    weights all checkpoints equally.
    """
    merge: bool = False
    """For a run with an adapter: export the full model with the adapter merged into its weights. Without this, the
    adapter is exported as a peft folder.
    """
    merge_into: Literal["original", "dequantized"] = "original"
    """With --merge true, for an adapter trained on 4-bit weights: merge it into the original weights, or into the
    dequantized 4-bit weights. The difference from the trained model is measured.
    """
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Data type of the exported weights. Adapters are always exported in float32."""
    max_shard_size: str = "5GB"
    """Maximum size of a safetensors file."""
    base_model: str | None = None
    """For the model card: OWNER/NAME of the model that training started from. Default: the one recorded in the
    checkpoint.
    """
    language: list[str] | None = None
    """For the model card: ISO 639 codes, such as es ca."""

    def faults(self) -> list[str]:
        """Return an invalid size or name, and several checkpoints that would be pushed to one place."""
        faults = [*super().faults(), *not_language_codes("--language", self.language)]
        if not self.checkpoint:
            faults.append("--checkpoint is empty; give a checkpoint or a run")
        if self.base_model is not None and not re.fullmatch(REPOSITORY, self.base_model):
            faults.append(f"--base_model: expected OWNER/NAME on the hub, got {self.base_model!r}")
        if not re.fullmatch(r"(?=.*[1-9])[0-9]{1,6}(\.[0-9]{1,6})?[KMGT]B", self.max_shard_size):
            faults.append(f"--max_shard_size: expected a size such as 5GB or 500MB, got {self.max_shard_size!r}")
        if self.average is not None and not re.fullmatch(r"all|last:(?!1$)[1-9][0-9]{0,5}", self.average):
            faults.append(f"--average: expected last:K such as last:5, or all; got {self.average!r}")
        if self.average_decay != 1 and self.average is None:
            faults.append(f"--average_decay {self.average_decay:g} needs --average: last:K, or all")
        if self.merge_into != "original" and not self.merge:
            faults.append(f"--merge_into {self.merge_into} needs --merge true")
        names_whole_run = any(os.path.basename(path) == "all" for path in self.checkpoint)
        exports_several = self.average is None and (len(self.checkpoint) > 1 or names_whole_run)
        if exports_several and (self.revision or self.create_pr):
            faults.append(
                "--revision and --create_pr need a single checkpoint; several checkpoints are pushed to branches "
                "with their names, such as step-00000500"
            )
        return faults


@dataclass(frozen=True)
class ExportPlan:
    """The exports of one command."""

    sources: "dict[Path, ExportSource]"
    """A checkpoint or an average, by the folder to write."""
    damaged: list[str]
    """Names of checkpoints that cannot be exported."""
    push_request: "PushRequest | None"
    """The repository to which the folders are pushed; None if they are not pushed."""


def main() -> None:
    """Convert and verify each checkpoint, or the average; if one of several fails, the others are still converted."""
    arguments = parse_arguments(ConvertArguments)
    from fabric_train.checkpoint import check_exists

    if len(arguments.checkpoint) == 1:  # of several, plan_exports names all that are missing
        check_exists(Path(arguments.checkpoint[0]))  # before torch is imported, which takes seconds
    plan = plan_exports(arguments)

    failed = []
    for target, source in plan.sources.items():
        try:
            _export_and_push(source, target, plan.push_request, arguments)
        except (RunError, InputError, OSError) as error:
            is_only_checkpoint = len(plan.sources) == 1
            if is_only_checkpoint and isinstance(error, InputError | OSError):
                raise  # run_program gives it its exit code
            failed.append(target.name)
            message = describe_os_error(error) if isinstance(error, OSError) else str(error)
            print_errors(f"error: {message}")

    # Report how many of several checkpoints were exported, and which were not.
    num_checkpoints = len(plan.sources) + len(plan.damaged)
    pushes = plan.push_request is not None
    if num_checkpoints > 1:
        num_exported = len(plan.sources) - len(failed)
        pushed = " and pushed" if pushes else ""
        print(f"{num_exported} of {num_checkpoints} checkpoints exported to {Path(arguments.output_dir)}{pushed}")
    if plan.damaged:
        names = ", ".join(plan.damaged)
        print_errors(f"error: not exported because they are damaged: {names}; remove them, or restore their files")
    if failed and num_checkpoints > 1:
        outcome = "not exported or not pushed" if pushes else "not exported"
        print_errors(f"error: {outcome}: {', '.join(failed)}; run the same command again to retry")
    if failed or plan.damaged:
        sys.exit(FAILURE)


def _export_and_push(
    source: "ExportSource", target: Path, push_request: "PushRequest | None", arguments: ConvertArguments
) -> None:
    """Export to a folder unless it is finished, print the verification, and push the folder if asked to."""
    report, is_new = export(source, target, arguments)
    if is_new:
        print_report(report, f"{target}: {source.describe()}")
        print_gaps(source, target)
    else:
        print(f"{target} is already a verified export of {source.describe()}; only pushing it")
    if push_request:
        print(f"pushed to {publish(source, target, push_request, arguments)}")


def plan_exports(arguments: ConvertArguments) -> ExportPlan:
    """Choose what to export to which folders, and check that it can be exported and pushed.

    Raises:
        InputError: a checkpoint cannot be exported, or nothing can be pushed to the repository.
    """
    import torch  # slow, like the modules below

    from fabric_train.export.hub import PushRequest, check_push
    from fabric_train.export.plan import plan_average, plan_targets
    from fabric_train.model.hf_model import quiet_transformers

    damaged: list[str] = []
    paths = [Path(path) for path in arguments.checkpoint]
    output_dir = Path(arguments.output_dir)
    dtype = getattr(torch, arguments.dtype)
    request = PushRequest.from_arguments(arguments, "model") if arguments.push_to_hub else None
    merges = arguments.merge_into if arguments.merge else None
    if arguments.average:
        targets = plan_average(
            paths,
            output_dir,
            arguments.average,
            arguments.average_decay,
            dtype,
            push=request is not None,
            merges=merges,
        )
    else:
        targets, damaged = plan_targets(paths, output_dir, dtype, push=request is not None, merges=merges)
    if request:
        check_push(request)
    quiet_transformers()
    return ExportPlan(sources=targets, damaged=damaged, push_request=request)


def export(source: "ExportSource", target: Path, arguments: ConvertArguments) -> "tuple[VerificationReport, bool]":
    """Convert and verify a checkpoint or an average; a finished export only gets a new card.

    Returns:
        The verification report, and whether the export is new.

    Raises:
        RunError: the export does not match the checkpoint.
    """
    import torch

    from fabric_train.export.adapter_export import write_adapter_config
    from fabric_train.export.convert import convert
    from fabric_train.export.model_card import CardFacts, renew_card
    from fabric_train.export.verification import is_verified_export
    from fabric_train.export.verification_report import read_report

    facts = CardFacts(
        name=arguments.push_to_hub or target.absolute().name,
        license=arguments.license,
        languages=tuple(arguments.language) if arguments.language else None,
        base_model=arguments.base_model,
    )
    dtype = torch.float32 if source.is_adapter else getattr(torch, arguments.dtype)
    if not is_verified_export(target, source, dtype):
        return convert(source, target, dtype, arguments.max_shard_size, facts), True
    renew_card(source, target, facts)
    if source.is_adapter:
        write_adapter_config(source, target, facts)
    return read_report(target), False


def publish(source: "ExportSource", target: Path, request: "PushRequest", arguments: ConvertArguments) -> str:
    """Push an export to the hub, and return its address there.

    If there are several exports, each is pushed to a branch with the name of its folder.

    Raises:
        RunError: the hub refuses it.
    """
    from fabric_train.export.hub import push

    branch = request.revision if target == Path(arguments.output_dir) else target.name
    message = arguments.commit_message or f"{source.describe().capitalize()}, exported by Fabric Train"
    return push(target, replace(request, revision=branch), message)


def print_gaps(source: "ExportSource", target: Path) -> None:
    """Print a note on stderr with the arguments that would complete the model card."""
    from huggingface_hub import metadata_load

    metadata = metadata_load(target / "README.md") or {}
    saved = source.saved.content
    is_from_scratch = "base_model" in saved and saved["base_model"] is None
    expected_names = ["license", "language"]
    if not is_from_scratch:
        expected_names.insert(0, "base_model")
    missing = [f"--{name}" for name in expected_names if name not in metadata]
    if missing:
        print(f"note: the model card is incomplete; {' and '.join(missing)} would complete it", file=sys.stderr)


def print_report(report: "VerificationReport", name: str) -> None:
    """Print a table that compares an export with its checkpoint; ``name`` is the title."""
    from rich.table import Table

    from fabric_train.cli.output import open_console

    table = Table("compared with the checkpoint", "found", title=f"{name}, verified by a separate process")

    # the tensors in the files
    tensors = report.tensors
    fault_counts = f"{len(tensors.missing)}, {len(tensors.unexpected)}, {len(tensors.different)}"
    table.add_row("tensors, bit-identical", f"{tensors.compared} ({tensors.parameters:,} parameters, {report.dtype})")
    table.add_row("missing, unexpected, different", fault_counts)
    table.add_row("largest difference of a weight", f"{tensors.max_difference:g}")

    # what the models compute
    logits = report.logits
    table.add_row("how the models were run", report.method)
    if report.layers:
        difference = max(layer.max_difference for layer in report.layers)
        table.add_row("largest difference of a layer's output", f"{difference:g} in {len(report.layers)} layers")
    if report.adapted and report.rounded:
        table.add_row("a logit, adapter merged in fp32", f"{report.adapted.max_difference:g} from base + adapter")
        table.add_row(f"a logit, then rounded to {report.dtype}", f"{report.rounded.max_difference:g} from them")
    if report.trained:
        table.add_row("the same", f"{report.trained.max_difference:g} from base in 4 bits + adapter")
    if logits:
        table.add_row("largest difference of a logit", f"{logits.max_difference:g} of {logits.compared:,} logits")

    # the configuration and the tokenizer
    table.add_row("different settings", ", ".join(report.settings) or "none")
    table.add_row("tokenizer", report.tokenizer)
    open_console().print(table)


if __name__ == "__main__":
    run_program(main)
