"""The way from sources to a token dataset: check, encode, split, pack, write down what was done."""

import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

import numpy as np

from fabric_train.complete_folder import complete_folder, refuse_if_taken
from fabric_train.corpus.encoder import Document, Encoding, available_cores, encode_documents, encoding_processes
from fabric_train.corpus.manifest import (
    EMPTY,
    LAST_INCOMPLETE_ROW,
    Ledger,
    Manifest,
    Settings,
    SplitLedger,
    TokenizerRecord,
    write_manifest,
)
from fabric_train.corpus.packing import pack_rows, write_dataset_dict, write_split
from fabric_train.corpus.progress import Goal, Pulse, show_progress
from fabric_train.corpus.sources import Source, open_sources, sha256
from fabric_train.corpus.spool import Spool, draw_validation, fill_spool
from fabric_train.corpus.tokenizer import CorpusTokenizer, load_tokenizer
from fabric_train.errors import InputError

if TYPE_CHECKING:
    from arguments import TokenizeArguments

# More than text has on average in any language; a survey that ends too soon costs early faults, nothing else.
_CHARACTERS_PER_TOKEN = 8
_VERSIONS_OF = ("fabric-train", "tokenizers", "transformers", "datasets", "numpy")


@dataclass(frozen=True)
class Outcome:
    """What was built: its manifest, and what encoding took: seconds once the processes were ready, and processes."""

    manifest: Manifest
    encode_seconds: float
    num_proc: int


class DocumentReader:
    """The documents with text of ``sources``, up to ``max_documents`` of them; ``num_read`` counts the others too."""

    def __init__(self, sources: list[Source], text_column: str, max_documents: int | None) -> None:
        self.num_read = 0
        self._texts = (text for source in sources for text in source.documents(text_column))
        self._max_documents = max_documents

    def __iter__(self) -> Iterator[Document]:
        return islice(self._with_text(), self._max_documents)

    def _with_text(self) -> Iterator[Document]:
        for text in self._texts:
            self.num_read += 1
            if _has_text(text):
                yield Document(text, self.num_read)


def build_token_dataset(arguments: "TokenizeArguments") -> Outcome:
    """Write the token dataset that ``arguments`` describe; the folder is there when it is whole, or not at all.

    The sources are read twice: first to find every fault, and to know how much there is, before any work is done.

    Raises:
        InputError: sources, tokenizer or output folder cannot be used, or there is less text than one row.
    """
    target = Path(arguments.output_dir).expanduser()
    refuse_if_taken(target)
    sources = open_sources(arguments.dataset)
    tokenizer = load_tokenizer(arguments.tokenizer_name)
    num_characters = survey_sources(sources, arguments)
    num_proc = arguments.num_proc or available_cores()
    with complete_folder(target) as folder:
        tokenizer.fast.save_pretrained(folder / "tokenizer")
        reader = DocumentReader(sources, arguments.text_column, arguments.max_documents)
        goal = Goal("tokens", arguments.max_tokens) if arguments.max_tokens else Goal("characters", num_characters)
        with encoding_processes(_encoding(tokenizer, folder / "tokenizer"), num_proc) as processes:
            started = time.monotonic()
            encoded = encode_documents(reader, processes, num_proc)
            spool = fill_spool(folder / ".tokens", show_progress(encoded, goal), arguments.max_tokens)
            seconds = time.monotonic() - started
        splits = _write_splits(spool, folder, arguments)
        spool.file.unlink()
        manifest = Manifest(
            ledger=_count(splits, len(spool.lengths), spool.last_number if spool.is_cut else reader.num_read),
            sources=tuple(source.record() for source in sources),
            tokenizer=_describe(tokenizer, folder / "tokenizer"),
            settings=Settings(**{field.name: getattr(arguments, field.name) for field in fields(Settings)}),
            versions={name: version(name) for name in _VERSIONS_OF},
        )
        write_manifest(folder, manifest)
    return Outcome(manifest, seconds, num_proc)


def survey_sources(sources: list[Source], arguments: "TokenizeArguments") -> int:
    """Read the sources, about as far as the caps will let the work go, and return the number of characters found.

    Raises:
        InputError: what the sources raise, and a source without any text.
    """
    enough = arguments.max_tokens * _CHARACTERS_PER_TOKEN if arguments.max_tokens else math.inf
    num_documents = num_characters = 0
    pulse = Pulse()
    for source in sources:
        print(f"reading {source.name}", *source.notes, sep="\n  ", file=sys.stderr)
        documents_before = num_documents
        for text in source.documents(arguments.text_column):
            pulse(f"reading {source.name}: {num_documents:,} documents, {num_characters:,} characters so far")
            if _has_text(text):
                num_documents += 1
                num_characters += len(text)
                if num_documents == arguments.max_documents or num_characters >= enough:
                    return num_characters
        if num_documents == documents_before:
            raise InputError(f"--dataset {source.name}: no document with any text in it")
    return num_characters


def _has_text(text: str | None) -> TypeGuard[str]:
    return text is not None and bool(text.strip())


def _encoding(tokenizer: CorpusTokenizer, folder: Path) -> Encoding:
    return Encoding(
        tokenizer_file=folder / "tokenizer.json",
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        special_text_is_plain=tokenizer.special_text_is_plain,
    )


def _write_splits(spool: Spool, folder: Path, arguments: "TokenizeArguments") -> dict[str, SplitLedger]:
    """Draw the split, pack each part and write it; return its ledger."""
    in_validation = draw_validation(len(spool.lengths), arguments.validation_split, arguments.seed)
    chosen = {"train": ~in_validation}
    if arguments.validation_split > 0:
        chosen["validation"] = in_validation
    ledgers = {name: _count_split(spool, documents, arguments.max_length) for name, documents in chosen.items()}
    faults = [_too_short(name, ledger, arguments) for name, ledger in ledgers.items() if not ledger.rows]
    if faults:
        raise InputError(*faults)
    for name, ledger in ledgers.items():
        rows = pack_rows(spool.documents(chosen[name]), arguments.max_length)
        write_split(folder / name, rows, ledger.rows, arguments.max_length)
    write_dataset_dict(folder, ledgers)
    return ledgers


def _count_split(spool: Spool, chosen: np.ndarray, max_length: int) -> SplitLedger:
    tokens = int(spool.lengths[chosen].sum())
    rows = tokens // max_length
    return SplitLedger(
        documents=int(chosen.sum()),
        characters=int(spool.characters[chosen].sum()),
        tokens_in=tokens,
        tokens_repeated=0,
        tokens_padding=0,
        tokens_supervised=rows * max_length,
        tokens_in_rows=rows * max_length,
        tokens_dropped={LAST_INCOMPLETE_ROW: tokens - rows * max_length},
        rows=rows,
    )


def _too_short(name: str, ledger: SplitLedger, arguments: "TokenizeArguments") -> str:
    without = " or --validation_split 0" if name == "validation" else ""
    return (
        f"{name} has {ledger.tokens_in:,} tokens in {ledger.documents:,} documents, less than one row of "
        f"{arguments.max_length:,}; give more documents, a smaller --max_length{without}"
    )


def _count(splits: dict[str, SplitLedger], documents_kept: int, documents_read: int) -> Ledger:
    skipped = documents_read - documents_kept
    return Ledger(
        splits=splits,
        documents_read=documents_read,
        documents_kept=documents_kept,
        documents_skipped={EMPTY: skipped} if skipped else {},
        documents_repeated=0,
        documents_unsampled=0,
        tokens_cut={},
    )


def _describe(tokenizer: CorpusTokenizer, folder: Path) -> TokenizerRecord:
    return TokenizerRecord(
        name=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token=tokenizer.fast.bos_token,
        eos_token=tokenizer.fast.eos_token,
        encoder="encode_batch_fast",
        sha256={file.name: sha256(file) for file in sorted(folder.iterdir())},
    )
