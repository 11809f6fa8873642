# PYTHON_ARGCOMPLETE_OK
"""Convert a checkpoint to a verified Hugging Face folder:  python convert_to_hf.py --checkpoint RUN --output_dir DIR"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from arguments import ConvertArguments, parse
from fabric_train.cli.errors import FAILURE, InputError, run_program
from fabric_train.files.atomic_folder import check_not_taken

if TYPE_CHECKING:
    from fabric_train.export.verification import VerificationReport


def main() -> None:
    """Convert and verify each checkpoint; push the export if --push_to_hub is given."""
    arguments = parse(ConvertArguments)

    import torch  # slow, like those below

    from fabric_train.checkpoint import read_trainer_json
    from fabric_train.export.convert import convert
    from fabric_train.export.hub import PushError, check_push, push
    from fabric_train.export.model_card import CardFacts
    from fabric_train.export.source import ExportSource
    from fabric_train.export.verification import VerificationError
    from fabric_train.model.hf_model import quiet_transformers

    if arguments.push_to_hub:
        check_push(arguments.push_to_hub)
    targets = plan_targets([Path(path) for path in arguments.checkpoint], Path(arguments.output_dir))
    quiet_transformers()
    try:
        for target, checkpoint in targets.items():
            facts = CardFacts(
                name=arguments.push_to_hub or target.absolute().name,
                license=arguments.license,
                languages=tuple(arguments.language) if arguments.language else None,
                base_model=arguments.base_model,
            )
            source, dtype = ExportSource(checkpoint), getattr(torch, arguments.dtype)
            report = convert(source, target, dtype, arguments.max_shard_size, facts)
            print_report(report, target)
            print_gaps(target)
            if arguments.push_to_hub:
                message = f"Step {read_trainer_json(checkpoint)['step']}, exported by Fabric Train"
                url = push(target, arguments.push_to_hub, private=arguments.private, message=message)
                print(f"pushed to {url}")
    except (VerificationError, PushError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(FAILURE)


def plan_targets(paths: list[Path], output_dir: Path) -> dict[Path, Path]:
    """Return the checkpoint for each folder to write: ``output_dir`` for one, its subfolders for several.

    Raises:
        InputError: ``output_dir`` is taken, a path has no checkpoint, or two checkpoints have the same name.
    """
    from fabric_train.checkpoint import find_whole_checkpoint

    check_not_taken(output_dir)
    faults: list[str] = []
    targets: dict[Path, Path] = {}
    for path in paths:
        try:
            checkpoint = find_whole_checkpoint(path)
        except InputError as error:
            faults += error.faults
            continue
        target = output_dir if len(paths) == 1 else output_dir / checkpoint.name
        if target in targets:
            faults.append(f"{targets[target]} and {checkpoint} have the same name: convert them one at a time")
        targets[target] = checkpoint
    if faults:
        raise InputError(*faults)
    return targets


def print_gaps(target: Path) -> None:
    """Print a note on standard error about what the model card does not say."""
    from huggingface_hub import metadata_load

    metadata = metadata_load(target / "README.md") or {}
    missing = [f"--{name}" for name in ("license", "language") if name not in metadata]
    if missing:
        print(f"note: the model card lacks what {' and '.join(missing)} would add", file=sys.stderr)


def print_report(report: "VerificationReport", target: Path) -> None:
    """Print what was compared and the differences found."""
    from rich.console import Console
    from rich.table import Table

    tensors, logits = report.tensors, report.logits
    faulty = f"{len(tensors.missing)}, {len(tensors.unexpected)}, {len(tensors.different)}"
    table = Table("compared with the checkpoint", "found", title=f"{target}: verified by a fresh process")
    table.add_row("tensors, bit for bit", f"{tensors.compared} ({tensors.parameters:,} parameters, {report.dtype})")
    table.add_row("missing, unexpected, different", faulty)
    table.add_row("largest difference of a weight", f"{tensors.max_difference:g}")
    table.add_row("largest difference of a logit", f"{logits.max_difference:g} of {logits.compared:,} logits")
    table.add_row("tokenizer", report.tokenizer)
    Console().print(table)


if __name__ == "__main__":
    run_program(main)
