"""Metrics reach metrics.csv, TensorBoard and Weights & Biases, each step once."""

import csv
import errno
import logging
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from fabric_train.checkpoint import TrainerState
from fabric_train.cli.errors import InputError
from fabric_train.training.loggers import (
    CSVLogger,
    GuardedLogger,
    LoggedRun,
    Logger,
    describe_loggers,
    open_loggers,
)
from fabric_train.training.loop import Stopwatch
from fabric_train.training.metrics import (
    Metrics,
    find_lost_rows,
    further_columns,
    peak_memory_gb,
    read_metrics,
)
from fabric_train.training.trackers import TensorBoardLogger, WandbLogger, complete_wandb
from tests.support.forked_runs import ForkedRuns
from tests.support.wandb_files import read_history

COLUMNS = [
    *("step", "epoch", "train_loss", "val_loss", "perplexity", "val_bits_per_byte", "learning_rate", "grad_norm"),
    *("num_tokens", "tokens_per_second", "samples_per_second", "step_time", "data_wait", "slowest_rank", "rank_lag"),
    *("mfu", "peak_memory_gb"),
    "skipped_steps",
    "rows_hash",
]
WANDB = {"project": "project", "entity": None}


def metrics(step: int, loss: float = 2.5) -> Metrics:
    return Metrics(
        step=step,
        epoch=0,
        train_loss=loss,
        learning_rate=1e-4,
        grad_norm=0.5,
        num_tokens=64 * step,
        rows_hash=f"{step:032x}",
    )


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_csv(path: Path, last_step: int, steps: range, loss: float = 2.5) -> None:
    logger = CSVLogger(path, last_step)
    for step in steps:
        logger.log(metrics(step, loss))
    logger.close()


# ------------------------------------------------------------------------------------------------------ metrics.csv


def test_metrics_csv_has_one_header_and_one_row_a_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write_csv(path, 0, range(1, 4))
    write_csv(path, 3, range(4, 6))
    lines = path.read_text().splitlines()
    assert lines[0].split(",") == COLUMNS
    assert sum(line.startswith("step") for line in lines) == 1
    assert [row["step"] for row in rows_of(path)] == ["1", "2", "3", "4", "5"]


def test_what_was_not_measured_is_an_empty_cell(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write_csv(path, 0, range(1, 2))
    (row,) = rows_of(path)
    assert (row["val_loss"], row["perplexity"], row["mfu"]) == ("", "", "")
    assert (row["train_loss"], row["learning_rate"], row["num_tokens"]) == ("2.5", "0.0001", "64")


def test_a_resumed_run_takes_back_the_rows_beyond_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write_csv(path, 0, range(1, 8), loss=1.5)  # killed after step 7, saved at step 4
    write_csv(path, 4, range(5, 10), loss=3.5)
    rows = rows_of(path)
    assert [int(row["step"]) for row in rows] == list(range(1, 10))
    assert [row["train_loss"] for row in rows] == ["1.5"] * 4 + ["3.5"] * 5
    write_csv(path, 0, range(1, 2))
    assert len(rows_of(path)) == 1


def test_losses_are_written_to_the_last_digit(tmp_path: Path) -> None:
    path, loss = tmp_path / "metrics.csv", 2.718281828459045
    write_csv(path, 0, range(1, 3), loss)
    write_csv(path, 2, range(3, 4), loss)
    assert [float(row["train_loss"]) for row in rows_of(path)] == [loss] * 3
    assert read_metrics(path, 3) == [metrics(step, loss) for step in (1, 2, 3)]


def test_a_row_is_on_disk_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path / "metrics.csv", 0)
    logger.log(metrics(1))
    assert len(rows_of(tmp_path / "metrics.csv")) == 1
    logger.close()


def test_a_row_cut_by_a_crash_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write_csv(path, 0, range(1, 13))
    content = path.read_bytes()
    torn = content[: content.rindex(b"12,") + 1]  # "1" is left of step 12
    path.write_bytes(torn)
    write_csv(path, 11, range(12, 14))
    assert [int(row["step"]) for row in rows_of(path)] == list(range(1, 14))


def test_step_0_is_logged_once_by_a_run_that_starts_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write_csv(path, -1, range(3))
    assert [row.step for row in read_metrics(path, 2)] == [0, 1, 2]
    write_csv(path, -1, range(2))
    assert [int(row["step"]) for row in rows_of(path)] == [0, 1]
    logger = TensorBoardLogger(tmp_path / "tensorboard", -1)
    logger.log(metrics(0, 1.0))
    logger.close()
    logger = TensorBoardLogger(tmp_path / "tensorboard", -1)
    logger.log(metrics(0, 2.0))
    logger.close()
    found = scalars(tmp_path / "tensorboard").Scalars("train_loss")
    assert [(event.step, event.value) for event in found] == [(0, 2.0)]


SOURCES = ("es", 'a, "b"', "gone\nlines")


def test_losses_of_sources_are_columns_whatever_the_names_hold(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    value = {"val_loss/es": 2.718281828459045, 'train_loss/a, "b"': 0.1, "val_bits_per_byte/gone\nlines": 3.5}
    row = replace(metrics(1), by_source=value)
    logger = CSVLogger(path, -1, further_columns([], [], SOURCES))
    logger.log(row)
    logger.close()
    assert read_metrics(path, 1) == [row]
    (cells,) = rows_of(path)
    figures = ("train_loss", "val_loss", "val_perplexity", "val_bits_per_byte")
    assert list(cells) == [*COLUMNS, *(f"{figure}/{name}" for name in SOURCES for figure in figures)]
    assert {name: cell for name, cell in cells.items() if "/" in name and cell} == {
        name: str(number) for name, number in value.items()
    }
    board = TensorBoardLogger(tmp_path / "tensorboard", -1)
    board.log(row)
    board.close()
    assert set(value) <= set(scalars(tmp_path / "tensorboard").Tags()["scalars"])


def test_a_run_that_resumes_with_other_sources_has_the_columns_of_both(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write_csv(path, 0, range(1, 3))  # of before there were columns of sources
    for step, name in ((3, "es"), (4, "va")):
        logger = CSVLogger(path, step - 1, further_columns([], [], [name]))
        logger.log(replace(metrics(step), by_source={f"val_loss/{name}": float(step)}))
        logger.close()
    rows = rows_of(path)
    assert [(row["step"], row["val_loss/es"], row["val_loss/va"]) for row in rows] == [
        *(("1", "", ""), ("2", "", "")),
        *(("3", "3.0", ""), ("4", "", "4.0")),
    ]


HEADER = ",".join(COLUMNS)
DAMAGES = {
    "semicolons": (f"{HEADER}\n".replace(",", ";") + "1;0;2.5\n", "its first line is not the header"),
    "another header": ("iteration,loss\n1,2.5\n", "its first line is not the header"),
    "a column of another program": (f"{HEADER},extra\n", "its first line is not the header"),
    "a source's column of another program": (f"{HEADER},accuracy/es\n", "its first line is not the header"),
    "a quote without its end": ('step,epoch\n1,0\n"2,0\n3,0\n', "line 4: not the row"),
    "a column twice": (f"{HEADER},epoch\n", "its first line is not the header"),
    "binary": ("\x89PNG\x00\x01", "its first line is not the header"),
    "words": ("step,epoch\n1,0\ntwo,0\n", "line 3: not the row of a step after the one before it"),
    "a cell too few": ("step,epoch\n1,0\n2\n3,0\n", "line 3: not the row"),
    "a cell too many": ("step,epoch\n1,0\n2,0,7\n", "line 3: not the row"),
    "no step": ("step,epoch\n,0\n", "line 2: not the row"),
    "a step twice": ("step,epoch\n1,0\n1,0\n", "line 3: not the row"),
    "a huge number": (f"step,epoch\n{'9' * 5000},0\n", "line 2: not the row"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_metrics_csv_is_named_and_left_as_it_is(tmp_path: Path, damage: str) -> None:
    text, fault = DAMAGES[damage]
    path = tmp_path / "metrics.csv"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        CSVLogger(path, 7)
    assert str(error.value).startswith(str(path))
    assert fault in str(error.value)
    assert str(error.value).endswith("put the file of this run back, or move this one away to go on without its rows")
    assert path.read_text() == text


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200), st.integers(0, 400), st.integers(0, 20), st.integers(0, 9))
def test_any_bytes_are_a_metrics_csv_or_named(
    tmp_path: Path, put: bytes, place: int, removed: int, last_step: int
) -> None:
    path = tmp_path / "metrics.csv"
    path.unlink(missing_ok=True)
    write_csv(path, 0, range(1, 8))
    content = path.read_bytes()
    for damaged in (put, content[:place] + put + content[place + removed :]):
        path.write_bytes(damaged)
        try:
            CSVLogger(path, last_step).close()
        except InputError:
            assert path.read_bytes() == damaged
        else:
            steps = [row.step for row in read_metrics(path, last_step)]
            assert steps == sorted(set(steps))
            assert all(0 <= step <= last_step for step in steps)


def test_what_is_beyond_the_checkpoint_is_not_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write_csv(path, 0, range(1, 5))
    whole = path.read_bytes()
    for beyond in (b"\0" * 4096, b"5,0,2."):  # after a power failure, and after a kill
        path.write_bytes(whole + beyond)
        assert [row.step for row in read_metrics(path, 4)] == [1, 2, 3, 4]
    path.write_bytes(whole + b"nonsense\n")
    assert [row.step for row in read_metrics(path, 3)] == [1, 2, 3]


def test_lost_rows_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    assert find_lost_rows(path, TrainerState(step=8), 1) is None  # the run began in another folder
    write_csv(path, 0, range(1, 6))
    assert find_lost_rows(path, TrainerState(step=5), 1) is None
    line = find_lost_rows(path, TrainerState(step=8), 1)
    assert line is not None
    assert line.startswith(f"{path}: rows are lost: it ends at step 5, and the run resumes after step 8; ")
    assert find_lost_rows(path, TrainerState(step=8), 10) is None  # not every step is logged
    assert find_lost_rows(path, TrainerState(step=8, unlogged={"step": 8}), 1) is None
    assert find_lost_rows(path, TrainerState(), 1) is None


# ------------------------------------------------------------------------------------------------------ TensorBoard


def scalars(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def test_tensorboard_holds_every_measured_value_at_its_step(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, 0)
    for step in (1, 2):
        logger.log(metrics(step, loss=step / 2))
    logger.close()
    events = scalars(tmp_path)
    assert set(events.Tags()["scalars"]) == {"epoch", "train_loss", "learning_rate", "grad_norm", "num_tokens"}
    assert [(event.step, event.value) for event in events.Scalars("train_loss")] == [(1, 0.5), (2, 1.0)]
    assert [event.value for event in events.Scalars("num_tokens")] == [64.0, 128.0]


def test_tensorboard_shows_no_step_twice_after_a_resume(tmp_path: Path) -> None:
    for last_step, steps, loss in ((0, range(1, 6), 1.0), (3, range(4, 8), 2.0)):
        logger = TensorBoardLogger(tmp_path, last_step)
        for step in steps:
            logger.log(metrics(step, loss))
        logger.close()
    found = [(event.step, event.value) for event in scalars(tmp_path).Scalars("train_loss")]
    assert found == [(step, 1.0 if step <= 3 else 2.0) for step in range(1, 8)]


def test_event_files_end_at_the_checkpoint_that_a_run_resumes_from(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, 0)
    for step in range(1, 6):
        logger.log(metrics(step))
    logger.close()
    (file,) = tmp_path.iterdir()
    with file.open("ab") as events:
        events.write(b"\x40\0\0\0\0\0\0\0 torn")  # a record that a crash has cut
    TensorBoardLogger(tmp_path, 3).close()
    steps = [event.step for event in EventFileLoader(str(file)).Load() if event.summary.value]
    assert steps == [step for step in (1, 2, 3) for _ in range(5)]


def test_damaged_events_are_cut_off(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, 0)
    for step in range(1, 6):
        logger.log(metrics(step))
    logger.close()
    (file,) = tmp_path.iterdir()
    content = bytearray(file.read_bytes())
    half = content.index(b"grad_norm", len(content) // 2)
    content[half - 30 : half] = b"\xff" * 30
    file.write_bytes(content)
    TensorBoardLogger(tmp_path, 5).close()
    assert 0 < file.stat().st_size < half


def test_a_damaged_wandb_id_is_named(tmp_path: Path) -> None:
    for content in (b"\xff\x00", b"", b"../elsewhere"):
        (tmp_path / "wandb_run_id").write_bytes(content)
        with pytest.raises(InputError, match=r"wandb_run_id: damaged; "):
            WandbLogger(LoggedRun(tmp_path, -1, WANDB))


def fails(*_: object) -> NoReturn:
    raise OSError(errno.ENOSPC, "No space left on device", "events")


@pytest.mark.parametrize("method", ["log", "log_samples", "log_model", "flush", "close"])
def test_a_logger_that_fails_is_reported_once_and_left_out(caplog: pytest.LogCaptureFixture, method: str) -> None:
    whole = Logger()
    setattr(whole, method, fails)
    logger = GuardedLogger("--loggers tensorboard", lambda: whole)
    given: dict[str, list[object]] = {"log": [metrics(1)], "log_samples": [[]], "log_model": [Path("step-00000001")]}
    for _ in range(2):
        getattr(logger, method)(*given.get(method, []))
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("warning: --loggers tensorboard: No space left on device: events; ")
    assert line.endswith("; the run goes on without it, and metrics.csv has every step")


def test_loggers_that_cannot_be_opened_leave_metrics_csv(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tensorboard").write_text("a file")
    (tmp_path / "wandb_run_id").write_text("../elsewhere")
    loggers = open_loggers(["tensorboard", "wandb"], LoggedRun(tmp_path, 0, WANDB))
    for logger in loggers:
        logger.log(metrics(1))
        logger.close()
    assert len(rows_of(tmp_path / "metrics.csv")) == 1
    assert [record.getMessage().split(":")[1] for record in caplog.records] == [
        " --loggers tensorboard",
        " --loggers wandb",
    ]


def test_wandb_that_is_disabled_is_noted_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    caplog.set_level(logging.INFO)
    for logger in open_loggers(["wandb"], LoggedRun(tmp_path, 0, WANDB)):
        logger.log(metrics(1))
        logger.log_model(tmp_path)
        logger.close()
    complete_wandb(LoggedRun(tmp_path, 1, WANDB))
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]
    assert caplog.messages == ["note: WANDB_MODE=disabled: nothing is logged to Weights & Biases"]


def test_metrics_are_read_back_as_they_were_logged(tmp_path: Path) -> None:
    path, loss = tmp_path / "metrics.csv", 2.718281828459045
    write_csv(path, 0, range(1, 5), loss)
    assert read_metrics(path, 3) == [metrics(step, loss) for step in (1, 2, 3)]
    assert read_metrics(tmp_path / "nothing.csv", 3) == []


def test_what_was_flushed_outlives_a_sigkill(tmp_path: Path, forked_runs: ForkedRuns) -> None:
    assert forked_runs.start([tmp_path], 1, before=LOG_AND_DIE).wait() == [-signal.SIGKILL]
    assert len(rows_of(tmp_path / "metrics.csv")) == 3
    assert [event.step for event in scalars(tmp_path / "tensorboard").Scalars("train_loss")] == [1, 2, 3]


def test_metrics_csv_is_written_whatever_loggers_are_asked_for(tmp_path: Path) -> None:
    for names in ([], ["csv"], ["tensorboard"]):
        folder = tmp_path / "-".join(["run", *names])
        folder.mkdir()
        loggers = open_loggers(names, LoggedRun(folder, 0))
        for logger in loggers:
            logger.log(metrics(1))
            logger.close()
        assert len(rows_of(folder / "metrics.csv")) == 1
        assert (folder / "tensorboard").exists() == ("tensorboard" in names)


LOG_AND_DIE = """
import os, signal, sys
from pathlib import Path
from typing import NoReturn
from fabric_train.training.metrics import Metrics
from fabric_train.training.loggers import LoggedRun, open_loggers

loggers = open_loggers(["tensorboard"], LoggedRun(Path(sys.argv[1]), 0))
for step in (1, 2, 3):
    for logger in loggers:
        logger.log(Metrics(step=step, epoch=0, train_loss=step / 2))
for logger in loggers:
    logger.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""

# ------------------------------------------------------------------------------------------------- Weights & Biases

LOG_TO_WANDB = """
import os, sys
for name in list(os.environ):
    if name == "NETRC" or name.startswith("WANDB_") and name not in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        del os.environ[name]
from pathlib import Path
from typing import NoReturn
from fabric_train.training.metrics import Metrics
from fabric_train.training.loggers import LoggedRun, open_loggers

run, checkpoint, last_step = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
loggers = open_loggers(["wandb"], LoggedRun(run, last_step, {"project": "project of ours", "entity": None, "lr": 0.5}))
for step in (last_step + 1, last_step + 2):
    for logger in loggers:
        logger.log(Metrics(step=step, epoch=0, train_loss=step / 2))
print("mode", loggers[-1].logger.mode)
for logger in loggers:
    logger.log_model(checkpoint)
    logger.close()
raise SystemExit
"""


@pytest.mark.slow
def test_the_places_of_loggers_are_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "my run"
    (run / "wandb" / "offline-run-20261124-abc").mkdir(parents=True)
    monkeypatch.setenv("WANDB_MODE", "offline")
    table, tensorboard, wandb = describe_loggers(["tensorboard", "wandb"], run, "project").splitlines()
    assert table.startswith(str(run / "metrics.csv"))
    assert shlex.split(tensorboard) == ["tensorboard", "--logdir", str(run / "tensorboard")]
    command = wandb.split("upload with: wandb sync ")[1]
    shown = subprocess.run(["bash", "-c", f"ls -d {command}"], capture_output=True, text=True, check=True)
    assert shown.stdout == f"{run}/wandb/offline-run-20261124-abc\n"
    monkeypatch.setenv("WANDB_MODE", "online")
    assert describe_loggers(["wandb"], run, "ours").splitlines()[1] == "Weights & Biases, project ours"


def test_wandb_without_account_logs_offline_and_never_asks(tmp_path: Path, forked_runs: ForkedRuns) -> None:
    run, home, checkpoint = tmp_path / "run", tmp_path / "home", tmp_path / "step-00000002"
    for folder in (run, home, checkpoint / "tokenizer", checkpoint / "optimizer"):
        folder.mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(b"weights of the model")
    (checkpoint / "tokenizer" / "tokenizer.json").write_text("{}")
    (checkpoint / "optimizer" / "optimizer.safetensors").write_bytes(b"moments of the optimizer")
    environment = {"HOME": str(home), "WANDB_CACHE_DIR": str(home / "cache"), "WANDB_DATA_DIR": str(home / "data")}
    for last_step in (0, 1):  # the second time resumes, from the checkpoint of step 1
        words = [run, checkpoint, last_step]
        finished = forked_runs.start(words, 1, before=LOG_TO_WANDB, env=environment, cwd=tmp_path)
        finished.finish()
        assert finished.stdout().splitlines() == ["mode offline"]
        assert "wandb" not in finished.stderr()
    identity = (run / "wandb_run_id").read_text()
    (newest,) = (run / "wandb").glob("offline-run-*")
    assert [(row["_step"], row["train_loss"]) for row in read_history(newest)] == [(1, 0.5), (2, 1.0), (3, 1.5)]
    offline = [newest, *(run / "wandb" / "replaced").glob("offline-run-*")]
    assert len(offline) == 2
    assert all(folder.name.endswith(identity) for folder in offline)
    for folder in offline:
        content = next(folder.glob("*.wandb")).read_bytes()
        assert b"train_loss" in content
        assert b"project of ours" in content
        assert f"model-{identity}".encode() in content
        assert b"model.safetensors" in content
        assert b"tokenizer/tokenizer.json" in content
        assert b"optimizer.safetensors" not in content
    staged = [path.read_bytes() for path in home.rglob("*") if path.is_file()]
    assert b"weights of the model" in staged
    assert b"moments of the optimizer" not in staged
    assert not (home / ".netrc").exists()


# --------------------------------------------------------------------------------------------------- time and memory


def test_stopwatch_counts_everything_since_its_last_reading() -> None:
    stopwatch = Stopwatch(peak_flops=1e9)
    stopwatch.waited(1000.0)
    stopwatch.restart()  # an evaluation: what was before does not count
    time.sleep(0.05)
    stopwatch.waited(0.01)
    stopwatch.stepped(300, 3, 4e6)
    stopwatch.stepped(200, 4, 3e6)
    reading = stopwatch.read()
    elapsed = reading["step_time"] * 2
    assert 0.05 <= elapsed < 5
    assert reading["tokens_per_second"] == pytest.approx(500 / elapsed)
    assert reading["data_wait"] == pytest.approx(0.01 / elapsed)
    assert reading["samples_per_second"] == pytest.approx(7 / elapsed)
    assert reading["mfu"] == pytest.approx(7e6 / elapsed / 1e9)
    stopwatch.stepped(1, 1, 1.0)
    assert stopwatch.read()["step_time"] < elapsed + 5
    stopwatch.stepped(1, 1, 1.0, [0.1, 0.5, 0.2])
    stopwatch.stepped(1, 1, 1.0, [0.1, 0.3, 0.2])
    reading = stopwatch.read()
    assert (reading["slowest_rank"], reading["rank_lag"]) == (1, pytest.approx(0.2))
    stopwatch.stepped(1, 1, 1.0, [0.1])
    assert "slowest_rank" not in stopwatch.read()  # a single rank


@pytest.mark.skipif(sys.platform != "linux", reason="compares with /proc")
def test_memory_on_cpu_is_the_most_that_this_process_held() -> None:
    measured = peak_memory_gb(torch.device("cpu"))
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    assert measured == pytest.approx(int(status["VmHWM"].removesuffix(" kB")) * 1024 / 1e9, rel=0.02)
