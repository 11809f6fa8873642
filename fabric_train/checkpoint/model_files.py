"""Find the files of a model that an argument names, and hash them, to recognize the same weights again."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import xxhash
from huggingface_hub import try_to_load_from_cache

from fabric_train.checkpoint.adapter_folder import files_of_adapter, is_adapter
from fabric_train.checkpoint.discovery import find_checkpoint, means_checkpoint
from fabric_train.files.regular_file import open_regular
from fabric_train.model.load_weights import find_safetensors
from fabric_train.model.origin import AdapterBase

_READ_BYTES = 1 << 24


def resolve_name(name: str) -> str:
    """Return the location of the model that an argument names: an absolute path, or a name on the hub."""
    path = Path(name)
    if means_checkpoint(path):
        return os.path.realpath(find_checkpoint(path))
    if path.is_dir():
        return os.path.realpath(path)
    return name


def list_model_files(location: str, base: AdapterBase | None) -> list[Path]:
    """Return the files that decide what a model computes: its configuration and weights, and those of its adapter.

    Args:
        location: A name on the hub, a folder, a checkpoint or an adapter.
        base: The base of the adapter; None if the model is not an adapter.
    """
    files = list(_list_weight_files(base.location if base else location))
    if Path(location).is_dir() and is_adapter(Path(location)):
        files += files_of_adapter(Path(location))
    return files


def _list_weight_files(location: str) -> Iterator[Path]:
    """Yield the configuration and the files of weights of a hub name, a folder or a checkpoint."""
    model_dir = Path(location)
    if not model_dir.is_dir():  # it is in the cache, where the run has read it
        model_dir = Path(str(try_to_load_from_cache(location, "config.json"))).parent
    yield model_dir / "config.json"
    if (model_dir / "model").is_dir() and (model_dir / "trainer.json").is_file():
        yield from sorted((model_dir / "model").glob("*.safetensors"))
        return
    safetensors = find_safetensors(location)
    if safetensors:
        yield from safetensors
    else:  # pickles
        yield from sorted(model_dir.glob("*.bin"))


def hash_model(files: Sequence[Path]) -> str:
    """Return the hash of a model with the files of :func:`list_model_files`, read by this process alone."""
    return join_hashes(np.stack([hash_model_file(file) for file in files]))


def join_hashes(hashes: np.ndarray) -> str:
    """Return the hash of a model from those of its files, int64 [files, 2], see :func:`hash_model_file`."""
    return hashlib.sha256(hashes.tobytes()).hexdigest()


def hash_model_file(file: Path) -> np.ndarray:
    """Return the XXH3-128 of a file, int64 [2]."""
    return np.frombuffer(bytes.fromhex(hash_file(file)), np.int64).copy()


def hash_file(file: Path) -> str:
    """Return the XXH3-128 of a file in hexadecimal."""
    digest = xxhash.xxh3_128()
    with open_regular(file, "restore the file") as opened:
        while content := opened.read(_READ_BYTES):
            digest.update(content)
    return digest.hexdigest()
