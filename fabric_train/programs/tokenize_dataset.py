# PYTHON_ARGCOMPLETE_OK
"""Turn documents into a token dataset for ``fabric run fabric_train``.

Modules that are slow to import are imported where they are used.
"""

import gc
import json
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabric_train.cli.errors import InputError, run_program, set_memory_advice, terminated_as_interrupted
from fabric_train.cli.fabric_command import command_from_here

if TYPE_CHECKING:
    from fabric_train.token_dataset.manifest import Manifest, SourceRecord
    from fabric_train.tokenization.arguments import TokenizeArguments
    from fabric_train.tokenization.build import Outcome
    from fabric_train.tokenization.shards import ShardSizes

_MEMORY_ADVICE = "use a smaller --num_proc, or tokenize some sources at a time and merge the results"
_WIDTH_OF_FILES = 200  # columns of a table in redirected output, which rich would cut to 80


def main(argv: list[str] | None = None, sizes: "ShardSizes | None" = None) -> None:
    """Tokenize what the command line names, in shards of these ``sizes``, and print a summary.

    Raises:
        InputError: the input cannot be used; nothing has been written.
        RunError: the push failed; the token dataset is complete.
    """
    gc.disable()  # a tokenizer is a million objects, which the collector would visit many times while they are made
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads are not used here and get in the way of forks

    from fabric_train.cli.parser import parse_arguments
    from fabric_train.tokenization.arguments import TokenizeArguments

    arguments = parse_arguments(TokenizeArguments, argv)
    manifest = find_pushed(arguments)
    if arguments.shard is not None:
        _print_slice(arguments, build_slice(arguments, sizes))
        return
    if manifest:
        print(f"{arguments.output_dir} has this token dataset already: it is only pushed")
    else:
        outcome = build_dataset(arguments, sizes)
        manifest = outcome.manifest
        _print_summary(arguments, outcome)
    if arguments.push_to_hub:
        from fabric_train.export.publish import publish

        print(f"pushed to  {publish(arguments, Path(arguments.output_dir).expanduser(), manifest)}")


def build_dataset(arguments: "TokenizeArguments", sizes: "ShardSizes | None" = None) -> "Outcome":
    """Write the token dataset that ``arguments`` describe, in shards of these ``sizes``."""
    from fabric_train.tokenization.tokenizers.parity_check import ParityCheck

    set_memory_advice(_MEMORY_ADVICE)
    with terminated_as_interrupted(), ParityCheck() as check:
        check.start_early(arguments.tokenizer_name)
        from fabric_train.tokenization.build import build_token_dataset
        from fabric_train.tokenization.shards import SIZES

        return build_token_dataset(arguments, check, sizes or SIZES)


def build_slice(arguments: "TokenizeArguments", sizes: "ShardSizes | None" = None) -> list[str] | None:
    """Encode the slice of --shard or count its lines; return lines of a summary, or None if that is done already."""
    from fabric_train.tokenization.shards import SIZES
    from fabric_train.tokenization.slice_folder import find_finished_slice
    from fabric_train.tokenization.slices import count_slice, encode_slice
    from fabric_train.tokenization.tokenizers.parity_check import ParityCheck

    set_memory_advice(_MEMORY_ADVICE)
    if find_finished_slice(arguments):
        return None
    with terminated_as_interrupted(), ParityCheck() as check:
        if arguments.counts_lines:
            return count_slice(arguments, sizes or SIZES)
        check.start_early(arguments.tokenizer_name)
        return encode_slice(arguments, check, sizes or SIZES)


def _print_slice(arguments: "TokenizeArguments", lines: "list[str] | None") -> None:
    from fabric_train.tokenization.slices import beside_slices, encode_command, merge_command

    if lines is None:
        print(f"{arguments.output_dir} has slice {arguments.shard} already: nothing to do")
    else:
        print(*lines, f"written    {arguments.output_dir}", sep="\n")
    repeated = beside_slices(arguments, "lines")
    merge = merge_command(arguments, repeated if arguments.counts_lines else "DIR")
    print(f"next       when all slices are there: {merge}")
    if arguments.counts_lines:
        print(f"then       for this slice: {encode_command(arguments, repeated)}")


def find_pushed(arguments: "TokenizeArguments") -> "Manifest | None":
    """Check that the token dataset can be pushed, if it is to be; return its manifest if it is finished already."""
    if not arguments.push_to_hub:
        return None

    from fabric_train.export.hub import PushRequest, check_push
    from fabric_train.tokenization.build import find_finished

    finished = find_finished(arguments)
    check_push(PushRequest.from_arguments(arguments, "dataset"))
    return finished


@contextmanager
def written_documents(documents: Iterable[Mapping[str, Any]], file: Path, output_dir: str) -> Iterator[None]:
    """Write documents as JSON lines for ``--dataset``; remove the file if the work on it fails.

    An InputError before anything is written if the file or ``output_dir`` exists, and at a document that is no mapping
    of JSON.
    """
    from fabric_train.files.atomic_folder import check_not_taken

    check_not_taken(Path(output_dir).expanduser())
    if os.path.lexists(file):
        raise InputError(f"--dataset: {file}, to which the documents are written, exists; remove it or rename it")
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with file.open("x", encoding="utf-8", newline="\n") as lines:
            for number, document in enumerate(documents, 1):
                try:
                    lines.write(json.dumps(dict(document), ensure_ascii=False) + "\n")
                except (TypeError, ValueError) as error:  # no mapping, no JSON, or text that is no Unicode
                    expected = "expected a mapping such as {'text': ...}"
                    raise InputError(f"--dataset: document {number}: {expected}; {error}") from error
        yield
    except BaseException:
        if not Path(output_dir).expanduser().is_dir():  # it has the token dataset if only the push has failed
            file.unlink()
        raise


def _unvalidated(manifest: "Manifest") -> list[str]:
    """Return a line for each source without a document in ``validation/``, if another one has some."""
    splits = manifest.ledger.splits
    held_out = splits["validation"].sources if "validation" in splits else {}
    return [
        f"{name} has no document in validation/, so a run does not see its loss; give a larger --validation_split, or "
        "--validation_dataset"
        for name in splits["train"].sources
        if held_out and not (name in held_out and held_out[name].documents)
    ]


def _print_summary(arguments: "TokenizeArguments", outcome: "Outcome") -> None:
    from rich import box
    from rich.table import Table

    from fabric_train.cli.output import open_console

    console = open_console(width=None if sys.stdout.isatty() else _WIDTH_OF_FILES)
    ledger = outcome.manifest.ledger
    tokenizer = outcome.manifest.tokenizer
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
        *(f"note       {note}" for note in (*outcome.notes, *_unvalidated(outcome.manifest))),
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
