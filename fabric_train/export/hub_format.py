"""Write an export in the form that other software reads: published tensor names, and settings for transformers 4.

transformers 5 has other names for some weights in memory, and joins a layer's experts in one tensor (GPT-NeoX,
Mixtral). ``save_pretrained`` writes the published form, and so does an export, a tensor at a time.
"""

import functools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from transformers import AutoConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from fabric_train.checkpoint.tensors import safetensors_header
from fabric_train.cli.output import open_console
from fabric_train.files.typed_json import read_json
from fabric_train.model.weight_files import StoredTensors, Weights

_ADVICE = "convert again"
_GPT_NEOX_NAMES = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
INDEX_NAME = "model.safetensors.index.json"
BLOCK_BYTES = 4 << 20
"""The fp32 bytes of a block that is read and written at once."""


def published(model: PreTrainedModel, tensors: StoredTensors) -> StoredTensors:
    """Return tensors by their published names instead of names in memory; as they are if one cannot be converted."""
    try:
        return PublishedTensors(model, tensors)
    except (LookupError, RuntimeError, TypeError, ValueError):
        return tensors


class PublishedTensors(StoredTensors):
    """Tensors by their published names, see :func:`published`. Each is read on request, and joined tensors in full."""

    def __init__(self, model: PreTrainedModel, tensors: StoredTensors) -> None:
        """Find the published names and shapes by converting tensors on the meta device.

        Args:
            model: The model on the meta device; its class has the published names.
            tensors: The model's tensors by their names in memory.
        """
        self._tensors = tensors
        self._memory_names: dict[str, str] = {}
        """The name in memory of each published tensor."""
        self._shapes: dict[str, torch.Size] = {}
        self._only_renamed: set[str] = set()
        """The published names of tensors whose content stays as it is in memory."""
        for memory_name in tensors:
            meta_tensor = torch.empty(tensors.shape(memory_name), device="meta")
            for published_name, published_tensor in revert_weight_conversion(model, {memory_name: meta_tensor}).items():
                self._memory_names[published_name] = memory_name
                self._shapes[published_name] = published_tensor.shape
                if published_tensor is meta_tensor:
                    self._only_renamed.add(published_name)

        # the last tensor that was converted: the blocks of its published tensors are read one after the other
        @functools.lru_cache(maxsize=1)
        def convert(memory_name: str) -> dict[str, torch.Tensor]:
            converted: dict[str, torch.Tensor] = revert_weight_conversion(
                model, {memory_name: tensors.read(memory_name)}
            )
            return converted

        self._convert = convert

    def __iter__(self) -> Iterator[str]:
        return iter(self._memory_names)

    def shape(self, name: str) -> torch.Size:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors.dtype(self._memory_names[name])

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Return the block of ``shape`` that begins at ``offsets`` of the published tensor."""
        memory_name = self._memory_names[name]
        if name in self._only_renamed:
            return self._tensors.read_block(memory_name, offsets, shape)
        published_tensor = self._convert(memory_name)[name]
        block = tuple(slice(begin, begin + size) for begin, size in zip(offsets, shape, strict=True))
        return published_tensor[block]


def add_former_names(folder: Path) -> None:
    """Add the setting names of transformers 4, which many servers and converters read, to an export's configurations.

    config.json is not changed if transformers 5 would then read one of the settings differently.
    """
    # config.json
    config_file = folder / "config.json"
    original_content = config_file.read_bytes()
    config = read_json(config_file, dict, _ADVICE)
    original_settings = AutoConfig.from_pretrained(folder, trust_remote_code=False).to_dict()
    _write_json(config_file, {**former_names(config), **config})
    settings = AutoConfig.from_pretrained(folder, trust_remote_code=False).to_dict()
    if any(settings.get(name) != value for name, value in original_settings.items()):
        config_file.write_bytes(original_content)

    # tokenizer_config.json
    tokenizer_file = folder / "tokenizer_config.json"
    if not tokenizer_file.is_file():
        return
    config = read_json(tokenizer_file, dict, _ADVICE)
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    if config.get("chat_template", "") is None:
        del config["chat_template"]  # llama.cpp's converter would take it, and not chat_template.jinja
    _write_json(tokenizer_file, config)


def raise_tokenizer_limit(folder: Path, longest_row: int, positions: int) -> None:
    """Raise the limit of an export's tokenizer to the model's positions if training rows were longer than the limit."""
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return
    config = read_json(file, dict, _ADVICE)
    limit = config.get("model_max_length")
    if isinstance(limit, int) and limit < longest_row:
        _write_json(file, config | {"model_max_length": positions})


def former_names(config: dict[str, Any]) -> dict[str, Any]:
    """Return the former names of the dtype and of rotary positions in config.json, with their values."""
    former = {"torch_dtype": config["dtype"]}
    rope_parameters = dict(config.get("rope_parameters") or {})
    if any(isinstance(value, dict) for value in rope_parameters.values()):
        return former  # parameters for each type of layer, which transformers 4 had no common form for

    # theta and the rotated part had names of their own, and the other parameters were the scaling
    is_gpt_neox = config["model_type"].startswith("gpt_neox")
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in rope_parameters:
            former_name = _GPT_NEOX_NAMES[name] if is_gpt_neox else name
            former[former_name] = rope_parameters.pop(name)
    if rope_parameters.get("rope_type", "default") != "default":
        former["rope_scaling"] = rope_parameters
    return former


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_weights(
    tensors: StoredTensors, folder: Path, dtype: torch.dtype | None, max_shard_size: str, title: str
) -> None:
    """Write ``model.safetensors``, or shards with an index. One block of rows of one tensor is in memory at a time.

    Args:
        tensors: The tensors to write.
        folder: The folder to write them to.
        dtype: The type to round them to; None keeps each tensor's type.
        max_shard_size: The largest size of a file, such as 5GB. A larger tensor gets its own file.
        title: The text of the progress bar.
    """
    # plan the files with tensors that have no memory
    dtypes = {name: dtype or tensors.dtype(name) for name in tensors}
    meta_tensors = {}
    for name in tensors:
        meta_tensors[name] = torch.empty(tensors.shape(name), dtype=dtypes[name], device="meta")
    plan = split_torch_state_dict_into_shards(meta_tensors, max_shard_size=max_shard_size)

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=open_console(stderr=True)) as progress:
        task = progress.add_task(title, total=plan.metadata["total_size"])
        for filename, names in plan.filename_to_tensors.items():
            dtypes_of_file = {name: dtypes[name] for name in names}
            _write_file(folder / filename, tensors, dtypes_of_file, partial(progress.advance, task))
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_file(
    path: Path, tensors: StoredTensors, dtypes: dict[str, torch.dtype], advance: Callable[[int], None]
) -> None:
    """Write a safetensors file with the tensors that ``dtypes`` names, rounded to these types.

    ``advance`` is called with the bytes of each block of rows, just before it is written.
    """
    # the order of the header: types with the largest elements first
    names = sorted(dtypes, key=lambda name: -dtypes[name].itemsize)
    entries = [(name, dtypes[name], tensors.shape(name)) for name in names]
    header, _ = safetensors_header(entries, {"format": "pt"})
    with path.open("wb", buffering=0) as file:
        _write_all(file, memoryview(header))
        for name in names:
            for block in blocks(tensors, name, tensors.shape(name)):
                values = block.to(dtypes[name]).contiguous().reshape(-1)
                advance(values.nbytes)
                _write_all(file, values.view(torch.uint8).numpy().data)


def blocks(weights: Weights, name: str, shape: torch.Size) -> Iterator[torch.Tensor]:
    """Yield the blocks of consecutive rows that make up a tensor, each of about ``BLOCK_BYTES``, or of one row."""
    if not shape:
        yield weights.read_block(name, (), ())
        return
    row_shape = shape[1:]
    bytes_per_row = max(1, math.prod(row_shape) * 4)  # in fp32
    rows_per_block = max(1, BLOCK_BYTES // bytes_per_row)
    for begin in range(0, shape[0], rows_per_block):
        num_rows = min(rows_per_block, shape[0] - begin)
        offsets = (begin, *(0 for _ in row_shape))
        yield weights.read_block(name, offsets, (num_rows, *row_shape))


def _write_all(file: BinaryIO, content: memoryview) -> None:
    """Write all bytes; a single call to the kernel writes 2 GiB at most."""
    while content:
        num_written = file.write(content)
        content = content[num_written:]
