"""Verify an export in a fresh process: ``python -m fabric_train.export.verification EXPORT CHECKPOINT DTYPE``.

For an average, ``PART=WEIGHT`` for each checkpoint in it ends the command line. The process has nothing of the one that
wrote the export. ``model_comparison.py`` says what it compares.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from fabric_train.cli.errors import FAILURE, InputError, run_program
from fabric_train.cli.fabric_command import project_first
from fabric_train.export.average import AveragePart, ExportSource
from fabric_train.export.model_comparison import compare
from fabric_train.export.verification_report import REPORT_NAME, VerificationReport, read_report


class VerificationError(RuntimeError):
    """An export that does not match its checkpoint; the message gives the differences in one line."""


def verify_in_fresh_process(folder: Path, source: ExportSource, dtype: torch.dtype) -> VerificationReport:
    """Compare ``folder`` with ``source`` in a new Python process, which also writes its report into ``folder``.

    Raises:
        VerificationError: they do not match, or the process ended without a report.
    """
    report_file, checkpoint = folder / REPORT_NAME, source.checkpoint
    command = [sys.executable, "-m", __name__, str(folder), str(checkpoint), str(dtype).removeprefix("torch.")]
    parts = [f"{part.checkpoint}={part.weight!r}" for part in source.parts]
    process = subprocess.run([*command, *parts], env={**os.environ, **project_first()}, check=False)
    if not report_file.is_file():
        reason = f"signal {-process.returncode}" if process.returncode < 0 else f"exit code {process.returncode}"
        raise VerificationError(
            f"the export of {checkpoint} could not be verified: the process that verifies it ended with {reason}"
        )
    report = read_report(folder)
    if report.faults:
        raise VerificationError(f"the export of {checkpoint} does not match it: {'; '.join(report.faults)}")
    return report


def is_verified_export(folder: Path, source: ExportSource, dtype: torch.dtype) -> bool:
    """Whether ``folder`` is a verified export of ``source`` in ``dtype``, as its report says."""
    if not (folder / REPORT_NAME).is_file():
        return False
    report = read_report(folder)
    return (report.source, report.dtype, report.faults) == (source.identity(), str(dtype).removeprefix("torch."), [])


def main() -> None:
    """Write the report into the export's folder; exit with 0 if they match, else with 1."""
    if len(sys.argv) < 4:
        raise InputError(
            f"usage: python -m {__spec__.name} EXPORT CHECKPOINT float32|bfloat16|float16 [PART=WEIGHT ...]"
        )
    parts = (word.rpartition("=") for word in sys.argv[4:])
    averaged = tuple(AveragePart(Path(checkpoint), float(weight)) for checkpoint, _, weight in parts)
    folder, source = Path(sys.argv[1]), ExportSource(Path(sys.argv[2]), averaged)
    report = compare(folder, source, getattr(torch, sys.argv[3]))
    (folder / REPORT_NAME).write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    for fault in report.faults:
        print(f"error: {fault}", file=sys.stderr)
    sys.exit(FAILURE if report.faults else 0)


if __name__ == "__main__":
    run_program(main)
