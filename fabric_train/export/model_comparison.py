"""Compare an export with its checkpoint: names and bits of all tensors, settings, tokenizer, logits on a fixed text.

One of the two models is in memory at a time, loaded as a user of transformers would. If a model would take more than
half of the available memory, tensors are compared in blocks from the files, and models are run layer by layer.
"""

import filecmp
import math
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from rich.progress import Progress, track
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from fabric_train.checkpoint import read_trainer_json
from fabric_train.checkpoint.adapter_folder import AdapterTensors, open_base
from fabric_train.cli.errors import InputError
from fabric_train.cli.output import open_console
from fabric_train.distributed.memory import available_memory
from fabric_train.export.hub_format import INDEX_NAME, blocks, former_names, published
from fabric_train.export.source import ExportSource, MergeInto, is_in_4_bits, open_unmerged
from fabric_train.export.verification import Method, OutputReport, TensorReport, VerificationReport, find_faults
from fabric_train.files.regular_file import read_json
from fabric_train.inference.load_model import add_adapter, load_onto_devices
from fabric_train.model import hf_model, load_weights
from fabric_train.model.layered_forward import LayeredOutput, layered_forward
from fabric_train.model.weight_files import CheckpointTensors, StoredTensors, open_weights

_TEXT = (
    "Now is the winter of our discontent made glorious summer by this sun of York; 1 + 1 = 2, naïve café, 東京.\n"
    "def main() -> None:\n    print('Hello, world!')\n"
)
_WRITTEN_ANEW = {"transformers_version", "_name_or_path", "_from_model_config", "architectures", "dtype", "use_cache"}


@dataclass(frozen=True)
class _Sides:
    """An export and its checkpoint, both opened."""

    folder: Path
    source: ExportSource
    dtype: torch.dtype
    files: CheckpointTensors
    stored: StoredTensors  # by the names of weights in memory
    published: StoredTensors  # the same by the names in which they are exported
    exported_shape: hf_model.ModelShape
    shape: hf_model.ModelShape
    input_ids: torch.Tensor  # [1, T], for both models


@dataclass(frozen=True)
class _Outputs:
    """The comparison of what two models compute."""

    method: Method
    layers: list[OutputReport]
    logits: OutputReport | None
    wrongly_loaded: list[str]  # weights that transformers misses, does not know, or loads with other values


_NOT_RUN = _Outputs("tensors only", [], None, [])


def compare(folder: Path, source: ExportSource, dtype: torch.dtype) -> VerificationReport:
    """Compare an export with what it was made from; a damaged file of it is a fault of the report, not an error.

    Raises:
        InputError: what the comparison needs beside the export is not there.
    """
    hf_model.quiet_transformers()
    source.check_needs()
    try:
        if source.is_adapter:
            return compare_adapter(folder, source)
        hf_model.check_readable(str(folder))
        return _compare(_open(folder, source, dtype))
    except InputError as error:  # a file is missing or damaged
        nothing = TensorReport(0, 0, [], [], [], 0.0)
        return VerificationReport(
            str(dtype).removeprefix("torch."), "tensors only", nothing, [], None, [], "absent", [*error.faults]
        )


def _open(folder: Path, source: ExportSource, dtype: torch.dtype) -> _Sides:
    shape = hf_model.read_shape(str(source.checkpoint))
    stored = source.open_reference()
    return _Sides(
        folder=folder,
        source=source,
        dtype=dtype,
        files=open_weights(folder),
        stored=stored,
        published=published(load_weights.build_on_meta(shape, dtype), stored),
        exported_shape=hf_model.read_shape(str(folder)),
        shape=shape,
        input_ids=_fixed_input(folder, shape),
    )


def _compare(sides: _Sides) -> VerificationReport:
    settings = [*_compare_configurations(sides), *_compare_index(sides.folder, sides.files)]
    of_tokenizer = _compare_tokenizers(sides.folder, sides.source)
    tensors = _compare_tensors(sides.published, sides.files, sides.dtype)
    fits = not (settings or tensors.missing or tensors.unexpected or tensors.max_difference == math.inf)
    outputs = _compare_outputs(sides) if fits else _NOT_RUN
    report = VerificationReport(
        dtype=str(sides.dtype).removeprefix("torch."),
        method=outputs.method,
        tensors=replace(tensors, different=sorted({*tensors.different, *outputs.wrongly_loaded})),
        layers=outputs.layers,
        logits=outputs.logits,
        settings=[*settings, *(f"{difference} of the tokenizer" for difference in of_tokenizer or ())],
        tokenizer="absent" if of_tokenizer is None else "different" if of_tokenizer else "equal",
        faults=[],
        source=sides.source.identity(),
    )
    if fits and sides.source.merges and not sides.source.parts:
        adapted, rounded, trained = _compare_merged(sides, sides.source.merges)
        report = replace(report, adapted=adapted, rounded=rounded, trained=trained)
    return replace(report, faults=find_faults(report, sides.dtype))


def _compare_merged(sides: _Sides, into: MergeInto) -> tuple[OutputReport, OutputReport, OutputReport | None]:
    """Compare logits of base and adapter with the merged weights' logits, before and after rounding; all in fp32.

    The third is of the rounded weights against the trained ones, if these were in 4 bits.
    """
    checkpoint = sides.source.checkpoint
    dtype = torch.float32

    def logits(model: load_weights.MetaModel) -> torch.Tensor:
        return layered_forward(model, sides.shape.layer_classes, sides.input_ids, lambda: None).logits

    exported = load_weights.open_in_parts(sides.exported_shape, dtype)
    assert exported is not None  # written a moment ago, in safetensors
    merged = logits(load_weights.open_tensors(sides.shape, sides.stored, dtype))
    rounded = logits(exported)
    adapted = logits(open_unmerged(checkpoint, dtype, into)[0])
    found = _difference(adapted, merged), _difference(adapted, rounded)
    if not is_in_4_bits(checkpoint):
        return *found, None
    trained = adapted if into == "dequantized" else logits(open_unmerged(checkpoint, dtype, "dequantized")[0])
    return *found, _difference(trained, rounded)


def compare_adapter(folder: Path, source: ExportSource) -> VerificationReport:
    """Compare an exported adapter: tensors, and logits of plain peft; an InputError if peft cannot open it."""
    opened, shape = open_unmerged(source.checkpoint, torch.float32)
    input_ids = _fixed_input(folder, shape)
    expected = layered_forward(opened, shape.layer_classes, input_ids, lambda: None).logits
    base = read_trainer_json(source.checkpoint).adapter_base
    assert base is not None  # open_unmerged has found it
    whole = load_onto_devices(open_base(shape, base, torch.float32))
    found = _logits(add_adapter(whole, folder, base.place), input_ids.to(whole.device)).cpu()
    of_tokenizer = _compare_tokenizers(folder, source)
    report = VerificationReport(
        dtype="float32",
        method="whole model",
        tensors=_compare_tensors(AdapterTensors(source.checkpoint), AdapterTensors(folder)),
        layers=[],
        logits=_difference(expected, found),
        settings=[f"{difference} of the tokenizer" for difference in of_tokenizer or ()],
        tokenizer="absent" if of_tokenizer is None else "different" if of_tokenizer else "equal",
        faults=[],
        source=source.identity(),
    )
    return replace(report, faults=find_faults(report, torch.float32))


def _compare_tensors(stored: StoredTensors, found: StoredTensors, dtype: torch.dtype | None = None) -> TensorReport:
    """Compare the tensors in an export's files with the stored ones, cast to ``dtype`` if it is given, by blocks."""
    names = set(found)
    wanted = set(stored)
    common = [name for name in stored if name in names]
    different = []
    max_difference = 0.0
    for name in track(common, "comparing tensors", console=open_console(stderr=True)):
        difference = _tensor_difference(stored, found, name, dtype or stored.dtype(name))
        if difference is not None:
            different.append(name)
            max_difference = max(max_difference, difference)
    return TensorReport(
        compared=len(common),
        parameters=sum(math.prod(found.shape(name)) for name in common),
        missing=[name for name in stored if name not in names],
        unexpected=[name for name in found if name not in wanted],
        different=different,
        max_difference=max_difference,
    )


def _tensor_difference(stored: StoredTensors, found: StoredTensors, name: str, dtype: torch.dtype) -> float | None:
    """Return the largest difference of a tensor that is not equal in every bit, infinite for another shape; or None."""
    shape = stored.shape(name)
    if found.shape(name) != shape:
        return math.inf
    is_equal = found.dtype(name) == dtype
    largest = 0.0
    for wanted, part in zip(blocks(stored, name, shape), blocks(found, name, shape), strict=True):
        cast = wanted.to(dtype)
        if not same_bits(cast, part):
            is_equal = False
            largest = max(largest, (cast.double() - part.double()).abs().max().item())
    return None if is_equal else largest


def _compare_outputs(sides: _Sides) -> _Outputs:
    if 2 * sides.shape.num_parameters * sides.dtype.itemsize <= available_memory():
        return _compare_whole(sides)
    compared = _compare_layers(sides)
    if compared is None:
        print(
            f"note: {sides.shape.config.model_type} does not fit in memory and cannot be run layer by layer, so only "
            "tensors and settings are compared, not the logits",
            file=sys.stderr,
        )
    return compared or _NOT_RUN


def _compare_whole(sides: _Sides) -> _Outputs:
    """Run the checkpoint's model, then load the export as its users do and run it."""
    weights = {name: sides.stored.read(name).to(sides.dtype) for name in sides.stored}
    expected = _logits(load_weights.build_model(sides.shape, weights, sides.dtype), sides.input_ids)
    del weights
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        sides.folder, dtype="auto", output_loading_info=True, local_files_only=True, trust_remote_code=False
    )
    model, loading = loaded
    state = model.state_dict()
    wrong = [name for name in sides.files if name in state and not same_bits(state[name], sides.files.read(name))]
    for name in set(sides.stored) - set(sides.files):  # they have other names in the files
        if not same_bits(state[name], sides.stored.read(name).to(sides.dtype)):
            wrong.append(name)
    wrong += [*map(str, loading["missing_keys"]), *map(str, loading["unexpected_keys"])]
    return _Outputs("whole model", [], _difference(expected, _logits(model, sides.input_ids)), wrong)


def _compare_layers(sides: _Sides) -> _Outputs | None:
    """Run both models layer by layer; return None if transformers does not run this family so."""
    expected = load_weights.open_tensors(sides.shape, sides.stored, sides.dtype)
    exported = load_weights.open_in_parts(sides.exported_shape, sides.dtype)
    if exported is None:
        return None
    num_layers = getattr(sides.shape.config.get_text_config(), "num_hidden_layers", None)
    with Progress(console=open_console(stderr=True)) as progress:
        task = progress.add_task("comparing layers", total=2 * num_layers if num_layers else None)

        def run(model: load_weights.MetaModel, shape: hf_model.ModelShape) -> LayeredOutput:
            return layered_forward(model, shape.layer_classes, sides.input_ids, lambda: progress.advance(task))

        try:
            outputs = run(expected, sides.shape)
        except RuntimeError:  # it computes with a weight outside of the module that has it
            return None
        found = run(exported, sides.exported_shape)
    layers = [_difference(*pair) for pair in zip(outputs.hidden_states, found.hidden_states, strict=True)]
    return _Outputs("layer by layer", layers, _difference(outputs.logits, found.logits), [])


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits; unlike ``torch.equal``, a NaN equals itself."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    # by numpy, because torch.equal compares one byte after the other
    first, second = (tensor.contiguous().reshape(-1).view(torch.uint8).numpy() for tensor in (one, other))
    return np.array_equal(first, second)


def _difference(expected: torch.Tensor, found: torch.Tensor) -> OutputReport:
    expected = expected.float()
    found = found.float()
    difference = (found - expected).abs().max().item() if found.shape == expected.shape else math.inf
    return OutputReport(found.numel(), expected.abs().max().item(), difference)


@torch.inference_mode()
def _logits(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model.eval()(input_ids=input_ids, use_cache=False).logits
    return logits.float()


def _fixed_input(folder: Path, shape: hf_model.ModelShape) -> torch.Tensor:
    """Return the ids [1, T] of the fixed text, or fixed ids without a tokenizer; as many as the model has positions."""
    if (folder / "tokenizer_config.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        ids: torch.Tensor = tokenizer(_TEXT, return_tensors="pt")["input_ids"]
    else:
        ids = (torch.arange(64) * 7919 % shape.vocab_size).unsqueeze(0)
    return ids[:, : shape.max_positions]


def _compare_configurations(sides: _Sides) -> list[str]:
    """Return the settings of config.json and generation_config.json that differ from the checkpoint's.

    An export has its own dtype and architecture, it always uses the cache, and it has names for transformers 4 too.
    """
    folder = sides.folder
    exported = sides.exported_shape.config
    stored = sides.shape.config
    expected = stored.to_dict()
    found = exported.to_dict()
    for name, value in former_names(found).items():
        if name not in expected and found.get(name) == value:
            del found[name]
    differences = [f"{name} in config.json" for name in _different(expected, found)]
    if exported.dtype != sides.dtype:
        differences.append("dtype in config.json")
    if not (folder / hf_model.GENERATION_CONFIG).is_file():
        return [*differences, hf_model.GENERATION_CONFIG]
    generation = hf_model.checkpoint_generation_config(sides.source.checkpoint, stored).to_dict()
    of_export = hf_model.read_generation_config(str(folder), exported).to_dict()
    return [*differences, *(f"{name} in {hf_model.GENERATION_CONFIG}" for name in _different(generation, of_export))]


def _compare_tokenizers(folder: Path, source: ExportSource) -> list[str] | None:
    """Return what differs between two tokenizers, as transformers reads them and in bytes; None without an original."""
    files = source.tokenizer_files()
    if not files:
        return None
    differences = _different(_traits(source.tokenizer), _traits(folder))
    for name, file in files.items():
        if name == "tokenizer_config.json":  # has names for transformers 4
            continue
        if not (folder / name).is_file() or not filecmp.cmp(file, folder / name, shallow=False):
            differences.append(file.name)
    return differences


def tokenizer_changed_by_config(tokenizer: Path, config: PretrainedConfig) -> list[str]:
    """Return what differs in a tokenizer when transformers reads it beside a model's config.json, as in an export.

    transformers chooses the class of a tokenizer by the model's type too. Without a config.json it cannot.
    """
    with TemporaryDirectory() as folder:
        beside = Path(folder)
        for file in tokenizer.iterdir():
            if file.is_file():
                shutil.copyfile(file, beside / file.name)
        config.save_pretrained(beside)
        return _different(_traits(tokenizer), _traits(beside))


def _compare_index(folder: Path, files: CheckpointTensors) -> list[str]:
    if not (folder / INDEX_NAME).is_file():
        return []
    weight_map = read_json(folder / INDEX_NAME, dict, "convert again").get("weight_map")
    if weight_map != {name: files.file_of(name).name for name in files}:
        return [f"{INDEX_NAME} does not say which file has which tensor"]
    return []


def _traits(source: Path) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    ids = tokenizer(_TEXT)["input_ids"]
    return {
        "ids": ids,
        "decoded text": tokenizer.decode(ids),
        "special tokens": tokenizer.special_tokens_map,
        "vocabulary": tokenizer.get_vocab(),
        "chat template": tokenizer.chat_template,
    }


def _different(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    return [name for name in sorted({*expected, *found} - _WRITTEN_ANEW) if expected.get(name) != found.get(name)]
