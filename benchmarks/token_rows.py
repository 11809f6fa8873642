"""Read the rows that a system has written, in any of the systems' formats."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.compute
from datasets import DatasetDict, load_from_disk
from numpy.typing import NDArray

COMPARED_ROWS = 100


@dataclass(frozen=True)
class TokenRows:
    """A system's rows; ``num_tokens`` is without padding, ``first`` are the first rows' ids, int32 [rows, length]."""

    num_rows: int
    num_tokens: int
    first: NDArray[np.int32]


def read_token_dataset(folder: Path, _max_length: int) -> TokenRows:
    """Read a token dataset of ``tokenize_dataset.py``."""
    made = load_from_disk(str(folder))
    assert isinstance(made, DatasetDict)
    num_tokens = json.loads((folder / "manifest.json").read_text())["ledger"]["train"]["tokens_in_rows"]
    return TokenRows(made["train"].num_rows, num_tokens, _first(made["train"][:COMPARED_ROWS]["input_ids"]))


def read_dataset(folder: Path, _max_length: int) -> TokenRows:
    """Read a dataset of ``datasets``; rows shorter than the length are those that a collator would pad."""
    made = load_from_disk(str(folder))
    num_tokens = pyarrow.compute.sum(pyarrow.compute.list_value_length(made.data.column("input_ids"))).as_py()
    return TokenRows(made.num_rows, num_tokens, _first(made[:COMPARED_ROWS]["input_ids"]))


def read_datatrove(folder: Path, max_length: int) -> TokenRows:
    """Read datatrove's ``.ds`` files: the ids as uint32, without a header."""
    return _from_streams([np.fromfile(file, np.uint32) for file in sorted(folder.glob("*.ds"))], max_length)


def read_litdata(folder: Path, max_length: int) -> TokenRows:
    """Read litdata's chunks: the number of items, the start of each and the end of the last as uint32, then the ids."""
    chunks = [np.fromfile(file, np.int32) for file in sorted(folder.glob("*.bin"))]
    return _from_streams([chunk[chunk[0] + 2 :] for chunk in chunks], max_length)


def _from_streams(streams: list[NDArray[np.uint32]] | list[NDArray[np.int32]], max_length: int) -> TokenRows:
    """Split each stream into rows as the systems' loaders do, without its last tokens if they do not fill a row."""
    num_rows = sum(len(stream) // max_length for stream in streams)
    first = streams[0][: min(COMPARED_ROWS, len(streams[0]) // max_length) * max_length].reshape(-1, max_length)
    return TokenRows(num_rows, num_rows * max_length, first.astype(np.int32))


def _first(rows: list[list[int]]) -> NDArray[np.int32]:
    return np.array(rows, np.int32)
