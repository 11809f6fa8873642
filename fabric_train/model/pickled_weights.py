"""Read tensors one at a time from ``pytorch_model.bin``, a pickle in which only tensors and plain values are read.

torch maps the file into memory, so a tensor only takes memory when it is read, as with safetensors.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from transformers.utils import WEIGHTS_INDEX_NAME, WEIGHTS_NAME, cached_file

from fabric_train.cli.errors import InputError, first_line, raise_if_limit_reached
from fabric_train.files.regular_file import check_not_pointer
from fabric_train.model.weight_files import StoredTensors, shard_names


class PickledTensors(StoredTensors):
    """The tensors in pickles by name; transformers saved weights in this format before safetensors."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = list(files)
        self._tensors: dict[str, torch.Tensor] = {}
        for file in files:
            check_not_pointer(file)
            content = _load(file)
            self._tensors |= {name: tensor for name, tensor in content.items() if isinstance(tensor, torch.Tensor)}

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def shape(self, name: str) -> torch.Size:
        return self._tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        block = tuple(slice(begin, begin + size) for begin, size in zip(offsets, shape, strict=True))
        return self._tensors[name].detach()[block].clone()


def find_pickles(source: str) -> list[Path]:
    """Return the pickles with the weights of a hub name or folder, if there are any."""
    folder = Path(source)
    if folder.is_dir():
        index = folder / WEIGHTS_INDEX_NAME
        if index.is_file():
            return [folder / name for name in shard_names(index)]
        file = folder / WEIGHTS_NAME
        return [file] if file.is_file() else []
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    cached_index = cached_file(source, WEIGHTS_INDEX_NAME, **quiet)
    names = shard_names(Path(cached_index)) if cached_index else [WEIGHTS_NAME]
    files = [cached_file(source, name, **quiet) for name in names]
    if not all(files):
        return []
    return [Path(file) for file in files if file]


def _load(file: Path) -> dict[str, Any]:
    """Return the content of a pickle; no code in it runs."""
    try:
        with file.open("rb") as opened:
            is_archive = opened.read(2) == b"PK"  # torch.save before 1.6 wrote other files, which cannot be mapped
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=is_archive)
    except (OSError, EOFError, ValueError, RuntimeError, LookupError, UnpicklingError) as error:
        raise_if_limit_reached(error)
        raise InputError(
            f"{file.parent}: cannot load its weights: {file.name}: {first_line(error).rstrip('.')}; download the "
            "model again, or give another"
        ) from error
    if not isinstance(content, dict):
        raise InputError(
            f"{file.parent}: cannot load its weights: {file.name} does not map names to tensors; give another model"
        )
    return content
