"""Report on a token dataset: one pass over its rows, and the tables that terminal and page show."""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

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
from fabric_train.token_dataset.manifest import Manifest, Settings, SourceRecord, load_manifest
from fabric_train.token_dataset.token_folder import Split, open_splits
from fabric_train.tokenization.tokenizers.vocabulary import Vocabulary, load_vocabulary

_SPLIT_NAMES = {"train": ("train",), "validation": ("validation", "valid")}
_PERCENTILES = (5, 25, 50, 75, 95)
_BARS = 10


@dataclass(frozen=True)
class DatasetReport:
    """The content of a token dataset; ``rows``, lengths of documents are of ``split``, ``dropped`` by reason."""

    folder: Path
    manifest: Manifest | None
    counts: dict[str, Counts]
    problems: list[Problem]
    split: str
    rows: list[RowView]
    dropped: dict[str, list[SampledDrop]]


@dataclass(frozen=True)
class TextTable:
    """A table of texts: ``num_words`` columns of words, then numbers. ``depth`` is the indentation of each line."""

    columns: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    depth: tuple[int, ...]
    num_words: int = 1


def make_report(folder: Path, split: str, rows: range, advance: Callable[[int, int], None]) -> DatasetReport:
    """Read all splits of a token dataset; ``split``, "train" or "validation", has the ``rows`` to be shown.

    ``advance`` is called with the number of rows read so far and the number of all rows.
    """
    splits = open_splits(folder)
    shown = shown_split(folder, splits, split).name
    if rows and rows.start >= splits[shown].num_rows:
        raise InputError(f"--start {rows.start}: {shown} has {splits[shown].num_rows:,} rows, numbered from 0")
    manifest = load_manifest(folder)
    vocabulary = load_vocabulary(folder / "tokenizer")
    total = sum(entry.num_rows for entry in splits.values())
    counts: dict[str, Counts] = {}
    dropped, sample_faults = read_sample(folder, manifest.ledger.documents_skipped if manifest else {})
    problems = [Problem(DROPPED_FILE, fault) for fault in sample_faults]
    problems += _file_problems(folder, manifest)
    views: list[RowView] = []
    and_next = range(rows.start, rows.stop + 1) if rows else rows
    done = 0
    for name, entry in splits.items():
        parts = _expectations(name, manifest, vocabulary)
        check = SplitCheck(name, parts[0])
        index, faults = _open_index(folder, manifest, name)
        problems += faults
        index_check = IndexCheck(name, index, manifest.has_pairs) if manifest and index else None
        for batch in entry.batches():
            if batch.first_row in parts:  # a file, and so a batch, belongs to one part
                check.begin_part(parts[batch.first_row])
            check.add(batch)
            if index_check:
                index_check.add(batch, content_ends(batch, check.expected))
            if name == shown:
                views += view_rows(batch, and_next, vocabulary, check.expected)
            done += len(batch.offsets) - 1
            advance(done, total)
        counts[name], found = check.finish()
        problems += found
        if manifest and index_check:
            problems += index_check.finish(manifest.ledger.splits[name].sources)
        if name == shown:
            views = with_origins(with_continuations(views, rows), index)
    if manifest:
        problems += _ledger_problems(manifest, counts)
        problems += [Problem("chats", loss) for loss in manifest.losses()]
    return DatasetReport(folder, manifest, counts, problems, shown, views, dropped)


def shown_split(folder: Path, splits: Mapping[str, Split], wanted: str) -> Split:
    """Return the split "train" or "validation" (in older folders, "valid"); InputError if there is none."""
    name = next((name for name in _SPLIT_NAMES[wanted] if name in splits), None)
    if name is None:
        raise InputError(f"{folder}: no {wanted} split, only {', '.join(splits)}; give --split")
    return splits[name]


def _open_index(folder: Path, manifest: Manifest | None, split: str) -> tuple[DocumentIndex | None, list[Problem]]:
    """Return the document index of a split, or None and why it cannot be used."""
    try:
        return (open_index(folder, manifest, split) if manifest else None), []
    except InputError as error:
        return None, [Problem(split, fault) for fault in error.faults]


def _file_problems(folder: Path, manifest: Manifest | None) -> list[Problem]:
    """Compare the tokenizer's files with their hashes in the manifest."""
    problems = []
    for name, digest in manifest.tokenizer.sha256.items() if manifest else ():
        file = folder / "tokenizer" / name
        if not file.is_file():
            problems.append(Problem("tokenizer", f"{name} is missing"))
        elif hashlib.sha256(file.read_bytes()).hexdigest() != digest:
            problems.append(Problem("tokenizer", f"{name} is not the file in the manifest"))
    return problems


def _ledger_problems(manifest: Manifest, counts: dict[str, Counts]) -> list[Problem]:
    """Check the ledger's sums, and compare it with the counts."""
    problems = [Problem("manifest", f"the ledger does not balance: {imbalance}") for imbalance in manifest.imbalances()]
    for name in sorted({*manifest.ledger.splits} ^ {*counts}):
        where = "not in the manifest" if name in counts else "only in the manifest"
        problems.append(Problem(name, f"the split is {where}"))
    for name, count in counts.items():
        if name not in manifest.ledger.splits:
            continue
        ledger = manifest.ledger.splits[name]
        compared = [
            ("rows", ledger.rows, count.rows),
            ("tokens in rows", ledger.tokens_in_rows, count.tokens),
            ("tokens of padding", ledger.tokens_padding, count.padding),
            ("supervised tokens", ledger.tokens_supervised, count.supervised),
        ]
        problems += [
            Problem(name, f"the ledger has {in_ledger:,} {what}, the rows have {counted:,}")
            for what, in_ledger, counted in compared
            if in_ledger != counted
        ]
        whole = (count.documents or 0) - count.pieces
        if whole > ledger.documents * (2 if manifest.has_pairs else 1):
            text = f"the ledger has {ledger.documents:,} documents, {whole:,} begin in the rows"
            problems.append(Problem(name, text))
    return problems


def _expectations(split: str, manifest: Manifest | None, vocabulary: Vocabulary | None) -> dict[int, Expectation]:
    """Return the expectation of each part of the split, by the part's first row."""
    if manifest is None or not manifest.parts:
        return {0: _expectation(manifest.settings if manifest else None, manifest, vocabulary)}
    expectations = {}
    row = 0
    for part in manifest.parts:
        if part.rows.get(split):
            expectations[row] = _expectation(part.settings, manifest, vocabulary)
            row += part.rows[split]
    return expectations or {0: _expectation(manifest.settings, manifest, vocabulary)}


def _expectation(settings: Settings | None, manifest: Manifest | None, vocabulary: Vocabulary | None) -> Expectation:
    tokenizer = manifest.tokenizer if manifest else None
    bos = eos = pad = unk = None
    size = tokenizer.vocab_size if tokenizer else None
    if vocabulary:
        bos = vocabulary.bos_token_id
        eos = vocabulary.eos_token_id
        size = vocabulary.size
        pad = vocabulary.pad_token_id
        unk = vocabulary.unk_token_id
    return Expectation(
        max_length=settings.max_length if settings else None,
        overlap=settings.overlap if settings else 0,
        in_sequence=settings is None or settings.packing != "best_fit",
        vocab_size=size,
        bos_token_id=tokenizer.bos_token_id if tokenizer else bos,
        unk_token_id=None if unk in (bos, eos, pad) else unk,
        ends=tokenizer.stop_token_ids if tokenizer else _known(eos),
        is_ended=manifest is not None,
        fillers=_known(pad, eos, tokenizer.eos_token_id if tokenizer else None),
        has_pairs=manifest is not None and manifest.has_pairs,
        with_prompts=settings is None or settings.train_on != "last",
    )


def success_line(report: DatasetReport) -> str:
    """Return the line of a report without problems."""
    counted = f"{sum(count.rows for count in report.counts.values()):,} rows counted"
    if report.manifest is None:
        return f"no problems found, {counted}; there is no ledger to compare them with"
    return f"no problems found, {counted}; the ledger balances and agrees with the rows"


def facts(report: DatasetReport) -> list[tuple[str, str]]:
    """Return the properties of the dataset as names and values."""
    manifest = report.manifest
    lines = [("rows", ", ".join(f"{count.rows:,} {name}" for name, count in report.counts.items()))]
    if manifest is None:
        return [*lines, ("manifest", "none: an older folder; the figures below are counted in its rows")]
    tokenizer = manifest.tokenizer
    all_settings = [part.settings for part in manifest.parts] or [manifest.settings]

    def setting(name: str) -> str:
        return " and ".join(dict.fromkeys(str(getattr(settings, name)) for settings in all_settings))

    begin = f"begins with {tokenizer.bos_token}" if tokenizer.bos_token else "begins without BOS"
    if manifest.parts:
        lines.append(("merged from", ", ".join(part.name for part in manifest.parts)))
    lines += [
        ("row length", f"{setting('max_length')} tokens, packing {setting('packing')}, overlap {setting('overlap')}"),
        ("documents", f"data format {setting('data_format')}; text {begin} and ends with {tokenizer.eos_token}"),
        ("tokenizer", f"{tokenizer.name}, {tokenizer.vocab_size:,} tokens, encoded by {tokenizer.encoder}"),
    ]
    splits = manifest.ledger.splits.items()
    lines += [(f"pairs of {name}", one.pairs.describe(one.documents)) for name, one in splits if one.pairs]
    lines += [(f"--{name}", _setting_text(settings)) for name, settings in manifest.cleaning.items()]
    if not manifest.has_index:
        lines.append(("document index", "none: an older version wrote this dataset, or a part of it"))
    if tokenizer.chat_template_sha256:
        template = tokenizer.chat_template_sha256[:12]
        lines.append(("chats", f"supervised by --train_on {setting('train_on')}; template {template}"))
    for source in manifest.sources:
        if source.unused_columns:
            lines.append(("columns not used", f"{source.name}: {', '.join(source.unused_columns)}"))
    return [*lines, ("versions", ", ".join(f"{name} {version}" for name, version in manifest.versions.items()))]


def ledger_table(report: DatasetReport) -> TextTable:
    """Return the ledger, with a column for each split and one for all; for an older folder, the counts."""
    names = tuple(report.counts)
    lines: list[tuple[int, tuple[str, ...]]] = []

    def line(depth: int, name: str, total: int | None, per_split: list[int] | None = None) -> None:
        values = ["" if total is None else f"{total:,}"]
        values += ["" for _ in names] if per_split is None else [f"{value:,}" for value in per_split]
        lines.append((depth, (name, *values)))

    def summed(depth: int, name: str, per_split: list[int]) -> None:
        line(depth, name, sum(per_split), per_split)

    if report.manifest is None:
        counts = list(report.counts.values())
        if all(count.documents is not None for count in counts):
            summed(0, "documents", [count.documents or 0 for count in counts])
        summed(0, "tokens in rows", [count.tokens for count in counts])
        summed(1, "supervised", [count.supervised for count in counts])
        summed(0, "padding", [count.padding for count in counts])
        summed(0, "rows", [count.rows for count in counts])
    else:
        ledger = report.manifest.ledger
        splits = [ledger.splits[name] for name in names if name in ledger.splits]
        names = tuple(name for name in names if name in ledger.splits)
        line(0, "documents read", ledger.documents_read)
        for reason, count in ledger.documents_skipped.items():
            line(1, f"skipped: {_words_of(reason)}", count)
            for name, of_source in _skipped_by_source(report.manifest.sources, reason).items():
                line(2, name, of_source)
        line(1, "kept", ledger.documents_kept)
        if ledger.documents_repeated or ledger.documents_unsampled:
            line(1, "repeated by --weights", ledger.documents_repeated)
            line(1, "left out by --weights", ledger.documents_unsampled)
        for kind, count in ledger.edits.items():
            line(0, f"changed by cleaning: {_words_of(kind)}", count)
        for task, count in ledger.contaminated.items():
            line(0, f"share words with the task {task}", count)
        for reason, count in ledger.tokens_cut.items():
            line(0, f"tokens cut off chats: {_words_of(reason)}", count)
        summed(0, "documents in the split", [split.documents for split in splits])
        summed(0, "characters", [split.characters for split in splits])
        summed(0, "tokens in", [split.tokens_in for split in splits])
        summed(1, "repeated for --overlap", [split.tokens_repeated for split in splits])
        for reason in sorted({reason for split in splits for reason in split.tokens_dropped}):
            summed(1, f"dropped: {_words_of(reason)}", [split.tokens_dropped.get(reason, 0) for split in splits])
        summed(0, "tokens in rows", [split.tokens_in_rows for split in splits])
        summed(1, "supervised", [split.tokens_supervised for split in splits])
        if pairs := [split.pairs for split in splits if split.pairs]:
            summed(2, "chosen answers", [one.chosen_tokens for one in pairs])
            summed(2, "rejected answers", [one.rejected_tokens for one in pairs])
        summed(0, "padding", [split.tokens_padding for split in splits])
        summed(0, "rows", [split.rows for split in splits])
    return TextTable(("", "all", *names), tuple(texts for _, texts in lines), tuple(depth for depth, _ in lines))


def _skipped_by_source(sources: Sequence[SourceRecord], reason: str) -> dict[str, int]:
    """Return the documents of each source that were skipped for a reason; none if there is one source."""
    counts: Counter[str] = Counter()
    for source in sources:
        counts[source.name] += (source.documents_skipped or {}).get(reason, 0)
    return {name: count for name, count in counts.items() if count} if len(counts) > 1 else {}


def source_table(manifest: Manifest) -> TextTable:
    """Return the sources, with the numbers of documents that were read, and of documents and tokens that were kept."""
    columns = ("source", "kind", "files", "read", "documents", "tokens", "weight", "epochs")
    lines = tuple(
        (
            source.name,
            _words_of(source.kind),
            f"{len(source.files):,}" if source.files else "",
            "" if source.documents_read is None else f"{source.documents_read:,}",
            f"{source.documents:,}",
            f"{source.tokens:,}",
            "" if source.weight is None else f"{source.weight:g}",
            f"{source.epochs:.3g}",
        )
        for source in manifest.sources
    )
    return TextTable(columns, lines, (0,) * len(lines), num_words=2)


@dataclass(frozen=True)
class Bar:
    """A bar of the histogram: the number of documents of ``low`` to ``high`` tokens."""

    low: int
    high: int
    count: int

    @property
    def name(self) -> str:
        return f"{self.low:,}–{self.high:,}" if self.high > self.low else f"{self.low:,}"


def histogram(lengths: Mapping[int, int]) -> list[Bar]:
    """Return bars for numbers of documents by length: powers of two if lengths differ widely, else ten equal steps."""
    if not lengths:
        return []
    low = min(lengths)
    high = max(lengths)
    if high >= 32 * max(low, 1):
        edges = [1 << power for power in range(max(low, 1).bit_length() - 1, high.bit_length() + 1)]
        edges = edges if low else [0, *edges]
    else:
        width = -(-(high - low + 1) // _BARS)
        edges = list(range(low, high + 1 + width, width))
    found, _ = np.histogram(list(lengths), bins=edges, weights=list(lengths.values()))
    bars = zip(edges, edges[1:], found, strict=False)
    return [Bar(first, min(stop - 1, high), int(count)) for first, stop, count in bars if first <= high]


def length_facts(lengths: Mapping[int, int]) -> list[tuple[str, int]]:
    """Return shortest, percentiles, longest and mean of numbers of documents by length."""
    documents = sum(lengths.values())
    if not documents:
        return []
    numbers = np.array(sorted(lengths))
    running = np.cumsum([lengths[int(number)] for number in numbers])
    ranks = [max(1, -(-documents * percentile // 100)) for percentile in _PERCENTILES]
    at = [int(numbers[np.searchsorted(running, rank)]) for rank in ranks]
    total = sum(length * count for length, count in lengths.items())
    names = [f"{percentile} %" for percentile in _PERCENTILES]
    return [
        ("shortest", int(numbers[0])),
        *zip(names, at, strict=True),
        ("longest", int(numbers[-1])),
        ("mean", round(total / documents)),
    ]


def length_notes(report: DatasetReport) -> list[str]:
    """Return sentences about the documents that lie in several rows, for the split that is shown."""
    counts = report.counts[report.split]
    ledger = report.manifest.ledger.splits.get(report.split) if report.manifest else None
    documents = counts.documents or 0
    if ledger and ledger.pairs:
        return [f"{documents:,} sequences, two of each of {ledger.documents:,} preference pairs."]
    if counts.pieces and ledger and documents != ledger.documents:
        return [f"best_fit splits documents longer than a row; these are {documents:,} pieces of documents."]
    notes = [f"{counts.documents_over_rows:,} of {documents:,} documents continue in the next row."]
    if counts.documents_cut:
        notes.append(f"Cut off at the end of the split or of a merged part: {counts.documents_cut:,}.")
    return notes


def dropped_title(report: DatasetReport, reason: str) -> str:
    """Return a reason with how many documents were left out for it, and how many of them are shown."""
    shown = len(report.dropped[reason])
    total = report.manifest.ledger.documents_skipped.get(reason, 0) if report.manifest else 0
    return f"{_words_of(reason)}: {shown:,} of {total:,} documents"


def _setting_text(settings: Any) -> str:
    """Return the settings of a cleaning step in one line: names with numbers, words or lists of them."""
    if isinstance(settings, dict):
        return ", ".join(f"{_words_of(str(name))} {_setting_text(value)}" for name, value in settings.items())
    if isinstance(settings, list):
        return " ".join(map(_setting_text, settings))
    return str(settings)


def _words_of(key: str) -> str:
    return key.replace("_", " ")


def _known(*ids: int | None) -> tuple[int, ...]:
    return tuple(dict.fromkeys(token for token in ids if token is not None))
