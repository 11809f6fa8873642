"""The facts and tables of a report on a token dataset, which the terminal and the page show."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from fabric_train.inspection.report import DatasetReport
from fabric_train.inspection.split_check import Counts
from fabric_train.token_dataset.manifest import Manifest, SourceRecord

_PERCENTILES = (5, 25, 50, 75, 95)
_BARS = 10


@dataclass(frozen=True)
class TextTable:
    """A table of texts."""

    columns: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    depth: tuple[int, ...]  # the indentation of each line
    num_words: int = 1  # columns that hold words; those after them hold numbers


def flat_table(columns: tuple[str, ...], lines: Sequence[tuple[str, ...]], num_words: int) -> TextTable:
    """Return a table without indentation, whose first ``num_words`` columns have words."""
    return TextTable(columns, tuple(lines), depth=(0,) * len(lines), num_words=num_words)


def success_line(report: DatasetReport) -> str:
    """Return the line of a report without problems."""
    num_rows = sum(counts.rows for counts in report.counts.values())
    if report.manifest is None:
        return f"no problems found in {num_rows:,} rows; there is no ledger to compare them with"
    return f"no problems found in {num_rows:,} rows; the ledger balances and agrees with the rows"


def facts(report: DatasetReport) -> list[tuple[str, str]]:
    """Return the properties of the dataset as names and values."""
    manifest = report.manifest
    rows_by_split = ", ".join(f"{counts.rows:,} {name}" for name, counts in report.counts.items())
    lines = [("rows", rows_by_split)]
    if manifest is None:
        lines.append(
            ("manifest", "none: an older version wrote this folder; the numbers below are counted from its rows")
        )
        return lines

    # settings may differ between the parts of a merged dataset
    all_settings = [part.settings for part in manifest.parts] or [manifest.settings]

    def setting(name: str) -> str:
        values = dict.fromkeys(str(getattr(settings, name)) for settings in all_settings)
        return " and ".join(values)

    # how the rows were made
    if manifest.parts:
        lines.append(("merged from", ", ".join(part.name for part in manifest.parts)))
    row_length = f"{setting('max_length')} tokens, packing {setting('packing')}, overlap {setting('overlap')}"
    lines.append(("row length", row_length))
    tokenizer = manifest.tokenizer
    begin = f"begins with {tokenizer.bos_token}" if tokenizer.bos_token else "begins without BOS"
    documents = f"data format {setting('data_format')}; text {begin} and ends with {tokenizer.eos_token}"
    lines.append(("documents", documents))
    vocabulary = f"{tokenizer.name}, {tokenizer.vocab_size:,} tokens, encoded by {tokenizer.encoder}"
    lines.append(("tokenizer", vocabulary))
    for name, split in manifest.ledger.splits.items():
        if split.pairs:
            lines.append((f"pairs of {name}", split.pairs.describe(split.documents)))
        if split.unpaired:
            lines.append((f"answers of {name}", split.unpaired.describe()))
    for name, settings in manifest.cleaning.items():
        lines.append((f"--{name}", _setting_text(settings)))

    # what a reader of the rows has to know
    if not manifest.has_index:
        lines.append(("document index", "none: an older version wrote this dataset, or part of it"))
    if tokenizer.chat_template_sha256:
        template = tokenizer.chat_template_sha256[:12]
        lines.append(("chats", f"supervised by --train_on {setting('train_on')}; template {template}"))
    for source in manifest.sources:
        if source.unused_columns:
            lines.append(("columns not used", f"{source.name}: {', '.join(source.unused_columns)}"))
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    lines.append(("versions", versions))
    return lines


class _TableOfCounts:
    """Collects the lines of a table with a column for the total and one for each split."""

    def __init__(self, split_names: tuple[str, ...]) -> None:
        self._split_names = split_names
        self._lines: list[tuple[str, ...]] = []
        self._depth: list[int] = []

    def add_total(self, name: str, total: int | None, *, depth: int = 0) -> None:
        """Add a line with only a total; its cell is empty if the total is None, unknown."""
        total_text = "" if total is None else f"{total:,}"
        self._lines.append((name, total_text, *("" for _ in self._split_names)))
        self._depth.append(depth)

    def add_sum(self, name: str, counts: list[int], *, depth: int = 0) -> None:
        """Add a line with the count of each split, and their sum."""
        self._lines.append((name, f"{sum(counts):,}", *(f"{count:,}" for count in counts)))
        self._depth.append(depth)

    def finish(self) -> TextTable:
        return TextTable(("", "all", *self._split_names), tuple(self._lines), tuple(self._depth))


def ledger_table(report: DatasetReport) -> TextTable:
    """Return the ledger, with a column for each split and one for all; for an older folder, the counts."""
    if report.manifest is None:
        return _table_without_ledger(report.counts)
    ledger = report.manifest.ledger
    names = tuple(name for name in report.counts if name in ledger.splits)
    splits = [ledger.splits[name] for name in names]
    table = _TableOfCounts(names)

    # documents, from the sources to the splits
    table.add_total("documents read", ledger.documents_read)
    for reason, count in ledger.documents_skipped.items():
        table.add_total(f"skipped: {_as_words(reason)}", count, depth=1)
        for source, skipped_count in _skipped_by_source(report.manifest.sources, reason).items():
            table.add_total(source, skipped_count, depth=2)
    table.add_total("kept", ledger.documents_kept, depth=1)
    if ledger.documents_repeated or ledger.documents_unsampled:
        table.add_total("repeated by --weights", ledger.documents_repeated, depth=1)
        table.add_total("left out by --weights", ledger.documents_unsampled, depth=1)
    for kind, count in ledger.edits.items():
        table.add_total(f"changed by cleaning: {_as_words(kind)}", count)
    for task, count in ledger.contaminated.items():
        table.add_total(f"share words with the task {task}", count)
    for reason, count in ledger.tokens_cut.items():
        table.add_total(f"tokens cut off chats: {_as_words(reason)}", count)

    # tokens, from the documents of the splits to their rows
    table.add_sum("documents in the split", [split.documents for split in splits])
    table.add_sum("characters", [split.characters for split in splits])
    table.add_sum("tokens in", [split.tokens_in for split in splits])
    table.add_sum("repeated for --overlap", [split.tokens_repeated for split in splits], depth=1)
    reasons: set[str] = set()
    for split in splits:
        reasons |= split.tokens_dropped.keys()
    for reason in sorted(reasons):
        table.add_sum(
            f"dropped: {_as_words(reason)}", [split.tokens_dropped.get(reason, 0) for split in splits], depth=1
        )
    table.add_sum("tokens in rows", [split.tokens_in_rows for split in splits])
    table.add_sum("supervised", [split.tokens_supervised for split in splits], depth=1)
    pair_ledgers = [split.pairs for split in splits if split.pairs]
    if pair_ledgers:
        table.add_sum("chosen answers", [pairs.chosen_tokens for pairs in pair_ledgers], depth=2)
        table.add_sum("rejected answers", [pairs.rejected_tokens for pairs in pair_ledgers], depth=2)
    unpaired_ledgers = [split.unpaired for split in splits if split.unpaired]
    if unpaired_ledgers:
        table.add_sum("answers", [answers.answer_tokens for answers in unpaired_ledgers], depth=2)
        table.add_sum("answers of other rows", [answers.mismatched_tokens for answers in unpaired_ledgers], depth=2)
    table.add_sum("padding", [split.tokens_padding for split in splits])
    table.add_sum("rows", [split.rows for split in splits])
    return table.finish()


def _table_without_ledger(counts_by_split: Mapping[str, Counts]) -> TextTable:
    table = _TableOfCounts(tuple(counts_by_split))
    all_counts = list(counts_by_split.values())
    num_documents = [counts.documents for counts in all_counts if counts.documents is not None]
    if len(num_documents) == len(all_counts):  # otherwise a split does not store where documents begin
        table.add_sum("documents", num_documents)
    table.add_sum("tokens in rows", [counts.tokens for counts in all_counts])
    table.add_sum("supervised", [counts.supervised for counts in all_counts], depth=1)
    table.add_sum("padding", [counts.padding for counts in all_counts])
    table.add_sum("rows", [counts.rows for counts in all_counts])
    return table.finish()


def _skipped_by_source(sources: Sequence[SourceRecord], reason: str) -> dict[str, int]:
    """Return how many documents of each source were skipped for a reason; empty if there is only one source."""
    counts: Counter[str] = Counter()
    for source in sources:
        documents_skipped = source.documents_skipped or {}
        counts[source.name] += documents_skipped.get(reason, 0)
    if len(counts) == 1:
        return {}
    return {name: count for name, count in counts.items() if count}


def source_table(manifest: Manifest) -> TextTable:
    """Return the sources, with the numbers of documents that were read, and of documents and tokens that were kept."""
    lines = []
    for source in manifest.sources:
        num_files = f"{len(source.files):,}" if source.files else ""
        num_read = "" if source.documents_read is None else f"{source.documents_read:,}"
        weight = "" if source.weight is None else f"{source.weight:g}"
        lines.append(
            (
                source.name,
                _as_words(source.kind),
                num_files,
                num_read,
                f"{source.documents:,}",
                f"{source.tokens:,}",
                weight,
                f"{source.epochs:.3g}",
            )
        )
    columns = ("source", "kind", "files", "read", "documents", "tokens", "weight", "epochs")
    return flat_table(columns, lines, num_words=2)


@dataclass(frozen=True)
class Bar:
    """A bar of the histogram: the number of documents with ``shortest`` to ``longest`` tokens."""

    shortest: int
    longest: int
    count: int

    @property
    def name(self) -> str:
        if self.longest > self.shortest:
            return f"{self.shortest:,}–{self.longest:,}"
        return f"{self.shortest:,}"


def histogram(lengths: Mapping[int, int]) -> list[Bar]:
    """Return bars for powers of two if lengths differ widely, and otherwise for ten equal steps.

    ``lengths`` has the number of documents by their length.
    """
    if not lengths:
        return []
    shortest = min(lengths)
    longest = max(lengths)
    if longest >= 32 * max(shortest, 1):
        smallest_power = max(shortest, 1).bit_length() - 1
        edges = [1 << power for power in range(smallest_power, longest.bit_length() + 1)]
        if shortest == 0:
            edges = [0, *edges]
    else:
        width = -(-(longest - shortest + 1) // _BARS)  # rounded up
        edges = list(range(shortest, longest + 1 + width, width))
    counts, _ = np.histogram(list(lengths), bins=edges, weights=list(lengths.values()))
    bars = []
    for (start, stop), count in zip(pairwise(edges), counts, strict=True):
        if start <= longest:
            bars.append(Bar(start, min(stop - 1, longest), int(count)))
    return bars


def length_facts(lengths: Mapping[int, int]) -> list[tuple[str, int]]:
    """Return names and values: the shortest length, percentiles, the longest and the mean.

    ``lengths`` has the number of documents by their length.
    """
    num_documents = sum(lengths.values())
    if not num_documents:
        return []
    sorted_lengths = np.array(sorted(lengths))
    cumulated_counts = np.cumsum([lengths[int(length)] for length in sorted_lengths])
    facts = [("shortest", int(sorted_lengths[0]))]
    for percentile in _PERCENTILES:
        # the shortest length that at least this share of the documents does not exceed
        num_not_longer = -(-num_documents * percentile // 100)  # rounded up
        position = np.searchsorted(cumulated_counts, max(num_not_longer, 1))
        facts.append((f"{percentile} %", int(sorted_lengths[position])))
    facts.append(("longest", int(sorted_lengths[-1])))
    num_tokens = sum(length * count for length, count in lengths.items())
    facts.append(("mean", round(num_tokens / num_documents)))
    return facts


def length_notes(report: DatasetReport) -> list[str]:
    """Return sentences about the documents that are in several rows, for the split that is shown."""
    counts = report.counts[report.split]
    ledger = report.manifest.ledger.splits.get(report.split) if report.manifest else None
    num_documents = counts.documents or 0
    if ledger and ledger.pairs:
        return [f"{num_documents:,} sequences, two for each of {ledger.documents:,} preference pairs."]
    if ledger and ledger.unpaired:
        return [f"{num_documents:,} sequences, two for each of {ledger.documents:,} unpaired answers."]
    if counts.pieces and ledger and num_documents != ledger.documents:
        return [f"best_fit splits documents longer than a row; this counts {num_documents:,} pieces of documents."]
    notes = [f"{counts.documents_over_rows:,} of {num_documents:,} documents continue in the next row."]
    if counts.documents_cut:
        notes.append(f"Cut off at the end of the split or of a merged part: {counts.documents_cut:,}.")
    return notes


def dropped_title(report: DatasetReport, reason: str) -> str:
    """Return a reason with how many documents were dropped for it, and how many of them are shown."""
    num_shown = len(report.dropped[reason])
    num_dropped = 0
    if report.manifest is not None:
        num_dropped = report.manifest.ledger.documents_skipped.get(reason, 0)
    return f"{_as_words(reason)}: {num_shown:,} of {num_dropped:,} documents"


def _setting_text(settings: Any) -> str:
    """Return the settings of a cleaning step in one line: names with numbers, words or lists of them."""
    if isinstance(settings, dict):
        return ", ".join(f"{_as_words(str(name))} {_setting_text(value)}" for name, value in settings.items())
    if isinstance(settings, list):
        return " ".join(map(_setting_text, settings))
    return str(settings)


def _as_words(key: str) -> str:
    return key.replace("_", " ")
