"""Identify the weights of an adapter's base, of which a checkpoint has no copy: by a hash of all of their bytes.

The hash is of the tensors by their names, so it does not depend on the number of files, nor on their format. XXH3 takes
a fraction of the time in which a disk reads the bytes. A new run hashes its base in the background, while the model is
read and the first steps are taken: the first checkpoint needs the result.

To hash a base again for each checkpoint that names it would take seconds a time. So a checkpoint also has the sizes and
times of the files that were hashed: as long as the system says that nothing has changed them, their bytes are the same.
"""

import os
import re
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
import xxhash

from fabric_train.cli.errors import InputError, describe_os_error, note
from fabric_train.model.load_weights import find_safetensors, open_stored
from fabric_train.model.origin import AdapterBase, HashedFile
from fabric_train.model.pickled_weights import find_pickles
from fabric_train.model.weight_files import StoredTensors, open_weights

_PREFIX = "xxh3_128:"
"""What a hash of all bytes begins with; earlier versions hashed the first and the last row of each tensor."""
_COMPUTED_BUFFER = re.compile(r"(rotary_emb\.inv_freq|\.masked_bias)$")
"""Buffers in older files, which transformers leaves out when it saves the model again."""
_TIED_HEAD = "lm_head.weight"
_BLOCK_BYTES = 1 << 24
_NUM_THREADS = 2
_SETTLED_SECONDS = 2.0
"""A file that was changed less than this ago may be changed again without a new time: clocks of disks are coarse."""


def fingerprint(tensors: StoredTensors) -> str:
    """Return a hash of the names, dtypes, shapes and all bytes of a model's tensors.

    A tied head may be stored or not. Buffers that transformers computes do not count.
    """
    names = [name for name in sorted(tensors) if not _COMPUTED_BUFFER.search(name)]
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        digests = dict(zip(names, pool.map(lambda name: _hash_of_tensor(tensors, name), names), strict=True))
    head = digests.get(_TIED_HEAD)
    if head is not None and list(digests.values()).count(head) > 1:
        del digests[_TIED_HEAD]
    digest = xxhash.xxh3_128()
    for name, of_tensor in digests.items():
        digest.update(f"{name} {of_tensor}\n".encode())
    return f"{_PREFIX}{digest.hexdigest()}"


def _hash_of_tensor(tensors: StoredTensors, name: str) -> str:
    shape = tensors.shape(name)
    dtype = tensors.dtype(name)
    digest = xxhash.xxh3_128(f"{dtype} {tuple(shape)}".encode())
    if not shape:
        digest.update(_bytes_of(tensors.read_block(name, (), ())))
    elif shape.numel():
        row_bytes = shape[1:].numel() * dtype.itemsize
        num_rows = max(1, _BLOCK_BYTES // row_bytes)
        for begin in range(0, shape[0], num_rows):
            offsets = (begin, *(0 for _ in shape[1:]))
            block = (min(num_rows, shape[0] - begin), *shape[1:])
            digest.update(_bytes_of(tensors.read_block(name, offsets, block)))
    return digest.hexdigest()


def _fingerprint_of_rows(tensors: StoredTensors) -> str:
    """Return what checkpoints of earlier versions have: a hash of the first and the last row of each tensor."""
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        shape = tensors.shape(name)
        digest.update(f"{name} {tensors.dtype(name)} {tuple(shape)}".encode())
        for row in {0, shape[0] - 1} if shape and shape.numel() else ():
            block = tensors.read_block(name, (row, *(0 for _ in shape[1:])), (1, *shape[1:]))
            digest.update(_bytes_of(block))
    return digest.hexdigest()


def _bytes_of(block: torch.Tensor) -> memoryview:
    return block.contiguous().reshape(-1).view(torch.uint8).numpy().data


def has_fingerprint(tensors: StoredTensors, saved: str) -> bool:
    """Return whether tensors have a fingerprint that some version of this program has saved."""
    if saved.startswith(_PREFIX):
        return fingerprint(tensors) == saved
    return _fingerprint_of_rows(tensors) == saved


def open_base_weights(place: str) -> StoredTensors:
    """Open the stored tensors of a base: a hub name, a folder, or a checkpoint of a run.

    Raises:
        InputError: there are none, or they cannot be read.
    """
    if (Path(place) / "trainer.json").is_file():
        return open_weights(Path(place))
    stored = open_stored(place)
    if stored is None:
        raise InputError(f"{place}: no weights in it (model.safetensors); fetch the model again")
    return stored


def same_weights(base: AdapterBase, saved: AdapterBase) -> AdapterBase | None:
    """Return a base with what is known of its weights; None if it has others than ``saved`` describes.

    Its files are read only if the system says that they may have changed.
    """
    assert saved.fingerprint is not None
    if saved.files and _describe_files(base.place) == saved.files:
        return replace(saved, place=base.place)
    if saved.fingerprint.startswith(_PREFIX):
        found = hashed(base)
        return found if found.fingerprint == saved.fingerprint else None
    # the next checkpoint gets a hash of all bytes
    return base if has_fingerprint(open_base_weights(base.place), saved.fingerprint) else None


_hashes: dict[tuple[str, tuple[HashedFile, ...]], "Future[AdapterBase]"] = {}


def start_hashing(base: AdapterBase) -> "Future[AdapterBase]":
    """Begin to hash the weights of a base in the background, unless that has begun; return the base with its hash."""
    key = (base.place, _describe_files(base.place))
    if key not in _hashes:
        future: Future[AdapterBase] = Future()
        _hashes[key] = future
        # a daemon: a run that ends before its first checkpoint does not wait for it
        threading.Thread(target=_hash, args=(base, future), daemon=True, name="hash of the base").start()
    return _hashes[key]


def hashed(base: AdapterBase) -> AdapterBase:
    """Return a base with the hash of its weights, and wait for it.

    Raises:
        InputError, OSError: a file cannot be read.
    """
    return base if base.fingerprint is not None else start_hashing(base).result()


def hashed_or_noted(base: AdapterBase) -> AdapterBase:
    """Return a base with its hash, and without it, with a note, if its files cannot be read any more."""
    try:
        return hashed(base)
    except (InputError, OSError) as error:
        reason = describe_os_error(error) if isinstance(error, OSError) else error
        note(f"checkpoints have no hash of the base {base.place}, so a later change of it is not found: {reason}")
        return base


def _hash(base: AdapterBase, future: "Future[AdapterBase]") -> None:
    try:
        before = _describe_files(base.place)
        of_weights = fingerprint(open_base_weights(base.place))
        is_settled = before == _describe_files(base.place) and all(map(_is_settled, before))
        future.set_result(replace(base, fingerprint=of_weights, files=before if is_settled else ()))
    except BaseException as error:
        future.set_exception(error)
        if not isinstance(error, InputError | OSError):
            raise


def _is_settled(file: HashedFile) -> bool:
    newest = max(file.modified_ns, file.changed_ns)
    return time.time_ns() - newest > _SETTLED_SECONDS * 1e9


def _describe_files(place: str) -> tuple[HashedFile, ...]:
    """Return the files of a base's weights with what the system says of them; none if it says nothing of changes."""
    folder = Path(place)
    if (folder / "trainer.json").is_file():
        files = sorted((folder / "model").glob("*.safetensors")) or find_safetensors(place)
    else:
        files = find_safetensors(place) or find_pickles(place)
    return tuple(_describe_file(file) for file in files)


def _describe_file(file: Path) -> HashedFile:
    status = os.stat(file)
    return HashedFile(file.name, status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
