"""What a comparison of an export with its checkpoint found, and which of it are faults."""

import filecmp
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoTokenizer

from fabric_train.export.hub_format import INDEX_NAME, former_names
from fabric_train.files.typed_json import read_json
from fabric_train.model.hf_model import (
    GENERATION_CONFIG,
    ModelShape,
    checkpoint_generation_config,
    read_generation_config,
)
from fabric_train.model.weight_files import CheckpointTensors

REPORT_NAME = "verification.json"
Method = Literal["whole model", "layer by layer", "tensors only"]
_LISTED = 5
TEXT = (
    "Now is the winter of our discontent made glorious summer by this sun of York; 1 + 1 = 2, naïve café, 東京.\n"
    "def main() -> None:\n    print('Hello, world!')\n"
)
_WRITTEN_ANEW = {"transformers_version", "_name_or_path", "_from_model_config", "architectures", "dtype", "use_cache"}


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


def compare_configurations(
    folder: Path, exported: ModelShape, checkpoint: Path, stored: ModelShape, dtype: torch.dtype
) -> list[str]:
    """Return the settings of config.json and generation_config.json that are not those of the checkpoint.

    An export has its own dtype and architecture, it always uses the cache, and it has names for transformers 4 too.
    """
    expected, found = stored.config.to_dict(), exported.config.to_dict()
    for name, value in former_names(found).items():
        if name not in expected and found.get(name) == value:
            del found[name]
    differences = [f"{name} in config.json" for name in _different(expected, found)]
    if exported.config.dtype != dtype:
        differences.append("dtype in config.json")
    if not (folder / GENERATION_CONFIG).is_file():
        return [*differences, GENERATION_CONFIG]
    generation = checkpoint_generation_config(checkpoint, stored.config).to_dict()
    of_export = read_generation_config(str(folder), exported.config).to_dict()
    return [*differences, *(f"{name} in {GENERATION_CONFIG}" for name in _different(generation, of_export))]


def compare_tokenizers(folder: Path, original: Path) -> list[str] | None:
    """Return what differs between two tokenizers; None if the checkpoint has none.

    Compared are ids, decoded text, special tokens, vocabulary and chat template as transformers reads them, and the
    bytes of all files except tokenizer_config.json.
    """
    if not original.is_dir():
        return None
    expected, found = _traits(original), _traits(folder)
    differences = _different(expected, found)
    for file in sorted(path for path in original.rglob("*") if path.is_file()):
        copy = folder / file.relative_to(original)
        if file.name == "tokenizer_config.json":  # has names for transformers 4
            continue
        if not copy.is_file() or not filecmp.cmp(file, copy, shallow=False):
            differences.append(file.name)
    return differences


def compare_index(folder: Path, files: CheckpointTensors) -> list[str]:
    """Return what is wrong with the index of sharded weights: a tensor in another file, or a file that it lacks."""
    if not (folder / INDEX_NAME).is_file():
        return []
    weight_map = read_json(folder / INDEX_NAME, dict, "convert again").get("weight_map")
    if weight_map != {name: files.file_of(name).name for name in files}:
        return [f"{INDEX_NAME} does not say which file has which tensor"]
    return []


def _traits(source: Path) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    ids = tokenizer(TEXT)["input_ids"]
    return {
        "ids": ids,
        "decoded text": tokenizer.decode(ids),
        "special tokens": tokenizer.special_tokens_map,
        "vocabulary": tokenizer.get_vocab(),
        "chat template": tokenizer.chat_template,
    }


def _different(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    names = sorted({*expected, *found} - _WRITTEN_ANEW)
    return [name for name in names if expected.get(name) != found.get(name)]
