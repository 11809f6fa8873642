"""The storage of large files that clients with hf_xet upload to: a folder, which hf_xet writes as it does a server.

A shard there says which chunks are a file with which SHA-256; its format follows hf_xet's specification
(https://huggingface.co/docs/xet/en/shard).
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

_ENTRY_BYTES = 48
"""Everything in a shard is a multiple of this: its header, a file's header, its segments, hashes and footer."""
_HASH_BYTES = 32
_LAST_HASH = b"\xff" * _HASH_BYTES
"""Ends the files of a shard."""
_HAS_VERIFICATION = 1 << 31
_HAS_SHA256 = 1 << 30


@dataclass(frozen=True)
class _StoredFile:
    """A file of a shard."""

    sha256: str
    xet_hash: str
    """The hash of its chunks, by which hf_xet downloads it."""
    size: int


def address_of(folder: Path) -> str:
    """Return the storage's address, which the hub gives to clients."""
    return f"local://{folder}"


def stored_bytes(folder: Path) -> int:
    """Return the bytes of the chunks that were uploaded."""
    return sum(file.stat().st_size for file in (folder / "xet" / "xorbs" / "xorbs").iterdir())


def read_file(folder: Path, sha256: str) -> bytes | None:
    """Return the content of the file with this SHA-256, None if it was not uploaded."""
    stored_file = _find_file(folder, sha256)
    if stored_file is None:
        return None
    from hf_xet import XetFileInfo, XetSession  # type: ignore[import-untyped]  # not needed to import this module

    with TemporaryDirectory() as downloads:
        target = Path(downloads) / "file"
        with XetSession().new_file_download_group(endpoint=address_of(folder)) as group:
            group.start_download_file(XetFileInfo(stored_file.xet_hash, stored_file.size), str(target))
        return target.read_bytes()


def _find_file(folder: Path, sha256: str) -> _StoredFile | None:
    for shard in (folder / "xet" / "xorbs" / "shards").glob("*.mdb"):
        for stored_file in _files_in_shard(shard.read_bytes()):
            if stored_file.sha256 == sha256:
                return stored_file
    return None


def _files_in_shard(shard: bytes) -> Iterator[_StoredFile]:
    """Yield the files of a shard that have a SHA-256.

    A file is a header of 32 bytes of hash, uint32 flags and uint32 number of segments; then the segments, each with its
    size as uint32 at byte 36; then as many hashes of segments, and the SHA-256, if the flags say that they are there.
    """
    position = _ENTRY_BYTES  # after the header of the shard
    while True:
        file_header = shard[position : position + _ENTRY_BYTES]
        xet_hash = file_header[:_HASH_BYTES]
        if xet_hash == _LAST_HASH:
            return
        flags, num_segments = struct.unpack_from("<II", file_header, _HASH_BYTES)
        position += _ENTRY_BYTES
        size = 0
        for segment in range(num_segments):
            (segment_size,) = struct.unpack_from("<I", shard, position + segment * _ENTRY_BYTES + 36)
            size += segment_size
        position += num_segments * _ENTRY_BYTES
        if flags & _HAS_VERIFICATION:
            position += num_segments * _ENTRY_BYTES
        if flags & _HAS_SHA256:
            sha256 = shard[position : position + _HASH_BYTES]
            yield _StoredFile(_to_hex(sha256), _to_hex(xet_hash), size)
            position += _ENTRY_BYTES


def _to_hex(digest: bytes) -> str:
    """Return a hash as hf_xet writes it: four little-endian uint64."""
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", digest))
