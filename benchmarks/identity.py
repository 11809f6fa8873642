"""Compare the ids of every document of two real corpora with the ids of the tokenizer's own library."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import sentencepiece
from rich import box
from rich.table import Table

from benchmarks.measure import ROOT
from benchmarks.report import Report
from fabric_train.sample_data import real_data
from fabric_train.tokenization.tokenizers.fast_tokenizer import load_fast
from fabric_train.tokenization.tokenizers.text_encoder import TextEncoder, open_encoder
from fabric_train.tokenization.tokenizers.tokenizer import load_tokenizer

CORPORA: dict[str, Callable[[], Path]] = {
    "Shakespeare": real_data.shakespeare,
    "Spanish Bible": real_data.bible_es,
}


@dataclass(frozen=True)
class CorpusIdentity:
    """One corpus, each document encoded by our ``encoder`` and by the library ``reference``."""

    corpus: str
    encoder: str
    reference: str
    num_documents: int
    num_characters: int
    num_tokens: int
    num_documents_different: int
    first_difference: str | None


@dataclass(frozen=True)
class IdentitySummary:
    """All corpora and tokenizers together."""

    num_documents: int
    num_tokens: int
    num_documents_different: int


@dataclass(frozen=True)
class _Tokenizer:
    """Our encoder and the library that it is compared with."""

    encoder: TextEncoder
    encoder_name: str
    reference: Callable[[str], list[int]]
    reference_name: str


def measure(work: Path) -> Report:
    """Compare all corpora with all tokenizers; save the tokenizers in ``work``, relative to the project's root."""
    tokenizers = {
        "Llama-3": _against_tokenizers(real_data.llama3_tokenizer_model(), ROOT / work / "llama-3"),
        "SmolLM2": _against_tokenizers(real_data.smollm2(), ROOT / work / "smollm2"),
        "SentencePiece": _against_sentencepiece(real_data.spm_tokenizer_model(), ROOT / work / "sentencepiece"),
    }
    corpora = {name: _texts(fetch()) for name, fetch in CORPORA.items()}
    runs: dict[str, list[CorpusIdentity]] = {name: [] for name in tokenizers}
    for name, tokenizer in tokenizers.items():
        for corpus, texts in corpora.items():
            print(f"identity: {corpus} with {name}", flush=True)
            started = time.perf_counter()
            runs[name].append(_compare(tokenizer, corpus, texts))
            print(f"  {time.perf_counter() - started:.1f} s", flush=True)
    found = [run for of_tokenizer in runs.values() for run in of_tokenizer]
    summary = IdentitySummary(
        num_documents=sum(run.num_documents for run in found),
        num_tokens=sum(run.num_tokens for run in found),
        num_documents_different=sum(run.num_documents_different for run in found),
    )
    return Report("identity", {"corpora": list(CORPORA)}, {}, runs, summary)


def table(report: Report) -> Table:
    """Return a table with a line for every tokenizer and corpus."""
    summary: IdentitySummary = report.summary
    title = (
        f"Identity of ids: {summary.num_documents_different:,} of {summary.num_documents:,} documents differ, "
        f"{summary.num_tokens:,} tokens compared"
    )
    shown = Table("tokenizer", "encoder", "library", "corpus", title=title, title_justify="left", box=box.SIMPLE)
    for column in ("documents", "tokens", "differ"):
        shown.add_column(column, justify="right", no_wrap=True)
    for name, runs in report.runs.items():
        for run in runs:
            encoder = run.encoder.split(":")[0]
            numbers = (f"{run.num_documents:,}", f"{run.num_tokens:,}", f"{run.num_documents_different:,}")
            shown.add_row(name, encoder, run.reference, run.corpus, *numbers)
    return shown


def _against_tokenizers(name: Path, folder: Path) -> _Tokenizer:
    tokenizer = load_tokenizer(str(name))
    tokenizer.save(folder)
    file = folder / "tokenizer.json"
    plain = tokenizer.special_text_is_plain
    encoder, encoder_name = open_encoder(file, plain)
    reference = load_fast(file, plain)
    return _Tokenizer(
        encoder, encoder_name, lambda text: list(reference.encode(text, add_special_tokens=False).ids), "tokenizers"
    )


def _against_sentencepiece(model: Path, folder: Path) -> _Tokenizer:
    tokenizer = load_tokenizer(str(model))
    tokenizer.save(folder)
    encoder, encoder_name = open_encoder(folder / "tokenizer.json", tokenizer.special_text_is_plain)
    library = sentencepiece.SentencePieceProcessor(model_file=str(model))
    return _Tokenizer(encoder, encoder_name, partial(library.encode, out_type=int), "sentencepiece")


def _texts(corpus: Path) -> list[str]:
    with corpus.open(encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def _compare(tokenizer: _Tokenizer, corpus: str, texts: list[str]) -> CorpusIdentity:
    num_tokens = num_different = 0
    first_difference = None
    for number, text in enumerate(texts, 1):
        (ids,) = tokenizer.encoder.encode_batch([text])
        expected = np.array(tokenizer.reference(text))
        num_tokens += len(expected)
        if not np.array_equal(ids, expected):
            num_different += 1
            first_difference = first_difference or f"document {number}: {text[:60]!r}"
    return CorpusIdentity(
        corpus=corpus,
        encoder=tokenizer.encoder_name,
        reference=tokenizer.reference_name,
        num_documents=len(texts),
        num_characters=sum(map(len, texts)),
        num_tokens=num_tokens,
        num_documents_different=num_different,
        first_difference=first_difference,
    )
