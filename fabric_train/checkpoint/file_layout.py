"""Where the tensors of a checkpoint lie in its files: safetensors headers, and which bytes this rank writes where.

A full checkpoint has one file for the weights and one for the optimizer's state. As a rank's part of a tensor is
contiguous, every rank writes its parts straight into the same file. A sharded one has a file a rank, named and laid
out as torch's ``HuggingFaceStorageWriter(save_distributed=True)`` does it: the header says where in the full tensor
each block begins.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from fabric_train.checkpoint.local_tensors import Held
from fabric_train.model.weight_files import DTYPES, SHARDING_INFO

_FULL = {"model": "model.safetensors", "optimizer": "optimizer/optimizer.safetensors"}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8  # of the data's begin, as the safetensors library writes it


@dataclass(frozen=True)
class Write:
    """A flat tensor on any device, and where its bytes belong."""

    file: str
    offset: int
    data: torch.Tensor


def full_writes(part: str, tensors: list[Held], rank: int) -> list[Write]:
    """Return what this rank writes into the one file of ``part``, "model" or "optimizer"; rank 0 also its header."""
    file = _FULL[part]
    header, offsets = _header([(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors], {"format": "pt"})
    writes = [Write(file, 0, torch.frombuffer(bytearray(header), dtype=torch.uint8))] if rank == 0 else []
    for tensor in own(tensors):
        writes += _in_order(file, offsets[tensor.name] + tensor.begin * tensor.dtype.itemsize, tensor.parts)
    return writes


def sharded_writes(part: str, tensors: list[Held], rank: int) -> list[Write]:
    """Return what this rank writes into its own file of ``part``; ``tensors`` are cut into whole rows."""
    blocks = {tensor.name: tensor for tensor in own(tensors)}
    if not blocks:
        return []
    file = f"{part}/shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
    begins = {name: {"saved_offsets": _block(tensor)[0]} for name, tensor in blocks.items()}
    entries = [(name, tensor.dtype, _block(tensor)[1]) for name, tensor in blocks.items()]
    header, offsets = _header(entries, {SHARDING_INFO: json.dumps(begins), "DCP_VERSION": "1.0", "format": "pt"})
    writes = [Write(file, 0, torch.frombuffer(bytearray(header), dtype=torch.uint8))]
    for name, tensor in blocks.items():
        writes += _in_order(file, offsets[name], tensor.parts)
    return writes


def own(tensors: Iterable[Held]) -> list[Held]:
    """Return those that this rank writes: of parts that several ranks hold, each is written by one of them, so that
    all have about the same number of bytes to write.
    """
    written: dict[int, list[int]] = {}  # bytes given to each copy, by the number of copies
    mine = []
    for tensor in tensors:
        loads = written.setdefault(tensor.num_copies, [0] * tensor.num_copies)
        chosen = loads.index(min(loads))
        loads[chosen] += tensor.numel * tensor.dtype.itemsize
        if tensor.parts and chosen == tensor.copy:
            mine.append(tensor)
    return mine


def _in_order(file: str, offset: int, parts: Iterable[torch.Tensor]) -> list[Write]:
    writes = []
    for part in parts:
        writes.append(Write(file, offset, part))
        offset += part.nbytes
    return writes


def _block(tensor: Held) -> tuple[list[int], list[int]]:
    """Where in the full tensor the rows of this rank begin, and their shape."""
    if not tensor.shape:
        return [], []
    row = tensor.shape[1:].numel()
    return [tensor.begin // row, *[0] * (len(tensor.shape) - 1)], [tensor.numel // row, *tensor.shape[1:]]


def _header(
    entries: Iterable[tuple[str, torch.dtype, Iterable[int]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """Return the head of a safetensors file, and where in the file each tensor begins.

    Tensors keep their order, so that what FSDP1 holds in one piece is one piece of the file; but those of larger types
    come first, so that all are aligned.
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
