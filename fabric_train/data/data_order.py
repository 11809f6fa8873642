"""Describe the order of the training data as a checkpoint stores it, and compare it with a resumed run's."""

from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from typing import Any

from pydantic import NonNegativeInt, PositiveInt

SHUFFLED = 1
"""The version of the order of one token dataset that numpy shuffles: a permutation of all rows in memory."""
KEYED = 3
"""The version of the order of one token dataset whose permutation is computed by index."""
MOST_SHUFFLED = 1 << 22
"""The most rows of a new run with version ``SHUFFLED``: their permutation takes 16 MiB."""


@dataclass(frozen=True)
class PhaseRows:
    """A phase: from ``first_step`` on, an epoch has ``rows_per_epoch`` of each source of a mixture."""

    first_step: PositiveInt
    rows_per_epoch: tuple[NonNegativeInt, ...]


@dataclass(frozen=True)
class DataOrder:
    """The values that determine which rows a step consumes. They must be equal to resume a run."""

    fingerprint: str
    """Identifies the token datasets."""
    num_rows: PositiveInt
    """The rows of an epoch."""
    rows_per_window: PositiveInt
    """The rows of one optimizer step."""
    seed: int
    version: PositiveInt = SHUFFLED
    """``SHUFFLED`` or ``KEYED`` for one token dataset, ``Mixture.VERSION`` (2) for a mixture."""
    rows_per_epoch: list[NonNegativeInt] | None = None
    """The rows of each source of a mixture."""
    phases: tuple[PhaseRows, ...] = ()
    """The phases with other rows, each lasting until the next one; phases that have not begun may change."""

    @classmethod
    def for_dataset(
        cls, fingerprint: str, num_rows: int, rows_per_window: int, seed: int, saved: object = None
    ) -> "DataOrder":
        """Return the order of one token dataset.

        ``saved`` is the order in the checkpoint of a resumed run: a run keeps the version that it began with.
        """
        version = SHUFFLED if num_rows <= MOST_SHUFFLED else KEYED
        if isinstance(saved, DataOrder) and saved.fingerprint == fingerprint and saved.version in (SHUFFLED, KEYED):
            version = saved.version
        return cls(fingerprint, num_rows, rows_per_window, seed, version)

    def with_phases_until(self, step: int) -> "DataOrder":
        """Return this order with only the phases that begin at ``step`` or before."""
        return replace(self, phases=tuple(phase for phase in self.phases if phase.first_step <= step))


@dataclass(frozen=True)
class StreamOrder:
    """The values that determine, with the cursors, which rows of a stream a step reads; a resumed run needs the same.

    ``shares`` says how much of each place a pass reads. If it is None, a pass reads one place after the other, and
    ``files_of_places``, the files or splits of each place, is None too. ``seed`` is None if the order does not depend
    on it. ``chat_template`` is the SHA-256 of the template, None without chats.
    """

    sources: list[str]
    text_column: str
    max_length: int
    tokenizer: str
    special_text_is_plain: bool
    rows_per_window: PositiveInt
    shares: list[float] | None = None
    files_of_places: list[PositiveInt] | None = None
    shuffle_buffer: NonNegativeInt = 0
    seed: int | None = None
    chat_template: str | None = None


_MESSAGES = {
    "sources": "--streaming_dataset reads different files, or its files have changed",
    "text_column": "--text_column differs",
    "shares": "--shares differ",
    "shuffle_buffer": "--shuffle_buffer differs",
    "files_of_places": "the sources of --streaming_dataset have different numbers of files",
    "max_length": "--max_length differs",
    "tokenizer": "the tokenizer differs",
    "chat_template": "the chat template differs, or there were no chats",
    "special_text_is_plain": "the type of the tokenizer differs",
    "fingerprint": "--train_data_dir is another token dataset (or --prompts has other prompts)",
    "num_rows": "--train_data_dir or --prompts has a different number of rows",
    "rows_per_window": "the number of rows per optimizer step differs (keep it with --total_batch_size or "
    "--prompts_per_step)",
    "seed": "--seed differs",
    "version": "the version of the data order differs (2 is for --shares and several --train_data_dir, 3 for many "
    "rows)",
    "rows_per_epoch": "an epoch has a different number of rows per source (--shares, --token_shares)",
    "phases": "--phases differs in a phase that has begun",
}
"""What the user has changed if a field of the order differs, for messages."""
_CONSEQUENCES = {
    "fingerprint": ("num_rows", "version", "rows_per_epoch", "phases"),
    "rows_per_epoch": ("num_rows", "version", "phases"),
    "sources": ("shares", "files_of_places", "chat_template"),
    "shares": ("files_of_places",),
    "tokenizer": ("special_text_is_plain", "chat_template"),
}
"""Fields that change because another field has changed. They are not reported: one cause is one line."""


def describe_changes(saved: DataOrder | StreamOrder, current: DataOrder | StreamOrder, step: int) -> list[str]:
    """Return a line for each difference between the data order of a checkpoint and that of the resumed run.

    Args:
        saved: The order in the checkpoint.
        current: The order of the resumed run.
        step: The checkpoint's step. Phases that begin after it may differ.
    """
    saved_values = _values_until(saved, step)
    current_values = _values_until(current, step)
    if saved_values.keys() != current_values.keys():
        if isinstance(saved, StreamOrder):
            return ["its run read --streaming_dataset, not --train_data_dir"]
        return ["its run read --train_data_dir, not --streaming_dataset"]

    changed_names = [name for name, value in current_values.items() if value != saved_values[name]]
    consequences: set[str] = set()
    for name in changed_names:
        consequences.update(_CONSEQUENCES.get(name, ()))
    if _num_shares(saved_values) == _num_shares(current_values):
        # there are as many places as before, so the user has changed their shares, and they follow from nothing else
        consequences.discard("shares")

    lines = []
    for name in changed_names:
        if name not in consequences:
            difference = _describe_difference(saved_values[name], current_values[name])
            lines.append(f"{_MESSAGES[name]}: {difference}")
    return lines


def _values_until(order: DataOrder | StreamOrder, step: int) -> dict[str, Any]:
    """Return an order's fields by name, without phases that begin after ``step``."""
    if isinstance(order, DataOrder):
        order = order.with_phases_until(step)
    return asdict(order)


def _num_shares(values: dict[str, Any]) -> int | None:
    """Return how many places of a stream have shares; None if they have none."""
    shares = values.get("shares")
    return None if shares is None else len(shares)


def _describe_difference(saved: Any, current: Any) -> str:
    """Return two values of a field as text; for two lists, only the first elements that differ."""
    if isinstance(saved, list | tuple) and isinstance(current, list | tuple):
        for saved_element, current_element in zip_longest(saved, current, fillvalue="nothing"):
            if saved_element != current_element:
                return f"{_as_text(saved_element)} there, {_as_text(current_element)} here"
    return f"{_as_text(saved)} there, {_as_text(current)} here"


def _as_text(value: Any) -> str:
    if isinstance(value, dict):  # a PhaseRows
        return f"{value['rows_per_epoch']} from step {value['first_step']} on"
    return str(value)
