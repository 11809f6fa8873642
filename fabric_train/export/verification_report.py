"""What a comparison of an export with its checkpoint found, and which of it are faults."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from fabric_train.files.typed_json import read_json

REPORT_NAME = "verification.json"
Method = Literal["whole model", "layer by layer", "tensors only"]
_LISTED = 5


@dataclass(frozen=True)
class TensorReport:
    """Number of tensors compared, their number of parameters, the names of tensors that do not match, and the largest
    absolute difference of a weight.
    """

    compared: int
    parameters: int
    missing: list[str]
    unexpected: list[str]
    different: list[str]
    max_difference: float


@dataclass(frozen=True)
class OutputReport:
    """Number of values compared, and the largest absolute value and difference; NaN if a value is not finite."""

    compared: int
    max_value: float
    max_difference: float


@dataclass(frozen=True)
class VerificationReport:
    """Result of a comparison; ``faults`` is empty for a good export.

    Attributes:
        dtype: of the export, such as "bfloat16".
        method: how the two models were run: "whole model"; "layer by layer"; or "tensors only" if they were not.
        tensors: the weights.
        layers: the output of each decoder layer, first to last; empty unless the method is "layer by layer".
        logits: the logits; None if the method is "tensors only".
        settings: settings of config.json and generation_config.json, and parts of the tokenizer, that differ.
        tokenizer: "equal", "different" or "absent".
        faults: what does not match, in words.
        source: the identity of what was exported, see ``ExportSource``; empty in reports of earlier versions.
    """

    dtype: str
    method: Method
    tensors: TensorReport
    layers: list[OutputReport]
    logits: OutputReport | None
    settings: list[str]
    tokenizer: str
    faults: list[str]
    source: str = ""


def read_report(folder: Path) -> VerificationReport:
    """Return the report in an export.

    Raises:
        InputError: it is damaged.
    """
    return read_json(folder / REPORT_NAME, VerificationReport, "convert again")


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
    if report.logits is None:
        return faults
    tolerance = _tolerance(report.logits, dtype)
    if math.isnan(report.logits.max_difference):
        faults.append(f"logits in {report.dtype} are not finite: choose another --dtype")
    elif report.logits.max_difference > tolerance:
        faults.append(f"logits differ by {report.logits.max_difference:.3g}, more than {tolerance:.3g}")
    return faults


def _tolerance(output: OutputReport, dtype: torch.dtype) -> float:
    """Return the allowed difference: same weights, same code, so only the order of summation may differ, which changes
    the last bit or two.
    """
    return max(1e-4, 2 * torch.finfo(dtype).eps) * output.max_value
