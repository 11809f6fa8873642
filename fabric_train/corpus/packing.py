"""Documents' tokens to rows of one length, and rows to a ``datasets`` folder; memory does not grow with them."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pyarrow

_TOKENS_PER_BATCH = 1 << 18
_BATCHES_PER_FILE = 512  # 512 MiB of int32


@dataclass(frozen=True)
class Row:
    """``input_ids``: int32 [max_length]; ``document_starts``: int32, positions in the row where a document begins."""

    input_ids: np.ndarray
    document_starts: np.ndarray


def pack_rows(documents: Iterable[np.ndarray], max_length: int) -> Iterator[Row]:
    """Join the documents in order and cut the whole every ``max_length`` tokens; a last, incomplete row is left out.

    Documents ``B a b E``, ``B c d e f E``, ``B g E`` in rows of 5 (B and E stand for BOS and EOS)::

        input_ids  B a b E B    document_starts  0 4
        input_ids  c d e f E    document_starts
        (B g E is left out)

    Args:
        documents: int32 [number of tokens] each.
        max_length: tokens in a row.
    """
    row = np.empty(max_length, dtype=np.int32)
    filled = 0
    starts: list[int] = []
    for tokens in documents:
        if len(tokens):
            starts.append(filled)
        taken = 0
        while taken < len(tokens):
            piece = tokens[taken : taken + max_length - filled]
            row[filled : filled + len(piece)] = piece
            filled += len(piece)
            taken += len(piece)
            if filled == max_length:
                yield Row(row, np.array(starts, dtype=np.int32))
                row = np.empty(max_length, dtype=np.int32)
                filled, starts = 0, []


def write_split(folder: Path, rows: Iterable[Row], num_rows: int, max_length: int) -> None:
    """Write ``num_rows`` rows as a folder that ``datasets.load_from_disk`` reads, in files of about 512 MiB.

    ``Dataset.save_to_disk`` copies what lies on the disk already; this writes the same files while the rows come.
    """
    import pyarrow
    from datasets import DatasetInfo, Features, List, Value

    folder.mkdir()
    features = Features({"input_ids": List(Value("int32"), length=max_length), "document_starts": List(Value("int32"))})
    rows_per_batch = max(1, _TOKENS_PER_BATCH // max_length)
    num_files = -(-num_rows // (rows_per_batch * _BATCHES_PER_FILE))
    names = [f"data-{index:05d}-of-{num_files:05d}.arrow" for index in range(num_files)]
    digest = hashlib.sha256()
    rows = iter(rows)
    written = 0
    for name in names:
        with (
            pyarrow.OSFile(str(folder / name), "wb") as file,
            pyarrow.ipc.new_stream(file, features.arrow_schema) as writer,
        ):
            for _ in range(_BATCHES_PER_FILE):
                batch = list(islice(rows, rows_per_batch))
                if batch:
                    writer.write_batch(_record_batch(batch, features.arrow_schema))
                    digest.update(np.concatenate([row.input_ids for row in batch]).data)
                    written += len(batch)
    assert written == num_rows, f"{written} rows written of {num_rows}"
    DatasetInfo(features=features).write_to_directory(str(folder))
    state: dict[str, object] = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": digest.hexdigest()[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": folder.name,
    }
    (folder / "state.json").write_text(json.dumps(state, indent=2) + "\n")


def write_dataset_dict(folder: Path, splits: Iterable[str]) -> None:
    """Write the ``dataset_dict.json`` that makes one ``DatasetDict`` of the splits' folders."""
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}) + "\n")


def _record_batch(rows: list[Row], schema: "pyarrow.Schema") -> "pyarrow.RecordBatch":
    import pyarrow

    input_ids = pyarrow.FixedSizeListArray.from_arrays(
        np.concatenate([row.input_ids for row in rows]), type=schema.field("input_ids").type
    )
    offsets = np.cumsum([0, *(len(row.document_starts) for row in rows)], dtype=np.int32)
    starts = pyarrow.ListArray.from_arrays(
        offsets, np.concatenate([row.document_starts for row in rows]), type=schema.field("document_starts").type
    )
    return pyarrow.RecordBatch.from_arrays([input_ids, starts], schema=schema)
