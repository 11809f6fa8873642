"""Measure text to rows of Llama-3 tokens on disk: ``tokenize_dataset.py``, its peers, bare gigatoken and tiktoken."""

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Group
from rich.table import Table

from benchmarks.corpora import DOCUMENT_CHARACTERS, Corpus, cut_documents, whole_documents, write_corpus
from benchmarks.measure import ROOT, Command, Measurement, Spread, interleave, run, spread
from benchmarks.report import Report
from benchmarks.tokenization_systems import (
    BARE,
    DATATROVE,
    GIGATOKEN,
    MAX_LENGTH,
    NUM_PROC,
    OURS,
    PEERS,
    RECIPE,
    our_command,
    peer_command,
    prepare_peers,
    read_rows,
)
from fabric_train.sample_data import real_data

REPETITIONS = 3
COPIES = 10  # of the text in the larger set
REPETITIONS_OF_LARGER = {OURS: 2, GIGATOKEN: 2, BARE: 2, DATATROVE: 2, RECIPE: 1}
BASELINES = (GIGATOKEN, BARE, RECIPE, DATATROVE)  # the table shows every system's speed relative to these


@dataclass(frozen=True)
class TokenizationRun:
    """One run of one system.

    Attributes:
        tokens_per_second: the documents' tokens over the whole command's time.
        encoding_tokens_per_second: the same over the time inside the library's call; bare loops only.
        padding_share: padding relative to all positions in the rows; None for bare loops, which write no rows.
        left_out_share: tokens in no row relative to the documents' tokens; None for bare loops.
    """

    seconds: float
    tokens_per_second: float
    encoding_tokens_per_second: float | None
    peak_rss_bytes: int
    peak_pss_bytes: int | None
    rows: int | None
    padding_share: float | None
    left_out_share: float | None


@dataclass(frozen=True)
class SystemSummary:
    """One system over its repetitions."""

    repetitions: int
    seconds: Spread
    tokens_per_second: Spread
    peak_rss_bytes: Spread
    peak_pss_bytes: Spread | None
    padding_share: float | None
    left_out_share: float | None


@dataclass(frozen=True)
class CorpusSummary:
    """All systems on one set of documents; ``speed_ratios`` are our median over the peer's."""

    num_documents: int
    num_characters: int
    num_tokens: int
    systems: dict[str, SystemSummary]
    speed_ratios: dict[str, float]


@dataclass(frozen=True)
class TokenizationSummary:
    """Both sets of documents; ``left_out`` maps a peer that cannot run here to the reason."""

    corpora: CorpusSummary
    larger: CorpusSummary
    left_out: dict[str, str]


@dataclass(frozen=True)
class _Input:
    """Documents and their rows by ``tokenize_dataset.py``; ``first`` are the first rows' ids, int32 [rows, length]."""

    corpus: Corpus
    tokenizer: Path
    num_tokens: int
    first: NDArray[np.int32]


def measure(work: Path) -> Report:
    """Measure all systems on the same texts.

    Args:
        work: folder for the files, relative to the project's root.

    Raises:
        ChildProcessError: a system failed, or two systems wrote different rows.
    """
    packages, left_out = prepare_peers()
    usable = {OURS: REPETITIONS, **{name: REPETITIONS for name in PEERS if name not in left_out}}
    usable_on_larger = {name: times for name, times in REPETITIONS_OF_LARGER.items() if name in usable}
    texts = whole_documents()
    corpora = _prepare(work / "corpora", texts)
    commands = _commands(usable, corpora, work, packages)
    runs = _run_all(commands, usable, corpora, work)
    larger = _prepare(work / "larger", cut_documents(texts, COPIES))
    commands_on_larger = _commands(usable_on_larger, larger, work, packages)
    runs_on_larger = _run_all(commands_on_larger, usable_on_larger, larger, work)
    return Report(
        "tokenization",
        _settings(),
        commands | {f"{name}, larger": command for name, command in commands_on_larger.items()},
        runs | {f"{name}, larger": of_system for name, of_system in runs_on_larger.items()},
        TokenizationSummary(_summarize(corpora, runs), _summarize(larger, runs_on_larger), left_out),
    )


def table(report: Report) -> Group:
    """Return a table for each set of documents, with medians, lowest and highest values."""
    summary: TokenizationSummary = report.summary
    shown = [
        _table_of("Shakespeare's works and the Spanish Bible's chapters", summary.corpora),
        _table_of(f"the same text {COPIES} times, in documents of {DOCUMENT_CHARACTERS:,} characters", summary.larger),
    ]
    return Group(*shown, *(f"left out: {reason}" for reason in summary.left_out.values()))


def _settings() -> dict[str, object]:
    return {
        "num_proc": NUM_PROC,
        "max_length": MAX_LENGTH,
        "tokenizer": "Llama-3",
        "corpora": "Shakespeare's 42 works and the 1,189 chapters of the Spanish Bible",
        "larger": f"the same text, joined, {COPIES} times, in documents of {DOCUMENT_CHARACTERS} characters",
        "repetitions": REPETITIONS,
        "repetitions on the larger set": REPETITIONS_OF_LARGER,
    }


def _prepare(folder: Path, documents: Iterable[str]) -> _Input:
    """Write the documents and tokenize them once, unmeasured, for their number of tokens and their first rows."""
    print(f"tokenization: preparing the set {folder.name}", flush=True)
    corpus = write_corpus(ROOT / folder, documents, NUM_PROC)
    model = real_data.llama3_tokenizer_model().relative_to(ROOT)
    reference = folder / "reference"
    run(our_command(corpus.file.relative_to(ROOT), model, reference))
    tokenizer = folder / "tokenizer"
    shutil.move(ROOT / reference / "tokenizer", ROOT / tokenizer)
    ledger = json.loads((ROOT / reference / "manifest.json").read_text())["ledger"]
    first = read_rows(OURS, ROOT / reference).first
    shutil.rmtree(ROOT / reference)
    return _Input(corpus, tokenizer, ledger["train"]["tokens_in"], first)


def _commands(names: Iterable[str], given: _Input, work: Path, packages: Mapping[str, Path]) -> dict[str, Command]:
    ours = our_command(given.corpus.file.relative_to(ROOT), given.tokenizer, work / OURS)
    return {
        name: ours if name == OURS else peer_command(name, given.corpus, given.tokenizer, work, packages)
        for name in names
    }


def _run_all(
    commands: Mapping[str, Command], repetitions: Mapping[str, int], given: _Input, work: Path
) -> dict[str, list[TokenizationRun]]:
    """Run each system as often as ``repetitions`` says."""
    systems = {name: partial(_run_once, name, command, given, work) for name, command in commands.items()}
    return interleave(systems, repetitions, f"tokenization, set {given.corpus.file.parent.name}")


def _run_once(name: str, command: Command, given: _Input, work: Path) -> TokenizationRun:
    """Remove what earlier runs have left, run the command and check its rows."""
    for leftover in (work / name, work / "cache"):
        shutil.rmtree(ROOT / leftover, ignore_errors=True)
    measured = run(command)
    if name in (GIGATOKEN, BARE):
        return _run_of_bare(name, measured, given)
    rows = read_rows(name, ROOT / work / name)
    if not np.array_equal(rows.first, given.first):
        raise ChildProcessError(f"{OURS} and {name} write different rows, so their speeds cannot be compared")
    return TokenizationRun(
        seconds=measured.seconds,
        tokens_per_second=given.num_tokens / measured.seconds,
        encoding_tokens_per_second=None,
        peak_rss_bytes=measured.peak_rss_bytes,
        peak_pss_bytes=measured.peak_pss_bytes,
        rows=rows.num_rows,
        padding_share=1 - rows.num_tokens / (rows.num_rows * MAX_LENGTH),
        left_out_share=1 - rows.num_tokens / given.num_tokens,
    )


def _run_of_bare(name: str, measured: Measurement, given: _Input) -> TokenizationRun:
    printed = json.loads(measured.output.splitlines()[-1])
    if printed["tokens"] != given.num_tokens - 2 * given.corpus.num_documents:  # it adds neither BOS nor EOS
        raise ChildProcessError(f"{OURS} and {name} count different tokens, so their speeds cannot be compared")
    return TokenizationRun(
        seconds=measured.seconds,
        tokens_per_second=printed["tokens"] / measured.seconds,
        encoding_tokens_per_second=printed["tokens"] / printed["encoding_seconds"],
        peak_rss_bytes=measured.peak_rss_bytes,
        peak_pss_bytes=measured.peak_pss_bytes,
        rows=None,
        padding_share=None,
        left_out_share=None,
    )


def _summarize(given: _Input, runs: Mapping[str, Sequence[TokenizationRun]]) -> CorpusSummary:
    systems = {name: _summarize_system(of_system) for name, of_system in runs.items()}
    ours = systems[OURS].tokens_per_second.median
    ratios = {name: ours / system.tokens_per_second.median for name, system in systems.items() if name != OURS}
    for name in (GIGATOKEN, BARE):
        encoding = spread([run.encoding_tokens_per_second for run in runs[name] if run.encoding_tokens_per_second])
        ratios[f"{name}, encoding alone"] = ours / encoding.median
    return CorpusSummary(
        num_documents=given.corpus.num_documents,
        num_characters=given.corpus.num_characters,
        num_tokens=given.num_tokens,
        systems=systems,
        speed_ratios={f"{OURS} / {name}": ratio for name, ratio in ratios.items()},
    )


def _summarize_system(runs: Sequence[TokenizationRun]) -> SystemSummary:
    pss = [run.peak_pss_bytes for run in runs if run.peak_pss_bytes is not None]
    return SystemSummary(
        repetitions=len(runs),
        seconds=spread([run.seconds for run in runs]),
        tokens_per_second=spread([run.tokens_per_second for run in runs]),
        peak_rss_bytes=spread([run.peak_rss_bytes for run in runs]),
        peak_pss_bytes=spread(pss) if pss else None,
        padding_share=runs[0].padding_share,
        left_out_share=runs[0].left_out_share,
    )


def _table_of(what: str, summary: CorpusSummary) -> Table:
    title = (
        f"Tokenization of {what}: {summary.num_documents:,} documents, {summary.num_tokens:,} tokens, "
        f"{NUM_PROC} processes, medians"
    )
    baselines = [name for name in BASELINES if name in summary.systems]
    columns = ("seconds", "lowest–highest", "tokens/s", *(f"/ {baseline}" for baseline in baselines))
    shown = Table(
        "system",
        *columns,
        "RSS, MB",
        "PSS, MB",
        "padding",
        "left out",
        title=title,
        title_justify="left",
        box=box.SIMPLE,
    )
    for column in shown.columns[1:]:
        column.justify = "right"
    for name, system in summary.systems.items():
        speed = system.tokens_per_second.median
        shown.add_row(
            name,
            f"{system.seconds.median:.1f}",
            f"{system.seconds.lowest:.1f}–{system.seconds.highest:.1f}",
            f"{speed:,.0f}",
            *(f"{speed / summary.systems[baseline].tokens_per_second.median:.2f}×" for baseline in baselines),
            _megabytes(system.peak_rss_bytes),
            _megabytes(system.peak_pss_bytes),
            _percent(system.padding_share),
            _percent(system.left_out_share),
        )
    return shown


def _megabytes(peak: Spread | None) -> str:
    return f"{peak.median / 1e6:,.0f}" if peak else "unknown"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.2%}"
