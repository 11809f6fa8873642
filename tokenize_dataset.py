# PYTHON_ARGCOMPLETE_OK
"""Turn documents into a token dataset for ``fabric run fabric_train``.

Modules that are slow to import are imported where they are used.
"""

import gc
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fabric_train.cli.errors import FAILURE, print_errors, run_program, set_memory_advice
from fabric_train.cli.fabric_command import command_from_here

if TYPE_CHECKING:
    from types import FrameType

    from fabric_train.tokenization.arguments import TokenizeArguments
    from fabric_train.tokenization.build import Outcome
    from fabric_train.tokenization.manifest import Manifest, SourceRecord
    from fabric_train.tokenization.shards import ShardSizes

_WIDTH_OF_FILES = 200  # columns of a table in redirected output, which rich would cut to 80


def main(argv: list[str] | None = None, sizes: "ShardSizes | None" = None) -> None:
    """Tokenize what the command line names, in shards of these ``sizes``, and print a summary.

    Raises:
        InputError: the input cannot be used; nothing has been written.
    """
    gc.disable()  # a tokenizer is a million objects, which the collector would visit many times while they are made
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads are not used here and get in the way of forks

    from fabric_train.cli.parser import parse_arguments
    from fabric_train.tokenization.arguments import TokenizeArguments

    set_memory_advice("use a smaller --num_proc, or tokenize some sources at a time and merge the results")
    arguments = parse_arguments(TokenizeArguments, argv)
    if arguments.push_to_hub and (finished := _check_publication(arguments)):
        print(f"{arguments.output_dir} has this token dataset already: it is only pushed")
        _publish(arguments, finished)
        return

    if arguments.shard is not None:
        _run_task(arguments, sizes)
        return

    from fabric_train.tokenization.tokenizers.parity_check import ParityCheck

    with _terminated_as_interrupted(), ParityCheck() as check:
        check.start_early(arguments.tokenizer_name)
        from fabric_train.tokenization.build import build_token_dataset
        from fabric_train.tokenization.shards import SIZES

        outcome = build_token_dataset(arguments, check, sizes or SIZES)
    _print_summary(arguments, outcome)
    if arguments.push_to_hub:
        _publish(arguments, outcome.manifest)


def _run_task(arguments: "TokenizeArguments", sizes: "ShardSizes | None") -> None:
    """Encode the slice of --shard or count its lines, unless that is done already, and print what follows."""
    from fabric_train.tokenization.shards import SIZES
    from fabric_train.tokenization.slice_folder import find_finished_slice
    from fabric_train.tokenization.slices import beside_slices, count_slice, encode_command, encode_slice, merge_command
    from fabric_train.tokenization.tokenizers.parity_check import ParityCheck

    if find_finished_slice(arguments):
        print(f"{arguments.output_dir} has slice {arguments.shard} already: nothing to do")
    else:
        with _terminated_as_interrupted(), ParityCheck() as check:
            if arguments.counts_lines:
                lines = count_slice(arguments, sizes or SIZES)
            else:
                check.start_early(arguments.tokenizer_name)
                lines = encode_slice(arguments, check, sizes or SIZES)
        print(*lines, f"written    {arguments.output_dir}", sep="\n")
    repeated = beside_slices(arguments, "lines")
    merge = merge_command(arguments, repeated if arguments.counts_lines else "DIR")
    print(f"next       when all slices are there: {merge}")
    if arguments.counts_lines:
        print(f"then       for this slice: {encode_command(arguments, repeated)}")


def _check_publication(arguments: "TokenizeArguments") -> "Manifest | None":
    """Check that the token dataset can be pushed; return its manifest if it is finished already."""
    from fabric_train.export.hub import PushRequest, check_push
    from fabric_train.tokenization.build import find_finished

    finished = find_finished(arguments)
    check_push(PushRequest.of(arguments, "dataset"))
    return finished


def _publish(arguments: "TokenizeArguments", manifest: "Manifest") -> None:
    """Push the token dataset with a card, and print its address."""
    from fabric_train.export.hub import PushError, PushRequest, push
    from fabric_train.export.public_dataset import public_copy

    request, folder = PushRequest.of(arguments, "dataset"), Path(arguments.output_dir).expanduser()
    try:
        with (
            _terminated_as_interrupted(),
            public_copy(folder, manifest, request.repository, arguments.license, arguments.card_language) as copy,
        ):
            url = push(folder, request, arguments.commit_message or "Token dataset made by Fabric Train", copy)
    except PushError as error:
        print_errors(f"error: {error}")
        sys.exit(FAILURE)
    print(f"pushed to  {url}")


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt as Ctrl-C does, so that unfinished files are removed."""

    def interrupt(_number: int, _frame: "FrameType | None") -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _print_summary(arguments: "TokenizeArguments", outcome: "Outcome") -> None:
    from rich import box
    from rich.table import Table

    from fabric_train.cli.output import open_console

    console = open_console(width=None if sys.stdout.isatty() else _WIDTH_OF_FILES)
    ledger, tokenizer = outcome.manifest.ledger, outcome.manifest.tokenizer
    columns = ("documents", "tokens", "rows", "supervised", "padding", "left over")
    table = Table("split", *columns, box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, split in ledger.splits.items():
        share = f"{split.tokens_padding / max(1, split.tokens_in_rows + split.tokens_padding):.1%}"
        left_over = f"{sum(split.tokens_dropped.values()):,}"
        counts = (split.documents, split.tokens_in, split.rows, split.tokens_supervised)
        table.add_row(name, *(f"{count:,}" for count in counts), share, left_over)
    console.print(table)

    num_tokens = sum(split.tokens_in for split in ledger.splits.values())
    begin = (
        f"begin with {tokenizer.bos_token}"
        if tokenizer.bos_token
        else "begin without BOS, which this tokenizer does not have,"
    )
    speed = num_tokens / outcome.encode_seconds
    lines = (
        f"read       {ledger.documents_read:,} documents{_parts(ledger.documents_skipped, 'left out')}"
        + _parts(ledger.edits, "changed")
        + "".join(f"; {count:,} share words with {task}" for task, count in ledger.contaminated.items())
        + _parts(ledger.tokens_cut, "tokens cut off"),
        *(
            f"pairs      {name}: {one.pairs.describe(one.documents)}"
            for name, one in ledger.splits.items()
            if one.pairs
        ),
        *(f"source     {_describe(source, len(outcome.manifest.sources))}" for source in outcome.manifest.sources),
        f"tokenizer  {tokenizer.name}: {tokenizer.vocab_size:,} tokens; documents {begin} and end with "
        f"{tokenizer.eos_token}",
        f"speed      {speed:,.0f} tokens/s, {outcome.encode_seconds:.1f} s with {outcome.num_proc} processes and "
        + tokenizer.encoder.split(":")[0],
        *(f"note       {note}" for note in outcome.notes),
        *(f"warning    {loss}" for loss in outcome.manifest.losses()),
        f"written    {arguments.output_dir}",
        f"next       {command_from_here('train')} --devices N --train_data_dir {shlex.quote(arguments.output_dir)} "
        f"--model_name MODEL{' --objective dpo' if outcome.manifest.has_pairs else ''} --output_dir RUN",
    )
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _parts(counts: dict[str, int], what: str) -> str:
    listed = ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in counts.items())
    return f"; {what}: {listed}" if listed else ""


def _describe(source: "SourceRecord", num_sources: int) -> str:
    line = f"{source.name}: {source.documents:,} documents, {source.tokens:,} tokens"
    line += _parts(source.documents_skipped or {}, "left out") if num_sources > 1 else ""
    if source.share_asked is None:
        return line
    return (
        f"{line}, weight {source.weight:g}: {source.train_tokens:,} tokens in train, {source.share_reached:.2%} of all "
        f"({source.share_asked:.2%} asked), {source.epochs:.2f} epochs"
    )


if __name__ == "__main__":
    run_program(main)
