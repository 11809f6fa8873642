"""Compare an export with its checkpoint as a user of transformers would load it, or layer by layer if it is large.

The names, shapes, dtypes and bits of all tensors are compared, and the logits on a fixed text. Only one of the two
models is in memory at a time. If a model would take more than half of the available memory, the tensors are compared in
blocks from the files, and both models are run layer by layer (``layered_forward.py``).
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, track
from transformers import AutoModelForCausalLM, AutoTokenizer

from fabric_train.cli.errors import InputError
from fabric_train.distributed.resources import available_memory
from fabric_train.export.file_comparison import TEXT, compare_configurations, compare_index, compare_tokenizers
from fabric_train.export.layered_forward import LayeredOutput, layered_forward
from fabric_train.export.source import ExportSource
from fabric_train.export.verification_report import Method, OutputReport, TensorReport, VerificationReport, find_faults
from fabric_train.export.weight_writer import blocks
from fabric_train.model.hf_model import (
    ModelShape,
    build_model,
    check_readable,
    quiet_transformers,
    read_shape,
    tied_weight_names,
)
from fabric_train.model.load_weights import MetaModel, open_in_parts, open_tensors
from fabric_train.model.weight_files import CheckpointTensors, StoredTensors, open_weights


@dataclass(frozen=True)
class _Sides:
    """An export and its checkpoint, both opened, and the ids [1, T] that both models get."""

    folder: Path
    source: ExportSource
    dtype: torch.dtype
    files: CheckpointTensors
    stored: StoredTensors
    exported_shape: ModelShape
    shape: ModelShape
    input_ids: torch.Tensor


@dataclass(frozen=True)
class _Models:
    """The comparison of two models; ``ties_differ``: they tie different weights."""

    method: Method
    tensors: TensorReport
    layers: list[OutputReport]
    logits: OutputReport | None
    ties_differ: bool


def compare(folder: Path, source: ExportSource, dtype: torch.dtype) -> VerificationReport:
    """Compare the export in ``folder`` with ``source`` in ``dtype``."""
    quiet_transformers()
    try:
        check_readable(str(folder))
        return _compare(_open(folder, source, dtype))
    except InputError as error:  # a file is missing or damaged
        nothing = TensorReport(0, 0, [], [], [], 0.0)
        return VerificationReport(_name(dtype), "tensors only", nothing, [], None, [], "absent", [*error.faults])


def _open(folder: Path, source: ExportSource, dtype: torch.dtype) -> _Sides:
    shape = read_shape(str(source.checkpoint))
    return _Sides(
        folder=folder,
        source=source,
        dtype=dtype,
        files=open_weights(folder),
        stored=source.open_reference(),
        exported_shape=read_shape(str(folder)),
        shape=shape,
        input_ids=_fixed_input(folder, shape.vocab_size),
    )


def _compare(sides: _Sides) -> VerificationReport:
    settings = compare_configurations(
        sides.folder, sides.exported_shape, sides.source.checkpoint, sides.shape, sides.dtype
    )
    settings += compare_index(sides.folder, sides.files)
    of_tokenizer = compare_tokenizers(sides.folder, sides.source.checkpoint / "tokenizer")
    models = _compare_whole(sides) if _fits_in_memory(sides) else _compare_in_parts(sides)
    report = VerificationReport(
        dtype=_name(sides.dtype),
        method=models.method,
        tensors=models.tensors,
        layers=models.layers,
        logits=models.logits,
        settings=[*settings, *(f"{difference} of the tokenizer" for difference in of_tokenizer or ())],
        tokenizer="absent" if of_tokenizer is None else "different" if of_tokenizer else "equal",
        faults=[],
        source=sides.source.identity(),
    )
    ties = ["the export ties other weights than the checkpoint's model"] if models.ties_differ else []
    return replace(report, faults=[*find_faults(report, sides.dtype), *ties])


def _fits_in_memory(sides: _Sides) -> bool:
    return 2 * sides.shape.num_parameters * sides.dtype.itemsize <= available_memory()


def _compare_whole(sides: _Sides) -> _Models:
    """Run the checkpoint's model, then load the export as its users do and compare."""
    weights = {name: sides.stored.read(name).to(sides.dtype) for name in sides.stored}
    model = build_model(sides.shape, weights, sides.dtype)
    expected, tied = _logits(model, sides.input_ids), tied_weight_names(model)
    del model, weights
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        sides.folder, dtype="auto", output_loading_info=True, local_files_only=True, trust_remote_code=False
    )
    exported, loading = loaded
    tensors = _compare_tensors(sides, _LoadedTensors(exported.state_dict()), tied)
    tensors = replace(
        tensors,
        missing=sorted({*tensors.missing, *map(str, loading["missing_keys"])}),
        unexpected=sorted({*tensors.unexpected, *map(str, loading["unexpected_keys"])}),
    )
    logits = _compare_outputs(expected, _logits(exported, sides.input_ids))
    return _Models("whole model", tensors, [], logits, tied_weight_names(exported) != tied)


def _compare_in_parts(sides: _Sides) -> _Models:
    """Compare the tensors from the files, and if their names and shapes fit, run both models layer by layer."""
    expected = open_tensors(sides.shape, sides.stored, sides.dtype)
    tied = tied_weight_names(expected.model)
    tensors = _compare_tensors(sides, sides.files, tied)
    misfits = tensors.missing or tensors.unexpected or tensors.max_difference == math.inf
    exported = None if misfits else open_in_parts(sides.exported_shape, sides.dtype)
    outputs = None if exported is None else _run_layers(sides, expected, exported)
    if exported is None or outputs is None:
        if not misfits:
            note = f"note: {sides.shape.config.model_type} cannot be run layer by layer and does not fit in memory, so "
            print(note + "only its tensors and settings are compared, not its logits", file=sys.stderr)
        return _Models("tensors only", tensors, [], None, False)
    layers = [_compare_outputs(*pair) for pair in zip(*(output.hidden_states for output in outputs), strict=True)]
    logits = _compare_outputs(*(output.logits for output in outputs))
    return _Models("layer by layer", tensors, layers, logits, tied_weight_names(exported.model) != tied)


def _run_layers(sides: _Sides, expected: MetaModel, exported: MetaModel) -> tuple[LayeredOutput, LayeredOutput] | None:
    """Run both models layer by layer; return None if that of the checkpoint cannot be run so."""
    num_layers = getattr(sides.shape.config.get_text_config(), "num_hidden_layers", None)
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("comparing layers", total=2 * num_layers if num_layers else None)

        def run(model: MetaModel, shape: ModelShape) -> LayeredOutput:
            return layered_forward(model, shape.layer_classes, sides.input_ids, lambda: progress.advance(task))

        try:
            reference = run(expected, sides.shape)
        except RuntimeError:  # it computes with a weight outside of the module that has it
            return None
        return reference, run(exported, sides.exported_shape)


@dataclass(frozen=True)
class _LoadedTensors:
    """The tensors of a model in memory, read like those of files."""

    tensors: Mapping[str, torch.Tensor]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def shape(self, name: str) -> torch.Size:
        return self.tensors[name].shape

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        ranges = zip(offsets, shape, strict=True)
        return self.tensors[name][tuple(slice(begin, begin + size) for begin, size in ranges)]


def _compare_tensors(sides: _Sides, exported: CheckpointTensors | _LoadedTensors, tied: set[str]) -> TensorReport:
    """Compare the exported tensors, and their dtypes in the files, with the stored tensors cast to the dtype."""
    names, on_disk = set(exported), set(sides.files)
    common = [name for name in sides.stored if name in names]
    different, max_difference = [], 0.0
    for name in track(common, "comparing tensors", console=Console(stderr=True)):
        is_equal = name in on_disk and sides.files.dtype(name) == sides.dtype
        shape = sides.stored.shape(name)
        if exported.shape(name) != shape:
            is_equal, max_difference = False, math.inf
        else:
            for wanted, found in zip(blocks(sides.stored, name, shape), blocks(exported, name, shape), strict=True):
                cast = wanted.to(sides.dtype)
                if not same_bits(cast, found):
                    is_equal = False
                    max_difference = max(max_difference, (cast.double() - found.double()).abs().max().item())
        if not is_equal:
            different.append(name)
    return TensorReport(
        compared=len(common),
        parameters=sum(math.prod(exported.shape(name)) for name in common),
        missing=[name for name in sides.stored if name not in names],
        unexpected=[name for name in exported if name not in {*sides.stored, *tied}],
        different=different,
        max_difference=max_difference,
    )


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits; unlike ``torch.equal``, a NaN equals itself."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))


def _compare_outputs(expected: torch.Tensor, found: torch.Tensor) -> OutputReport:
    expected, found = expected.float(), found.float()
    difference = (found - expected).abs().max().item() if found.shape == expected.shape else math.inf
    return OutputReport(found.numel(), expected.abs().max().item(), difference)


@torch.inference_mode()
def _logits(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """Return the logits [1, T, V] in fp32 of input_ids [1, T]."""
    logits: torch.Tensor = model.eval()(input_ids=input_ids, use_cache=False).logits
    return logits.float()


def _fixed_input(folder: Path, vocab_size: int) -> torch.Tensor:
    """Return the ids [1, T] of the fixed text, or 64 fixed ids if the export has no tokenizer."""
    if not (folder / "tokenizer_config.json").is_file():
        return (torch.arange(64) * 7919 % vocab_size).unsqueeze(0)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    ids: torch.Tensor = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    return ids


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
