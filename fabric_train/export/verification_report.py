"""Read the report of an export's verification, and decide which findings are faults."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from fabric_train.files.typed_json import read_json

REPORT_NAME = "verification.json"
Method = Literal["whole model", "layer by layer", "tensors only"]
_LISTED_NAMES = 5


@dataclass(frozen=True)
class TensorReport:
    """The comparison of the tensors in the files."""

    compared: int
    """The number of tensors that are in both."""
    parameters: int
    """The number of weights in these tensors."""
    missing: list[str]
    """Tensors that the export lacks."""
    unexpected: list[str]
    """Tensors that only the export has."""
    different: list[str]
    max_difference: float
    """The largest absolute difference of a weight."""


@dataclass(frozen=True)
class OutputReport:
    """The number of compared values, and the largest absolute value and difference; NaN if a value is not finite."""

    compared: int
    max_value: float
    max_difference: float


@dataclass(frozen=True)
class VerificationReport:
    """The result of a comparison; ``faults`` is empty for a good export."""

    dtype: str
    """The type of the export, such as "bfloat16"."""
    method: Method
    """How the two models were run."""
    tensors: TensorReport
    layers: list[OutputReport]
    """The outputs of the decoder layers in order; empty unless the models were run layer by layer."""
    logits: OutputReport | None
    """The comparison of the logits; None if the models were not run."""
    settings: list[str]
    """The settings of config.json, generation_config.json and the tokenizer that differ."""
    tokenizer: str
    """"equal", "different" or "absent"."""
    faults: list[str]
    """A sentence for each thing that does not match."""
    adapted: OutputReport | None = None
    """The fp32 logits of the merged weights, compared with those of base and adapter."""
    rounded: OutputReport | None = None
    """The same for the merged weights after rounding to the export's dtype."""
    trained: OutputReport | None = None
    """The logits of the rounded weights, compared with those of the adapter on the base in 4 bits, as in training."""
    source: str = ""
    """The ``ExportSource.identity`` of the export's source; empty in reports of earlier versions."""


def read_report(export_dir: Path) -> VerificationReport:
    """Return the report in an export; an InputError if it is damaged."""
    return read_json(export_dir / REPORT_NAME, VerificationReport, "convert again")


def find_faults(report: VerificationReport, dtype: torch.dtype) -> list[str]:
    """Return a sentence for each thing that does not match; ``dtype`` is the type in which the models were run."""
    # tensors and settings
    faults = []
    for names, finding in (
        (report.tensors.missing, "tensors missing"),
        (report.tensors.unexpected, "tensors not in the checkpoint"),
        (report.tensors.different, "tensors different in shape, type or value"),
        (report.settings, "different from the checkpoint's"),
    ):
        if names:
            num_unlisted = len(names) - _LISTED_NAMES
            unlisted = f" and {num_unlisted} more" if num_unlisted > 0 else ""
            faults.append(f"{finding}: {', '.join(names[:_LISTED_NAMES])}{unlisted}")

    # outputs; `not … <= …` is also true of a NaN
    for layer_index, layer in enumerate(report.layers):
        if not layer.max_difference <= _tolerance(layer, dtype):
            faults.append(f"the output of decoder layer {layer_index} differs by {layer.max_difference:.3g}")
            break
    if report.adapted and not report.adapted.max_difference <= _tolerance(report.adapted, torch.float32):
        faults.append(f"logits with the adapter merged differ by {report.adapted.max_difference:.3g} in fp32")
    if report.logits is not None:
        tolerance = _tolerance(report.logits, dtype)
        if math.isnan(report.logits.max_difference):
            faults.append(f"logits in {report.dtype} are not finite; choose another --dtype")
        elif report.logits.max_difference > tolerance:
            faults.append(f"logits differ by {report.logits.max_difference:.3g}, more than {tolerance:.3g}")
    return faults


def _tolerance(output: OutputReport, dtype: torch.dtype) -> float:
    # same weights, same code, so only the order of summation may differ, which changes the last bit or two
    return max(1e-4, 2 * torch.finfo(dtype).eps) * output.max_value
