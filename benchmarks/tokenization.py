"""Text → rows of Llama-3 tokens on the disk: ``tokenize_dataset.py`` beside the usual ``datasets.map`` recipe."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from datasets import Dataset, DatasetDict, load_from_disk
from rich import box
from rich.table import Table

from benchmarks.measure import ROOT, Command, Spread, interleave, run, spread
from benchmarks.report import Report
from demo import real_data
from fabric_train.corpus.tokenizer import load_tokenizer

REPETITIONS = 3
NUM_PROC = 2
MAX_LENGTH = 2048
DOCUMENT_CHARACTERS = 3_000
COPIES = 4  # of Shakespeare
_SHIFT = 577  # characters by which each copy is cut elsewhere, so that no two documents are the same
_COMPARED_ROWS = 100
OURS, PEER = "fabric_train", "datasets_map"


@dataclass(frozen=True)
class TokenizationRun:
    """One run of one system; ``tokens_per_second`` are the documents' tokens over the whole command's time."""

    seconds: float
    tokens_per_second: float
    peak_rss_bytes: int
    peak_pss_bytes: int | None
    rows: int


@dataclass(frozen=True)
class SystemSummary:
    """A system over its repetitions."""

    seconds: Spread
    tokens_per_second: Spread
    peak_rss_bytes: Spread
    peak_pss_bytes: Spread | None


@dataclass(frozen=True)
class TokenizationSummary:
    """``speed_ratio`` and the memory ratios are ours over the peer's, of the medians."""

    num_documents: int
    num_characters: int
    num_tokens: int
    compared_rows_equal: int
    systems: dict[str, SystemSummary]
    speed_ratio: float
    rss_ratio: float
    pss_ratio: float | None


@dataclass(frozen=True)
class _Input:
    documents: Path
    tokenizer: Path
    num_documents: int
    num_characters: int


def measure(work: Path) -> Report:
    """Measure both systems on the same texts, with their files in ``work``, relative to the project's root.

    Raises:
        ChildProcessError: a system failed, or they did not make the same rows.
    """
    given = _prepare(work)
    commands = {OURS: _our_command(given, work / OURS), PEER: _peer_command(given, work / PEER, work / "cache")}
    # first unmeasured: are the rows the same, and how many tokens are they?
    interleave({name: partial(run, command) for name, command in commands.items()}, 1, "tokenization, not counted")
    num_tokens = json.loads((ROOT / work / OURS / "manifest.json").read_text())["ledger"]["train"]["tokens_in"]
    num_equal = _compare_rows(ROOT / work / OURS, ROOT / work / PEER)
    systems = {
        name: partial(_measure_once, command, work / name, work / "cache", num_tokens)
        for name, command in commands.items()
    }
    runs = interleave(systems, REPETITIONS, "tokenization")
    summary = _summarize(given, num_tokens, num_equal, runs)
    settings = {
        "num_proc": NUM_PROC,
        "max_length": MAX_LENGTH,
        "repetitions": REPETITIONS,
        "text": f"Shakespeare, {COPIES} times, in documents of {DOCUMENT_CHARACTERS} characters",
        "tokenizer": "Llama-3",
    }
    return Report("tokenization", settings, commands, runs, summary)


def table(report: Report) -> Table:
    """Show the medians, and the lowest and highest values behind them."""
    summary: TokenizationSummary = report.summary
    title = (
        f"Tokenization: {summary.num_documents:,} documents, {summary.num_tokens:,} tokens, {NUM_PROC} processes, "
        f"median of {REPETITIONS}"
    )
    columns = ("system", "seconds", "lowest–highest", "tokens/s", "RSS, MB", "PSS, MB")
    shown = Table(*columns, title=title, title_justify="left", box=box.SIMPLE)
    for name, system in summary.systems.items():
        shown.add_row(
            name,
            f"{system.seconds.median:.1f}",
            f"{system.seconds.lowest:.1f}–{system.seconds.highest:.1f}",
            f"{system.tokens_per_second.median:,.0f}",
            _megabytes(system.peak_rss_bytes),
            _megabytes(system.peak_pss_bytes),
        )
    pss_ratio = f"{summary.pss_ratio:.2f}×" if summary.pss_ratio else "unknown"
    shown.add_row("ours / peer", "", "", f"{summary.speed_ratio:.2f}×", f"{summary.rss_ratio:.2f}×", pss_ratio)
    return shown


def _megabytes(peak: Spread | None) -> str:
    return f"{peak.median / 1e6:,.0f}" if peak else "unknown"


def _prepare(work: Path) -> _Input:
    """Write the documents and the tokenizer that both systems are given."""
    folder = ROOT / work
    tokenizer = load_tokenizer(str(real_data.llama3_tokenizer_model()))
    tokenizer.fast.save_pretrained(folder / "tokenizer")
    num_documents = num_characters = 0
    with (folder / "documents.jsonl").open("w", encoding="utf-8") as file:
        for document in _documents(real_data.shakespeare()):
            file.write(json.dumps({"text": document}, ensure_ascii=False) + "\n")
            num_documents += 1
            num_characters += len(document)
    return _Input(work / "documents.jsonl", work / "tokenizer", num_documents, num_characters)


def _documents(works: Path) -> Iterator[str]:
    with works.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    for copy in range(COPIES):
        for text in texts:
            for start in range(copy * _SHIFT, len(text), DOCUMENT_CHARACTERS):
                document = text[start : start + DOCUMENT_CHARACTERS]
                if document.strip():  # ours leaves empty documents out, the peer does not
                    yield document


def _our_command(given: _Input, target: Path) -> Command:
    options = {"validation_split": 0, **_shared_options(given, target)}
    return Command(("python", "tokenize_dataset.py", *_line(options)))


def _peer_command(given: _Input, target: Path, cache: Path) -> Command:
    words = ("python", "benchmarks/peers/datasets_map.py", *_line(_shared_options(given, target)))
    return Command(words, {"HF_DATASETS_CACHE": str(cache)})


def _shared_options(given: _Input, target: Path) -> dict[str, object]:
    return {
        "dataset": given.documents,
        "tokenizer_name": given.tokenizer,
        "output_dir": target,
        "max_length": MAX_LENGTH,
        "num_proc": NUM_PROC,
    }


def _line(options: dict[str, object]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def _measure_once(command: Command, target: Path, cache: Path, num_tokens: int) -> TokenizationRun:
    """Run the command without what an earlier one has left for it to find."""
    for leftover in (target, cache):
        shutil.rmtree(ROOT / leftover, ignore_errors=True)
    measured = run(command)
    return TokenizationRun(
        seconds=measured.seconds,
        tokens_per_second=num_tokens / measured.seconds,
        peak_rss_bytes=measured.peak_rss_bytes,
        peak_pss_bytes=measured.peak_pss_bytes,
        rows=_train(ROOT / target).num_rows,
    )


def _train(folder: Path) -> Dataset:
    made = load_from_disk(str(folder))
    return made["train"] if isinstance(made, DatasetDict) else made


def _compare_rows(ours: Path, peers: Path) -> int:
    """Return how many first rows were compared and are the same.

    The peer begins rows anew with every batch of documents, so later ones are not.
    """
    num_rows = min(_COMPARED_ROWS, _train(ours).num_rows, _train(peers).num_rows)
    if _train(ours)[:num_rows]["input_ids"] != _train(peers)[:num_rows]["input_ids"]:
        raise ChildProcessError(f"{OURS} and {PEER} made other rows of the same texts: nothing can be compared")
    return num_rows


def _summarize(
    given: _Input, num_tokens: int, num_equal: int, runs: dict[str, list[TokenizationRun]]
) -> TokenizationSummary:
    systems = {name: _summarize_system(of_system) for name, of_system in runs.items()}
    ours, peer = systems[OURS], systems[PEER]
    pss_ratio = None
    if ours.peak_pss_bytes and peer.peak_pss_bytes:
        pss_ratio = ours.peak_pss_bytes.median / peer.peak_pss_bytes.median
    return TokenizationSummary(
        num_documents=given.num_documents,
        num_characters=given.num_characters,
        num_tokens=num_tokens,
        compared_rows_equal=num_equal,
        systems=systems,
        speed_ratio=ours.tokens_per_second.median / peer.tokens_per_second.median,
        rss_ratio=ours.peak_rss_bytes.median / peer.peak_rss_bytes.median,
        pss_ratio=pss_ratio,
    )


def _summarize_system(runs: list[TokenizationRun]) -> SystemSummary:
    pss = [run.peak_pss_bytes for run in runs if run.peak_pss_bytes is not None]
    return SystemSummary(
        seconds=spread([run.seconds for run in runs]),
        tokens_per_second=spread([run.tokens_per_second for run in runs]),
        peak_rss_bytes=spread([run.peak_rss_bytes for run in runs]),
        peak_pss_bytes=spread(pss) if pss else None,
    )
