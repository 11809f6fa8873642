"""The storage of large files that clients with hf_xet upload to: a folder, which hf_xet writes as it does a server.

A shard there says which chunks are a file with which SHA-256; its format follows hf_xet's specification
(https://huggingface.co/docs/xet/en/shard).
"""

import struct
from pathlib import Path
from tempfile import TemporaryDirectory

_BLOCK = 48  # bytes of each part of a shard
_HAS_VERIFICATION = 1 << 31
_HAS_SHA256 = 1 << 30


def address_of(folder: Path) -> str:
    """Return the storage's address, which the hub gives to clients."""
    return f"local://{folder}"


def stored_bytes(folder: Path) -> int:
    """Return the bytes of the chunks that were uploaded."""
    return sum(file.stat().st_size for file in (folder / "xet" / "xorbs" / "xorbs").iterdir())


def read_file(folder: Path, sha256: str) -> bytes | None:
    """Return the content of the file with this SHA-256, None if it was not uploaded."""
    shards = (folder / "xet" / "xorbs" / "shards").glob("*.mdb")
    found = [one for shard in shards for one in _files(shard.read_bytes()) if one[0] == sha256]
    if not found:
        return None
    _, xet_hash, size = found[0]
    from hf_xet import XetFileInfo, XetSession  # type: ignore[import-untyped]  # not needed to import this module

    with TemporaryDirectory() as downloads:
        target = Path(downloads) / "file"
        with XetSession().new_file_download_group(endpoint=address_of(folder)) as group:
            group.start_download_file(XetFileInfo(xet_hash, size), str(target))
        return target.read_bytes()


def _files(shard: bytes) -> list[tuple[str, str, int]]:
    """Return SHA-256, hash of the chunks and size of each file in a shard."""
    # after the header
    files = []
    position = _BLOCK
    while (head := shard[position : position + _BLOCK])[:32] != b"\xff" * 32:
        flags, count = struct.unpack("<II", head[32:40])
        position += _BLOCK
        sizes = [
            struct.unpack("<I", shard[start + 36 : start + 40])[0]
            for start in range(position, position + count * _BLOCK, _BLOCK)
        ]
        position += count * _BLOCK * (2 if flags & _HAS_VERIFICATION else 1)
        if flags & _HAS_SHA256:
            files.append((_hex(shard[position : position + 32]), _hex(head[:32]), sum(sizes)))
            position += _BLOCK
    return files


def _hex(digest: bytes) -> str:
    """Return a hash as hf_xet writes it: four little-endian numbers."""
    return "".join(f"{number:016x}" for number in struct.unpack("<4Q", digest))
