"""Verify an export in a process that has nothing of the one that wrote it, and decide what in its report is a fault.

``python -m fabric_train.export.verification EXPORT DTYPE CHECKPOINT [--merged INTO] [PART=WEIGHT ...]``: an
adapter is merged into original or dequantized weights, and there is a part for each checkpoint of an average.
``model_comparison.py`` says what it compares.
"""

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NoReturn, cast

import torch

from fabric_train.cli.errors import FAILURE, INPUT_ERROR, InputError, RunError, run_program
from fabric_train.cli.fabric_command import project_first
from fabric_train.export.source import AveragePart, ExportSource, MergeInto
from fabric_train.files.regular_file import read_json

REPORT_NAME = "verification.json"
_FAULTS = "faults.json"
"""The lines of an InputError of the process that verifies; its folder is not kept then."""
Method = Literal["whole model", "layer by layer", "tensors only"]
_LISTED = 5


@dataclass(frozen=True)
class TensorReport:
    """The tensors: how many were compared, and the names of those that do not match."""

    compared: int
    parameters: int
    missing: list[str]
    unexpected: list[str]
    different: list[str]
    max_difference: float  # the largest absolute difference of a weight


@dataclass(frozen=True)
class OutputReport:
    """Number of values compared, and the largest absolute value and difference; NaN if a value is not finite."""

    compared: int
    max_value: float
    max_difference: float


@dataclass(frozen=True)
class VerificationReport:
    """Result of a comparison; ``faults`` is empty for a good export."""

    dtype: str  # of the export, such as "bfloat16"
    method: Method  # how the two models were run
    tensors: TensorReport
    layers: list[OutputReport]  # of each decoder layer, first to last; empty unless run layer by layer
    logits: OutputReport | None  # None if the models were not run
    settings: list[str]  # of config.json, generation_config.json and tokenizer, those that differ
    tokenizer: str  # "equal", "different" or "absent"
    faults: list[str]  # what does not match, in words
    adapted: OutputReport | None = None  # logits in fp32 with the adapter merged, against base and adapter
    rounded: OutputReport | None = None  # the same, with the merged weights rounded to the dtype
    trained: OutputReport | None = None  # the latter, against adapter and base in 4 bits, as they were in training
    source: str = ""  # ``ExportSource.identity`` of the export's source; empty in reports of earlier versions


class VerificationError(RunError):
    """An export that does not match its checkpoint; the message gives the differences in one line."""


def verify_in_fresh_process(folder: Path, source: ExportSource, dtype: torch.dtype) -> VerificationReport:
    """Compare the export ``folder`` with ``source`` in a new Python process, which also writes its report there."""
    report_file = folder / REPORT_NAME
    checkpoint = source.checkpoint
    module, *words = source.verification_command()
    command = [sys.executable, "-m", module, str(folder), str(dtype).removeprefix("torch."), *words]
    process = subprocess.run(command, env={**os.environ, **project_first()}, check=False)
    if (folder / _FAULTS).is_file():
        raise InputError(*read_json(folder / _FAULTS, list[str], "convert again"))
    if not report_file.is_file():
        reason = f"signal {-process.returncode}" if process.returncode < 0 else f"exit code {process.returncode}"
        raise VerificationError(
            f"the export of {checkpoint} could not be verified: the process that verifies it ended with {reason}"
        )
    report = read_report(folder)
    if report.faults:
        raise VerificationError(f"the export of {checkpoint} does not match it: {'; '.join(report.faults)}")
    return report


def read_report(export: Path) -> VerificationReport:
    """Return the comparison made with an export; an InputError if its report is damaged."""
    return read_json(export / REPORT_NAME, VerificationReport, "convert again")


def is_verified_export(folder: Path, source: ExportSource, dtype: torch.dtype) -> bool:
    """Whether ``folder`` is a verified export of ``source`` in ``dtype``, as its report says."""
    if not (folder / REPORT_NAME).is_file():
        return False
    report = read_report(folder)
    return (report.source, report.dtype, report.faults) == (source.identity(), str(dtype).removeprefix("torch."), [])


def find_faults(report: VerificationReport, dtype: torch.dtype) -> list[str]:
    """Return what does not match, in words."""
    faults = []
    for names, what in (
        (report.tensors.missing, "tensors missing"),
        (report.tensors.unexpected, "tensors not in the checkpoint"),
        (report.tensors.different, "tensors different in shape, type or value"),
        (report.settings, "different from the checkpoint's"),
    ):
        if names:
            more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            faults.append(f"{what}: {', '.join(names[:_LISTED])}{more}")
    for number, layer in enumerate(report.layers):
        if not layer.max_difference <= _tolerance(layer, dtype):
            faults.append(f"the output of decoder layer {number} differs by {layer.max_difference:.3g}")
            break
    if report.adapted and not report.adapted.max_difference <= _tolerance(report.adapted, torch.float32):
        faults.append(f"logits with the adapter merged differ by {report.adapted.max_difference:.3g} in fp32")
    if report.logits is None:
        return faults
    tolerance = _tolerance(report.logits, dtype)
    if math.isnan(report.logits.max_difference):
        faults.append(f"logits in {report.dtype} are not finite: choose another --dtype")
    elif report.logits.max_difference > tolerance:
        faults.append(f"logits differ by {report.logits.max_difference:.3g}, more than {tolerance:.3g}")
    return faults


def _tolerance(output: OutputReport, dtype: torch.dtype) -> float:
    # same weights, same code, so only the order of summation may differ, which changes the last bit or two
    return max(1e-4, 2 * torch.finfo(dtype).eps) * output.max_value


def write_report(folder: Path, source: ExportSource, dtype: str) -> NoReturn:
    """Compare an export with its source and write the report into its folder; exit with 0 if they match, else 1."""
    from fabric_train.export.model_comparison import compare  # needs this module

    try:
        report = compare(folder, source, getattr(torch, dtype))
    except InputError as error:
        (folder / _FAULTS).write_text(json.dumps(error.faults), encoding="utf-8")
        sys.exit(INPUT_ERROR)
    (folder / REPORT_NAME).write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    sys.exit(FAILURE if report.faults else 0)  # whoever started this process says what is wrong


def main() -> None:
    """Verify the export of a checkpoint, or of an average."""
    words = sys.argv[1:]
    if len(words) < 3:
        usage = "EXPORT float32|bfloat16|float16 CHECKPOINT [--merged original|dequantized] [PART=WEIGHT ...]"
        raise InputError(f"usage: python -m {__spec__.name} {usage}")
    folder, dtype, checkpoint, *words = words
    merges, words = (words[1], words[2:]) if words[:1] == ["--merged"] else (None, words)
    parts = (word.rpartition("=") for word in words)
    averaged = tuple(AveragePart(Path(part), float(weight)) for part, _, weight in parts)
    write_report(Path(folder), ExportSource(Path(checkpoint), averaged, cast(MergeInto | None, merges)), dtype)


if __name__ == "__main__":
    run_program(main)
