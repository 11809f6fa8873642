"""Read the files that Weights & Biases writes offline: a ``.wandb`` file is a LevelDB log of protobuf records."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FILE_HEADER_BYTES = 7
_BLOCK_BYTES = 32 * 1024
_PIECE_HEADER_BYTES = 7
# kinds of pieces; the first and the middle pieces of a record have other kinds
_WHOLE_RECORD = 1
_END_OF_RECORD = 4


def read_history(folder: Path) -> list[dict[str, Any]]:
    """Return the logged rows of an offline-run folder in order, each with its step as ``_step``."""
    from wandb.proto import wandb_internal_pb2  # slow: all of wandb, which most test files do not need

    (file,) = folder.glob("*.wandb")
    rows = []
    for content in _records(file.read_bytes()):
        record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
        record.ParseFromString(content)
        if record.WhichOneof("record_type") != "history":
            continue
        row = {}
        for item in record.history.item:
            name = item.key or item.nested_key[0]
            row[name] = json.loads(item.value_json)
        rows.append(row)
    return rows


def _records(log: bytes) -> Iterator[bytes]:
    """Yield the records; each is one or more pieces of uint32 checksum, uint16 length, uint8 kind and content."""
    offset = _FILE_HEADER_BYTES
    record = b""
    while offset + _PIECE_HEADER_BYTES <= len(log):
        remaining_in_block = _BLOCK_BYTES - offset % _BLOCK_BYTES
        if remaining_in_block < _PIECE_HEADER_BYTES:  # too short for a piece
            offset += remaining_in_block
            continue
        _checksum, length, kind = struct.unpack_from("<IHB", log, offset)
        offset += _PIECE_HEADER_BYTES
        record += log[offset : offset + length]
        offset += length
        if kind in (_WHOLE_RECORD, _END_OF_RECORD):
            yield record
            record = b""
