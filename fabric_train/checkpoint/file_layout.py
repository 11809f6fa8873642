"""Lay out the tensors of a checkpoint in safetensors files: the headers, and which bytes each rank writes.

A full checkpoint has one file for the weights and one for the optimizer state. A rank's part of a tensor is contiguous,
so every rank writes its parts directly into these files. A sharded checkpoint has one file per rank, named and laid out
as torch's ``HuggingFaceStorageWriter(save_distributed=True)`` does: the header has the offsets of each block in the
full tensor.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from fabric_train.checkpoint.local_tensors import LocalTensor
from fabric_train.model.weight_files import DTYPES, SHARDING_INFO

_FULL = {"model": "model.safetensors", "optimizer": "optimizer/optimizer.safetensors"}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8  # of the start of the data, as in the safetensors library


@dataclass(frozen=True)
class Write:
    """A flat tensor on any device, and the file and byte offset to write it to."""

    file: str
    offset: int
    data: torch.Tensor


def full_writes(part: str, tensors: list[LocalTensor], rank: int) -> list[Write]:
    """Return this rank's writes into the file of ``part``, "model" or "optimizer". Rank 0 also writes the header."""
    file = _FULL[part]
    header, offsets = safetensors_header(
        [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors], {"format": "pt"}
    )
    writes = [Write(file, 0, torch.frombuffer(bytearray(header), dtype=torch.uint8))] if rank == 0 else []
    for tensor in select_owned(tensors):
        writes += _consecutive(file, offsets[tensor.name] + tensor.begin * tensor.dtype.itemsize, tensor.parts)
    return writes


def sharded_writes(part: str, tensors: list[LocalTensor], rank: int) -> list[Write]:
    """Return this rank's writes into its own file of ``part``; its parts of ``tensors`` are whole rows."""
    blocks = {tensor.name: tensor for tensor in select_owned(tensors)}
    if not blocks:
        return []
    file = f"{part}/shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
    begins = {name: {"saved_offsets": _block(tensor)[0]} for name, tensor in blocks.items()}
    entries = [(name, tensor.dtype, _block(tensor)[1]) for name, tensor in blocks.items()]
    header, offsets = safetensors_header(
        entries, {SHARDING_INFO: json.dumps(begins), "DCP_VERSION": "1.0", "format": "pt"}
    )
    writes = [Write(file, 0, torch.frombuffer(bytearray(header), dtype=torch.uint8))]
    for name, tensor in blocks.items():
        writes += _consecutive(file, offsets[name], tensor.parts)
    return writes


def select_owned(tensors: Iterable[LocalTensor]) -> list[LocalTensor]:
    """Return the tensors whose parts this rank writes.

    If several ranks have the same part, one of them writes it. The bytes are spread evenly over these ranks.
    """
    written: dict[int, list[int]] = {}  # number of copies → bytes assigned to each copy
    owned = []
    for tensor in tensors:
        loads = written.setdefault(tensor.num_copies, [0] * tensor.num_copies)
        chosen = loads.index(min(loads))
        loads[chosen] += tensor.numel * tensor.dtype.itemsize
        if tensor.parts and chosen == tensor.copy:
            owned.append(tensor)
    return owned


def _consecutive(file: str, offset: int, parts: Iterable[torch.Tensor]) -> list[Write]:
    writes = []
    for part in parts:
        writes.append(Write(file, offset, part))
        offset += part.nbytes
    return writes


def _block(tensor: LocalTensor) -> tuple[list[int], list[int]]:
    """Return the offsets in the full tensor of this rank's rows, and their shape."""
    if not tensor.shape:
        return [], []
    row = tensor.shape[1:].numel()
    return [tensor.begin // row, *[0] * (len(tensor.shape) - 1)], [tensor.numel // row, *tensor.shape[1:]]


def safetensors_header(
    entries: Iterable[tuple[str, torch.dtype, Iterable[int]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """Return the header of a safetensors file and the offset of each tensor in the file.

    Tensors keep their order, so that each flat vector of FSDP1 is contiguous in the file. But larger dtypes come first,
    so that all tensors are aligned.
    """
    content: dict[str, object] = {"__metadata__": dict(metadata)}
    begins, begin = {}, 0
    for name, dtype, shape in sorted(entries, key=lambda entry: -entry[1].itemsize):
        shape = list(shape)
        end = begin + math.prod(shape) * dtype.itemsize
        content[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": shape, "data_offsets": [begin, end]}
        begins[name], begin = begin, end
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: start + begin for name, begin in begins.items()}
