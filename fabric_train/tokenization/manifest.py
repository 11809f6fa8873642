"""``manifest.json`` of a token dataset: sources and tokenizer by hash, settings, and a ledger whose sums balance."""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from fabric_train.cli.errors import InputError
from fabric_train.files.safe_paths import check_file_name
from fabric_train.files.typed_json import parse_json

FORMAT = 2
FILE_NAME = "manifest.json"
LAST_INCOMPLETE_ROW = "last_incomplete_row"  # reasons of the ledger
EMPTY = "empty"
BAD_ROW = "bad_row"
DUPLICATE = "duplicate"
TOO_LONG = "too_long"
NOTHING_SUPERVISED = "nothing_supervised"


@dataclass(frozen=True)
class SourceFile:
    """A file that was read: path beneath its source's folder, size in bytes, SHA-256 in hexadecimal."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class SourceRecord:
    """A source of --dataset or --validation_dataset.

    ``kind`` is files, saved_dataset or hub; ``revision`` is a hub dataset's fingerprint. ``documents`` and ``tokens``
    are those kept of it; ``weight`` is its share in train/ where --weights was given, and ``epochs`` how often its
    documents for training are in there on average.
    """

    name: str
    kind: str
    files: tuple[SourceFile, ...]
    splits: tuple[str, ...]
    revision: str | None
    documents: int = 0
    tokens: int = 0
    weight: float | None = None
    epochs: float = 1.0


@dataclass(frozen=True)
class TokenizerRecord:
    """The tokenizer; ``vocab_size`` is its largest id plus one, ``sha256`` the hash of each file in ``tokenizer/``.

    ``encoder`` is tiktoken, or encode_batch_fast and why. ``chat_template_sha256`` and ``end_of_turn_token_id`` are of
    the template that chats were rendered with, None where there were none.
    """

    name: str
    vocab_size: int
    bos_token_id: int | None
    eos_token_id: int
    bos_token: str | None
    eos_token: str
    sha256: dict[str, str]
    encoder: str
    chat_template_sha256: str | None = None
    end_of_turn_token_id: int | None = None


@dataclass(frozen=True)
class Settings:
    """The arguments that decide what is in the rows."""

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


@dataclass(frozen=True)
class SplitLedger:
    """What went into a split and what came of it; ``tokens_in`` counts BOS and EOS, characters are code points.

    ``tokens_repeated`` are in rows a second time for --overlap; ``tokens_supervised`` have a label of their own.
    """

    documents: int
    characters: int
    tokens_in: int
    tokens_repeated: int
    tokens_in_rows: int
    tokens_padding: int
    tokens_supervised: int
    tokens_dropped: dict[str, int]
    rows: int


@dataclass(frozen=True)
class Ledger:
    """The documents read, skipped by reason, and kept, which lie in the splits.

    Sampling by --weights puts ``documents_repeated`` there again and leaves ``documents_unsampled`` out.
    ``tokens_cut`` are tokens of turns that were taken off chats, by reason; they count in no split.
    """

    splits: dict[str, SplitLedger]
    documents_read: int
    documents_kept: int
    documents_skipped: dict[str, int]
    documents_repeated: int
    documents_unsampled: int
    tokens_cut: dict[str, int]

    def imbalances(self, max_length: int) -> list[str]:
        """Return the sums that do not balance, in words; none when all do."""
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
        return [f"{name}: {total:,} is not {parts:,}" for name, total, parts in sums if total != parts]


@dataclass(frozen=True)
class MergedPart:
    """A token dataset that was merged into this one: its name, the SHA-256 of its manifest, its rows in each split."""

    name: str
    manifest_sha256: str
    rows: dict[str, int]
    settings: Settings
    versions: dict[str, str]


@dataclass(frozen=True)
class Manifest:
    """All that ``manifest.json`` says.

    ``parts`` are those of a merged token dataset, in the order in which their rows lie; its ``settings`` are those of
    the first.
    """

    ledger: Ledger
    sources: tuple[SourceRecord, ...]
    tokenizer: TokenizerRecord
    settings: Settings
    versions: dict[str, str]
    parts: tuple[MergedPart, ...] = ()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` into ``folder``; the ledger must balance."""
    imbalances = manifest.ledger.imbalances(manifest.settings.max_length)
    assert not imbalances, imbalances
    content = {"format": FORMAT, **asdict(manifest)}
    content["ledger"] = {**content["ledger"].pop("splits"), **content["ledger"]}
    if not manifest.parts:
        del content["parts"]
    (folder / FILE_NAME).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of ``folder``, None if it has none.

    Raises:
        InputError: the file is damaged, of another format, or its ledger does not balance.
    """
    manifest = load_manifest(folder)
    imbalances = manifest.ledger.imbalances(manifest.settings.max_length) if manifest else []
    if imbalances:
        file = folder / FILE_NAME
        raise InputError(*(f"{file} is damaged: {imbalance}; make the token dataset anew" for imbalance in imbalances))
    return manifest


def load_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of ``folder``, also one whose ledger does not balance; None if it has none.

    Raises:
        InputError: the file is damaged or of another format.
    """
    file = folder / FILE_NAME
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise InputError(
                f"{file} is of format {content['format']}, this version reads {FORMAT}; make the token dataset anew"
            )
        totals = {field.name: content["ledger"].pop(field.name) for field in fields(Ledger) if field.name != "splits"}
        content["ledger"] = {"splits": content["ledger"], **totals}
        manifest = parse_json(json.dumps(content), Manifest)
        for name in manifest.tokenizer.sha256:
            check_file_name(name, file)
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{file} is damaged ({type(error).__name__}: {error}); make the token dataset anew") from None
    return manifest


def changed_tokenizer(folder: Path, record: TokenizerRecord) -> list[str]:
    """Name the files in ``tokenizer/`` of a token dataset that are not those its manifest was written for."""
    faults = []
    for name, sha256 in record.sha256.items():
        file = folder / "tokenizer" / name
        if not file.is_file():
            faults.append(f"{file} is missing, {FILE_NAME} names it in tokenizer.sha256; tokenize again")
        elif hashlib.sha256(file.read_bytes()).hexdigest() != sha256:
            faults.append(
                f"{file} is not the file of tokenizer.sha256 in {FILE_NAME}: damaged or edited; "
                "put it back as it was, or tokenize again"
            )
    return faults
