"""Describe a folder of stored values of a teacher: its files, and what decides the values.

``fabric-train teach`` writes::

    STATES/states.json                    ``StatesRecord``
           head.safetensors               the teacher's head, only beside hidden states
           train/000000.safetensors       a block of rows, see ``blocks``
           validation/000000.safetensors

With ``--shard I/N``, STATES has such a folder for each shard, with the name ``shard-0003-of-0064``. Nothing merges
them: a reader opens all N.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from pydantic import NonNegativeInt, PositiveInt

from fabric_train.cli.errors import InputError
from fabric_train.files.regular_file import check_file_name, write_atomically
from fabric_train.files.typed_json import read_json
from fabric_train.model.origin import TeacherModel
from fabric_train.teacher_states.vocabulary import NamedIdRange

FILE_NAME = "states.json"
HEAD = "head.safetensors"
BYTES_OF_HIDDEN = 2  # bfloat16
_BYTES_OF_ID = 4
_BYTES_OF_LOG_PROBABILITY = 4
_FORMAT = 1
TEACH_AGAIN = "remove it and run fabric-train teach again"


@dataclass(frozen=True)
class StatesContent:
    """What decides the stored values. Two folders with equal contents have the same values."""

    token_dataset: str
    """The ``TokenDataset.fingerprint``."""
    isolate_documents: bool
    distill_on: str
    """Which tokens are targets, as ``--distill_on`` says."""
    teacher: str
    """The hash of the teacher's weights (``checkpoint.model_files``)."""
    tokenizer: str
    """The hash of the tokens and their ids."""
    named_ids: NamedIdRange
    dtype: str
    """The dtype of the teacher's weights and matrix products, such as bfloat16."""
    attention: str
    top_k: PositiveInt | None
    """The number of likeliest tokens; None for hidden states."""
    temperature: float
    """The temperature of the distributions; 1 for hidden states, from which any follows."""
    hidden_size: int
    rows_per_batch: PositiveInt
    """The rows of a forward pass, which decide the last digits."""
    rows_per_block: PositiveInt
    teacher_weights: str = "16bit"
    """How the teacher's decoder layers were held, as ``--teacher_weights`` says."""

    @property
    def bytes_per_target(self) -> int:
        """The size of the stored values of a target."""
        if self.top_k is None:
            return BYTES_OF_HIDDEN * self.hidden_size
        return _BYTES_OF_ID * self.top_k + _BYTES_OF_LOG_PROBABILITY * (self.top_k + 1)

    def describe(self) -> str:
        """Return the form of the values, such as ``top 64 of 128,256 tokens and the rest, temperature 1``."""
        if self.top_k is None:
            return f"last hidden states, {self.hidden_size:,} × bfloat16"
        return f"top {self.top_k:,} of {self.named_ids.num_ids:,} tokens and the rest, temperature {self.temperature:g}"


_NAMES = {
    "token_dataset": "rows (the token dataset's fingerprint)",
    "isolate_documents": "--isolate_documents",
    "distill_on": "--distill_on",
    "teacher": "teacher (the hash of its weights)",
    "tokenizer": "tokenizer (the hash of its tokens)",
    "named_ids": "range of ids with a token",
    "top_k": "--top_k",
    "temperature": "--distill_temperature",
    "rows_per_batch": "number of rows in a forward pass",
    "rows_per_block": "number of rows in a block",
    "teacher_weights": "--teacher_weights",
}
"""What messages call the fields of ``StatesContent`` that they do not call by their own names."""


@dataclass(frozen=True)
class StatesDifference:
    """The first field in which two contents differ."""

    name: str
    first_value: str
    second_value: str


def find_difference(
    first: StatesContent, second: StatesContent, compared: Collection[str] | None = None
) -> StatesDifference | None:
    """Return the first field in which two contents differ, by its name in messages; None if they are equal.

    ``compared`` are the names of the compared fields, None for all.
    """
    for field in fields(StatesContent):
        if compared is not None and field.name not in compared:
            continue
        first_value = getattr(first, field.name)
        second_value = getattr(second, field.name)
        if first_value != second_value:
            name = _NAMES.get(field.name, field.name.replace("_", " "))
            return StatesDifference(name, _show_value(first_value), _show_value(second_value))
    return None


def _show_value(value: object) -> str:
    return "absent (hidden states)" if value is None else str(value)  # only --top_k may be None


@dataclass(frozen=True)
class StatesSplit:
    """The size of a split."""

    num_rows: NonNegativeInt
    num_targets: NonNegativeInt


@dataclass(frozen=True)
class StatesShard:
    """Which of how many shards a folder has; 1 of 1 without ``--shard``."""

    number: PositiveInt = 1
    count: PositiveInt = 1

    @property
    def folder_name(self) -> str:
        """The name of its folder, such as ``shard-0003-of-0064``."""
        return f"shard-{self.number:04d}-of-{self.count:04d}"


@dataclass(frozen=True)
class StatesRecord:
    """The content of ``states.json``."""

    content: StatesContent
    teacher: TeacherModel
    splits: dict[str, StatesSplit]
    """The splits of the token dataset, of which a shard has some blocks."""
    shard: StatesShard
    files: dict[str, int]
    """The bytes of each file in this folder, by its path in it."""
    format: int = _FORMAT


@dataclass(frozen=True)
class Block:
    """Consecutive rows of a split, which are in one file."""

    split: str
    number: int
    """Its number among the blocks of the split, from 0."""
    rows: range

    @property
    def file_name(self) -> str:
        """The path of its file in the folder."""
        return f"{self.split}/{self.number:06d}.safetensors"


def list_blocks(splits: Mapping[str, StatesSplit], rows_per_block: int) -> list[Block]:
    """Return the blocks of all splits, in order."""
    blocks = []
    for name, split in splits.items():
        for number, begin in enumerate(range(0, split.num_rows, rows_per_block)):
            rows = range(begin, min(begin + rows_per_block, split.num_rows))
            blocks.append(Block(name, number, rows))
    return blocks


def blocks_of_shard(blocks: list[Block], shard: StatesShard) -> list[Block]:
    """Return the consecutive blocks of a shard; shards have equally many blocks, or one more."""
    begin = (shard.number - 1) * len(blocks) // shard.count
    end = shard.number * len(blocks) // shard.count
    return blocks[begin:end]


def read_record(folder: Path, file_name: str = FILE_NAME) -> StatesRecord:
    """Read the record of a folder.

    Raises:
        InputError: The record is missing or damaged, or another version wrote it.
    """
    file = folder / file_name
    record = read_json(file, StatesRecord, TEACH_AGAIN)
    if record.format != _FORMAT:
        raise InputError(f"{file} has format {record.format}, but this version reads {_FORMAT}; {TEACH_AGAIN}")
    for name in record.splits:
        check_file_name(name, file)
    named_ids = record.content.named_ids
    if any(not 0 <= gap < named_ids.end for gap in named_ids.gaps):
        raise InputError(f"{file}: damaged (an id without a token is not below {named_ids.end}); {TEACH_AGAIN}")
    return record


def write_record(folder: Path, record: StatesRecord, file_name: str = FILE_NAME) -> None:
    """Write the record of a folder; the file is complete or unchanged."""
    write_atomically(folder / file_name, json.dumps(asdict(record), indent=1) + "\n")
