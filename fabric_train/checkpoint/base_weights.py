"""Identify the weights of an adapter's base by a hash of all their bytes, because a checkpoint has no copy of them.

Tensors are hashed by name, so the hash does not depend on the number and the format of the files. XXH3 takes a fraction
of the time that a disk needs to read the bytes. A new run hashes its base in the background, while the model is read
and the first steps are taken: the first checkpoint needs the result.

Hashing a base again for each checkpoint that names it would take seconds every time. So a checkpoint also records the
sizes and times of the files that were hashed. As long as these are the same, the bytes are taken to be the same.
"""

import functools
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
"""The prefix of a hash of all bytes; earlier versions hashed the first and the last row of each tensor."""
_COMPUTED_BUFFER = re.compile(r"(rotary_emb\.inv_freq|\.masked_bias)$")
"""The names of buffers in older files, which transformers now computes and no longer saves."""
_TIED_HEAD = "lm_head.weight"
_BLOCK_BYTES = 1 << 24
_NUM_THREADS = 2
_SETTLED_SECONDS = 2.0
"""A file that changed more recently may change again without a new time, because file systems have coarse clocks."""


def fingerprint(tensors: StoredTensors) -> str:
    """Return a hash of the names, dtypes, shapes and all bytes of a model's tensors.

    A tied head does not change the hash, whether it is stored or not. Buffers that transformers computes are left out.
    """
    # in the order of the names, so the hash does not depend on the files
    names = [name for name in sorted(tensors) if not _COMPUTED_BUFFER.search(name)]
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        digests = pool.map(lambda name: _hash_tensor(tensors, name), names)
        digests_by_name = dict(zip(names, digests, strict=True))

    # a head with the same bytes as another tensor, the embedding, is tied
    head_digest = digests_by_name.get(_TIED_HEAD)
    is_tied = head_digest is not None and list(digests_by_name.values()).count(head_digest) > 1
    if is_tied:
        del digests_by_name[_TIED_HEAD]

    hasher = xxhash.xxh3_128()
    for name, digest in digests_by_name.items():
        hasher.update(f"{name} {digest}\n".encode())
    return f"{_PREFIX}{hasher.hexdigest()}"


def _hash_tensor(tensors: StoredTensors, name: str) -> str:
    """Return a hash of the dtype, shape and bytes of a tensor, which is read in blocks of rows."""
    shape = tensors.shape(name)
    dtype = tensors.dtype(name)
    hasher = xxhash.xxh3_128(f"{dtype} {tuple(shape)}".encode())
    if not shape:  # a single number
        hasher.update(_bytes_of(tensors.read_block(name, (), ())))
        return hasher.hexdigest()
    if not shape.numel():  # an empty tensor has no bytes
        return hasher.hexdigest()

    # in blocks, since a large embedding need not fit into memory
    row_shape = shape[1:]
    row_bytes = row_shape.numel() * dtype.itemsize
    num_block_rows = max(1, _BLOCK_BYTES // row_bytes)
    offsets_in_row = (0,) * len(row_shape)
    for row in range(0, shape[0], num_block_rows):
        num_rows = min(num_block_rows, shape[0] - row)
        block = tensors.read_block(name, (row, *offsets_in_row), (num_rows, *row_shape))
        hasher.update(_bytes_of(block))
    return hasher.hexdigest()


def _fingerprint_of_rows(tensors: StoredTensors) -> str:
    """Return the hash that earlier versions saved, computed from the first and the last row of each tensor."""
    hasher = xxhash.xxh3_128()
    for name in sorted(tensors):
        shape = tensors.shape(name)
        hasher.update(f"{name} {tensors.dtype(name)} {tuple(shape)}".encode())
        if not shape or not shape.numel():
            continue
        row_shape = shape[1:]
        offsets_in_row = (0,) * len(row_shape)
        for row in {0, shape[0] - 1}:  # a set: an only row is hashed once
            block = tensors.read_block(name, (row, *offsets_in_row), (1, *row_shape))
            hasher.update(_bytes_of(block))
    return hasher.hexdigest()


def _bytes_of(block: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor on the CPU, without a copy if it is contiguous."""
    return block.contiguous().reshape(-1).view(torch.uint8).numpy().data


def has_fingerprint(tensors: StoredTensors, saved: str) -> bool:
    """Return whether tensors have a certain fingerprint, which any version of this program may have saved."""
    if saved.startswith(_PREFIX):
        return fingerprint(tensors) == saved
    return _fingerprint_of_rows(tensors) == saved


def open_base_weights(model_name: str) -> StoredTensors:
    """Open the stored tensors of a base, which is a hub name, a folder, or a checkpoint of a run.

    Raises:
        InputError: there are no tensors, or they cannot be read.
    """
    if (Path(model_name) / "trainer.json").is_file():
        return open_weights(Path(model_name))
    stored = open_stored(model_name)
    if stored is None:
        raise InputError(f"{model_name}: it has no weights (model.safetensors); download the model again")
    return stored


def same_weights(base: AdapterBase, saved: AdapterBase) -> AdapterBase | None:
    """Compare the weights of a base with those that a checkpoint has recorded.

    The files are read only if their sizes or times have changed.

    Returns:
        The base, with its hash if that is known; None if its weights differ from those of ``saved``.
    """
    assert saved.fingerprint is not None
    # the files that were hashed, unchanged: nothing is read
    if saved.files and _describe_files(base.location) == saved.files:
        return replace(saved, location=base.location)
    if saved.fingerprint.startswith(_PREFIX):
        hashed_base = hashed(base)
        return hashed_base if hashed_base.fingerprint == saved.fingerprint else None
    # the base is returned without the earlier version's hash: the next checkpoint gets a hash of all bytes
    return base if has_fingerprint(open_base_weights(base.location), saved.fingerprint) else None


def start_hashing(base: AdapterBase) -> "Future[AdapterBase]":
    """Hash the weights of a base in the background, if that has not begun yet; return the future base with its hash."""
    return _start_hashing(base, _describe_files(base.location))


@functools.cache
def _start_hashing(base: AdapterBase, files: tuple[HashedFile, ...]) -> "Future[AdapterBase]":
    """Begin to hash a base, once in this process unless its ``files`` change."""
    future: Future[AdapterBase] = Future()
    # a daemon: a run that ends before its first checkpoint does not wait for it
    threading.Thread(target=_hash_base, args=(base, files, future), daemon=True, name="hash of the base").start()
    return future


def hashed(base: AdapterBase) -> AdapterBase:
    """Wait for the hash of a base's weights, and return the base with it.

    Raises:
        InputError, OSError: a file cannot be read.
    """
    if base.fingerprint is not None:
        return base
    return start_hashing(base).result()


def hashed_or_noted(base: AdapterBase) -> AdapterBase:
    """Return a base with its hash; if its files can no longer be read, print a note and return it without a hash."""
    try:
        return hashed(base)
    except (InputError, OSError) as error:
        reason = describe_os_error(error) if isinstance(error, OSError) else error
        note(f"checkpoints store no hash of the base {base.location}, so later changes to it go unnoticed: {reason}")
        return base


def _hash_base(base: AdapterBase, files: tuple[HashedFile, ...], future: "Future[AdapterBase]") -> None:
    """Set ``future`` to the base with its hash, and with its ``files`` unless they have changed meanwhile."""
    try:
        digest = fingerprint(open_base_weights(base.location))
        # files that may be changed without a new time are not recorded: a later run hashes them again
        is_unchanged = files == _describe_files(base.location) and all(_is_settled(file) for file in files)
        future.set_result(replace(base, fingerprint=digest, files=files if is_unchanged else ()))
    except BaseException as error:  # whoever waits for the future gets it
        future.set_exception(error)
        if not isinstance(error, InputError | OSError):  # a bug, whose traceback the thread prints
            raise


def _is_settled(file: HashedFile) -> bool:
    """Return whether a file last changed so long ago that another change would have a later time."""
    newest_change = max(file.modified_ns, file.changed_ns)
    return time.time_ns() - newest_change > _SETTLED_SECONDS * 1e9


def _describe_files(model_name: str) -> tuple[HashedFile, ...]:
    """Return the sizes and times of the files of a base's weights; ``model_name`` is its hub name or absolute path."""
    folder = Path(model_name)
    # a sharded checkpoint has its weights in model/
    if (folder / "trainer.json").is_file():
        files = sorted((folder / "model").glob("*.safetensors")) or find_safetensors(model_name)
    else:
        files = find_safetensors(model_name) or find_pickles(model_name)
    return tuple(_describe_file(file) for file in files)


def _describe_file(file: Path) -> HashedFile:
    status = os.stat(file)
    return HashedFile(
        name=file.name,
        num_bytes=status.st_size,
        inode=status.st_ino,
        modified_ns=status.st_mtime_ns,
        changed_ns=status.st_ctime_ns,
    )
