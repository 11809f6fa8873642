"""Read the lines of run.log: all of them, or how the last session ended."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fabric_train.cli.output import redact
from fabric_train.files.regular_file import open_regular

LOG = "run.log"
# numbers of at most 18 digits, as steps and ranks have: a damaged line may have thousands, which ``int`` refuses
_LINE = re.compile(r"([0-9]{4}-[0-9-]{5} [0-9:]{8}[+-][0-9]{4}) (.*) rank ([0-9]{1,18}): (.*)")
_STEP = re.compile(r"\bstep[ -]0*([0-9]{1,18})\b")
_AFTER_LAST_MESSAGE = ("warning: ", "note: ", "written ")
"""The beginnings of lines that may follow the line that says how a session ended."""
_TAIL_BYTES = 1 << 18


@dataclass(frozen=True)
class LogLine:
    """A line of run.log."""

    time: str
    machine: str
    rank: int
    text: str
    step: int
    """The step that the line names; if it names none, the last step named before it."""


def read_log(run_dir: Path) -> Iterator[LogLine]:
    """Yield the lines of run.log that begin with a time, without the rows of tables and without secrets.

    Raises:
        OSError: The file cannot be read.
    """
    step = 0
    with (run_dir / LOG).open(encoding="utf-8", errors="replace") as file:
        for line in file:
            match = _LINE.match(redact(line))
            if match is None:
                continue
            time, machine, rank, text = match.groups()
            named_steps = _STEP.findall(text)
            if named_steps:
                step = int(named_steps[0])
            yield LogLine(time, machine, int(rank), text, step)


def read_last_message(run_dir: Path) -> str:
    """Return the line of run.log that says how the last session ended, without its time; "" if there is no such line.

    Only the end of the file is read.
    """
    log = run_dir / LOG
    if not log.is_file():
        return ""
    with open_regular(log, "") as opened:
        opened.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = opened.read(_TAIL_BYTES).decode(errors="replace").splitlines()
    for line in reversed(lines):
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        text = match[4]
        if not text.startswith(_AFTER_LAST_MESSAGE):
            return text
    return ""
