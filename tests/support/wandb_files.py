"""Read what Weights & Biases has written offline: a ``.wandb`` file is a LevelDB log of protobuf records."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

_FILE_HEADER, _BLOCK, _HEADER = 7, 32 * 1024, 7
_FULL, _LAST = 1, 4


def read_history(folder: Path) -> list[dict[str, Any]]:
    """Return what an offline-run folder logged at each step, in its order, the step as ``_step``."""
    (file,) = folder.glob("*.wandb")
    rows = []
    for content in _records(file.read_bytes()):
        record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
        record.ParseFromString(content)
        if record.WhichOneof("record_type") == "history":
            rows.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item})
    return rows


def _records(log: bytes) -> Iterator[bytes]:
    """Yield the records, each of one or more pieces: uint32 checksum, uint16 length, uint8 kind, content."""
    at, pieces = _FILE_HEADER, b""
    while at + _HEADER <= len(log):
        if _BLOCK - at % _BLOCK < _HEADER:  # the end of a block that is too short for a piece
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", log, at)
        pieces += log[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        if kind in (_FULL, _LAST):
            yield pieces
            pieces = b""
