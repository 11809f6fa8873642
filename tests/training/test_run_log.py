"""What a run prints and logs: the same lines on any standard output and in RUN/run.log."""

import contextlib
import io
import logging
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from fabric_train.training.metrics import Metrics
from fabric_train.training.panel import ProgressLines
from fabric_train.training.run_log import log, note, progress, show, start_log, warn, write_log
from tests.support.forked_runs import ForkedRuns
from tests.support.short_runs import argv, at_point

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
HEAD = rf"{TIME}[+-]\d{{4}} {re.escape(socket.gethostname())} rank (\d): "


def printed_by(console: Console) -> list[str]:
    """Return the lines that a console without a terminal has got, without their times."""
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    return [re.sub(f"^{TIME} ", "", line) for line in lines]


@pytest.fixture
def console() -> Iterator[Console]:
    """A console that is no terminal and narrow, to which the log prints. Later tests find the loggers as new."""
    yield start_log(Console(file=io.StringIO(), force_terminal=False, width=40, markup=False))
    for logger in (log, progress):
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
            handler.close()
        logger.addHandler(logging.NullHandler())


def metrics(step: int, **more: Any) -> Metrics:
    return Metrics(step=step, epoch=0, train_loss=2.5, learning_rate=1e-4, **more)


# ----------------------------------------------------------------------------------------------------- not a terminal


PRINTS = """
from rich.table import Table
from fabric_train.training.run_log import log, note, show, start_log

start_log()
log.info("saved %s", "/data/[/bold]" + "long " * 30 + ":smile:")
note("an escape code, \\x1b[31m")
table = Table(title="Done", title_justify="left", show_header=False, box=None)
table.add_row("next", "python convert_to_hf.py --checkpoint " + "deep/" * 40)
show(table)
raise SystemExit
"""


def test_redirected_lines_carry_the_time_are_whole_and_without_codes(forked_runs: ForkedRuns) -> None:
    done = forked_runs.start([], 1, before=PRINTS, env={"FORCE_COLOR": "1", "COLUMNS": "40"})
    done.finish()
    saved, noted, title, row = done.stdout().splitlines()
    assert "\x1b" not in done.stdout()
    assert re.fullmatch(f"{TIME} " + re.escape(f"saved /data/[/bold]{'long ' * 30}:smile:"), saved)
    assert re.fullmatch(rf"{TIME} note: an escape code, \\x1b\[31m", noted)
    assert re.fullmatch(f"{TIME} Done", title)
    assert row.split() == ["next", "python", "convert_to_hf.py", "--checkpoint", "deep/" * 40]


def test_progress_lines_are_printed_where_there_is_no_terminal(console: Console) -> None:
    line = ProgressLines(0, 3)
    line.log(metrics(1, tokens_per_second=1234.5, peak_memory_gb=1.5))
    line.log(metrics(2))  # within two seconds: not a line
    line.log(metrics(3, val_loss=1.0, perplexity=2.718281828))
    line.close()
    printed = printed_by(console)
    assert re.fullmatch(r"step 1/3 loss 2\.5000 lr 1\.00e-04 tok/s 1,23[45] mem 1\.50 GB eta 0:00", printed[0])
    assert printed[1:] == [
        "step 3: validation loss 1.0000, perplexity 2.718",
        "step 3/3 loss 2.5000 lr 1.00e-04 eta 0:00",
    ]


@pytest.mark.parametrize(("seconds_a_step", "left"), [(6, "5:00"), (600, "8:20:00")])
def test_the_time_left_follows_from_the_steps_since_the_start(
    console: Console, monkeypatch: pytest.MonkeyPatch, seconds_a_step: float, left: str
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    line = ProgressLines(100, 160)
    monkeypatch.setattr(time, "monotonic", lambda: now + 10 * seconds_a_step)
    line.log(metrics(110))  # 50 are left
    monkeypatch.undo()
    line.close()
    assert printed_by(console)[0].endswith(f"eta {left}")


def test_a_silent_start_says_what_it_is_doing(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fabric_train.training.run_log.SILENT_SECONDS", 0.02)
    progress.info("loading weights %d/%d", 3, 8)
    deadline = time.monotonic() + 30
    while not printed_by(console) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert re.fullmatch(r"loading weights 3/8 \(\d+ s\)", printed_by(console)[0])
    progress.info("")
    time.sleep(0.1)
    number = len(printed_by(console))
    time.sleep(0.3)
    assert len(printed_by(console)) == number
    start_log(console)  # ends the thread


# ----------------------------------------------------------------------------------------------------------- run.log


@pytest.mark.parametrize("secret", ["SOME_API_KEY", "OPENAI_APIKEY"])
def test_run_log_has_every_line_with_time_host_and_rank(
    console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    monkeypatch.setenv(secret, "hunter2hunter2")
    file = tmp_path / "run.log"
    note("from before the file was opened")
    write_log(file)
    warn("hunter2hunter2")
    log.debug("a step")
    table = Table("a", "b", box=None)
    table.add_row("1", "2")
    show(table)
    try:
        raise KeyError("rows")
    except KeyError:
        log.error("traceback", exc_info=True)
    text = file.read_text()
    assert re.match(HEAD + "note: from before the file was opened\n" + HEAD + r"warning: \*\*\*\n" + HEAD, text)
    assert "step" not in text
    assert text.splitlines()[3] == " 1  2"
    assert text.endswith("KeyError: 'rows'\n")
    start_log(console)
    write_log(file)
    note("again")
    assert file.read_text().startswith(text)
    assert file.read_text().endswith("note: again\n")


def test_run_log_reports_a_full_disk_once_and_the_run_goes_on(
    console: Console, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_log(tmp_path / "run.log")
    (handler,) = [handler for handler in log.handlers if isinstance(handler, logging.FileHandler)]
    opened = handler.stream
    with open("/dev/full", "w") as full:  # a disk that is full from now on
        handler.stream = full
        note("first")
        note("second")
        with contextlib.suppress(OSError):
            full.close()
    handler.stream = opened
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {tmp_path / 'run.log'}: No space left on device; ")
    assert printed_by(console) == ["note: first", "note: second"]


@pytest.mark.parametrize("kind", ["link", "dead link", "pipe", "folder"])
def test_nothing_is_logged_through_a_link_or_into_a_pipe(
    forked_runs: ForkedRuns, tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path, kind: str
) -> None:
    run = tmp_path / "run"
    elsewhere = tmp_path / "elsewhere"
    run.mkdir()
    if kind == "pipe":
        os.mkfifo(run / "run.log")
    elif kind == "folder":
        (run / "run.log").mkdir()
    else:
        (run / "run.log").symlink_to(elsewhere)
    if kind == "link":
        elsewhere.write_text("of the user")
    refused = forked_runs.start(argv(tiny_model_dir, tiny_tokens_dir, run), 1)
    assert refused.wait() == [2]
    (line,) = refused.stderr().splitlines()
    assert line.startswith(f"error: {run / 'run.log'}")
    assert "remove " in line
    assert not elsewhere.exists() or elsewhere.read_text() == "of the user"


def test_a_run_and_its_resume_are_in_one_log(
    forked_runs: ForkedRuns, tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path
) -> None:
    run = tmp_path / "run"
    first = forked_runs.start(argv(tiny_model_dir, tiny_tokens_dir, run, max_step=2))
    first.finish()
    text = (run / "run.log").read_text()
    printed = [line for line in first.stdout().splitlines() if not re.search(r"step \d+/\d+ ", line)]
    assert [re.sub(f"^{HEAD}", "", line) for line in text.splitlines()] == [
        re.sub(f"^{TIME} ", "", line) for line in printed
    ]
    assert set(re.findall(f"^{HEAD}", text, re.MULTILINE)) == {"0"}
    for wanted in ("Fabric Train", "note: --max_step 2 ends", f"saved {run}/checkpoints/step-00000002", "Done"):
        assert re.search(f"^{HEAD}{re.escape(wanted)}", text, re.MULTILINE), wanted
    assert re.search(r"^steps +2, the last one in epoch 0 \(counted from 0, as in metrics.csv\)$", text, re.MULTILINE)
    forked_runs.start(argv(tiny_model_dir, tiny_tokens_dir, run, max_step=3, resume="true")).finish()
    both = (run / "run.log").read_text()
    assert both.startswith(text)
    assert f"saved {run}/checkpoints/step-00000003" in both


def test_the_traceback_of_any_rank_is_in_the_log(
    forked_runs: ForkedRuns, tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path
) -> None:
    run = tmp_path / "run"
    at_once = "import fabric_train.distributed.watchdog as watchdog; watchdog._DECISION_SECONDS = 0.1\n"
    fails = at_once + at_point("raise KeyError('rows')", 2, "COMPUTING", 1, (1,))
    failed = forked_runs.start(argv(tiny_model_dir, tiny_tokens_dir, run), before=fails)
    assert failed.wait() == [1, 1]
    text = (run / "run.log").read_text()
    (line,) = failed.stderr(0).splitlines()
    assert line.startswith("error (rank 1): KeyError: 'rows' in ")
    assert re.search(f"^{HEAD}{re.escape(line)}$", text, re.MULTILINE)[1] == "0"  # type: ignore[index]
    traceback = re.search(f"^{HEAD}traceback\nTraceback .*?^KeyError: 'rows'$", text, re.MULTILINE | re.DOTALL)
    assert traceback is not None
    assert traceback[1] == "1"


SILENT = "import fabric_train.training.run_log as run_log; run_log.SILENT_SECONDS = 0.2\n"
SLOW_WEIGHTS = """
import time
import fabric_train.model.load_weights as load_weights

num_read = 0
def read_local_part(*arguments, original=load_weights.read_local_part):
    global num_read
    num_read += 1
    time.sleep(0.1 * (num_read < 6))
    return original(*arguments)

load_weights.read_local_part = read_local_part
"""


def test_a_slow_start_names_weights_and_the_first_step(
    forked_runs: ForkedRuns, tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path
) -> None:
    slow = SILENT + SLOW_WEIGHTS + at_point("time.sleep(0.7)", 1, "COMPUTING", 1)
    run = forked_runs.start(argv(tiny_model_dir, tiny_tokens_dir, tmp_path / "run", max_step=2), before=slow)
    run.finish()
    assert re.search(rf"^{TIME} loading weights \d+/\d+ \(\d+ s\)$", run.stdout(), re.MULTILINE)
    assert re.search(rf"^{TIME} step 1, forward and backward pass 1 \(\d+ s\)$", run.stdout(), re.MULTILINE)
    assert not re.search(r" step 2, ", run.stdout())
    assert run.stdout(1) == ""
