"""Read the files that Weights & Biases writes offline: a ``.wandb`` file is a LevelDB log of protobuf records."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FILE_HEADER = 7
_BLOCK = 32 * 1024
_HEADER = 7
_FULL = 1
_LAST = 4


def read_history(folder: Path) -> list[dict[str, Any]]:
    """Return the logged rows of an offline-run folder in order, each with its step as ``_step``."""
    from wandb.proto import wandb_internal_pb2  # slow: all of wandb, which most test files do not need

    (file,) = folder.glob("*.wandb")
    rows = []
    for content in _records(file.read_bytes()):
        record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
        record.ParseFromString(content)
        if record.WhichOneof("record_type") == "history":
            rows.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item})
    return rows


def _records(log: bytes) -> Iterator[bytes]:
    """Yield the records; each is one or more pieces of uint32 checksum, uint16 length, uint8 kind and content."""
    offset = _FILE_HEADER
    pieces = b""
    while offset + _HEADER <= len(log):
        if _BLOCK - offset % _BLOCK < _HEADER:  # the rest of the block is too short for a piece
            offset += _BLOCK - offset % _BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", log, offset)
        pieces += log[offset + _HEADER : offset + _HEADER + length]
        offset += _HEADER + length
        if kind in (_FULL, _LAST):
            yield pieces
            pieces = b""
