"""Measure chats to tokens with labels: how many tokens a second of processor time, whole and cut to a length.

``python -m benchmarks.chat_tokens TOKENIZER MAX_LENGTH`` is the process that is measured.
"""

import json
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich import box
from rich.table import Table

from benchmarks.measure import ROOT, Command, Spread, interleave, run, spread
from benchmarks.report import Report
from fabric_train.reading.documents import BadRowError
from fabric_train.sample_data import real_data
from fabric_train.tokenization.chats.chat_encoder import ChatEncoder
from fabric_train.tokenization.chats.formats import read_chat
from fabric_train.tokenization.tokenizers.tokenizer import load_tokenizer

LENGTHS = {"whole": 1 << 20, "1,024": 1024, "256": 256}  # no chat is as long as the first
REPETITIONS = 3


@dataclass(frozen=True)
class ChatTokensRun:
    """The tokens of all chats as they are and as they were cut, and the processor time to encode them."""

    tokens: int
    tokens_kept: int
    cpu_seconds: float


@dataclass(frozen=True)
class ChatTokensSummary:
    """Tokens a second of processor time, by tokenizer and length: of the whole chats, and of the kept parts."""

    tokens_per_second: dict[str, Spread]
    tokens_kept_per_second: dict[str, Spread]


def measure(work: Path) -> Report:
    """Measure Llama-3's template and SmolLM2's ChatML on the real chats, whole and cut.

    Args:
        work: folder for the files, relative to the project's root.

    Raises:
        ChildProcessError: a run failed.
    """
    llama3 = work / "llama-3"
    (ROOT / llama3).mkdir()
    load_tokenizer(str(real_data.llama3_tokenizer_model())).save(ROOT / llama3)
    real_data.chats()
    folders = {"Llama-3": llama3, "SmolLM2": real_data.smollm2().relative_to(ROOT)}
    commands = {
        f"{tokenizer}, {length}": Command(("python", "-m", "benchmarks.chat_tokens", str(folder), str(LENGTHS[length])))
        for tokenizer, folder in folders.items()
        for length in LENGTHS
    }
    systems = {name: partial(_run, command) for name, command in commands.items()}
    runs = interleave(systems, dict.fromkeys(systems, REPETITIONS), "chat_tokens")
    summary = ChatTokensSummary(
        {name: spread([run.tokens / run.cpu_seconds for run in of_name]) for name, of_name in runs.items()},
        {name: spread([run.tokens_kept / run.cpu_seconds for run in of_name]) for name, of_name in runs.items()},
    )
    return Report("chat_tokens", {"repetitions": REPETITIONS}, commands, runs, summary)


def table(report: Report) -> Table:
    """Return a table of the medians."""
    summary: ChatTokensSummary = report.summary
    title = f"Chats to tokens on one core, a second of processor time, median of {REPETITIONS} runs"
    shown = Table("tokenizer, cut to", "tokens read/s", "tokens kept/s", title=title, box=box.SIMPLE)
    for name, read in summary.tokens_per_second.items():
        shown.add_row(name, f"{read.median:,.0f}", f"{summary.tokens_kept_per_second[name].median:,.0f}")
    return shown


def _run(command: Command) -> ChatTokensRun:
    return ChatTokensRun(**json.loads(run(command).output.splitlines()[-1]))


def _encode(tokenizer: Path, max_length: int) -> ChatTokensRun:
    with real_data.chats().open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    encoder = ChatEncoder(tokenizer, "messages", "assistant", "cut_end", max_length)
    started = time.process_time()
    tokens = kept = 0
    for document in encoder.encode_all(read_chat(row, "messages") for row in rows):
        assert not isinstance(document, BadRowError), document
        num_tokens = len(getattr(document, "input_ids", ()))
        kept += num_tokens
        tokens += num_tokens + document.num_tokens_cut
    return ChatTokensRun(tokens, kept, time.process_time() - started)


if __name__ == "__main__":
    result = _encode(Path(sys.argv[1]), int(sys.argv[2]))
    print(json.dumps(vars(result)))
