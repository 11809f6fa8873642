"""Read and write a token dataset's ``manifest.json``: hashed sources and tokenizer, settings, a balanced ledger."""

import hashlib
import json
import os
import re
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import orjson

from fabric_train.cli.errors import InputError
from fabric_train.cli.tables import Component
from fabric_train.files.regular_file import check_file_name, parse_json, read_json

# versions that know no pairs refuse the second
FORMAT = 2
FORMAT_OF_PAIRS = 3
FILE_NAME = "manifest.json"
REFERENCE = "reference"  # folder in which training keeps log-probabilities of pairs, and names models by their place

# reasons for which the ledger counts documents as skipped, or tokens as dropped or cut
LAST_INCOMPLETE_ROW = "last_incomplete_row"
EMPTY = "empty"
BAD_ROW = "bad_row"
DUPLICATE = "duplicate"
NEAR_DUPLICATE = "near_duplicate"
TOO_LONG = "too_long"
NOTHING_SUPERVISED = "nothing_supervised"
EMPTY_ANSWER = "empty_answer"
EQUAL_ANSWERS = "equal_answers"
UNDESIRABLE_ANSWER = "undesirable_answer"
BAD_ROWS = frozenset([BAD_ROW, EMPTY_ANSWER, EQUAL_ANSWERS])  # what --on_bad_rows fail refuses

_TOLERATED_CUT = 0.05  # of all tokens


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that was read: path relative to its source's folder, size in bytes, SHA-256 in hexadecimal."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class SourceRecord:
    """A source of --dataset or --validation_dataset."""

    name: str  # the name given to it, or its place; records of one name are one source
    kind: str  # `files`, `saved_dataset` or `hub`
    files: tuple[SourceFile, ...]  # the files read; empty for a hub dataset
    splits: tuple[str, ...]  # the splits read; empty for files
    revision: str | None  # a hub dataset's commit; None for others. `subset` likewise
    subset: str | None = None
    documents: int = 0  # documents kept; `tokens` are theirs
    tokens: int = 0
    weight: float | None = None  # its value in --weights, None without --weights
    epochs: float = 1.0  # how often its training documents are in the train split: their tokens there / their tokens
    train_tokens: int | None = None  # its tokens in the train split, repeats included; None from older versions
    share_asked: float | None = None  # of the train split's tokens, by --weights; None without --weights
    share_reached: float | None = None  # the share of the train split's tokens that it has; None after a merge
    # the path, pattern, URL or hub name as given, without passwords; None from older versions, whose name is the
    # place, of a hub dataset without subset and revision
    place: str | None = None
    folder: str | None = None  # the folder to which the paths of `files` are relative; None for URLs and datasets
    documents_skipped: dict[str, int] | None = None  # documents read and not kept, by reason; None from older versions
    unused_columns: tuple[str, ...] = ()  # columns, and keys of messages, of which nothing was made

    @property
    def given(self) -> str:
        """The argument that gave it: NAME=PLACE or PLACE."""
        return self.name if self.place in (None, self.name) else f"{self.name}={self.place}"

    @property
    def documents_read(self) -> int | None:
        """The documents kept and skipped; None if an older version has not counted those."""
        return None if self.documents_skipped is None else self.documents + sum(self.documents_skipped.values())

    @property
    def hub_name(self) -> str:
        """The name of a hub dataset without subset, split and revision."""
        return re.split("[:@]", self.place or self.name)[0]

    @property
    def num_files(self) -> int:
        """The number of its files or, of a dataset, of its splits: what the document index counts."""
        return len(self.files if self.kind == "files" else self.splits)

    def file_name(self, number: int) -> str:
        """Return the name of a file or split of it, counted from 0."""
        if self.kind == "files":
            path = self.files[number].path
            return path if self.folder in (None, ".") else os.path.join(self.folder or "", path)
        return f"{self.place} ({self.splits[number]})"


@dataclass(frozen=True)
class TokenizerRecord:
    """The tokenizer. The hash and the token of the template with which chats were rendered are None without chats."""

    name: str
    vocab_size: int  # the largest id plus one
    bos_token_id: int | None
    eos_token_id: int
    bos_token: str | None
    eos_token: str
    sha256: dict[str, str]  # of each file in `tokenizer/`
    encoder: str  # `gigatoken`, or `tokenizers: WHY`
    chat_template_sha256: str | None = None
    end_of_turn_token_id: int | None = None
    turn_end_token_ids: tuple[int, ...] = ()  # the control tokens with which supervised turns of the chats end

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens at which generation has to stop: EOS, and those that end the turns of chats."""
        of_template = () if self.end_of_turn_token_id is None else (self.end_of_turn_token_id,)
        return tuple(dict.fromkeys((self.eos_token_id, *of_template, *self.turn_end_token_ids)))


@dataclass(frozen=True)
class Settings:
    """The arguments that decide the content of the rows."""

    max_length: int
    packing: str
    overlap: int
    data_format: str
    text_column: str
    train_on: str
    too_long: str
    validation_split: float
    validation_dataset: list[str] | None
    weights: list[float] | None
    deduplicate: bool
    on_bad_rows: str
    seed: int
    max_documents: int | None
    max_tokens: int | None
    chat_template: str | None = None
    near_duplicates: float | None = None
    boilerplate: int | str | None = None
    extensions: list[str] | None = None


@dataclass(frozen=True)
class SourceLedger:
    """The counts of one source in one split; ``bytes`` of the UTF-8 text, of a chat of its messages' content."""

    documents: int
    bytes: int
    tokens_in: int
    tokens_repeated: int
    tokens_in_rows: int
    tokens_dropped: int


@dataclass(frozen=True)
class PairLedger:
    """The preference pairs of one split, repeats included. An answer's tokens are its supervised ones."""

    chosen_tokens: int  # of all chosen answers
    rejected_tokens: int
    chosen_longer: int  # pairs whose chosen answer has more tokens
    equal_lengths: int  # pairs whose answers have as many tokens as each other
    prefixes: int  # pairs in which one answer is the beginning of the other
    rated: int  # pairs with a rating of both answers
    rating_margin: float  # the sum of rating of the chosen answer minus rating of the rejected one

    def describe(self, num_pairs: int) -> str:
        """Return the means over the ``num_pairs`` pairs of the split, in one line."""
        chosen = self.chosen_tokens / num_pairs
        rejected = self.rejected_tokens / num_pairs
        parts = [
            f"{num_pairs:,} with answers of {chosen:,.1f} tokens (chosen) and {rejected:,.1f} (rejected)",
            f"the chosen one is longer in {self.chosen_longer / num_pairs:.1%}, as long in "
            f"{self.equal_lengths / num_pairs:.1%}",
        ]
        if self.prefixes:
            parts.append(f"one begins the other in {self.prefixes:,}")
        if self.rated:
            parts.append(f"it is rated {self.rating_margin / self.rated:+.3g} above the other, {self.rated:,} rated")
        return "; ".join(parts)


@dataclass(frozen=True)
class SplitLedger:
    documents: int  # documents packed, repeats included; `characters` are their code points
    characters: int
    tokens_in: int  # their tokens, BOS and EOS included
    tokens_repeated: int  # tokens that are in a further row because of --overlap
    tokens_in_rows: int  # tokens in rows, repeated ones included and padding not
    tokens_padding: int
    tokens_supervised: int  # tokens whose label is not -100
    tokens_dropped: dict[str, int]  # tokens in no row, by reason
    rows: int
    chats_severed: int = 0  # chats with a supervised token in a row that does not hold the chat's beginning
    sources: dict[str, SourceLedger] = field(default_factory=dict)  # by name; empty without a document index
    pairs: PairLedger | None = None  # None if the documents are no preference pairs


@dataclass(frozen=True)
class Ledger:
    """The documents read, skipped by reason, and kept; the kept ones are packed into the splits."""

    splits: dict[str, SplitLedger]
    documents_read: int
    documents_kept: int
    documents_skipped: dict[str, int]
    documents_repeated: int  # the times that a document comes again, with --weights
    documents_unsampled: int  # the documents in no split, with --weights
    # tokens of turns removed from chats, and of chats skipped for the same reason, by reason; no split includes them
    tokens_cut: dict[str, int]
    edits: dict[str, int] = field(default_factory=dict)  # what cleaning changed in the documents read, by kind
    # the documents read that share words with evaluation tasks, by task; --contaminated says whether they are skipped
    contaminated: dict[str, int] = field(default_factory=dict)

    def imbalances(self, max_length: int) -> list[str]:
        """Return one line for each sum that does not balance, in rows of ``max_length`` tokens."""
        sampled = self.documents_kept + self.documents_repeated - self.documents_unsampled
        sums = [
            ("documents read", self.documents_read, self.documents_kept + sum(self.documents_skipped.values())),
            ("documents sampled", sampled, sum(split.documents for split in self.splits.values())),
        ]
        for name, split in self.splits.items():
            dropped = sum(split.tokens_dropped.values())
            filled = split.tokens_in_rows + split.tokens_padding
            placed = split.tokens_in_rows + dropped
            sums.append((f"tokens into {name}", split.tokens_in + split.tokens_repeated, placed))
            sums.append((f"tokens in rows of {name}", filled, split.rows * max_length))
            if split.pairs is not None:
                answers = split.pairs.chosen_tokens + split.pairs.rejected_tokens
                sums.append((f"supervised tokens of {name}", split.tokens_supervised, answers))
            sums += _sums_of_sources(name, split)
        return [f"{name}: {total:,} is not {parts:,}" for name, total, parts in sums if total != parts]


def _sums_of_sources(name: str, split: SplitLedger) -> list[tuple[str, int, int]]:
    """Return what, a total of the split and its sum over the sources; nothing without a document index."""
    if not split.sources:
        return []
    sums = []
    for source, one in split.sources.items():
        placed = one.tokens_in_rows + one.tokens_dropped
        sums.append((f"tokens of {source} into {name}", one.tokens_in + one.tokens_repeated, placed))
    totals = {what: getattr(split, what) for what in ("documents", "tokens_in", "tokens_repeated", "tokens_in_rows")}
    totals["tokens_dropped"] = sum(split.tokens_dropped.values())
    for what, total in totals.items():
        parts = sum(getattr(one, what) for one in split.sources.values())
        sums.append((f"{what.replace('_', ' ')} of the sources of {name}", total, parts))
    return sums


@dataclass(frozen=True)
class MergedPart:
    """A token dataset that was merged into this one; ``rows`` has its number of rows in each split."""

    name: str
    manifest_sha256: str
    rows: dict[str, int]
    settings: Settings
    versions: dict[str, str]
    cleaning: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``."""

    ledger: Ledger
    sources: tuple[SourceRecord, ...]
    tokenizer: TokenizerRecord
    settings: Settings  # after a merge, of the first part
    versions: dict[str, str]
    parts: tuple[MergedPart, ...] = ()  # of a merged token dataset, in the order of their rows
    has_index: bool = False  # whether each split has a document index; older versions wrote none
    # the settings of each cleaning step by switch, such as thresholds and hashes of files; of a merge, see its parts
    cleaning: dict[str, Any] = field(default_factory=dict)
    has_pairs: bool = False  # whether each document is a preference pair, with two entries of `document_starts`
    chat_formats: tuple[Component, ...] = ()  # the registered formats that its rows were read by

    def imbalances(self) -> list[str]:
        """Return one line for each sum of the ledger, or of the documents skipped of the sources, that is wrong."""
        faults = self.ledger.imbalances(self.settings.max_length)
        of_sources: Counter[str] = Counter()
        for source in self.sources:
            if source.documents_skipped is None:
                return faults
            of_sources.update(source.documents_skipped)
        for reason in {**self.ledger.documents_skipped, **of_sources}:
            total = self.ledger.documents_skipped.get(reason, 0)
            if total != of_sources[reason]:
                faults.append(f"documents skipped of the sources, {reason}: {total:,} is not {of_sources[reason]:,}")
        return faults

    def losses(self) -> list[str]:
        """Return a line if more than 5 % of the tokens were cut off, and one if chats are cut by rows."""
        cut = sum(self.ledger.tokens_cut.values())
        total = cut + sum(source.tokens for source in self.sources)
        severed = sum(split.chats_severed for split in self.ledger.splits.values())
        documents = sum(split.documents for split in self.ledger.splits.values())
        losses = []
        kind = "preference pairs" if self.has_pairs else "chats"
        if cut > _TOLERATED_CUT * total:
            losses.append(
                f"{cut:,} of {total:,} tokens ({cut / total:.0%}) were cut off because {kind} are longer than a row of "
                f"{self.settings.max_length:,}; give a larger --max_length"
            )
        if severed:
            losses.append(
                f"{severed:,} of {documents:,} documents are chats that continue in another row, where the model "
                "learns turns without those before them; use --packing best_fit"
            )
        return losses


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` into ``folder``; the ledger of ``manifest`` must balance."""
    imbalances = manifest.imbalances()
    assert not imbalances, imbalances
    version = FORMAT_OF_PAIRS if manifest.has_pairs else FORMAT
    content = {"format": version, **vars(manifest)}
    totals = dict(vars(manifest.ledger))
    splits = {name: dict(vars(split)) for name, split in totals.pop("splits").items()}
    if not manifest.has_pairs:
        del content["has_pairs"]
        for split in splits.values():
            del split["pairs"]
    content["ledger"] = {**splits, **totals}
    if not manifest.parts:
        del content["parts"]
    (folder / FILE_NAME).write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of ``folder``, None if it has none; InputError if it is damaged or does not balance."""
    manifest = load_manifest(folder)
    if manifest and (imbalances := manifest.imbalances()):
        raise InputError(*(f"{folder / FILE_NAME} is damaged: {one}; tokenize again" for one in imbalances))
    return manifest


def load_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of ``folder``, None if it has none, without checking that its ledger balances."""
    file = folder / FILE_NAME
    if not file.exists():
        return None
    content = read_json(file, dict, "tokenize again")
    known = FORMAT_OF_PAIRS if content.get("has_pairs") is True else FORMAT
    if (found := content.get("format")) != known:
        raise InputError(f"{file} has format {found!r}, this version reads {known}; tokenize again")
    try:
        ledger = content["ledger"]
        of_totals = {one.name for one in fields(Ledger)} - {"splits"}
        totals = {name: ledger.pop(name) for name in of_totals & ledger.keys()}
        content["ledger"] = {"splits": ledger, **totals}
        manifest = parse_json(json.dumps(content), Manifest)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{file}: damaged ({type(error).__name__}: {error}); tokenize again") from None
    for name in manifest.tokenizer.sha256:
        check_file_name(name, file)
    return manifest


def changed_tokenizer(folder: Path, record: TokenizerRecord) -> list[str]:
    """Return one line for each file in ``folder/tokenizer`` that is missing or whose hash is not that in ``record``."""
    faults = []
    for name, sha256 in record.sha256.items():
        file = folder / "tokenizer" / name
        if not file.is_file():
            faults.append(f"{file} is missing, but {FILE_NAME} lists it in tokenizer.sha256; tokenize again")
        elif hashlib.sha256(file.read_bytes()).hexdigest() != sha256:
            faults.append(
                f"{file} does not match tokenizer.sha256 in {FILE_NAME}: it is damaged or edited; "
                "restore the file, or tokenize again"
            )
    return faults
