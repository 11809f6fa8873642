"""Read trainer.json and stream.json: a run's counters, its data order and its description."""

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
    """The values that determine which rows a step consumes. They must be equal to resume a run."""

    fingerprint: str
    num_rows: int
    rows_per_window: int
    seed: int


@dataclass(frozen=True)
class StreamOrder:
    """The values that determine, with the cursors, which rows of a stream a step consumes.

    They must be equal to resume a run.
    """

    sources: list[str]
    text_column: str
    max_length: int
    tokenizer: str
    special_text_is_plain: bool
    rows_per_window: int


@dataclass(frozen=True)
class TrainerState:
    """The counters of a run after ``step`` optimizer steps.

    ``epoch`` and the losses are those of the last step. ``skipped_steps`` were skipped because their loss or gradient
    was not finite. ``rows_hash`` is the hash of all consumed rows of a token dataset, see ``WindowOrder.rows_hash``;
    None for a stream. ``unlogged`` are the step's metrics if a signal came before its evaluation was complete.
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
    """The description of a run in each of its checkpoints, sufficient to export, generate or resume.

    ``attachments`` are files and folders that are copied into each checkpoint: the tokenizer and the token dataset's
    manifest.
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
    """Return the format number in trainer.json, or None if there is none or the file cannot be read."""
    try:
        content = json.loads((checkpoint / "trainer.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content.get("format") if isinstance(content, dict) else None


def read_trainer_json(checkpoint: Path) -> dict[str, Any]:
    """Return the content of trainer.json.

    Raises:
        InputError: The file is damaged or has a format that this version does not read.
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
    """Return the counters of the checkpoint's run.

    Raises:
        InputError: trainer.json is damaged.
    """
    content = read_trainer_json(checkpoint)
    return TrainerState(**{field.name: content[field.name] for field in fields(TrainerState)})


def read_stream_order(checkpoint: Path) -> StreamOrder | None:
    """Return the data order of the checkpoint's stream, or None if its run read a token dataset.

    Raises:
        InputError: trainer.json is damaged.
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


def find_data_changes(checkpoint: Path, data: DataOrder | StreamOrder) -> list[str]:
    """Return a line for each difference in the data order that would make a resumed run consume other rows.

    Raises:
        InputError: trainer.json is damaged.
    """
    saved = read_trainer_json(checkpoint)["data"]
    current = asdict(data)
    advice = "resume with the same, or take only its weights with --weights_only true"
    if saved.keys() != current.keys():
        options = ("--streaming_dataset", "--train_data_dir")
        saved_option, current_option = options if "sources" in saved else reversed(options)
        return [f"{checkpoint}: its run read {saved_option}, not {current_option}; {advice}"]
    causes = {
        "sources": "--streaming_dataset reads other files, or they have changed",
        "text_column": "--text_column differs",
        "max_length": "--max_length differs",
        "tokenizer": "the tokenizer differs",
        "special_text_is_plain": "the kind of the tokenizer differs",
        "fingerprint": "--train_data_dir is another token dataset",
        "num_rows": "--train_data_dir has another number of rows",
        "rows_per_window": "the rows of one optimizer step differ (--total_batch_size keeps them)",
        "seed": "--seed differs",
    }
    return [
        f"{checkpoint}: {causes[name]}: {_difference(saved[name], value)}; {advice}"
        for name, value in current.items()
        if saved[name] != value
    ]


def _difference(saved: Any, current: Any) -> str:
    """Return both values as text; for lists, the first elements that differ."""
    if isinstance(current, list):
        saved, current = next(pair for pair in zip_longest(saved, current, fillvalue="nothing") if pair[0] != pair[1])
    return f"{saved} there, {current} here"
