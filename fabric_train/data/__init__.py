"""Token datasets and streams: read rows and make the micro-batches of each optimizer step.

Open ``step_sampler.py`` first: it defines the order of the rows and how they are split among ranks. ``batch.py`` makes
the input of one forward pass. ``stream_batches.py`` does the same for ``--streaming_dataset``.
"""

from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from typing import Any

from pydantic import NonNegativeInt, PositiveInt

SHUFFLED = 1
KEYED = 3
"""Versions of the order of one token dataset: numpy's permutation of all rows, and one that is computed by index."""
MOST_SHUFFLED = 1 << 22
"""Rows in memory as one permutation: 16 MiB."""


@dataclass(frozen=True)
class PhaseRows:
    """From ``first_step`` on, an epoch has ``rows_per_epoch`` of each source of a mixture."""

    first_step: PositiveInt
    rows_per_epoch: tuple[NonNegativeInt, ...]


@dataclass(frozen=True)
class DataOrder:
    """The values that determine which rows a step consumes. They must be equal to resume a run.

    ``num_rows`` are an epoch's. ``version`` is 2 for a mixture, 3 for one token dataset of more than ``MOST_SHUFFLED``
    rows, else 1; a run that has begun keeps its version. ``rows_per_epoch`` are the rows of each source of a mixture.
    ``phases`` have others, from their first step to the next phase's; later ones may change.
    """

    fingerprint: str
    num_rows: PositiveInt
    rows_per_window: PositiveInt
    seed: int
    version: PositiveInt = 1
    rows_per_epoch: list[NonNegativeInt] | None = None
    phases: tuple[PhaseRows, ...] = ()

    @classmethod
    def of_one(
        cls, fingerprint: str, num_rows: int, rows_per_window: int, seed: int, saved: object = None
    ) -> "DataOrder":
        """Return the order of one token dataset, for a run whose checkpoint has the order ``saved``."""
        version = SHUFFLED if num_rows <= MOST_SHUFFLED else KEYED
        if isinstance(saved, DataOrder) and saved.fingerprint == fingerprint and saved.version in (SHUFFLED, KEYED):
            version = saved.version
        return cls(fingerprint, num_rows, rows_per_window, seed, version)

    def begun(self, step: int) -> "DataOrder":
        """Return this order with the phases that have taken a step by ``step``."""
        return replace(self, phases=tuple(phase for phase in self.phases if phase.first_step <= step))


@dataclass(frozen=True)
class StreamOrder:
    """The values that determine, with the cursors, which rows of a stream a step consumes; a resumed run has the same.

    ``shares`` is how much of each place a pass reads, None if it reads one place after the other; then
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


_FOLLOWS_FROM = {
    "fingerprint": ("num_rows", "version", "rows_per_epoch", "phases"),
    "rows_per_epoch": ("num_rows", "version", "phases"),
    "sources": ("shares", "files_of_places", "chat_template"),
    "shares": ("files_of_places",),
    "tokenizer": ("special_text_is_plain", "chat_template"),
}
"""What changes too if the data, their mixture or the tokenizer are others: one cause is one line."""


def describe_changes(saved: DataOrder | StreamOrder, current: DataOrder | StreamOrder, step: int) -> list[str]:
    """Return each difference between the data order of a checkpoint and another one, up to the checkpoint's step."""
    there, here = (asdict(order.begun(step) if isinstance(order, DataOrder) else order) for order in (saved, current))
    if there.keys() != here.keys():
        options = ("--streaming_dataset", "--train_data_dir")
        saved_option, current_option = options if "sources" in there else reversed(options)
        return [f"its run read {saved_option}, not {current_option}"]
    causes = {
        "sources": "--streaming_dataset reads other files, or they have changed",
        "text_column": "--text_column differs",
        "shares": "--shares differ",
        "shuffle_buffer": "--shuffle_buffer differs",
        "files_of_places": "--streaming_dataset has other numbers of files in its places",
        "max_length": "--max_length differs",
        "tokenizer": "the tokenizer differs",
        "chat_template": "the chat template differs, or there were no chats",
        "special_text_is_plain": "the kind of the tokenizer differs",
        "fingerprint": "--train_data_dir is another token dataset",
        "num_rows": "--train_data_dir has another number of rows",
        "rows_per_window": "the rows of one optimizer step differ (--total_batch_size keeps them)",
        "seed": "--seed differs",
        "version": "the version of the order differs (2 is for --shares and several --train_data_dir, 3 for many rows)",
        "rows_per_epoch": "an epoch has other numbers of rows of each source (--shares, --token_shares)",
        "phases": "--phases differs in a phase that has begun",
    }
    changed = [name for name, now in here.items() if now != there[name]]
    follows = {consequence for name in changed for consequence in _FOLLOWS_FROM.get(name, ())}
    if _num_shares(there) == _num_shares(here):
        follows.discard("shares")  # as many places as before: somebody has changed their shares
    return [f"{causes[name]}: {_difference(there[name], here[name])}" for name in changed if name not in follows]


def _num_shares(order: dict[str, Any]) -> int | None:
    """Return how many places of a stream have shares; None if they have none."""
    shares = order.get("shares")
    return None if shares is None else len(shares)


def _difference(saved: Any, current: Any) -> str:
    """Return both values as text; for lists, the first elements that differ."""
    if isinstance(saved, list | tuple) and isinstance(current, list | tuple):
        saved, current = next(pair for pair in zip_longest(saved, current, fillvalue="nothing") if pair[0] != pair[1])
    if isinstance(saved, dict) or isinstance(current, dict):
        saved, current = (
            f"{each['rows_per_epoch']} from step {each['first_step']} on" if isinstance(each, dict) else each
            for each in (saved, current)
        )
    return f"{saved} there, {current} here"
