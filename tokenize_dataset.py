"""Program 1: documents → token dataset, for ``fabric run fabric_train``.

Its processes import this file anew when they start: what takes long to import is imported where it is used.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fabric_train.errors import run_program

if TYPE_CHECKING:
    from types import FrameType

    from arguments import TokenizeArguments
    from fabric_train.corpus.build import Outcome


def main(argv: list[str] | None = None) -> None:
    """Tokenize as the command line says and print what was done.

    Raises:
        InputError: what was given cannot be used; nothing has been written.
    """
    from arguments import TokenizeArguments, parse

    arguments = parse(TokenizeArguments, argv)

    from fabric_train.corpus.build import build_token_dataset

    with _terminated_as_interrupted():
        outcome = build_token_dataset(arguments)
    _print_summary(arguments, outcome)


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM end the work as Ctrl-C does, so that the unfinished folder is removed."""

    def interrupt(_number: int, _frame: "FrameType | None") -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _print_summary(arguments: "TokenizeArguments", outcome: "Outcome") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    ledger, tokenizer = outcome.manifest.ledger, outcome.manifest.tokenizer
    table = Table("split", *("documents", "characters", "tokens", "rows", "left over"), box=box.SIMPLE)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, split in ledger.splits.items():
        left_over = sum(split.tokens_dropped.values())
        counts = (split.documents, split.characters, split.tokens_in, split.rows, left_over)
        table.add_row(name, *(f"{count:,}" for count in counts))
    console.print(table)

    num_tokens = sum(split.tokens_in for split in ledger.splits.values())
    skipped = "".join(f", {count:,} {reason}" for reason, count in ledger.documents_skipped.items())
    begin = (
        f"begin with {tokenizer.bos_token}"
        if tokenizer.bos_token
        else "begin without BOS, which this tokenizer does not have,"
    )
    sources = ", ".join(source.name for source in outcome.manifest.sources)
    speed = num_tokens / outcome.encode_seconds
    lines = (
        f"sources    {sources}: {ledger.documents_read:,} documents{skipped}",
        f"tokenizer  {tokenizer.name}: {tokenizer.vocab_size:,} tokens; documents {begin} and end with "
        f"{tokenizer.eos_token}",
        f"speed      {speed:,.0f} tokens/s, {outcome.encode_seconds:.1f} s with {outcome.num_proc} processes",
        f"written    {arguments.output_dir}",
        f"next       fabric run fabric_train --devices N --train_data_dir {arguments.output_dir} --model_name MODEL "
        "--output_dir RUN",
    )
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    run_program(main)
