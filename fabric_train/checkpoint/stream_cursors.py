"""Read the cursors of a stream, which are the positions of its lanes, from a checkpoint's stream.json."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from fabric_train.checkpoint.trainer_json import (
    ADVICE,
    read_trainer_json,
)
from fabric_train.cli.errors import InputError
from fabric_train.data.stream_batches import LaneCursor
from fabric_train.files.typed_json import read_json


@dataclass(frozen=True)
class _StreamJson:
    cursors: list[Annotated[list[int], Field(min_length=8)]]


def read_cursors(checkpoint: Path) -> list[LaneCursor]:
    """Return the cursors of all lanes; raise an InputError if the checkpoint's stream.json is damaged."""
    file = checkpoint / "stream.json"
    order = read_trainer_json(checkpoint).stream
    cursors = read_json(file, _StreamJson, ADVICE).cursors
    if order is None or len(cursors) != order.rows_per_window:
        raise InputError(f"{file}: damaged ({len(cursors)} cursors instead of one for each row of a step); {ADVICE}")
    for cursor in cursors:
        # numbers 6 and 7 are the halves of a hash, which may be negative
        nonnegative_numbers = (*cursor[:6], *cursor[8:])
        if min(nonnegative_numbers) < 0:
            raise InputError(f"{file}: damaged (negative number); {ADVICE}")
    return [LaneCursor.from_numbers(numbers) for numbers in cursors]
