"""The panel of a run on a terminal: what it shows in any size, what stays when it goes, and the way of a signal."""

import csv
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from rich.cells import cell_len

from fabric_train.training.metrics import Metrics
from fabric_train.training.panel import Moment, Panel
from tests.support.forked_runs import ForkedRun, ForkedRuns
from tests.support.short_runs import argv
from tests.support.terminal import Terminal
from tests.support.token_datasets import TEXTS, tokenize, write_jsonl

SHOWS = """
import os, sys, time
from pathlib import Path
from fabric_train.distributed.signals import Heartbeat, StepPhase
from fabric_train.training.metrics import Metrics
from fabric_train.training.panel import open_progress
from fabric_train.training.run_log import log, start_log

heartbeat = Heartbeat()
heartbeat.machines = {0: "node-1", 1: "node-2"}
panel = open_progress("my-run", 0, 200, start_log(), heartbeat)
values = dict(learning_rate=1e-4, grad_norm=1.25, tokens_per_second=123456.0, data_wait=0.012, peak_memory_gb=70.25)
values |= dict(skipped_steps=3, slowest_rank=1, rank_lag=0.08)
for step in (10, 20):
    heartbeat.enter(StepPhase.COMPUTING, 1, step + 1)
    sources = {"train_loss/es": 3 - step / 100, "train_loss/va": 2 + step / 100}
    sources |= {"val_loss/es": 3.25, "val_loss/va": 2.5}
    log.info("line %d of the log%s", step, " is long" * 20)
    panel.log(Metrics(step=step, epoch=1, train_loss=2.5, val_loss=3 - step / 100, by_source=sources, **values))
panel.log_save(Path("step-00000020"))
print("a library's warning", file=sys.stderr)
if os.fork() == 0:  # a data worker: it neither hangs nor draws
    print("a worker's warning", file=sys.stderr)
    os._exit(0)
os.wait()
os.write(2, b"a native library's warning\\n")
while not Path("go").exists():
    time.sleep(0.02)
panel.close()
log.info("Done")
raise SystemExit
"""
IN_100 = """
── my-run ─ step 20 of 200 (10%), epoch 1 ─────────────────────────────────────────────────────────
███████░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░ T left, T elapsed
loss      train   validation
all      2.5000 →     2.8000 ↓
es       2.8000 ↓     3.2500 →
va       2.2000 ↑     2.5000 →
now             step 21, forward and backward pass 1              tokens/s        123,456
learning rate   1.00e-04         gradient norm   1.250            data wait       1.2%
memory          70.25 GB         skipped steps   3                last save       step 20, 0 s ago
last evaluation step 20, 0 s ago slowest rank    node-2 rank 1, +0.080 s per step
"""
IN_60 = """
── my-run ─ step 20 of 200 (10%), epoch 1 ─────────────────
███░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░ T left, T elapsed
loss      train   validation
all      2.5000 →     2.8000 ↓
es       2.8000 ↓     3.2500 →
va       2.2000 ↑     2.5000 →
now             step 21, forward and backward pass 1
tokens/s        123,456      learning rate   1.00e-04
gradient norm   1.250        data wait       1.2%
memory          70.25 GB     skipped steps   3
last save       step 20, 0 s ago
last evaluation step 20, 0 s ago
slowest rank    node-2 rank 1, +0.080 s per step
"""
IN_FEW_ROWS = """
step 20/200 eta T loss 2.5000 lr 1.00e-04 grad 1.250
"""
LINES = ("a library's warning", "a worker's warning", "a native library's warning")


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal(100, 30)
    yield terminal
    terminal.close()


def start(runs: ForkedRuns, terminal: Terminal, folder: Path, before: str, **env: str) -> ForkedRun:
    return runs.start([], 1, cwd=folder, before=before, terminal=terminal.device, env=terminal.env | env)


def panel_of(text: str) -> str:
    """Return the lines below the last empty one of a screen, with a T for each time."""
    last = text.rstrip().rpartition("\n\n")[2]
    return "\n" + re.sub(r"\d+:\d\d", "T", re.sub(r"\d+ s ago", "0 s ago", last)) + "\n"


def check_log(text: str) -> None:
    for step in (10, 20):
        assert f"line {step} of the log{' is long' * 20}" in text


def test_the_panel_fits_any_terminal_and_leaves_the_log(
    forked_runs: ForkedRuns, tmp_path: Path, terminal: Terminal
) -> None:
    run = start(forked_runs, terminal, tmp_path, SHOWS)
    terminal.wait_for(lambda text: LINES[-1] in text and panel_of(text) == IN_100)
    check_log("".join(terminal.lines()))
    # output that is not Python's is written over the panel, which moves down
    assert [wanted for line in terminal.lines() for wanted in LINES if line.startswith(wanted)] == list(LINES)
    terminal.resize(60, 30)
    text = terminal.wait_for(lambda text: panel_of(text) == IN_60)
    assert text.count("── my-run") == 1
    assert "\x1b[32m" in terminal.written  # a loss that falls is green
    (tmp_path / "go").touch()
    assert terminal.wait_for_end(run) == [0]
    assert "\n".join(terminal.lines()).rstrip().endswith("\nDone")
    assert not re.search("my-run|slowest rank|gone", terminal.text())


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux wraps the lines of a narrower window anew")
def test_tmux_shows_one_panel_and_a_whole_log_after_a_resize(forked_runs: ForkedRuns, tmp_path: Path) -> None:
    def tmux(*command: str) -> str:
        line = ["tmux", "-f", "/dev/null", "-S", str(tmp_path / "socket"), *command]
        return subprocess.run(line, capture_output=True, text=True, check=True).stdout

    tmux("new-session", "-d", "-x", "100", "-y", "30", "sleep 600")
    try:
        device = tmux("display-message", "-p", "#{pane_tty}").strip()
        env = {"TERM": "tmux-256color", "PYTHONWARNINGS": "ignore", "PYTHONUTF8": "1"}
        run = forked_runs.start([], 1, cwd=tmp_path, before=SHOWS, terminal=device, env=env)
        for columns, rows, panel in ((100, 30, IN_100), (60, 30, IN_60), (60, 10, IN_FEW_ROWS), (100, 30, IN_100)):
            tmux("resize-window", "-x", str(columns), "-y", str(rows))
            deadline = time.monotonic() + 60
            while True:
                text = tmux("capture-pane", "-p", "-S", "-")
                num_panels = len(re.findall(r"── my-run|^step 20/", text, re.MULTILINE))
                if panel_of(text) == panel and num_panels == 1:
                    break
                assert time.monotonic() < deadline, text  # on a busy machine the former panel is removed later
                time.sleep(0.1)
            check_log(tmux("capture-pane", "-p", "-J", "-S", "-"))
        (tmp_path / "go").touch()
        assert run.wait() == [0]
        assert tmux("capture-pane", "-p").rstrip().splitlines()[-1] == "Done"
    finally:
        tmux("kill-server")


def test_no_color_is_respected(forked_runs: ForkedRuns, tmp_path: Path, terminal: Terminal) -> None:
    (tmp_path / "go").touch()
    run = start(
        forked_runs, terminal, tmp_path, SHOWS.replace("panel.close", "time.sleep(1); panel.close"), NO_COLOR="1"
    )
    assert terminal.wait_for_end(run) == [0]
    assert "slowest rank" in terminal.written
    assert not re.search(r"\x1b\[[\d;]*[349]\d[\d;]*m", terminal.written)
    assert "\x1b[2m" in terminal.written  # dim is no colour


@pytest.mark.parametrize(("kind", "env"), [("dumb", {}), ("xterm-256color", {"CI": "true"})])
def test_a_terminal_without_a_cursor_and_ci_get_lines(
    forked_runs: ForkedRuns, tmp_path: Path, kind: str, env: dict[str, str]
) -> None:
    (tmp_path / "go").touch()
    terminal = Terminal(200, kind=kind)
    run = start(forked_runs, terminal, tmp_path, SHOWS, **env)
    assert terminal.wait_for_end(run) == [0]
    assert "step 10/200 loss 2.5000 lr 1.00e-04 grad 1.250 tok/s 123,456 mem 70.25 GB eta " in terminal.text()
    assert "\x1b[" not in terminal.written.replace("\x1b[?25h", "")
    terminal.close()


FAILS = """
import sys, threading, time
from fabric_train.cli.errors import end_run
from fabric_train.distributed.signals import Heartbeat
from fabric_train.training.metrics import Metrics
from fabric_train.training.panel import open_progress
from fabric_train.training.run_log import start_log

panel = open_progress("my-run", 0, 100_000, start_log(), Heartbeat())
values = dict(train_loss=2.5, learning_rate=1e-4, grad_norm=1.25, tokens_per_second=123456.0, mfu=0.5)
panel.log(Metrics(step=40_000, epoch=0, peak_memory_gb=70.25, val_loss=1.0, perplexity=2.7, **values))
print("a library's warning", file=sys.stderr)
threading.Timer(0.5, end_run, args=(1, "error: rank 1 died")).start()
while True:  # until the other thread ends the process
    panel.log(Metrics(step=40_001, epoch=0, **values))
    time.sleep(0.001)
"""


@pytest.mark.parametrize(("columns", "values"), [(80, " loss 2.5000 lr 1.00e-04 grad 1.250"), (40, "")])
def test_an_error_takes_the_place_of_the_panel_below_its_last_values(
    forked_runs: ForkedRuns, tmp_path: Path, columns: int, values: str
) -> None:
    terminal = Terminal(columns)
    run = start(forked_runs, terminal, tmp_path, FAILS)
    assert terminal.wait_for_end(run) == [1]
    lines = [line for line in terminal.lines() if line]
    assert lines[-1] == "error: rank 1 died"
    assert re.match(r"step 40,001/100,000 eta \d+:\d\d" + re.escape(values), lines[-2])
    assert "a library's warning" in lines
    assert not re.search("my-run|gone", terminal.text())
    terminal.close()


def test_a_fault_of_the_panel_is_reported_and_the_run_goes_on(
    forked_runs: ForkedRuns, tmp_path: Path, terminal: Terminal
) -> None:
    faulty = """
from fabric_train.distributed.signals import Heartbeat
from fabric_train.training.logger import GuardedLogger
from fabric_train.training.metrics import Metrics
from fabric_train.training.panel import Panel, open_progress
from fabric_train.training.run_log import log, start_log

console, Panel.lines = start_log(), lambda *_: 1 / 0
panel = GuardedLogger("progress", lambda: open_progress("my-run", 0, 9, console, Heartbeat()))
log.info("a line")
panel.log(Metrics(step=1, epoch=0))
panel.log(Metrics(step=2, epoch=0))
log.info("Done")
raise SystemExit
"""
    assert terminal.wait_for_end(start(forked_runs, terminal, tmp_path, faulty)) == [0]
    first, warning, last = (line for line in terminal.lines() if line)
    assert (first, last) == ("a line", "Done")
    assert warning.startswith("warning: progress: division by zero; the run continues without it")


# --------------------------------------------------------------------------------------------------------- a real run


SLOW = """
import time
from fabric_train.distributed.signals import Heartbeat, StepPhase

def enter(self, phase, index=0, step=None, original=Heartbeat.enter):
    original(self, phase, index, step)
    if phase == StepPhase.COMPUTING and index == 0:
        time.sleep(0.02 + 0.1 * (rank == 1))
    if phase == StepPhase.SAVING:
        time.sleep(1)

Heartbeat.enter = enter
"""


def test_a_run_names_its_slowest_rank_and_acknowledges_ctrl_c(
    forked_runs: ForkedRuns, tmp_path: Path, tiny_model_dir: Path, terminal: Terminal
) -> None:
    files = [f"{name}={write_jsonl(tmp_path / f'{name}.jsonl', TEXTS)}" for name in ("es", "va")]
    tokenize(tmp_path / "tokens", tiny_model_dir, *files, validation_split=0.1)
    given = {"number_epochs": 100, "max_step": 1000, "log_step_interval": 1, "eval_step_interval": 3}
    line = argv(tiny_model_dir, tmp_path / "tokens", tmp_path / "my-run", **given, save_step_interval=1000)
    run = forked_runs.start(line, 2, before=SLOW, terminal=terminal.device, env=terminal.env)
    name = rf"slowest rank    {re.escape(socket.gethostname())} rank 1, \+0\.\d+ s per step"
    text = terminal.wait_for(lambda text: re.search(name, text) and "last evaluation step" in text)
    assert re.search(r"^all +\d\.\d{4} [↓↑] +\d\.\d{4}", text, re.MULTILINE)
    assert re.search(r"^va +\d\.\d{4}", text, re.MULTILINE)
    os.kill(run.pids[0], signal.SIGINT)
    stops = r"^Ctrl-C: stopping and saving \(step .+\); again after 2 s: end immediately without\s+saving$"
    terminal.wait_for(lambda text: re.search(stops, text, re.MULTILINE))
    assert terminal.wait_for_end(run) == [75, 75]
    text = terminal.text()
    assert re.search(r"^stopped by SIGINT after step \d+ of 1000, saved in ", text, re.MULTILINE)
    assert not re.search("── my-run|slowest rank|elapsed|Ctrl-C", text)
    log = (tmp_path / "my-run" / "run.log").read_text()
    assert "SIGINT: stopping and saving; send it again to end without saving" in log
    with (tmp_path / "my-run" / "metrics.csv").open(newline="") as file:
        last = list(csv.DictReader(file))[-1]
    assert last["slowest_rank"] == "1"
    assert float(last["rank_lag"]) > 0


# ------------------------------------------------------------------------------------------------------------- layout


def lines_of(panel: Panel, columns: int, rows: int, **moment: int) -> list[str]:
    lines = panel.lines(columns, rows, Moment("step 1, optimizer step", 100.0, **moment))
    return ["".join(segment.text for segment in line) for line in lines]


@pytest.mark.parametrize("columns", [1, 20, 40, 41, 59, 80, 250])
def test_no_panel_is_larger_than_its_terminal(columns: int) -> None:
    sources = {f"train_loss/{'源' * number}{number}": 2.0 for number in range(1, 30)}
    last = Metrics(step=1, epoch=0, train_loss=2.0, by_source=sources, slowest_rank=700, rank_lag=1.0, skipped_steps=1)
    panel = Panel("a run " * 20, 10, 0.0, last, {700: "a-long-name-of-a-machine" * 5})
    for rows, stop in itertools.product((1, 2, 3, 11, 12, 24, 60), (0, signal.SIGTERM)):
        lines = lines_of(panel.after(last, 50.0, 200.0), columns, rows, stop_signal=stop)
        assert len(lines) < rows or not lines
        assert columns < 20 or all(cell_len(line) < columns for line in lines), lines  # the terminal crops the rest


def test_what_does_not_fit_is_left_out_last_facts_first() -> None:
    sources = {f"train_loss/s{number}": 2.0 for number in range(9)}
    last = Metrics(step=1, epoch=0, train_loss=2.0, by_source=sources, grad_norm=1.0, tokens_per_second=5.0, mfu=0.5)
    panel = Panel("run", 10, 0.0, last).after(last, 50.0, 200.0)
    large, small = (" ".join(lines_of(panel, 60, rows)) for rows in (60, 12))
    assert all(f"s{number} " in large for number in range(9))
    assert "mfu" in large
    assert "tokens/s" in small
    assert "mfu" not in small
    assert "and 9 more sources" in small


def test_the_reward_of_the_last_evaluation_stays_in_the_panel() -> None:
    panel = Panel("my-run", num_steps=9, started=0.0, metrics=Metrics(step=0, epoch=0))
    evaluated = {"train_reward": 0.25, "val_reward": 0.4375, "val_completion_tokens": 12.0}
    panel = panel.after(Metrics(step=1, epoch=0, extra=evaluated), now=1.0, expected_end=9.0)
    panel = panel.after(Metrics(step=2, epoch=0, extra={"train_reward": 0.5}), now=2.0, expected_end=9.0)
    segments = chain.from_iterable(panel.lines(100, 30, Moment("", now=2.0)))
    text = "\n".join(segment.text for segment in segments)
    assert re.search(r"validation reward\s+0\.438", text)
    assert re.search(r"last evaluation\s+step 1,", text)
