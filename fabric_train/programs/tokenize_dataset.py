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

from fabric_train.cli.commands import command_from_here
from fabric_train.cli.errors import InputError, program, run_program, terminated_as_interrupted

if TYPE_CHECKING:
    from fabric_train.token_dataset.manifest import Manifest, SourceRecord
    from fabric_train.tokenization.arguments import TokenizeArguments
    from fabric_train.tokenization.build import Outcome
    from fabric_train.tokenization.shards import ShardSizes

_MEMORY_ADVICE = "use a smaller --num_proc, or tokenize the sources in several runs and merge the results"
_WIDTH_OF_FILES = 200  # columns of a table in redirected output, which rich would cut to 80


def main(argv: list[str] | None = None, sizes: "ShardSizes | None" = None) -> None:
    """Tokenize the documents that the command line names, in shards of these ``sizes``, and print a summary.

    Raises:
        InputError: the input cannot be used; nothing has been written.
        RunError: the push failed; the token dataset is complete.
    """
    gc.disable()  # a tokenizer has a million objects, and the collector would visit them many times during loading
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads are not used here, and are unsafe with fork

    from fabric_train.cli.parser import parse_arguments
    from fabric_train.tokenization.arguments import TokenizeArguments

    arguments = parse_arguments(TokenizeArguments, argv)
    manifest = find_finished_to_push(arguments)

    # One machine of several only writes its slice.
    if arguments.shard is not None:
        summary_lines = build_slice(arguments, sizes)
        _print_slice(arguments, summary_lines)
        return

    if manifest:
        print(f"{arguments.output_dir} already has this token dataset; only pushing it")
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

    program.memory_advice = _MEMORY_ADVICE
    with terminated_as_interrupted(), ParityCheck() as check:
        check.start_early(arguments.tokenizer_name)
        from fabric_train.tokenization.build import build_token_dataset
        from fabric_train.tokenization.shards import SIZES

        return build_token_dataset(arguments, check, sizes or SIZES)


def build_slice(arguments: "TokenizeArguments", sizes: "ShardSizes | None" = None) -> list[str] | None:
    """Encode the slice of --shard, or count its lines; return a summary, or None if the slice was finished already."""
    from fabric_train.tokenization.shards import SIZES
    from fabric_train.tokenization.slice_folder import find_finished_slice
    from fabric_train.tokenization.slices import count_slice, encode_slice
    from fabric_train.tokenization.tokenizers.parity_check import ParityCheck

    program.memory_advice = _MEMORY_ADVICE
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
        print(f"{arguments.output_dir} already has slice {arguments.shard}; nothing to do")
    else:
        print(*lines, f"written    {arguments.output_dir}", sep="\n")
    if not arguments.counts_lines:
        print(f"next       when all slices are done: {merge_command(arguments, 'DIR')}")
        return
    # Lines that repeat across slices are known once all slices are counted, and are then left out of the encoding.
    lines_dir = beside_slices(arguments, "lines")
    print(f"next       when all slices are done: {merge_command(arguments, lines_dir)}")
    print(f"then       for this slice: {encode_command(arguments, lines_dir)}")


def find_finished_to_push(arguments: "TokenizeArguments") -> "Manifest | None":
    """Check that the token dataset can be pushed, if --push_to_hub asks for it.

    Returns:
        The manifest of a finished token dataset, which only has to be pushed; None if it must be written first, or is
        not to be pushed.
    """
    if not arguments.push_to_hub:
        return None

    from fabric_train.export.hub import PushRequest, check_push
    from fabric_train.tokenization.build import find_finished

    finished = find_finished(arguments)
    check_push(PushRequest.from_arguments(arguments, "dataset"))
    return finished


@contextmanager
def written_documents(documents: Iterable[Mapping[str, Any]], file: Path, output_dir: str) -> Iterator[None]:
    """Write documents as JSON lines for ``--dataset``; if the block raises, remove the file.

    Raises:
        InputError: the file or ``output_dir`` exists, and nothing has been written; or a document is not a mapping that
            JSON can hold.
    """
    from fabric_train.files.atomic_folder import check_not_taken

    check_not_taken(Path(output_dir).expanduser())
    if os.path.lexists(file):
        raise InputError(f"--dataset: cannot write the documents to {file}, which exists already; remove or rename it")
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with file.open("x", encoding="utf-8", newline="\n") as lines:
            for document_number, document in enumerate(documents, 1):
                try:
                    lines.write(json.dumps(dict(document), ensure_ascii=False) + "\n")
                except (TypeError, ValueError) as error:  # no mapping, no JSON, or a text with a lone surrogate
                    expected = "expected a mapping such as {'text': ...}"
                    raise InputError(f"--dataset: document {document_number}: {expected}; {error}") from error
        yield
    except BaseException:
        if not Path(output_dir).expanduser().is_dir():  # if it exists, only the push has failed, and the file is needed
            file.unlink()
        raise


def _describe_unvalidated_sources(manifest: "Manifest") -> list[str]:
    """Return a line for each source that has no document in a validation split which is not empty."""
    splits = manifest.ledger.splits
    if "validation" not in splits or not splits["validation"].sources:
        return []
    validation_sources = splits["validation"].sources
    lines = []
    for name in splits["train"].sources:
        if name not in validation_sources or not validation_sources[name].documents:
            lines.append(
                f"{name} has no documents in validation/, so runs cannot measure its loss; give a larger "
                "--validation_split, or --validation_dataset"
            )
    return lines


def _print_summary(arguments: "TokenizeArguments", outcome: "Outcome") -> None:
    """Print a table of the splits, lines about documents, tokenizer and speed, and the command for training."""
    from rich import box
    from rich.table import Table

    from fabric_train.cli.output import open_console

    # the table
    console = open_console(width=None if sys.stdout.isatty() else _WIDTH_OF_FILES)
    ledger = outcome.manifest.ledger
    columns = ("documents", "tokens", "rows", "supervised", "padding", "left over")
    table = Table("split", *columns, box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, split in ledger.splits.items():
        num_positions = split.tokens_in_rows + split.tokens_padding
        table.add_row(
            name,
            f"{split.documents:,}",
            f"{split.tokens_in:,}",
            f"{split.rows:,}",
            f"{split.tokens_supervised:,}",
            f"{split.tokens_padding / max(1, num_positions):.1%}",
            f"{sum(split.tokens_dropped.values()):,}",
        )
    console.print(table)

    for line in _summary_lines(arguments, outcome):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _summary_lines(arguments: "TokenizeArguments", outcome: "Outcome") -> list[str]:
    manifest = outcome.manifest
    ledger = manifest.ledger

    # documents, pairs and sources
    documents = f"{ledger.documents_read:,} documents{_list_counts(ledger.documents_skipped, 'left out')}"
    documents += _list_counts(ledger.edits, "changed")
    for task, count in ledger.contaminated.items():
        documents += f"; {count:,} share words with {task}"
    documents += _list_counts(ledger.tokens_cut, "tokens cut off")
    lines = [f"read       {documents}"]
    for name, split in ledger.splits.items():
        if split.pairs:
            lines.append(f"pairs      {name}: {split.pairs.describe(split.documents)}")
        if split.unpaired:
            lines.append(f"answers    {name}: {split.unpaired.describe()}")
    for source in manifest.sources:
        lines.append(f"source     {_describe_source(source, len(manifest.sources))}")

    # tokenizer and speed
    tokenizer = manifest.tokenizer
    if tokenizer.bos_token:
        beginning = f"begin with {tokenizer.bos_token}"
    else:
        beginning = "begin without BOS (this tokenizer has none)"
    lines.append(
        f"tokenizer  {tokenizer.name}: {tokenizer.vocab_size:,} tokens; documents {beginning} and end with "
        f"{tokenizer.eos_token}"
    )
    num_tokens = sum(split.tokens_in for split in ledger.splits.values())
    tokens_per_second = num_tokens / outcome.encode_seconds
    encoder = tokenizer.encoder.split(":")[0]
    lines.append(
        f"speed      {tokens_per_second:,.0f} tokens/s, {outcome.encode_seconds:.1f} s with {outcome.num_proc} "
        f"processes and {encoder}"
    )

    # what to know, and what to do next
    lines += [f"note       {note}" for note in (*outcome.notes, *_describe_unvalidated_sources(manifest))]
    lines += [f"warning    {loss}" for loss in manifest.losses()]
    lines.append(f"written    {arguments.output_dir}")
    objective = f" --objective {manifest.objective}" if manifest.objective else ""
    lines.append(
        f"next       {command_from_here('train')} --devices N --train_data_dir {shlex.quote(arguments.output_dir)} "
        f"--model_name MODEL{objective} --output_dir RUN"
    )
    return lines


def _list_counts(counts: dict[str, int], title: str) -> str:
    """Return counts by reason as a clause such as "; left out: 2 too short, 1 empty"; empty without counts."""
    if not counts:
        return ""
    texts = [f"{count:,} {reason.replace('_', ' ')}" for reason, count in counts.items()]
    return f"; {title}: {', '.join(texts)}"


def _describe_source(source: "SourceRecord", num_sources: int) -> str:
    line = f"{source.name}: {source.documents:,} documents, {source.tokens:,} tokens"
    if num_sources > 1:  # for a single source they would repeat the numbers of all documents
        line += _list_counts(source.documents_skipped or {}, "left out")
    if source.share_asked is None:
        return line
    return (
        f"{line}, weight {source.weight:g}: {source.train_tokens:,} tokens in train, {source.share_reached:.2%} of all "
        f"({source.share_asked:.2%} asked), {source.epochs:.2f} epochs"
    )


if __name__ == "__main__":
    run_program(main)
