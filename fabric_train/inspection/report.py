"""Check a token dataset: read all rows of its splits once, count them, and compare them with the manifest."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fabric_train.cleaning.dropped import DROPPED_FILE, SampledDrop, read_sample
from fabric_train.cli.errors import InputError
from fabric_train.inspection.row_view import (
    Expectation,
    RowView,
    content_ends,
    view_rows,
    with_continuations,
    with_origins,
)
from fabric_train.inspection.split_check import Counts, IndexCheck, Problem, SplitCheck
from fabric_train.token_dataset.document_index import DocumentIndex, open_index
from fabric_train.token_dataset.manifest import Manifest, Settings, load_manifest
from fabric_train.token_dataset.token_folder import Split, open_splits
from fabric_train.tokenization.tokenizers.vocabulary import Vocabulary, load_vocabulary

_SPLIT_NAMES = {"train": ("train",), "validation": ("validation", "valid")}  # older folders have valid
_COMPARED = {
    "preference pairs": ("chosen", "rejected"),
    "unpaired answers": ("answer", "another row's answer"),
}
"""The names of the two answers of a document, by the kind of documents."""


@dataclass(frozen=True)
class DatasetReport:
    """The content of a token dataset, and what is wrong with it."""

    folder: Path
    manifest: Manifest | None  # None for an older folder
    counts: dict[str, Counts]  # by split
    problems: list[Problem]
    split: str  # the split that is shown
    rows: list[RowView]  # some rows of the split that is shown
    dropped: dict[str, list[SampledDrop]]  # some documents that cleaning dropped, by reason


def make_report(folder: Path, split_name: str, rows: range, advance: Callable[[int, int], None]) -> DatasetReport:
    """Read and check all splits of a token dataset.

    Args:
        folder: the token dataset.
        split_name: the split that is shown, "train" or "validation".
        rows: the rows of that split that are shown, numbered from 0.
        advance: called with the number of rows read so far, and the number of all rows.

    Raises:
        InputError: the folder cannot be read, or has no such split or rows.
    """
    splits = open_splits(folder)
    shown_split = choose_split(folder, splits, split_name)
    if rows and rows.start >= shown_split.num_rows:
        available_rows = f"{shown_split.name} has {shown_split.num_rows:,} rows, numbered from 0"
        raise InputError(f"--start {rows.start}: {available_rows}")
    manifest = load_manifest(folder)
    vocabulary = load_vocabulary(folder / "tokenizer")

    # the files next to the rows
    num_skipped = manifest.ledger.documents_skipped if manifest else {}
    dropped, sample_faults = read_sample(folder, num_skipped)
    problems = [Problem(DROPPED_FILE, fault) for fault in sample_faults]
    if manifest is not None:
        problems += _check_tokenizer_files(folder, manifest)

    # the rows
    num_rows = sum(split.num_rows for split in splits.values())
    num_rows_read = 0

    def advance_by(num_rows_of_batch: int) -> None:
        nonlocal num_rows_read
        num_rows_read += num_rows_of_batch
        advance(num_rows_read, num_rows)

    counts: dict[str, Counts] = {}
    views: list[RowView] = []
    for name, split in splits.items():
        viewed_rows = rows if name == shown_split.name else range(0)
        checked_split = _check_split(
            split, folder, manifest, vocabulary, viewed_rows=viewed_rows, advance_by=advance_by
        )
        counts[name] = checked_split.counts
        problems += checked_split.problems
        views += checked_split.views

    if manifest is not None:
        problems += _check_ledger(manifest, counts)
        problems += [Problem("chats", loss) for loss in manifest.losses()]
    return DatasetReport(
        folder, manifest, counts, problems=problems, split=shown_split.name, rows=views, dropped=dropped
    )


def choose_split(folder: Path, splits: Mapping[str, Split], split_name: str) -> Split:
    """Return the split "train" or "validation" (in older folders, "valid"); InputError if there is none."""
    for name in _SPLIT_NAMES[split_name]:
        if name in splits:
            return splits[name]
    raise InputError(f"{folder}: no {split_name} split, only {', '.join(splits)}; give --split")


@dataclass(frozen=True)
class _CheckedSplit:
    counts: Counts
    problems: list[Problem]
    views: list[RowView]


def _check_split(
    split: Split,
    folder: Path,
    manifest: Manifest | None,
    vocabulary: Vocabulary | None,
    viewed_rows: range,
    advance_by: Callable[[int], None],
) -> _CheckedSplit:
    """Read all rows of a split: count and check them, compare them with the document index, and view some.

    Args:
        split: the split.
        folder: the token dataset.
        manifest: its manifest; None for an older folder.
        vocabulary: its tokenizer; None if unknown.
        viewed_rows: the rows to view.
        advance_by: called with the number of rows that were just read.
    """
    expectations = _expectations_by_first_row(split.name, manifest, vocabulary)
    check = SplitCheck(split.name, expectations[0])
    index, problems = _open_index(folder, manifest, split.name)
    index_check = None
    if manifest is not None and index is not None:
        index_check = IndexCheck(split.name, index, sequences_per_document=manifest.sequences_per_document)

    # the row after those viewed says whether a document continues in it
    rows_to_read = range(viewed_rows.start, viewed_rows.stop + 1) if viewed_rows else viewed_rows
    views: list[RowView] = []
    for batch in split.batches():
        if batch.first_row in expectations:  # a file, and so a batch, belongs to one part of a merged dataset
            check.begin_part(expectations[batch.first_row])
        check.add(batch)
        if index_check is not None:
            index_check.add(batch, content_ends(batch, check.expected))
        views += view_rows(batch, rows_to_read, vocabulary, check.expected)
        advance_by(len(batch.offsets) - 1)

    counts, split_problems = check.finish()
    problems += split_problems
    if manifest is not None and index_check is not None:
        problems += index_check.finish(manifest.ledger.splits[split.name])
    views = with_origins(with_continuations(views, viewed_rows), index)
    return _CheckedSplit(counts, problems, views)


def _open_index(folder: Path, manifest: Manifest | None, split: str) -> tuple[DocumentIndex | None, list[Problem]]:
    """Return the document index of a split, or None and why it cannot be used."""
    if manifest is None:
        return None, []
    try:
        return open_index(folder, manifest, split), []
    except InputError as error:
        return None, [Problem(split, fault) for fault in error.faults]


def _check_tokenizer_files(folder: Path, manifest: Manifest) -> list[Problem]:
    """Compare the tokenizer's files with their hashes in the manifest."""
    problems = []
    for name, sha256 in manifest.tokenizer.sha256.items():
        file = folder / "tokenizer" / name
        if not file.is_file():
            problems.append(Problem("tokenizer", f"{name} is missing"))
        elif hashlib.sha256(file.read_bytes()).hexdigest() != sha256:
            problems.append(Problem("tokenizer", f"{name} differs from the file in the manifest"))
    return problems


def _check_ledger(manifest: Manifest, counts_by_split: dict[str, Counts]) -> list[Problem]:
    """Check the ledger's sums, and compare it with the counts."""
    splits = manifest.ledger.splits
    # the manifest alone
    problems = [Problem("manifest", f"the ledger does not balance: {imbalance}") for imbalance in manifest.imbalances()]
    # splits that only one of both has
    for name in sorted({*splits} ^ {*counts_by_split}):
        where = "not in the manifest" if name in counts_by_split else "only in the manifest"
        problems.append(Problem(name, f"the split is {where}"))
    # the counts of each split
    for name, counts in counts_by_split.items():
        if name not in splits:
            continue
        ledger = splits[name]
        compared_counts = [
            ("rows", ledger.rows, counts.rows),
            ("tokens in rows", ledger.tokens_in_rows, counts.tokens),
            ("tokens of padding", ledger.tokens_padding, counts.padding),
            ("supervised tokens", ledger.tokens_supervised, counts.supervised),
        ]
        for unit, in_ledger, in_rows in compared_counts:
            if in_ledger != in_rows:
                text = f"the ledger has {in_ledger:,} {unit}, but the rows have {in_rows:,}"
                problems.append(Problem(name, text))
        # pieces may belong to one document, and the two sequences of a pair count as two documents here
        num_documents = (counts.documents or 0) - counts.pieces
        if num_documents > ledger.documents * manifest.sequences_per_document:
            text = f"the ledger has {ledger.documents:,} documents, but {num_documents:,} begin in the rows"
            problems.append(Problem(name, text))
    return problems


def _expectations_by_first_row(
    split: str, manifest: Manifest | None, vocabulary: Vocabulary | None
) -> dict[int, Expectation]:
    """Return what the rows of each part of a merged split should be, by its first row; other splits have one part."""
    expectation = _expectation(manifest, vocabulary)
    if manifest is None or not manifest.parts:
        return {0: expectation}
    expectations = {}
    first_row = 0
    for part in manifest.parts:
        num_rows = part.rows.get(split, 0)
        if num_rows:
            expectations[first_row] = _with_settings(expectation, part.settings)
            first_row += num_rows
    return expectations or {0: expectation}


def _expectation(manifest: Manifest | None, vocabulary: Vocabulary | None) -> Expectation:
    """Return what rows should be, as far as the manifest and the vocabulary tell."""
    bos_token_id = None
    eos_token_ids: tuple[int, ...] = ()
    vocab_size = None
    unk_token_id = None
    padding_token_ids: tuple[int | None, ...] = ()
    if vocabulary is not None:
        bos_token_id = vocabulary.bos_token_id
        eos_token_ids = _without_none(vocabulary.eos_token_id)
        vocab_size = vocabulary.size
        padding_token_ids = (vocabulary.pad_token_id, vocabulary.eos_token_id)
        # an id that also has another role says nothing about unknown text
        special_token_ids = (vocabulary.bos_token_id, vocabulary.eos_token_id, vocabulary.pad_token_id)
        if vocabulary.unk_token_id not in special_token_ids:
            unk_token_id = vocabulary.unk_token_id
    if manifest is not None:
        bos_token_id = manifest.tokenizer.bos_token_id
        eos_token_ids = manifest.tokenizer.stop_token_ids
        padding_token_ids = (*padding_token_ids, manifest.tokenizer.eos_token_id)
        if vocabulary is None:
            vocab_size = manifest.tokenizer.vocab_size
    expectation = Expectation(
        max_length=None,
        overlap=0,
        in_sequence=True,
        vocab_size=vocab_size,
        bos_token_id=bos_token_id,
        unk_token_id=unk_token_id,
        end_token_ids=eos_token_ids,
        is_ended=manifest is not None,
        padding_token_ids=_without_none(*padding_token_ids),
        compared=None if manifest is None else _COMPARED.get(manifest.kind),
    )
    if manifest is None:
        return expectation
    return _with_settings(expectation, manifest.settings)


def _with_settings(expectation: Expectation, settings: Settings) -> Expectation:
    return replace(
        expectation,
        max_length=settings.max_length,
        overlap=settings.overlap,
        in_sequence=settings.packing != "best_fit",
        with_prompts=settings.train_on != "last",
    )


def _without_none(*token_ids: int | None) -> tuple[int, ...]:
    """Return the token ids that are known, each once."""
    return tuple(dict.fromkeys(token_id for token_id in token_ids if token_id is not None))
