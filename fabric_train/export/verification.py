"""Verify an export in a fresh process, which shares no state with the process that wrote it.

``python -m fabric_train.export.verification EXPORT DTYPE CHECKPOINT [--merged INTO] [CHECKPOINT=WEIGHT ...]``:
``--merged`` says whether an adapter is merged into original or dequantized weights; an average has checkpoints with
weights. ``model_comparison.py`` says what is compared.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn, cast

import torch

from fabric_train.cli.commands import project_first
from fabric_train.cli.errors import FAILURE, INPUT_ERROR, InputError, RunError, run_program
from fabric_train.export.average import WeightedCheckpoint
from fabric_train.export.merged_adapter import MergeInto
from fabric_train.export.source import ExportSource
from fabric_train.export.verification_report import REPORT_NAME, VerificationReport, read_report
from fabric_train.files.typed_json import read_json

_FAULTS = "faults.json"
"""The file with the lines of an InputError in the verifying process; the folder with this file is not kept."""


class VerificationError(RunError):
    """An export that does not match its checkpoint; the message gives the differences in one line."""


def verify_in_fresh_process(folder: Path, source: ExportSource, dtype: torch.dtype) -> VerificationReport:
    """Compare the export ``folder`` with ``source`` in a new Python process, which also writes its report there.

    Raises:
        InputError: something else that the comparison needs, apart from the export, is missing.
        VerificationError: the export does not match, or the process ended without a report.
    """
    checkpoint = source.checkpoint
    module, *source_words = source.verification_command()
    command = [sys.executable, "-m", module, str(folder), str(dtype).removeprefix("torch."), *source_words]
    process = subprocess.run(command, env={**os.environ, **project_first()}, check=False)
    if (folder / _FAULTS).is_file():
        raise InputError(*read_json(folder / _FAULTS, list[str], "convert again"))
    if not (folder / REPORT_NAME).is_file():
        # subprocess reports a signal as a negative code
        reason = f"signal {-process.returncode}" if process.returncode < 0 else f"exit code {process.returncode}"
        raise VerificationError(
            f"the export of {checkpoint} could not be verified: the process that verifies it ended with {reason}"
        )
    report = read_report(folder)
    if report.faults:
        raise VerificationError(f"the export of {checkpoint} does not match it: {'; '.join(report.faults)}")
    return report


def is_verified_export(folder: Path, source: ExportSource, dtype: torch.dtype) -> bool:
    """Return whether ``folder`` is a verified export of ``source`` in ``dtype``, as its report says."""
    if not (folder / REPORT_NAME).is_file():
        return False
    report = read_report(folder)
    is_same_export = report.source == source.identity() and report.dtype == str(dtype).removeprefix("torch.")
    return is_same_export and not report.faults


def write_report(folder: Path, source: ExportSource, dtype: str) -> NoReturn:
    """Compare an export with its source, and write the report to its folder; exit with 0 if they match, or else 1."""
    from fabric_train.export.model_comparison import compare  # slow to import, and only this process compares

    try:
        report = compare(folder, source, getattr(torch, dtype))
    except InputError as error:
        (folder / _FAULTS).write_text(json.dumps(error.faults), encoding="utf-8")
        sys.exit(INPUT_ERROR)
    (folder / REPORT_NAME).write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    sys.exit(FAILURE if report.faults else 0)  # the process that started this one says what is wrong


def main() -> None:
    """Verify the export of a checkpoint, or of an average."""
    words = sys.argv[1:]
    if len(words) < 3:
        usage = "EXPORT float32|bfloat16|float16 CHECKPOINT [--merged original|dequantized] [CHECKPOINT=WEIGHT ...]"
        raise InputError(f"usage: python -m {__spec__.name} {usage}")
    folder, dtype, checkpoint, *source_words = words

    # the words of ``ExportSource.verification_command``, from which the source is made again
    merges = None
    if source_words[:1] == ["--merged"]:
        merges = cast(MergeInto, source_words[1])
        source_words = source_words[2:]
    averaged = []
    for word in source_words:
        averaged_checkpoint, _, weight = word.rpartition("=")
        averaged.append(WeightedCheckpoint(Path(averaged_checkpoint), float(weight)))
    source = ExportSource(Path(checkpoint), tuple(averaged), merges)

    write_report(Path(folder), source, dtype)


if __name__ == "__main__":
    run_program(main)
