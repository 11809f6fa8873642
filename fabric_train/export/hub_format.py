"""Write an export in the form that other software reads: published names of tensors, and settings for transformers 4.

transformers 5 has other names for some weights in memory, and joins the experts of a layer to one tensor (GPT-NeoX,
Mixtral). ``save_pretrained`` writes the published form, and so does an export, a tensor at a time.
"""

import functools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from transformers import AutoConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from fabric_train.checkpoint.tensors import safetensors_header
from fabric_train.cli.output import open_console
from fabric_train.files.regular_file import read_json
from fabric_train.model.weight_files import StoredTensors, Weights

_ADVICE = "convert again"
_GPT_NEOX = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
INDEX_NAME = "model.safetensors.index.json"
BLOCK_BYTES = 4 << 20


def published(model: PreTrainedModel, tensors: StoredTensors) -> StoredTensors:
    """Return tensors, by names in memory, by their published names; as they are if one cannot be converted alone."""
    try:
        return PublishedTensors(model, tensors)
    except (LookupError, RuntimeError, TypeError, ValueError):
        return tensors


class PublishedTensors(StoredTensors):
    """Tensors by their published names, see :func:`published`; each is read on request, and joined ones whole."""

    def __init__(self, model: PreTrainedModel, tensors: StoredTensors) -> None:
        self._tensors = tensors
        self._in_memory: dict[str, str] = {}
        self._shapes: dict[str, torch.Size] = {}
        self._renamed: set[str] = set()
        for name in tensors:
            outline = torch.empty(tensors.shape(name), device="meta")
            for published, part in revert_weight_conversion(model, {name: outline}).items():
                self._in_memory[published] = name
                self._shapes[published] = part.shape
                if part is outline:
                    self._renamed.add(published)
        self._convert = functools.lru_cache(maxsize=1)(
            lambda name: revert_weight_conversion(model, {name: tensors.read(name)})
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._in_memory)

    def shape(self, name: str) -> torch.Size:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors.dtype(self._in_memory[name])

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Return the block of ``shape`` that begins at ``offsets`` of the published tensor."""
        if name in self._renamed:
            return self._tensors.read_block(self._in_memory[name], offsets, shape)
        block = tuple(slice(begin, begin + size) for begin, size in zip(offsets, shape, strict=True))
        converted: dict[str, torch.Tensor] = self._convert(self._in_memory[name])
        return converted[name][block]


def add_former_names(folder: Path) -> None:
    """Add the names of transformers 4, which many a server and converter reads, to the configurations of an export.

    config.json stays as it is if transformers 5 would then read one of the settings differently.
    """
    file = folder / "config.json"
    written = file.read_bytes()
    config = read_json(file, dict, _ADVICE)
    settings = AutoConfig.from_pretrained(folder, trust_remote_code=False).to_dict()
    _write_json(file, {**former_names(config), **config})
    found = AutoConfig.from_pretrained(folder, trust_remote_code=False).to_dict()
    if any(found.get(name) != value for name, value in settings.items()):
        file.write_bytes(written)
    file = folder / "tokenizer_config.json"
    if file.is_file():
        config = read_json(file, dict, _ADVICE)
        if config.get("tokenizer_class") == "TokenizersBackend":
            config["tokenizer_class"] = "PreTrainedTokenizerFast"
        if isinstance(config.get("extra_special_tokens"), list):
            config["additional_special_tokens"] = config.pop("extra_special_tokens")
        if config.get("chat_template", "") is None:
            del config["chat_template"]  # llama.cpp's converter would take it, and not chat_template.jinja
        _write_json(file, config)


def raise_tokenizer_limit(folder: Path, longest_row: int, positions: int) -> None:
    """Let an export's tokenizer take as many tokens as the model, if it was trained on longer rows than that takes."""
    file = folder / "tokenizer_config.json"
    config = read_json(file, dict, _ADVICE) if file.is_file() else {}
    if isinstance(limit := config.get("model_max_length"), int) and limit < longest_row:
        _write_json(file, config | {"model_max_length": positions})


def former_names(config: dict[str, Any]) -> dict[str, Any]:
    """Return the former names of the dtype and of rotary positions in config.json, with their values."""
    former = {"torch_dtype": config["dtype"]}
    rope = dict(config.get("rope_parameters") or {})
    if any(isinstance(value, dict) for value in rope.values()):
        return former  # one set for each type of layer, for which there was no common form
    renamed = _GPT_NEOX if config["model_type"].startswith("gpt_neox") else {}
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in rope:
            former[renamed.get(name, name)] = rope.pop(name)
    if rope.get("rope_type", "default") != "default":
        former["rope_scaling"] = rope
    return former


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_weights(
    tensors: StoredTensors, folder: Path, dtype: torch.dtype | None, max_shard_size: str, title: str
) -> None:
    """Write ``model.safetensors``, or shards with an index. One block of rows of one tensor is in memory at a time.

    Without a ``dtype``, each tensor keeps its own. A tensor that is larger than ``max_shard_size``, such as 5GB, gets a
    file of its own.
    """
    dtypes = {name: dtype or tensors.dtype(name) for name in tensors}
    outline = {name: torch.empty(tensors.shape(name), dtype=dtypes[name], device="meta") for name in tensors}
    plan = split_torch_state_dict_into_shards(outline, max_shard_size=max_shard_size)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=open_console(stderr=True)) as progress:
        task = progress.add_task(title, total=plan.metadata["total_size"])
        for filename, names in plan.filename_to_tensors.items():
            names = sorted(names, key=lambda name: -dtypes[name].itemsize)  # the header's order
            header, _ = safetensors_header(
                [(name, dtypes[name], tensors.shape(name)) for name in names], {"format": "pt"}
            )
            with (folder / filename).open("wb", buffering=0) as file:
                _write(file, memoryview(header))
                for name in names:
                    for block in blocks(tensors, name, tensors.shape(name)):
                        values = block.to(dtypes[name]).contiguous().reshape(-1)
                        progress.advance(task, values.nbytes)
                        _write(file, values.view(torch.uint8).numpy().data)
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def blocks(weights: Weights, name: str, shape: torch.Size) -> Iterator[torch.Tensor]:
    """Yield the blocks of consecutive rows that make up a tensor, each of about ``BLOCK_BYTES``, or of one row."""
    if not shape:
        yield weights.read_block(name, (), ())
        return
    rest = shape[1:]
    num_rows = max(1, BLOCK_BYTES // max(1, math.prod(rest) * 4))  # in fp32
    for begin in range(0, shape[0], num_rows):
        rows = min(num_rows, shape[0] - begin)
        yield weights.read_block(name, (begin, *(0 for _ in rest)), (rows, *rest))


def _write(file: BinaryIO, content: memoryview) -> None:
    """Write all bytes; one call to the kernel writes 2 GiB at most."""
    while content:
        content = content[file.write(content) :]
