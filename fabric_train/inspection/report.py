"""Token dataset → report: one pass over the rows, and the tables that terminal and page both show."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fabric_train.corpus.manifest import Manifest, load_manifest
from fabric_train.corpus.token_folder import open_splits
from fabric_train.corpus.vocabulary import Vocabulary, load_vocabulary
from fabric_train.errors import InputError
from fabric_train.inspection.examination import Complaint, Counts, Examination, Expectation
from fabric_train.inspection.row_view import RowView, view_rows, with_continuations

SPLIT_NAMES = {"train": ("train",), "validation": ("validation", "valid")}
PERCENTILES = (5, 25, 50, 75, 95)
_BARS = 10


@dataclass(frozen=True)
class Report:
    """What there is to say of a token dataset; ``split`` is the one whose ``rows`` and lengths are shown."""

    folder: Path
    manifest: Manifest | None
    has_tokenizer: bool
    counts: dict[str, Counts]
    complaints: list[Complaint]
    split: str
    rows: list[RowView]


@dataclass(frozen=True)
class Table:
    """A table of texts: ``num_words`` columns of words, then numbers. ``depth`` indents each line's first text."""

    columns: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    depth: tuple[int, ...]
    num_words: int = 1


@dataclass(frozen=True)
class Bar:
    """How many documents have from ``low`` to ``high`` tokens."""

    low: int
    high: int
    count: int


def make_report(folder: Path, split: str, rows: range, advance: Callable[[int, int], None]) -> Report:
    """Read every split of ``folder``, and show ``rows`` of one; ``advance`` hears of rows read and rows in all.

    Raises:
        InputError: ``folder`` is no token dataset or a damaged one, or has no such split or row.
    """
    splits = open_splits(folder)
    shown = next((name for name in SPLIT_NAMES[split] if name in splits), None)
    if shown is None:
        raise InputError(f"{folder}: no {split} split, only {', '.join(splits)}; give --split")
    if rows and rows.start >= splits[shown].num_rows:
        raise InputError(f"--start {rows.start}: {shown} has {splits[shown].num_rows:,} rows, numbered from 0")
    manifest = load_manifest(folder)
    vocabulary = load_vocabulary(folder / "tokenizer")
    expected = expectation(manifest, vocabulary)
    total = sum(entry.num_rows for entry in splits.values())
    counts: dict[str, Counts] = {}
    complaints = _complaints_of_files(folder, manifest)
    views: list[RowView] = []
    and_next = range(rows.start, rows.stop + 1) if rows else rows
    done = 0
    for name, entry in splits.items():
        examination = Examination(name, expected)
        for batch in entry.batches():
            examination.add(batch)
            if name == shown:
                views += view_rows(batch, and_next, vocabulary, expected)
            done += len(batch.offsets) - 1
            advance(done, total)
        counts[name], found = examination.finish()
        complaints += found
    if manifest:
        complaints += _complaints_of_ledger(manifest, counts)
    return Report(folder, manifest, vocabulary is not None, counts, complaints, shown, with_continuations(views, rows))


def _complaints_of_files(folder: Path, manifest: Manifest | None) -> list[Complaint]:
    """Compare the tokenizer's files with those that the manifest names."""
    named = manifest.tokenizer.sha256 if manifest else {}
    complaints = []
    for name, digest in named.items():
        file = folder / "tokenizer" / name
        if not file.is_file():
            complaints.append(Complaint("tokenizer", f"{name} is missing"))
        elif hashlib.sha256(file.read_bytes()).hexdigest() != digest:
            complaints.append(Complaint("tokenizer", f"{name} is not the file that the manifest names"))
    return complaints


def _complaints_of_ledger(manifest: Manifest, counts: dict[str, Counts]) -> list[Complaint]:
    """Check the ledger's own sums, and compare it with what was counted."""
    imbalances = manifest.ledger.imbalances(manifest.settings.max_length)
    complaints = [Complaint("manifest", f"the ledger does not balance: {imbalance}") for imbalance in imbalances]
    for name in sorted({*manifest.ledger.splits} ^ {*counts}):
        where = "not in the manifest" if name in counts else "in the manifest alone"
        complaints.append(Complaint(name, f"the split is {where}"))
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
        complaints += [
            Complaint(name, f"the ledger says {said:,} {what}, the rows hold {found:,}")
            for what, said, found in compared
            if said != found
        ]
        if (count.documents or 0) > ledger.documents:
            text = f"the ledger says {ledger.documents:,} documents, in the rows begin {count.documents:,}"
            complaints.append(Complaint(name, text))
    return complaints


def expectation(manifest: Manifest | None, vocabulary: Vocabulary | None) -> Expectation:
    """Return what the rows should be like by what the folder says of itself."""
    pad = vocabulary.pad_token_id if vocabulary else None
    eos = vocabulary.eos_token_id if vocabulary else None
    named = (vocabulary.bos_token_id, eos, pad) if vocabulary else ()
    unknown = vocabulary.unk_token_id if vocabulary and vocabulary.unk_token_id not in named else None
    return Expectation(
        max_length=manifest.settings.max_length if manifest else None,
        overlap=manifest.settings.overlap if manifest else 0,
        vocab_size=vocabulary.size if vocabulary else manifest.tokenizer.vocab_size if manifest else None,
        bos_token_id=manifest.tokenizer.bos_token_id if manifest else named[0] if named else None,
        unk_token_id=unknown,
        ends=_known(
            *((manifest.tokenizer.eos_token_id, manifest.tokenizer.end_of_turn_token_id) if manifest else (eos,))
        ),
        is_ended=manifest is not None,
        fillers=_known(pad, eos, manifest.tokenizer.eos_token_id if manifest else None),
    )


def verdict(report: Report) -> str:
    """Say what has been found in order, for a report without complaints."""
    counted = f"{sum(count.rows for count in report.counts.values()):,} rows counted"
    if report.manifest is None:
        return f"nothing to complain of, {counted}; there is no ledger to compare them with"
    return f"nothing to complain of, {counted}; the ledger balances, and the rows hold what it says"


def facts(report: Report) -> list[tuple[str, str]]:
    """Return what the dataset is, as names and values."""
    manifest = report.manifest
    lines = [("rows", ", ".join(f"{count.rows:,} {name}" for name, count in report.counts.items()))]
    if manifest is None:
        return [*lines, ("manifest", "none: an older folder; what follows is counted in its rows")]
    tokenizer, settings = manifest.tokenizer, manifest.settings
    begin = f"begin with {tokenizer.bos_token}" if tokenizer.bos_token else "begin without BOS"
    text = f"text in {settings.text_column!r}" if settings.data_format == "text" else settings.data_format
    lines += [
        ("row length", f"{settings.max_length:,} tokens, packing {settings.packing}, overlap {settings.overlap}"),
        ("documents", f"{text}, {begin}, end with {tokenizer.eos_token}"),
        ("tokenizer", f"{tokenizer.name}, {tokenizer.vocab_size:,} tokens, encoded by {tokenizer.encoder}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())),
    ]
    if tokenizer.chat_template_sha256:
        lines.insert(3, ("chats", f"trained on {settings.train_on}; template {tokenizer.chat_template_sha256[:12]}"))
    return lines


def ledger_table(report: Report) -> Table:
    """Return the ledger, a column for each split and one for all; for an older folder, what was counted."""
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
            line(1, f"skipped: {_words(reason)}", count)
        line(1, "kept", ledger.documents_kept)
        if ledger.documents_repeated or ledger.documents_unsampled:
            line(1, "repeated by --weights", ledger.documents_repeated)
            line(1, "left out by --weights", ledger.documents_unsampled)
        for reason, count in ledger.tokens_cut.items():
            line(0, f"tokens cut off chats: {_words(reason)}", count)
        summed(0, "documents in the split", [split.documents for split in splits])
        summed(0, "characters", [split.characters for split in splits])
        summed(0, "tokens in", [split.tokens_in for split in splits])
        summed(1, "repeated for --overlap", [split.tokens_repeated for split in splits])
        for reason in sorted({reason for split in splits for reason in split.tokens_dropped}):
            summed(1, f"dropped: {_words(reason)}", [split.tokens_dropped.get(reason, 0) for split in splits])
        summed(0, "tokens in rows", [split.tokens_in_rows for split in splits])
        summed(1, "supervised", [split.tokens_supervised for split in splits])
        summed(0, "padding", [split.tokens_padding for split in splits])
        summed(0, "rows", [split.rows for split in splits])
    return Table(("", "all", *names), tuple(texts for _, texts in lines), tuple(depth for depth, _ in lines))


def source_table(manifest: Manifest) -> Table:
    """Return the sources with what was kept of each."""
    columns = ("source", "kind", "files", "documents", "tokens", "weight", "epochs")
    lines = tuple(
        (
            source.name,
            _words(source.kind),
            f"{len(source.files):,}" if source.files else "",
            f"{source.documents:,}",
            f"{source.tokens:,}",
            "" if source.weight is None else f"{source.weight:g}",
            f"{source.epochs:.3g}",
        )
        for source in manifest.sources
    )
    return Table(columns, lines, (0,) * len(lines), num_words=2)


def histogram(counts: Counts) -> list[Bar]:
    """Return the documents by length: octaves where lengths spread widely, else ten equal steps."""
    lengths = counts.lengths
    if not lengths:
        return []
    low, high = min(lengths), max(lengths)
    if high >= 32 * max(low, 1):
        edges = [1 << power for power in range(max(low, 1).bit_length() - 1, high.bit_length() + 1)]
    else:
        width = -(-(high - low + 1) // _BARS)
        edges = list(range(low, high + 1 + width, width))
    numbers = np.array(list(lengths))
    weights = np.array(list(lengths.values()))
    found, _ = np.histogram(numbers, bins=edges, weights=weights)
    bars = zip(edges, edges[1:], found, strict=False)
    return [Bar(first, min(stop - 1, high), int(count)) for first, stop, count in bars if first <= high]


def length_facts(counts: Counts) -> list[tuple[str, int]]:
    """Return minimum, percentiles, maximum and mean of the documents' lengths in tokens."""
    if not counts.lengths or not counts.documents:
        return []
    numbers = np.array(sorted(counts.lengths))
    running = np.cumsum([counts.lengths[int(number)] for number in numbers])
    ranks = [max(1, -(-counts.documents * percentile // 100)) for percentile in PERCENTILES]
    at = [int(numbers[np.searchsorted(running, rank)]) for rank in ranks]
    total = sum(length * count for length, count in counts.lengths.items())
    names = [f"{percentile} %" for percentile in PERCENTILES]
    return [
        ("shortest", int(numbers[0])),
        *zip(names, at, strict=True),
        ("longest", int(numbers[-1])),
        ("mean", round(total / counts.documents)),
    ]


def length_notes(counts: Counts) -> list[str]:
    """Return how documents lie over the rows' ends, in sentences."""
    notes = [f"{counts.documents_over_rows:,} of {counts.documents or 0:,} documents go on in a next row."]
    if counts.is_last_cut:
        notes.append("The last one's end is in no row.")
    return notes


def _words(reason: str) -> str:
    return reason.replace("_", " ")


def _known(*ids: int | None) -> tuple[int, ...]:
    return tuple(dict.fromkeys(token for token in ids if token is not None))
