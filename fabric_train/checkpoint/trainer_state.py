"""What a checkpoint says: where its run stood, what fixes its data order, and what describes the run; trainer.json."""

import json
from dataclasses import asdict, dataclass, fields
from itertools import zip_longest
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import create_model

from fabric_train.cli.errors import InputError
from fabric_train.data.lanes import LaneCursor
from fabric_train.files.typed_json import parse_json

FORMAT = 2


@dataclass(frozen=True)
class DataOrder:
    """What fixes which rows a step consumes; a run is resumed only where all of it is the same."""

    fingerprint: str
    num_rows: int
    rows_per_window: int
    seed: int


@dataclass(frozen=True)
class StreamOrder:
    """What fixes, beside the cursors, which rows of a stream a step consumes; a run is resumed only where all of it is
    the same.
    """

    sources: list[str]
    text_column: str
    max_length: int
    tokenizer: str
    special_text_is_plain: bool
    rows_per_window: int


@dataclass(frozen=True)
class TrainerState:
    """Where a run stands after ``step`` optimizer steps; ``epoch`` is that of the last one. Losses are of that very
    step; ``skipped_steps`` were left out because their loss or gradient was not finite. ``rows_hash`` is of all rows of
    a token dataset that the steps consumed, see ``WindowOrder.rows_hash``; None for a stream, of which stream.json
    knows each lane's last row. ``unlogged``, the step's metrics, is there where a signal came before its evaluation was
    done.
    """

    step: int = 0
    epoch: int = 0
    num_tokens: int = 0
    num_samples: int = 0
    skipped_steps: int = 0
    rows_hash: str | None = None
    train_loss: float | None = None
    val_loss: float | None = None
    unlogged: dict[str, Any] | None = None


@dataclass(frozen=True)
class Description:
    """What every checkpoint of a run says of it: enough to export, generate or resume with no other argument.

    ``attachments`` are files and folders copied into each: the tokenizer, and the token dataset's manifest.
    """

    state_dict_type: str
    weights_dtype: str
    data: DataOrder | StreamOrder
    arguments: dict[str, Any]
    versions: dict[str, str]
    attachments: tuple[Path, ...]


_TYPES = get_type_hints(TrainerState) | get_type_hints(Description)
_REQUIRED: dict[str, Any] = {name: (kind, ...) for name, kind in _TYPES.items() if name != "attachments"}
_TrainerJson = create_model("TrainerJson", **_REQUIRED)


def read_format(checkpoint: Path) -> Any:
    """Return the format that trainer.json names, None where it names none or cannot be read."""
    try:
        content = json.loads((checkpoint / "trainer.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content.get("format") if isinstance(content, dict) else None


def read_trainer_json(checkpoint: Path) -> dict[str, Any]:
    """Return what trainer.json says.

    Raises:
        InputError: where it is damaged or of a format this version does not know.
    """
    file = checkpoint / "trainer.json"
    try:
        text = file.read_text(encoding="utf-8")
        content = json.loads(text)
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read ({error}); use another checkpoint") from error
    if not isinstance(content, dict):
        raise InputError(f"{file}: damaged, no JSON object; use another checkpoint")
    if content.get("format") != FORMAT:
        raise InputError(
            f"{checkpoint}: format {content.get('format')} is not format {FORMAT}, which this version reads; "
            "use another checkpoint"
        )
    try:
        parse_json(text, _TrainerJson)
    except ValueError as error:
        raise InputError(f"{file}: damaged ({error}); use another checkpoint") from error
    return content


def read_trainer_state(checkpoint: Path) -> TrainerState:
    """Return where the checkpoint's run stood.

    Raises:
        InputError: where trainer.json is damaged.
    """
    content = read_trainer_json(checkpoint)
    return TrainerState(**{field.name: content[field.name] for field in fields(TrainerState)})


def read_stream_order(checkpoint: Path) -> StreamOrder | None:
    """Return what the checkpoint's run streamed, None where it read a token dataset.

    Raises:
        InputError: where trainer.json is damaged.
    """
    saved = read_trainer_json(checkpoint)["data"]
    return StreamOrder(**saved) if "sources" in saved else None


def read_cursors(checkpoint: Path) -> list[LaneCursor]:
    """Return the cursors of all lanes of the checkpoint's stream.

    Raises:
        InputError: where stream.json is damaged.
    """
    file = checkpoint / "stream.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return [LaneCursor.from_numbers(numbers) for numbers in content["cursors"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file}: cannot be read ({error}); use another checkpoint") from error


def faults_of_data(checkpoint: Path, data: DataOrder | StreamOrder) -> list[str]:
    """Name by what the steps to come would not consume the rows that they would have consumed.

    Raises:
        InputError: where trainer.json is damaged.
    """
    saved = read_trainer_json(checkpoint)["data"]
    here = asdict(data)
    mend = "resume with the same, or take its weights alone with --weights_only true"
    if saved.keys() != here.keys():
        options = ("--streaming_dataset", "--train_data_dir")
        there, other = options if "sources" in saved else reversed(options)
        return [f"{checkpoint}: its run read {there}, not {other}; {mend}"]
    advice = {
        "sources": "--streaming_dataset reads other files, or they have changed",
        "text_column": "--text_column differs",
        "max_length": "--max_length differs",
        "tokenizer": "the tokenizer is another one",
        "special_text_is_plain": "the tokenizer is of another kind",
        "fingerprint": "--train_data_dir is another token dataset",
        "num_rows": "--train_data_dir has another number of rows",
        "rows_per_window": "the rows of one optimizer step differ (--total_batch_size keeps them)",
        "seed": "--seed differs",
    }
    return [
        f"{checkpoint}: {advice[name]}: {_difference(saved[name], value)}; {mend}"
        for name, value in here.items()
        if saved[name] != value
    ]


def _difference(saved: Any, here: Any) -> str:
    """Say both values; of lists the first elements that differ."""
    if isinstance(here, list):
        saved, here = next(pair for pair in zip_longest(saved, here, fillvalue="nothing") if pair[0] != pair[1])
    return f"{saved} there, {here} here"
