"""Count lines for --boilerplate in slices of the input (``--shard I/N``), and add all slices up."""

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, compress
from pathlib import Path
from typing import TYPE_CHECKING

from fabric_train.files.atomic_folder import check_not_taken, complete_folder
from fabric_train.tokenization.all_slices import check_settings, check_unchanged, folders_of_shards, open_input
from fabric_train.tokenization.cleaning.boilerplate import Boilerplate
from fabric_train.tokenization.cleaning.line_counts import (
    add_up_lines,
    count_lines,
    counting_settings,
    lines_file,
    split_to_count,
)
from fabric_train.tokenization.cleaning.repeated_lines import write_repeated_lines
from fabric_train.tokenization.opened_corpus import open_corpus
from fabric_train.tokenization.slice_folder import (
    InputFile,
    Slice,
    SliceRecord,
    link_shards,
    part_of,
    states_of,
    write_slice,
)
from fabric_train.tokenization.unfinished import DOWNLOADS, unfinished_folder

if TYPE_CHECKING:
    from arguments import TokenizeArguments


@dataclass(frozen=True)
class CountOutcome:
    """What a task has done: shards, bytes of the input, processes that may work, seconds."""

    num_shards: int
    num_bytes: int
    num_proc: int
    seconds: float


def count_slice(arguments: "TokenizeArguments") -> CountOutcome:
    """Count the lines of the slice --shard of the input into --output_dir. The folder is complete or absent.

    Raises:
        InputError: a source, the tokenizer or the output folder cannot be used, or a row is bad and not skipped.
    """
    target, part = Path(arguments.output_dir).expanduser(), part_of(arguments)
    check_not_taken(target)
    with unfinished_folder(target) as unfinished, complete_folder(target) as folder:
        corpus = open_corpus(arguments, folder / "tokenizer", unfinished / DOWNLOADS)
        shutil.rmtree(folder / "tokenizer")  # of no use here, but a wrong one is found before the lines are counted
        all_shards = split_to_count(corpus)
        shards = list(compress(all_shards, part.of([shard.num_bytes for shard in all_shards])))
        started = time.monotonic()
        count_lines(corpus, shards, unfinished)
        states = list(chain.from_iterable(states_of(corpus.sources)))
        own = compress(states, part.of([size for _, _, size, *_ in states]))
        files, written = [InputFile(state, None) for state in own], link_shards(shards, unfinished, folder)
        write_slice(folder, arguments, SliceRecord("", counting_settings(corpus), files, written, os.getcwd()))
    num_bytes = sum(shard.num_bytes for shard in shards)
    return CountOutcome(len(shards), num_bytes, corpus.num_proc, time.monotonic() - started)


def merge_counts(slices: Sequence[Slice], target: Path) -> Boilerplate:
    """Add up all counted slices and write the lines that repeat into ``target``, which is complete or absent.

    Args:
        slices: all slices of a run, in their order.
        target: the folder to write; see ``repeated_lines``.

    Raises:
        InputError: the input has changed since the slices were made, or cannot be read.
    """
    with complete_folder(target) as folder:
        corpus = open_input(slices, folder)
        shutil.rmtree(folder / "tokenizer")
        check_settings(slices, counting_settings(corpus))
        shards, folders = split_to_count(corpus), folders_of_shards(slices)
        lost = [shard.index for shard in shards if shard.key not in folders]
        check_unchanged(slices, corpus, shards, lost)
        assert corpus.cleaner is not None, "--boilerplate is a cleaning step"
        lines = add_up_lines(corpus, shards, [lines_file(folders[shard.key], shard) for shard in shards])
        lines = lines.redacted(corpus.cleaner.redact)
        write_repeated_lines(folder, lines, corpus.arguments.text_column)
    return lines
