"""Compare an export with its checkpoint: ``python -m fabric_train.export.verification EXPORT CHECKPOINT DTYPE``.

A fresh process loads the export with plain transformers, as its users will. It compares the names, shapes, dtypes and
bits of all tensors, the logits on a fixed text, and the tokenizer. Only one of the two models is in memory at a time.
For an average, ``PART=WEIGHT`` for each checkpoint in it ends the command line.
"""

import json
import math
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from fabric_train.cli.errors import FAILURE, InputError, run_program
from fabric_train.export.average import AveragePart
from fabric_train.export.source import ExportSource
from fabric_train.files.typed_json import read_json
from fabric_train.model.hf_model import build_model, quiet_transformers, read_shape, tied_weight_names
from fabric_train.model.weight_files import StoredTensors, open_weights

REPORT_NAME = "verification.json"
TEXT = (
    "Now is the winter of our discontent made glorious summer by this sun of York; 1 + 1 = 2, naïve café, 東京.\n"
    "def main() -> None:\n    print('Hello, world!')\n"
)
_LISTED = 5


class VerificationError(RuntimeError):
    """An export that does not match its checkpoint; the message gives the differences in one line."""


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
class LogitsReport:
    """Number of logits compared, and the largest absolute value and difference; NaN if a logit is not finite."""

    compared: int
    max_logit: float
    max_difference: float


@dataclass(frozen=True)
class VerificationReport:
    """Result of a comparison. ``tokenizer`` is equal, different or absent; ``faults`` is empty for a good export.

    ``source`` is the identity of what was exported, see :class:`ExportSource`; empty in reports of earlier versions.
    """

    dtype: str
    tensors: TensorReport
    logits: LogitsReport
    tokenizer: str
    faults: list[str]
    source: str = ""


def verify_in_fresh_process(folder: Path, source: ExportSource, dtype: torch.dtype) -> VerificationReport:
    """Compare ``folder`` with ``source`` in a new Python process, which also writes its report into ``folder``.

    Raises:
        VerificationError: they do not match, or the process ended without a report.
    """
    report_file, checkpoint = folder / REPORT_NAME, source.checkpoint
    command = [sys.executable, "-m", __name__, str(folder), str(checkpoint), str(dtype).removeprefix("torch.")]
    parts = [f"{part.checkpoint}={part.weight!r}" for part in source.parts]
    process = subprocess.run([*command, *parts], check=False)
    if not report_file.is_file():
        reason = f"signal {-process.returncode}" if process.returncode < 0 else f"exit code {process.returncode}"
        raise VerificationError(
            f"the export of {checkpoint} could not be verified: the process that verifies it ended with {reason}"
        )
    report = _read_report(report_file)
    if report.faults:
        raise VerificationError(f"the export of {checkpoint} does not match it: {'; '.join(report.faults)}")
    return report


def is_verified_export(folder: Path, source: ExportSource, dtype: torch.dtype) -> bool:
    """Whether ``folder`` is a verified export of ``source`` in ``dtype``, as its report says."""
    if not (folder / REPORT_NAME).is_file():
        return False
    report = _read_report(folder / REPORT_NAME)
    return (report.source, report.dtype, report.faults) == (source.identity(), str(dtype).removeprefix("torch."), [])


def compare(folder: Path, source: ExportSource, dtype: torch.dtype) -> VerificationReport:
    """Load the export in ``folder`` with plain transformers and compare it with ``source`` in ``dtype``."""
    quiet_transformers()
    checkpoint, stored = source.checkpoint, source.open_reference()
    input_ids = _fixed_input(folder, read_shape(str(checkpoint)).vocab_size)
    wanted, tied = _reference(checkpoint, stored, dtype, input_ids)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", output_loading_info=True, local_files_only=True, trust_remote_code=False
    )
    exported, loading = loaded
    tensors = _compare_tensors(exported, stored, open_weights(folder), tied, dtype)
    found = _logits(exported, input_ids)
    logits = LogitsReport(found.numel(), wanted.abs().max().item(), (found - wanted).abs().max().item())
    report = VerificationReport(
        dtype=str(dtype).removeprefix("torch."),
        tensors=replace(
            tensors,
            missing=sorted({*tensors.missing, *map(str, loading["missing_keys"])}),
            unexpected=sorted({*tensors.unexpected, *map(str, loading["unexpected_keys"])}),
        ),
        logits=logits,
        tokenizer=_compare_tokenizers(folder, checkpoint / "tokenizer"),
        faults=[],
        source=source.identity(),
    )
    ties = [] if tied_weight_names(exported) == tied else ["the export ties other weights than the checkpoint's model"]
    return replace(report, faults=[*_faults(report, dtype), *ties])


def _compare_tensors(
    exported: PreTrainedModel, stored: StoredTensors, files: StoredTensors, tied: set[str], dtype: torch.dtype
) -> TensorReport:
    """Compare the loaded model, and the dtypes in its files, with the stored tensors cast to ``dtype``."""
    loaded, on_disk = exported.state_dict(), set(files)
    common = [name for name in stored if name in loaded]
    different, max_difference = [], 0.0
    for name in track(common, "comparing tensors", console=Console(stderr=True)):
        wanted, found = stored.read(name).to(dtype), loaded[name]
        if name in on_disk and files.dtype(name) == dtype and same_bits(wanted, found):
            continue
        different.append(name)
        if wanted.shape == found.shape:
            max_difference = max(max_difference, (wanted.double() - found.double()).abs().max().item())
    return TensorReport(
        compared=len(common),
        parameters=sum(loaded[name].numel() for name in common),
        missing=[name for name in stored if name not in loaded],
        unexpected=[name for name in loaded if name not in {*stored, *tied}],
        different=different,
        max_difference=max_difference,
    )


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits; unlike ``torch.equal``, a NaN equals itself."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))


def _faults(report: VerificationReport, dtype: torch.dtype) -> list[str]:
    """Return what does not match, in words."""
    faults = []
    for names, what in (
        (report.tensors.missing, "missing"),
        (report.tensors.unexpected, "not in the checkpoint"),
        (report.tensors.different, "different in shape, type or value"),
    ):
        if names:
            more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            faults.append(f"tensors {what}: {', '.join(names[:_LISTED])}{more}")
    # same weights, same code: only the order of summation may differ, which changes the last bit or two
    tolerance = max(1e-4, 2 * torch.finfo(dtype).eps) * report.logits.max_logit
    if math.isnan(report.logits.max_difference):
        faults.append(f"logits in {report.dtype} are not finite: choose another --dtype")
    elif report.logits.max_difference > tolerance:
        faults.append(f"logits differ by {report.logits.max_difference:.3g}, more than {tolerance:.3g}")
    if report.tokenizer == "different":
        faults.append("the tokenizer differs from the checkpoint's")
    return faults


def _read_report(file: Path) -> VerificationReport:
    return read_json(file, VerificationReport, "convert again")


def _reference(
    checkpoint: Path, stored: StoredTensors, dtype: torch.dtype, input_ids: torch.Tensor
) -> tuple[torch.Tensor, set[str]]:
    """Return the logits [1, T, V] of the checkpoint's weights in ``dtype``, and the names of its tied weights."""
    weights = {name: stored.read(name).to(dtype) for name in stored}
    model = build_model(read_shape(str(checkpoint)), weights, dtype)
    return _logits(model, input_ids), tied_weight_names(model)


@torch.inference_mode()
def _logits(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """Return the logits [1, T, V] in fp32 of input_ids [1, T]."""
    logits: torch.Tensor = model.eval()(input_ids=input_ids, use_cache=False).logits
    return logits.float()


def _fixed_input(folder: Path, vocab_size: int) -> torch.Tensor:
    """Return the ids [1, T] of the fixed text, or 64 fixed ids if the export has no tokenizer."""
    if not (folder / "tokenizer_config.json").is_file():
        return (torch.arange(64) * 7919 % vocab_size).unsqueeze(0)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    ids: torch.Tensor = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    return ids


def _compare_tokenizers(folder: Path, original: Path) -> str:
    """Compare ids, decoded text, special tokens, vocabulary and chat template of the two tokenizers."""
    if not original.is_dir():
        return "absent"
    traits = []
    for source in (folder, original):
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
        ids = tokenizer(TEXT)["input_ids"]
        traits.append(
            (ids, tokenizer.decode(ids), tokenizer.special_tokens_map, tokenizer.get_vocab(), tokenizer.chat_template)
        )
    return "equal" if traits[0] == traits[1] else "different"


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
