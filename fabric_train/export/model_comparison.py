"""Compare an export with its checkpoint: names and bits of all tensors, settings, tokenizer, logits on a fixed text.

One of the two models is in memory at a time, loaded as a user of transformers would. If a model would take more than
half of the available memory, tensors are compared in blocks from the files, and models are run layer by layer.
"""

import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import Progress, track
from transformers import AutoModelForCausalLM, AutoTokenizer

from fabric_train.checkpoint.adapter_base import open_base
from fabric_train.checkpoint.adapter_folder import AdapterTensors
from fabric_train.cli.errors import InputError
from fabric_train.cli.output import open_console
from fabric_train.distributed.memory import available_memory
from fabric_train.export.hub_format import INDEX_NAME, blocks, former_names, published
from fabric_train.export.merged_adapter import MergeInto, is_in_4_bits, open_unmerged
from fabric_train.export.source import ExportSource
from fabric_train.export.tokenizer_comparison import FIXED_TEXT, compare_tokenizers
from fabric_train.export.verification_report import (
    Method,
    OutputReport,
    TensorReport,
    VerificationReport,
    find_faults,
)
from fabric_train.files.typed_json import read_json
from fabric_train.inference.devices import load_onto_devices
from fabric_train.inference.peft_adapter import add_adapter
from fabric_train.model import hf_model, load_weights
from fabric_train.model.generation_settings import (
    GENERATION_CONFIG,
    checkpoint_generation_config,
    read_generation_config,
)
from fabric_train.model.layered_forward import LayeredOutput, layered_forward
from fabric_train.model.weight_files import CheckpointTensors, StoredTensors, open_weights

_REWRITTEN_SETTINGS = {
    "transformers_version",
    "_name_or_path",
    "_from_model_config",
    "architectures",
    "dtype",
    "use_cache",
}
"""Settings that an export writes, so that they may differ from the checkpoint's."""


@dataclass(frozen=True)
class _ModelPair:
    """An export and its checkpoint, both opened."""

    export_dir: Path
    source: ExportSource
    dtype: torch.dtype
    exported_tensors: CheckpointTensors
    stored_tensors: StoredTensors
    """The source's tensors by the names of weights in memory."""
    published_tensors: StoredTensors
    """The same tensors by their names in the export."""
    exported_shape: hf_model.ModelShape
    stored_shape: hf_model.ModelShape
    input_ids: torch.Tensor
    """int64 [1, T], for both models."""


@dataclass(frozen=True)
class _OutputComparison:
    """The comparison of the outputs of two models."""

    method: Method
    layers: list[OutputReport]
    logits: OutputReport | None
    wrongly_loaded: list[str]
    """Weights that transformers misses, does not use, or loads with other values."""


_NOT_RUN = _OutputComparison("tensors only", layers=[], logits=None, wrongly_loaded=[])


def compare(folder: Path, source: ExportSource, dtype: torch.dtype) -> VerificationReport:
    """Compare an export with its source; a damaged file of the export is a fault in the report, not an error.

    Raises:
        InputError: something else that the comparison needs, apart from the export, is missing.
    """
    hf_model.quiet_transformers()
    source.check_needs()
    try:
        if source.is_adapter:
            return compare_adapter(folder, source)
        hf_model.check_readable(str(folder))
        return _compare_models(_open(folder, source, dtype))
    except InputError as error:  # a file is missing or damaged
        return VerificationReport(
            dtype=str(dtype).removeprefix("torch."),
            method="tensors only",
            tensors=TensorReport(compared=0, parameters=0, missing=[], unexpected=[], different=[], max_difference=0.0),
            layers=[],
            logits=None,
            settings=[],
            tokenizer="absent",
            faults=list(error.faults),
        )


def _open(folder: Path, source: ExportSource, dtype: torch.dtype) -> _ModelPair:
    """Open an export and its checkpoint; no weight is read yet."""
    shape = source.read_shape()
    stored_tensors = source.open_reference()
    return _ModelPair(
        export_dir=folder,
        source=source,
        dtype=dtype,
        exported_tensors=open_weights(folder),
        stored_tensors=stored_tensors,
        published_tensors=published(load_weights.build_on_meta(shape, dtype), stored_tensors),
        exported_shape=hf_model.read_shape(str(folder)),
        stored_shape=shape,
        input_ids=_fixed_input(folder, shape),
    )


def _compare_models(pair: _ModelPair) -> VerificationReport:
    """Compare a full model: settings, tokenizer, tensors, and the outputs if all else fits together."""
    settings = [*_compare_configurations(pair), *_compare_index(pair.export_dir, pair.exported_tensors)]
    tokenizer_differences = compare_tokenizers(pair.export_dir, pair.source)
    tensors = _compare_tensors(pair.published_tensors, pair.exported_tensors, pair.dtype)

    # a model with other settings, tensors or shapes may not even load
    has_other_shapes = tensors.max_difference == math.inf
    can_run = not (settings or tensors.missing or tensors.unexpected or has_other_shapes)
    outputs = _compare_outputs(pair) if can_run else _NOT_RUN

    report = VerificationReport(
        dtype=str(pair.dtype).removeprefix("torch."),
        method=outputs.method,
        tensors=replace(tensors, different=sorted({*tensors.different, *outputs.wrongly_loaded})),
        layers=outputs.layers,
        logits=outputs.logits,
        settings=[*settings, *_as_settings(tokenizer_differences)],
        tokenizer=_tokenizer_verdict(tokenizer_differences),
        faults=[],
        source=pair.source.identity(),
    )
    if can_run and pair.source.merges and not pair.source.averaged:
        report = _compare_merged(pair, pair.source.merges, report)
    return replace(report, faults=find_faults(report, pair.dtype))


def _as_settings(tokenizer_differences: list[str] | None) -> list[str]:
    return [f"{difference} of the tokenizer" for difference in tokenizer_differences or ()]


def _tokenizer_verdict(differences: list[str] | None) -> str:
    if differences is None:
        return "absent"
    return "different" if differences else "equal"


def _compare_merged(pair: _ModelPair, into: MergeInto, report: VerificationReport) -> VerificationReport:
    """Add to the report the comparison of the logits of base and adapter with those of the merged weights.

    All logits are computed in fp32, before and after the merged weights are rounded to the export's type. If the base
    was in 4 bits during training, the trained model's logits are also compared with the rounded ones.
    """
    checkpoint = pair.source.checkpoint
    dtype = torch.float32

    def logits(model: load_weights.MetaModel) -> torch.Tensor:
        return layered_forward(model, pair.stored_shape.layer_classes, pair.input_ids, lambda: None).logits

    exported = load_weights.open_in_parts(pair.exported_shape, dtype)
    assert exported is not None  # written a moment ago, in safetensors
    merged_logits = logits(load_weights.open_tensors(pair.stored_shape, pair.stored_tensors, dtype))
    rounded_logits = logits(exported)
    adapted_model, _ = open_unmerged(checkpoint, dtype, into)
    adapted_logits = logits(adapted_model)
    report = replace(
        report,
        adapted=_compare_values(adapted_logits, merged_logits),
        rounded=_compare_values(adapted_logits, rounded_logits),
    )
    if not is_in_4_bits(checkpoint):
        return report

    if into == "dequantized":
        trained_logits = adapted_logits
    else:
        trained_model, _ = open_unmerged(checkpoint, dtype, "dequantized")
        trained_logits = logits(trained_model)
    return replace(report, trained=_compare_values(trained_logits, rounded_logits))


def compare_adapter(folder: Path, source: ExportSource) -> VerificationReport:
    """Compare an exported adapter: tensors, and logits of plain peft; an InputError if peft cannot open it."""
    # what this program computes with base and adapter
    opened, shape = open_unmerged(source.checkpoint, torch.float32)
    input_ids = _fixed_input(folder, shape)
    expected_logits = layered_forward(opened, shape.layer_classes, input_ids, lambda: None).logits

    # what peft computes
    base = source.saved.adapter_base
    assert base is not None  # open_unmerged has found it
    base_model = load_onto_devices(open_base(shape, base, torch.float32))
    peft_model = add_adapter(base_model, folder, base.location)
    peft_logits = _logits(peft_model, input_ids.to(base_model.device)).cpu()

    tokenizer_differences = compare_tokenizers(folder, source)
    report = VerificationReport(
        dtype="float32",
        method="whole model",
        tensors=_compare_tensors(AdapterTensors(source.checkpoint), AdapterTensors(folder)),
        layers=[],
        logits=_compare_values(expected_logits, peft_logits),
        settings=_as_settings(tokenizer_differences),
        tokenizer=_tokenizer_verdict(tokenizer_differences),
        faults=[],
        source=source.identity(),
    )
    return replace(report, faults=find_faults(report, torch.float32))


def _compare_tensors(stored: StoredTensors, exported: StoredTensors, dtype: torch.dtype | None = None) -> TensorReport:
    """Compare the tensors in an export's files with the stored ones, cast to ``dtype`` if it is given, by blocks."""
    stored_names = set(stored)
    exported_names = set(exported)
    common_names = [name for name in stored if name in exported_names]
    different = []
    max_difference = 0.0
    for name in track(common_names, "comparing tensors", console=open_console(stderr=True)):
        difference = _tensor_difference(stored, exported, name, dtype or stored.dtype(name))
        if difference is not None:
            different.append(name)
            max_difference = max(max_difference, difference)
    return TensorReport(
        compared=len(common_names),
        parameters=sum(math.prod(exported.shape(name)) for name in common_names),
        missing=[name for name in stored if name not in exported_names],
        unexpected=[name for name in exported if name not in stored_names],
        different=different,
        max_difference=max_difference,
    )


def _tensor_difference(stored: StoredTensors, exported: StoredTensors, name: str, dtype: torch.dtype) -> float | None:
    """Return the largest absolute difference of a tensor; None if every bit is equal.

    It is infinite if the shapes differ, and 0 if only bits differ, such as in another dtype or the sign of a zero.
    """
    shape = stored.shape(name)
    if exported.shape(name) != shape:
        return math.inf
    is_equal = exported.dtype(name) == dtype
    max_difference = 0.0
    for stored_block, exported_block in zip(blocks(stored, name, shape), blocks(exported, name, shape), strict=True):
        expected_block = stored_block.to(dtype)
        if not same_bits(expected_block, exported_block):
            is_equal = False
            difference = (expected_block.double() - exported_block.double()).abs().max().item()
            max_difference = max(max_difference, difference)
    return None if is_equal else max_difference


def _compare_outputs(pair: _ModelPair) -> _OutputComparison:
    """Run both models: as a whole if they fit in memory, or else layer by layer."""
    # at most half of the memory for the weights: activations and the process itself take memory too
    if 2 * pair.stored_shape.num_parameters * pair.dtype.itemsize <= available_memory():
        return _compare_whole(pair)
    outputs = _compare_layers(pair)
    if outputs is None:
        print(
            f"note: {pair.stored_shape.config.model_type} does not fit in memory and cannot run layer by layer, so "
            "only tensors and settings are compared, not logits",
            file=sys.stderr,
        )
        return _NOT_RUN
    return outputs


def _compare_whole(pair: _ModelPair) -> _OutputComparison:
    """Compare the logits of both models, and check that transformers loads the export's weights bit for bit."""
    # run the checkpoint's model
    stored_weights = {name: pair.stored_tensors.read(name).to(pair.dtype) for name in pair.stored_tensors}
    stored_model = load_weights.build_model(pair.stored_shape, stored_weights, pair.dtype)
    expected_logits = _logits(stored_model, pair.input_ids)
    del stored_weights, stored_model  # one model is in memory at a time

    # load the export as its users do
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        pair.export_dir, dtype="auto", output_loading_info=True, local_files_only=True, trust_remote_code=False
    )
    exported_model, loading_info = loaded
    loaded_weights = exported_model.state_dict()

    # Most weights have the same name in the export's files and in memory. For the others (such as experts, which are
    # joined in memory), the checkpoint is compared, whose tensors have the names in memory.
    wrongly_loaded = []
    for name in pair.exported_tensors:
        if name in loaded_weights and not same_bits(loaded_weights[name], pair.exported_tensors.read(name)):
            wrongly_loaded.append(name)
    for name in set(pair.stored_tensors) - set(pair.exported_tensors):
        if not same_bits(loaded_weights[name], pair.stored_tensors.read(name).to(pair.dtype)):
            wrongly_loaded.append(name)
    wrongly_loaded += map(str, loading_info["missing_keys"])
    wrongly_loaded += map(str, loading_info["unexpected_keys"])

    # run the export
    logits = _compare_values(expected_logits, _logits(exported_model, pair.input_ids))
    return _OutputComparison("whole model", layers=[], logits=logits, wrongly_loaded=wrongly_loaded)


def _compare_layers(pair: _ModelPair) -> _OutputComparison | None:
    """Run both models layer by layer; return None if transformers cannot run this family layer by layer."""
    stored_model = load_weights.open_tensors(pair.stored_shape, pair.stored_tensors, pair.dtype)
    exported_model = load_weights.open_in_parts(pair.exported_shape, pair.dtype)
    if exported_model is None:
        return None
    num_layers = getattr(pair.stored_shape.config.get_text_config(), "num_hidden_layers", None)
    num_forwards = 2 * num_layers if num_layers else None  # of a layer, in both models
    with Progress(console=open_console(stderr=True)) as progress:
        task = progress.add_task("comparing layers", total=num_forwards)

        def run(model: load_weights.MetaModel, shape: hf_model.ModelShape) -> LayeredOutput:
            return layered_forward(model, shape.layer_classes, pair.input_ids, lambda: progress.advance(task))

        try:
            expected = run(stored_model, pair.stored_shape)
        except RuntimeError:  # the family computes with a weight outside of the module that has it
            return None
        exported = run(exported_model, pair.exported_shape)
    layers = []
    for expected_states, exported_states in zip(expected.hidden_states, exported.hidden_states, strict=True):
        layers.append(_compare_values(expected_states, exported_states))
    logits = _compare_values(expected.logits, exported.logits)
    return _OutputComparison("layer by layer", layers, logits, wrongly_loaded=[])


def same_bits(tensor: torch.Tensor, other_tensor: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and bits; unlike in ``torch.equal``, a NaN is itself."""
    if tensor.shape != other_tensor.shape or tensor.dtype != other_tensor.dtype:
        return False
    # by numpy, because torch.equal compares one byte after the other
    tensor_bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    other_bytes = other_tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return np.array_equal(tensor_bytes, other_bytes)


def _compare_values(expected: torch.Tensor, actual: torch.Tensor) -> OutputReport:
    """Return the largest difference between two outputs; infinite if their shapes differ."""
    expected = expected.float()
    actual = actual.float()
    max_difference = math.inf
    if actual.shape == expected.shape:
        max_difference = (actual - expected).abs().max().item()
    return OutputReport(actual.numel(), expected.abs().max().item(), max_difference)


@torch.inference_mode()
def _logits(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """Return the logits [1, T, V] in fp32."""
    logits: torch.Tensor = model.eval()(input_ids=input_ids, use_cache=False).logits
    return logits.float()


def _fixed_input(folder: Path, shape: hf_model.ModelShape) -> torch.Tensor:
    """Return the ids [1, T] of the fixed text, or without a tokenizer fixed ids, at most as many as the positions."""
    if (folder / "tokenizer_config.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        ids: torch.Tensor = tokenizer(FIXED_TEXT, return_tensors="pt")["input_ids"]
    else:
        # 64 ids over the whole vocabulary: 7919 is a prime
        ids = (torch.arange(64) * 7919 % shape.vocab_size).unsqueeze(0)
    return ids[:, : shape.max_positions]


def _compare_configurations(pair: _ModelPair) -> list[str]:
    """Return the settings of config.json and generation_config.json that differ from the checkpoint's.

    An export has its own dtype and architecture, always uses the cache, and also has the names of transformers 4.
    """
    export_dir = pair.export_dir
    exported_config = pair.exported_shape.config
    stored_config = pair.stored_shape.config

    # config.json, without the names that were added for transformers 4
    stored_settings = stored_config.to_dict()
    exported_settings = exported_config.to_dict()
    for name, value in former_names(exported_settings).items():
        if name not in stored_settings and exported_settings.get(name) == value:
            del exported_settings[name]
    differences = [f"{name} in config.json" for name in _different_settings(stored_settings, exported_settings)]
    if exported_config.dtype != pair.dtype:
        differences.append("dtype in config.json")

    # generation_config.json
    if not (export_dir / GENERATION_CONFIG).is_file():
        return [*differences, GENERATION_CONFIG]
    stored_generation = checkpoint_generation_config(pair.source.checkpoint, stored_config)
    exported_generation = read_generation_config(str(export_dir), exported_config)
    for name in _different_settings(stored_generation.to_dict(), exported_generation.to_dict()):
        differences.append(f"{name} in {GENERATION_CONFIG}")
    return differences


def _different_settings(expected: dict[str, Any], actual: dict[str, Any]) -> list[str]:
    """Return the names of the settings that differ, apart from those that an export writes itself."""
    kept_settings = _without_rewritten(expected)
    exported_settings = _without_rewritten(actual)
    names = sorted({*kept_settings, *exported_settings})
    return [name for name in names if kept_settings.get(name) != exported_settings.get(name)]


def _without_rewritten(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings without those that an export writes itself, also in ``text_config`` and its like."""
    kept_settings: dict[str, Any] = {}
    for name, value in settings.items():
        if name in _REWRITTEN_SETTINGS:
            continue
        kept_settings[name] = _without_rewritten(value) if isinstance(value, dict) else value
    return kept_settings


def _compare_index(folder: Path, tensors: CheckpointTensors) -> list[str]:
    """Return a fault if the index of the weight files names another file for a tensor."""
    if not (folder / INDEX_NAME).is_file():
        return []
    weight_map = read_json(folder / INDEX_NAME, dict, "convert again").get("weight_map")
    if weight_map != {name: tensors.file_of(name).name for name in tensors}:
        return [f"{INDEX_NAME} does not say which file has which tensor"]
    return []
