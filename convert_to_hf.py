# PYTHON_ARGCOMPLETE_OK
"""Convert a checkpoint to a verified Hugging Face folder:  python convert_to_hf.py --checkpoint RUN --output_dir DIR"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from arguments import ConvertArguments, parse
from fabric_train.cli.errors import FAILURE, run_program

if TYPE_CHECKING:
    from fabric_train.export.verification import VerificationReport


def main() -> None:
    """Convert and verify each checkpoint; push the export if --push_to_hub is given."""
    arguments = parse(ConvertArguments)

    import torch  # slow, like those below

    from fabric_train.export.convert import convert
    from fabric_train.export.hub import PushError, check_push, push
    from fabric_train.export.model_card import CardFacts
    from fabric_train.export.targets import plan_average, plan_targets
    from fabric_train.export.verification import VerificationError
    from fabric_train.model.hf_model import quiet_transformers

    if arguments.push_to_hub:
        check_push(arguments.push_to_hub)
    paths, output_dir = [Path(path) for path in arguments.checkpoint], Path(arguments.output_dir)
    if arguments.average:
        targets = plan_average(paths, output_dir, arguments.average, arguments.average_decay)
    else:
        targets = plan_targets(paths, output_dir)
    quiet_transformers()
    try:
        for target, source in targets.items():
            facts = CardFacts(
                name=arguments.push_to_hub or target.absolute().name,
                license=arguments.license,
                languages=tuple(arguments.language) if arguments.language else None,
                base_model=arguments.base_model,
            )
            report = convert(source, target, getattr(torch, arguments.dtype), arguments.max_shard_size, facts)
            print_report(report, f"{target}: {source.describe()}")
            print_gaps(target)
            if arguments.push_to_hub:
                message = f"{source.describe().capitalize()}, exported by Fabric Train"
                url = push(target, arguments.push_to_hub, private=arguments.private, message=message)
                print(f"pushed to {url}")
    except (VerificationError, PushError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(FAILURE)


def print_gaps(target: Path) -> None:
    """Print a note on standard error about what the model card does not say."""
    from huggingface_hub import metadata_load

    metadata = metadata_load(target / "README.md") or {}
    missing = [f"--{name}" for name in ("license", "language") if name not in metadata]
    if missing:
        print(f"note: the model card lacks what {' and '.join(missing)} would add", file=sys.stderr)


def print_report(report: "VerificationReport", name: str) -> None:
    """Print what was compared and the differences found."""
    from rich.console import Console
    from rich.table import Table

    tensors, logits = report.tensors, report.logits
    faulty = f"{len(tensors.missing)}, {len(tensors.unexpected)}, {len(tensors.different)}"
    table = Table("compared with the checkpoint", "found", title=f"{name}, verified by a fresh process")
    table.add_row("tensors, bit for bit", f"{tensors.compared} ({tensors.parameters:,} parameters, {report.dtype})")
    table.add_row("missing, unexpected, different", faulty)
    table.add_row("largest difference of a weight", f"{tensors.max_difference:g}")
    table.add_row("largest difference of a logit", f"{logits.max_difference:g} of {logits.compared:,} logits")
    table.add_row("tokenizer", report.tokenizer)
    Console().print(table)


if __name__ == "__main__":
    run_program(main)
