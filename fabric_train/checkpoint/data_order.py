"""What decides which rows a step consumes: it must be equal to resume a run."""

from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from fabric_train.checkpoint.validation_loss import Count

PositiveCount: TypeAlias = Annotated[int, Field(gt=0)]


@dataclass(frozen=True)
class PhaseRows:
    """From ``first_step`` on, an epoch has ``rows_per_epoch`` of each source of a mixture."""

    first_step: PositiveCount
    rows_per_epoch: tuple[Count, ...]


@dataclass(frozen=True)
class DataOrder:
    """The values that determine which rows a step consumes. They must be equal to resume a run.

    ``num_rows`` are those of an epoch. ``version`` is that of the order: 2 for a mixture, else 1, as in checkpoints
    that do not have it. ``rows_per_epoch`` are the rows of each source of a mixture. ``phases`` have others,
    from their first step to that of the next one; those that have not begun may change.
    """

    fingerprint: str
    num_rows: PositiveCount
    rows_per_window: PositiveCount
    seed: int
    version: PositiveCount = 1
    rows_per_epoch: list[Count] | None = None
    phases: tuple[PhaseRows, ...] = ()

    def begun(self, step: int) -> "DataOrder":
        """Return this order with the phases that have taken a step by ``step``: all that these rows depend on."""
        return replace(self, phases=tuple(phase for phase in self.phases if phase.first_step <= step))


@dataclass(frozen=True)
class StreamOrder:
    """The values that determine, with the cursors, which rows of a stream a step consumes.

    They must be equal to resume a run. ``shares`` is how much of each place a pass reads, None if it reads one place
    after the other; then ``files_of_places``, the files or splits of each place, is None too. ``seed`` is None if the
    order does not depend on it. ``chat_template`` is the SHA-256 of the template, None without chats.
    """

    sources: list[str]
    text_column: str
    max_length: int
    tokenizer: str
    special_text_is_plain: bool
    rows_per_window: PositiveCount
    shares: list[float] | None = None
    files_of_places: list[PositiveCount] | None = None
    shuffle_buffer: Count = 0
    seed: int | None = None
    chat_template: str | None = None


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
        "version": "the version of the order differs (2 is that of --shares and of several --train_data_dir)",
        "rows_per_epoch": "an epoch has other numbers of rows of each source (--shares, --token_shares)",
        "phases": "--phases differs in a phase that has begun",
    }
    return [
        f"{causes[name]}: {_difference(there[name], value)}" for name, value in here.items() if there[name] != value
    ]


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
