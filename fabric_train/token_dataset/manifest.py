"""Read and write a token dataset's ``manifest.json``: hashed sources and tokenizer, settings, and a balanced ledger."""

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
from fabric_train.files.regular_file import check_file_name
from fabric_train.files.typed_json import parse_json, read_json

# versions that know no pairs refuse the second, and those that know no unpaired answers the third
FORMAT = 2
FORMAT_OF_PAIRS = 3
FORMAT_OF_UNPAIRED = 4
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
NO_OTHER_ANSWER = "no_other_answer"
BAD_ROWS = frozenset([BAD_ROW, EMPTY_ANSWER, EQUAL_ANSWERS])  # what --on_bad_rows fail refuses

_TOLERATED_CUT = 0.05  # of all tokens


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that was read."""

    path: str  # relative to the folder of its source
    bytes: int
    sha256: str  # in hexadecimal


@dataclass(frozen=True)
class SourceRecord:
    """A source of --dataset or --validation_dataset."""

    name: str  # the name given to it, or its place; records of one name are one source
    kind: str  # `files`, `saved_dataset` or `hub`
    files: tuple[SourceFile, ...]  # the files read; empty for a hub dataset
    splits: tuple[str, ...]  # the splits read; empty for files
    revision: str | None  # the commit of a hub dataset; None for others
    subset: str | None = None  # the subset of a hub dataset; None for others
    documents: int = 0  # documents kept
    tokens: int = 0  # tokens of the documents kept
    weight: float | None = None  # its value in --weights, None without --weights
    epochs: float = 1.0  # how often its training documents are in the train split: their tokens there / their tokens
    train_tokens: int | None = None  # its tokens in the train split, repeats included; None from older versions
    share_asked: float | None = None  # of the train split's tokens, by --weights; None without --weights
    share_reached: float | None = None  # the share of the train split's tokens that it has; None after a merge
    # the path, pattern, URL or hub name as given, without passwords. None from older versions: there the name is the
    # place, without the subset and the revision of a hub dataset
    place: str | None = None
    folder: str | None = None  # the folder to which the paths of `files` are relative; None for URLs and datasets
    documents_skipped: dict[str, int] | None = None  # documents read and not kept, by reason; None from older versions
    unused_columns: tuple[str, ...] = ()  # columns, and keys of messages, that were not used

    @property
    def argument(self) -> str:
        """The argument of --dataset that names the source: NAME=PLACE or PLACE."""
        if self.place is None or self.place == self.name:
            return self.name
        return f"{self.name}={self.place}"

    @property
    def documents_read(self) -> int | None:
        """The number of documents kept and skipped; None if an older version did not count them."""
        if self.documents_skipped is None:
            return None
        return self.documents + sum(self.documents_skipped.values())

    @property
    def hub_name(self) -> str:
        """The name of a hub dataset, without subset, split and revision."""
        return re.split("[:@]", self.place or self.name)[0]

    @property
    def num_files(self) -> int:
        """The number of files, or for a dataset of splits, as the document index counts them."""
        return len(self.files if self.kind == "files" else self.splits)

    def file_name(self, number: int) -> str:
        """Return the name of a file or split, counted from 0."""
        if self.kind != "files":
            return f"{self.place} ({self.splits[number]})"
        path = self.files[number].path
        if self.folder in (None, "."):
            return path
        return os.path.join(self.folder or "", path)


@dataclass(frozen=True)
class TokenizerRecord:
    """The tokenizer. Without chats, the hash of the chat template and the token that ends turns are None."""

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
        """The tokens at which generation must stop: EOS, and the tokens that end turns of chats."""
        token_ids = [self.eos_token_id]
        if self.end_of_turn_token_id is not None:
            token_ids.append(self.end_of_turn_token_id)
        token_ids += self.turn_end_token_ids
        return tuple(dict.fromkeys(token_ids))


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
    """The counts of one source in one split; ``bytes`` are those of the UTF-8 text, or of a chat's message contents."""

    documents: int
    bytes: int
    tokens_in: int
    tokens_repeated: int
    tokens_in_rows: int
    tokens_dropped: int


@dataclass(frozen=True)
class PairLedger:
    """The preference pairs of one split, including repeats. An answer's tokens are its supervised tokens."""

    chosen_tokens: int  # of all chosen answers
    rejected_tokens: int
    chosen_longer: int  # pairs whose chosen answer has more tokens
    equal_lengths: int  # pairs whose answers have as many tokens as each other
    prefixes: int  # pairs in which one answer is the beginning of the other
    rated: int  # pairs with a rating of both answers
    rating_margin: float  # the sum of rating of the chosen answer minus rating of the rejected one

    def describe(self, num_pairs: int) -> str:
        """Return the means over the ``num_pairs`` pairs of the split, in one line."""
        mean_chosen = self.chosen_tokens / num_pairs
        mean_rejected = self.rejected_tokens / num_pairs
        longer_share = self.chosen_longer / num_pairs
        equal_share = self.equal_lengths / num_pairs
        phrases = [
            f"{num_pairs:,} with answers of {mean_chosen:,.1f} tokens (chosen) and {mean_rejected:,.1f} (rejected)",
            f"the chosen answer is longer in {longer_share:.1%} and equally long in {equal_share:.1%}",
        ]
        if self.prefixes:
            phrases.append(f"one is a prefix of the other in {self.prefixes:,}")
        if self.rated:
            mean_margin = self.rating_margin / self.rated
            phrases.append(f"the chosen answer is rated {mean_margin:+.3g} higher on average ({self.rated:,} rated)")
        return "; ".join(phrases)


@dataclass(frozen=True)
class UnpairedLedger:
    """The unpaired answers of one split, including repeats. An answer's tokens are its supervised tokens."""

    desirable: int  # answers
    undesirable: int
    answer_tokens: int  # of all answers
    mismatched_tokens: int  # of answers from other rows, each after the same prompt

    def describe(self) -> str:
        """Return the counts and the mean lengths in one line."""
        num_answers = self.desirable + self.undesirable
        return (
            f"{self.desirable:,} desirable and {self.undesirable:,} undesirable, with "
            f"{self.answer_tokens / num_answers:,.1f} tokens on average; the mismatched answers that estimate the KL "
            f"divergence have {self.mismatched_tokens / num_answers:,.1f}"
        )


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
    unpaired: UnpairedLedger | None = None  # None if they are no unpaired answers


@dataclass(frozen=True)
class Ledger:
    """The documents that were read, skipped (by reason), and kept, which are packed into the splits."""

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
        num_sampled = self.documents_kept + self.documents_repeated - self.documents_unsampled
        num_packed = sum(split.documents for split in self.splits.values())
        num_kept_or_skipped = self.documents_kept + sum(self.documents_skipped.values())
        balances = [
            _Balance("documents read", self.documents_read, num_kept_or_skipped),
            _Balance("documents sampled", num_sampled, num_packed),
        ]
        for name, split in self.splits.items():
            tokens_in = split.tokens_in + split.tokens_repeated
            tokens_out = split.tokens_in_rows + sum(split.tokens_dropped.values())
            balances.append(_Balance(f"tokens into {name}", tokens_in, tokens_out))
            num_filled = split.tokens_in_rows + split.tokens_padding
            balances.append(_Balance(f"tokens in rows of {name}", num_filled, split.rows * max_length))
            if split.pairs is not None:
                num_answers = split.pairs.chosen_tokens + split.pairs.rejected_tokens
                balances.append(_Balance(f"supervised tokens of {name}", split.tokens_supervised, num_answers))
            if split.unpaired is not None:
                unpaired = split.unpaired
                num_tokens = unpaired.answer_tokens + unpaired.mismatched_tokens
                balances.append(_Balance(f"supervised tokens of {name}", split.tokens_supervised, num_tokens))
                num_labels = unpaired.desirable + unpaired.undesirable
                balances.append(_Balance(f"labels of {name}", num_labels, split.documents))
            balances += _balances_of_sources(name, split)
        return [str(balance) for balance in balances if balance.left != balance.right]


@dataclass(frozen=True)
class _Balance:
    """Two counts that must be equal."""

    name: str
    left: int
    right: int

    def __str__(self) -> str:
        return f"{self.name}: {self.left:,} is not {self.right:,}"


def _balances_of_sources(split_name: str, split: SplitLedger) -> list[_Balance]:
    """Return the counts that must balance for each source of a split, and in their sums; none without an index."""
    if not split.sources:
        return []
    balances = []
    for source_name, source in split.sources.items():
        tokens_in = source.tokens_in + source.tokens_repeated
        tokens_out = source.tokens_in_rows + source.tokens_dropped
        balances.append(_Balance(f"tokens of {source_name} into {split_name}", tokens_in, tokens_out))
    totals = {
        "documents": split.documents,
        "tokens_in": split.tokens_in,
        "tokens_repeated": split.tokens_repeated,
        "tokens_in_rows": split.tokens_in_rows,
        "tokens_dropped": sum(split.tokens_dropped.values()),
    }
    for unit, total in totals.items():
        sum_over_sources = sum(getattr(source, unit) for source in split.sources.values())
        name = f"{unit.replace('_', ' ')} of the sources of {split_name}"
        balances.append(_Balance(name, total, sum_over_sources))
    return balances


@dataclass(frozen=True)
class MergedPart:
    """A token dataset that was merged into this one."""

    name: str
    manifest_sha256: str
    rows: dict[str, int]  # by split
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
    # whether each document is an unpaired answer, followed by the same prompt with another row's answer: two entries of
    # `document_starts`, and a label in the document index
    has_unpaired: bool = False

    @property
    def sequences_per_document(self) -> int:
        """The number of entries of ``document_starts`` that a document has."""
        return 2 if self.has_pairs or self.has_unpaired else 1

    @property
    def objective(self) -> str:
        """The usual ``--objective`` for training on the documents; "" for cross entropy."""
        if self.has_pairs:
            return "dpo"
        return "kto" if self.has_unpaired else ""

    @property
    def kind(self) -> str:
        """The kind of documents, for messages."""
        if self.has_pairs:
            return "preference pairs"
        if self.has_unpaired:
            return "unpaired answers"
        return "texts or chats"

    def imbalances(self) -> list[str]:
        """Return one line for each wrong sum in the ledger, or of the sources' skipped documents."""
        faults = self.ledger.imbalances(self.settings.max_length)
        skipped_by_reason: Counter[str] = Counter()
        for source in self.sources:
            if source.documents_skipped is None:  # an older version has not counted them
                return faults
            skipped_by_reason.update(source.documents_skipped)
        for reason in {**self.ledger.documents_skipped, **skipped_by_reason}:
            total = self.ledger.documents_skipped.get(reason, 0)
            balance = _Balance(f"documents skipped of the sources, {reason}", total, skipped_by_reason[reason])
            if balance.left != balance.right:
                faults.append(str(balance))
        return faults

    def losses(self) -> list[str]:
        """Return a line if more than 5 % of the tokens were cut off, and a line if rows cut chats."""
        losses = []
        num_cut = sum(self.ledger.tokens_cut.values())
        num_tokens = num_cut + sum(source.tokens for source in self.sources)
        if num_cut > _TOLERATED_CUT * num_tokens:
            kind = self.kind if self.sequences_per_document > 1 else "chats"
            losses.append(
                f"{num_cut:,} of {num_tokens:,} tokens ({num_cut / num_tokens:.0%}) were cut off because {kind} are "
                f"longer than a row of {self.settings.max_length:,} tokens; give a larger --max_length to keep them"
            )
        num_severed = sum(split.chats_severed for split in self.ledger.splits.values())
        num_documents = sum(split.documents for split in self.ledger.splits.values())
        if num_severed:
            losses.append(
                f"{num_severed:,} of {num_documents:,} documents are chats that continue in another row, where the "
                "model learns turns without the turns before them; use --packing best_fit"
            )
        return losses


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` to ``folder``; the ledger of ``manifest`` must balance.

    In the file, the ledger has its splits and its totals side by side.
    """
    imbalances = manifest.imbalances()
    assert not imbalances, imbalances
    content = {"format": _format_of(has_pairs=manifest.has_pairs, has_unpaired=manifest.has_unpaired), **vars(manifest)}
    totals = dict(vars(manifest.ledger))
    splits = {name: dict(vars(split)) for name, split in totals.pop("splits").items()}
    # older versions know neither pairs, unpaired answers nor parts
    if not manifest.has_pairs:
        del content["has_pairs"]
        for split in splits.values():
            del split["pairs"]
    if not manifest.has_unpaired:
        del content["has_unpaired"]
        for split in splits.values():
            del split["unpaired"]
    if not manifest.parts:
        del content["parts"]
    content["ledger"] = {**splits, **totals}
    (folder / FILE_NAME).write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def _format_of(*, has_pairs: bool, has_unpaired: bool) -> int:
    if has_unpaired:
        return FORMAT_OF_UNPAIRED
    return FORMAT_OF_PAIRS if has_pairs else FORMAT


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of ``folder``, or None if it has none; InputError if it is damaged or does not balance."""
    manifest = load_manifest(folder)
    if manifest is None:
        return None
    imbalances = manifest.imbalances()
    if imbalances:
        raise InputError(*(f"{folder / FILE_NAME} is damaged: {fault}; tokenize again" for fault in imbalances))
    return manifest


def load_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of ``folder``, or None if it has none, without checking that its ledger balances."""
    file = folder / FILE_NAME
    if not file.exists():
        return None
    content = read_json(file, dict, "tokenize again")
    expected_format = _format_of(
        has_pairs=content.get("has_pairs") is True, has_unpaired=content.get("has_unpaired") is True
    )
    file_format = content.get("format")
    if file_format != expected_format:
        raise InputError(f"{file} has format {file_format!r}, but this version reads {expected_format}; tokenize again")
    try:
        # in the file, the ledger has its splits and its totals side by side
        ledger = content["ledger"]
        names_of_totals = ({ledger_field.name for ledger_field in fields(Ledger)} - {"splits"}) & ledger.keys()
        totals = {name: ledger[name] for name in names_of_totals}
        splits = {name: split for name, split in ledger.items() if name not in names_of_totals}
        content["ledger"] = {"splits": splits, **totals}
        manifest = parse_json(json.dumps(content), Manifest)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{file}: damaged ({type(error).__name__}: {error}); tokenize again") from None
    for name in manifest.tokenizer.sha256:
        check_file_name(name, file)
    return manifest


def changed_tokenizer(folder: Path, record: TokenizerRecord) -> list[str]:
    """Return one line for each file in ``folder/tokenizer`` that is missing or whose hash differs from ``record``."""
    faults = []
    for name, sha256 in record.sha256.items():
        file = folder / "tokenizer" / name
        if not file.is_file():
            faults.append(f"{file} is missing, but {FILE_NAME} lists it in tokenizer.sha256; tokenize again")
        elif hashlib.sha256(file.read_bytes()).hexdigest() != sha256:
            faults.append(
                f"{file} does not match tokenizer.sha256 in {FILE_NAME}: it is damaged or was edited; restore the "
                "file, or tokenize again"
            )
    return faults
