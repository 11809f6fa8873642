"""Metrics reach metrics.csv, TensorBoard and Weights & Biases, each step once."""

import csv
import errno
import importlib
import json
import logging
import shlex
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import ClassVar, NoReturn

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from fabric_train.checkpoint import TrainerState
from fabric_train.cli.errors import InputError
from fabric_train.data.step_sampler import RolloutSeconds
from fabric_train.training.logger import GuardedLogger, LoggedRun, Logger
from fabric_train.training.loggers import CSVLogger, TensorBoardLogger, describe_loggers, open_loggers
from fabric_train.training.metrics import (
    Metrics,
    extra_columns,
    find_lost_rows,
    grouped_name,
    read_metrics,
)
from fabric_train.training.stopwatch import Stopwatch, peak_memory_gb
from fabric_train.training.trackers import WandbLogger, check_trackers, complete_trackers
from tests.support.forked_runs import ForkedRuns
from tests.support.ports import free_port
from tests.support.wandb_files import read_history

COLUMNS = [
    *("step", "epoch", "train_loss", "val_loss", "perplexity", "val_bits_per_byte", "learning_rate", "grad_norm"),
    *("num_tokens", "tokens_per_second", "samples_per_second", "step_time", "data_wait"),
    *("weights_time", "sampling_time", "rewards_time"),
    *("slowest_rank", "rank_lag", "mfu", "peak_memory_gb"),
    "skipped_steps",
    "rows_hash",
]
TRACKED = {
    "project": "project of ours",
    "entity": None,
    "run_name": "first try",
    "tags": ["es", "ca"],
    "group": "ours",
    "notes": "notes of ours",
    "log_model": "none",
    "lr": 0.5,
}


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
    path = tmp_path / "metrics.csv"
    loss = 2.718281828459045
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
    (event,) = scalars(tmp_path / "tensorboard").Scalars("train/loss")
    assert (event.step, event.value) == (0, 2.0)


SOURCES = ("es", 'a, "b"', "gone\nlines")


def test_losses_of_sources_are_columns_whatever_the_names_hold(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    losses = {"val_loss/es": 2.718281828459045, 'train_loss/a, "b"': 0.1, "val_bits_per_byte/gone\nlines": 3.5}
    logged = replace(metrics(1), by_source=losses)

    # metrics.csv has four columns for each source, and the values in theirs
    csv_logger = CSVLogger(path, -1, extra_columns([], [], SOURCES))
    csv_logger.log(logged)
    csv_logger.close()
    assert read_metrics(path, 1) == [logged]
    (row,) = rows_of(path)
    columns = list(COLUMNS)
    for name in SOURCES:
        columns += [f"train_loss/{name}", f"val_loss/{name}", f"val_perplexity/{name}", f"val_bits_per_byte/{name}"]
    assert list(row) == columns
    for column in columns[len(COLUMNS) :]:
        assert row[column] == str(losses.get(column, ""))

    # TensorBoard has them in groups
    tensorboard = TensorBoardLogger(tmp_path / "tensorboard", -1)
    tensorboard.log(logged)
    tensorboard.close()
    tags = {"val/es/loss", 'train/a, "b"/loss', "val/gone\nlines/bits_per_byte"}
    assert tags <= set(scalars(tmp_path / "tensorboard").Tags()["scalars"])


def test_a_run_that_resumes_with_other_sources_has_the_columns_of_both(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write_csv(path, 0, range(1, 3))  # of before there were columns of sources
    for step, name in ((3, "es"), (4, "va")):
        logger = CSVLogger(path, step - 1, extra_columns([], [], [name]))
        logger.log(replace(metrics(step), by_source={f"val_loss/{name}": float(step)}))
        logger.close()
    assert [(row["step"], row["val_loss/es"], row["val_loss/va"]) for row in rows_of(path)] == [
        ("1", "", ""),
        ("2", "", ""),
        ("3", "3.0", ""),
        ("4", "", "4.0"),
    ]


HEADER = ",".join(COLUMNS)
DAMAGES = {
    "semicolons": (f"{HEADER}\n".replace(",", ";") + "1;0;2.5\n", "its first line is not the metrics.csv header"),
    "another header": ("iteration,loss\n1,2.5\n", "its first line is not the metrics.csv header"),
    "a column of another program": (f"{HEADER},extra\n", "its first line is not the metrics.csv header"),
    "a source's column of another program": (f"{HEADER},accuracy/es\n", "its first line is not the metrics.csv header"),
    "a quote without its end": ('step,epoch\n1,0\n"2,0\n3,0\n', "line 4: not a row"),
    "a column twice": (f"{HEADER},epoch\n", "its first line is not the metrics.csv header"),
    "binary": ("\x89PNG\x00\x01", "its first line is not the metrics.csv header"),
    "words": ("step,epoch\n1,0\ntwo,0\n", "line 3: not a row with a later step than the row before it"),
    "a cell too few": ("step,epoch\n1,0\n2\n3,0\n", "line 3: not a row"),
    "a cell too many": ("step,epoch\n1,0\n2,0,7\n", "line 3: not a row"),
    "no step": ("step,epoch\n,0\n", "line 2: not a row"),
    "a step twice": ("step,epoch\n1,0\n1,0\n", "line 3: not a row"),
    "a huge number": (f"step,epoch\n{'9' * 5000},0\n", "line 2: not a row"),
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
    assert str(error.value).endswith("restore this run's file, or move this file away to continue without its rows")
    assert path.read_text() == text


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    inserted=st.binary(max_size=200),
    position=st.integers(0, 400),
    num_removed=st.integers(0, 20),
    last_step=st.integers(0, 9),
)
def test_any_bytes_are_a_metrics_csv_or_named(
    tmp_path: Path, inserted: bytes, position: int, num_removed: int, last_step: int
) -> None:
    path = tmp_path / "metrics.csv"
    path.unlink(missing_ok=True)
    write_csv(path, 0, range(1, 8))
    content = path.read_bytes()
    partly_damaged = content[:position] + inserted + content[position + num_removed :]
    for damaged in (inserted, partly_damaged):
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
    assert line.startswith(f"{path}: rows are lost: it ends at step 5, but the run resumes after step 8; ")
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
    names = ("epoch", "loss", "learning_rate", "grad_norm", "num_tokens")
    assert set(events.Tags()["scalars"]) == {f"train/{name}" for name in names}
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 0.5), (2, 1.0)]
    assert [event.value for event in events.Scalars("train/num_tokens")] == [64.0, 128.0]


def test_every_column_has_a_group() -> None:
    columns = [name for name in COLUMNS if name not in ("step", "rows_hash")]
    assert [grouped_name(name) for name in columns] == [
        *("train/epoch", "train/loss", "val/loss", "val/perplexity", "val/bits_per_byte", "train/learning_rate"),
        *("train/grad_norm", "train/num_tokens", "speed/tokens_per_second", "speed/samples_per_second"),
        *("speed/step_time", "speed/data_wait", "speed/weights_time", "speed/sampling_time", "speed/rewards_time"),
        *("speed/slowest_rank", "speed/rank_lag", "speed/mfu"),
        *("system/peak_memory_gb", "train/skipped_steps"),
    ]
    further = extra_columns(["margin"], ["accuracy"], ["es/news"])
    assert [grouped_name(name) for name in further] == [
        *("train/margin", "val/accuracy", "val/margin", "train/es/news/loss", "val/es/news/loss"),
        *("val/es/news/perplexity", "val/es/news/bits_per_byte", "val/es/news/accuracy"),
    ]


def test_tensorboard_has_the_report_as_text(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, -1)
    logger.log(metrics(7))
    logger.log_report(tmp_path / "report.html", "# The report")
    logger.close()
    (event,) = scalars(tmp_path).Tensors("report/text_summary")
    assert (event.step, event.tensor_proto.string_val[0]) == (7, b"# The report")


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])  # nothing can be found any more
    importlib.invalidate_caches()
    for name in ("trackio", "mlflow"):
        with pytest.raises(
            InputError, match=rf"--loggers {name} needs {name}; run pip install 'fabric-train\[{name}\]'"
        ):
            check_trackers(["csv", "wandb", name])
    check_trackers(["csv", "wandb"])


def test_tensorboard_shows_no_step_twice_after_a_resume(tmp_path: Path) -> None:
    for last_step, steps, loss in ((0, range(1, 6), 1.0), (3, range(4, 8), 2.0)):
        logger = TensorBoardLogger(tmp_path, last_step)
        for step in steps:
            logger.log(metrics(step, loss))
        logger.close()
    losses = [(event.step, event.value) for event in scalars(tmp_path).Scalars("train/loss")]
    assert losses == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0), (7, 2.0)]


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
            WandbLogger(LoggedRun(tmp_path, -1, TRACKED))


def fails(*_: object) -> NoReturn:
    raise OSError(errno.ENOSPC, "No space left on device", "events")


@pytest.mark.parametrize("method", ["log", "log_samples", "log_model", "log_report", "flush", "close"])
def test_a_logger_that_fails_is_reported_once_and_left_out(caplog: pytest.LogCaptureFixture, method: str) -> None:
    failing_logger = Logger()
    setattr(failing_logger, method, fails)
    logger = GuardedLogger("--loggers tensorboard", lambda: failing_logger)
    arguments: dict[str, list[object]] = {
        "log": [metrics(1)],
        "log_samples": [[]],
        "log_model": [Path("step-00000001")],
        "log_report": [Path("report.html"), "# The report"],
        "flush": [],
        "close": [],
    }
    for _ in range(2):
        getattr(logger, method)(*arguments[method])
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("warning: --loggers tensorboard: No space left on device: events; ")
    assert line.endswith("; the run continues without it, and metrics.csv has every step")


def test_loggers_that_cannot_be_opened_leave_metrics_csv(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tensorboard").write_text("a file")
    (tmp_path / "wandb_run_id").write_text("../elsewhere")
    loggers = open_loggers(["tensorboard", "wandb"], LoggedRun(tmp_path, 0, TRACKED))
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
    for logger in open_loggers(["wandb"], LoggedRun(tmp_path, 0, TRACKED)):
        logger.log(metrics(1))
        logger.log_model(tmp_path)
        logger.close()
    complete_trackers(["wandb"], LoggedRun(tmp_path, 1, TRACKED))
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]
    assert caplog.messages == ["note: WANDB_MODE=disabled: nothing is logged to Weights & Biases"]


def test_metrics_are_read_back_as_they_were_logged(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    loss = 2.718281828459045
    write_csv(path, 0, range(1, 5), loss)
    assert read_metrics(path, 3) == [metrics(step, loss) for step in (1, 2, 3)]
    assert read_metrics(tmp_path / "nothing.csv", 3) == []


def test_what_was_flushed_outlives_a_sigkill(tmp_path: Path, forked_runs: ForkedRuns) -> None:
    assert forked_runs.start([tmp_path], 1, before=LOG_AND_DIE).wait() == [-signal.SIGKILL]
    assert len(rows_of(tmp_path / "metrics.csv")) == 3
    assert [event.step for event in scalars(tmp_path / "tensorboard").Scalars("train/loss")] == [1, 2, 3]


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
from fabric_train.training.logger import LoggedRun
from fabric_train.training.loggers import open_loggers

loggers = open_loggers(["tensorboard"], LoggedRun(Path(sys.argv[1]), 0))
for step in (1, 2, 3):
    for logger in loggers:
        logger.log(Metrics(step=step, epoch=0, train_loss=step / 2))
for logger in loggers:
    logger.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""

# ------------------------------------------------------------------------------------------------- Weights & Biases

LOG_TO_TRACKER = f"""
import os, sys
kept = ("WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_BASE_URL", "WANDB_API_KEY")
for name in list(os.environ):
    if name == "NETRC" or name.startswith("WANDB_") and name not in kept:
        del os.environ[name]
from pathlib import Path
from fabric_train.training.logger import LoggedRun, Sample
from fabric_train.training.loggers import open_loggers
from fabric_train.training.metrics import Metrics
from fabric_train.training.run_log import start_log

start_log()
tracker, run, checkpoint, last_step = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
loggers = open_loggers([tracker], LoggedRun(run, last_step, {TRACKED}, ["val_loss/a|b"]))
for step in (last_step + 1, last_step + 2):
    for logger in loggers:
        logger.log_samples([Sample(step, "To be", "or not"), Sample(step, "Ser", f"o no {{step}}")])
        logger.log(Metrics(step=step, epoch=0, train_loss=step / 2, by_source={{"val_loss/a|b": 1.5}}))
print("mode", getattr(loggers[-1].logger, "mode", None))
page = run / "report.html"
page.write_text("<p>the whole page")
for logger in loggers:
    logger.log_model(checkpoint)
    logger.log_report(page, "# The report")
    if len(sys.argv) == 5:
        logger.close()
sys.stdout.flush()
os._exit(0)
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


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "step-00000002"
    for name in ("tokenizer", "optimizer"):
        (folder / name).mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights of the model")
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    (folder / "optimizer" / "optimizer.safetensors").write_bytes(b"moments of the optimizer")
    return folder


def test_wandb_without_account_logs_offline_and_never_asks(
    tmp_path: Path, checkpoint: Path, forked_runs: ForkedRuns
) -> None:
    run = tmp_path / "run"
    home = tmp_path / "home"
    for folder in (run, home):
        folder.mkdir()
    environment = {"HOME": str(home), "WANDB_CACHE_DIR": str(home / "cache"), "WANDB_DATA_DIR": str(home / "data")}
    for last_step in (0, 1):  # the second time resumes, from the checkpoint of step 1
        words = ["wandb", run, checkpoint, last_step]
        finished = forked_runs.start(words, 1, before=LOG_TO_TRACKER, env=environment, cwd=tmp_path)
        finished.finish()
        assert finished.stdout().splitlines() == ["mode offline"]
        assert "wandb" not in finished.stderr()
    identity = (run / "wandb_run_id").read_text()
    (newest,) = (run / "wandb").glob("offline-run-*")
    rows = [row for row in read_history(newest) if "train/loss" in row]
    assert [(row["_step"], row["train/loss"]) for row in rows] == [(1, 0.5), (2, 1.0), (3, 1.5)]
    offline = [newest, *(run / "wandb" / "replaced").glob("offline-run-*")]
    assert len(offline) == 2
    assert all(folder.name.endswith(identity) for folder in offline)
    for folder in offline:
        content = next(folder.glob("*.wandb")).read_bytes()
        for expected in ("train/loss", "val/a|b/loss", f"model-{identity}", "model.safetensors"):
            assert expected.encode() in content
        for expected in ("project of ours", "first try", "notes of ours", f"report-{identity}", "report.html"):
            assert expected.encode() in content, expected
        assert b"tokenizer/tokenizer.json" in content
        assert b"optimizer.safetensors" not in content
    tables = "".join(file.read_text() for file in newest.rglob("samples_*.table.json"))
    assert all(f'["Ser","o no {step}"]' in tables for step in (1, 2, 3))
    staged = [path.read_bytes() for path in home.rglob("*") if path.is_file()]
    assert b"weights of the model" in staged
    assert b"<p>the whole page" in staged
    assert b"moments of the optimizer" not in staged
    assert not (home / ".netrc").exists()


# ------------------------------------------------------------------------------------------------ Trackio and MLflow

needs = {
    name: pytest.mark.skipif(find_spec(name) is None, reason=f"pip install 'fabric-train[{name}]'")
    for name in ("trackio", "mlflow")
}


def log_and_resume(tracker: str, run: Path, checkpoint: Path, runs: ForkedRuns, env: dict[str, str]) -> None:
    """Log steps 1 and 2 and die, log them again, then resume after step 1 with steps 2 and 3."""
    run.mkdir()
    words = [tracker, run, checkpoint]
    for last_words in ([0, "dies"], [0], [1]):  # the step to log after, and whether to end without closing
        session = runs.start([*words, *last_words], 1, before=LOG_TO_TRACKER, env=env, cwd=run.parent)
        session.finish()
        assert session.lines() == ["mode None"]
        assert session.stderr() == ""


@needs["mlflow"]
def test_mlflow_has_each_step_once_and_everything_else(
    tmp_path: Path, checkpoint: Path, forked_runs: ForkedRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    log_and_resume("mlflow", run, checkpoint, forked_runs, {})
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    client = MlflowClient((run / "mlruns").as_uri())
    run_id = (run / "mlflow_run_id").read_text()
    for name, values in (("train/loss", [0.5, 1.0, 1.5]), ("val/a_b/loss", [1.5] * 3)):
        history = client.get_metric_history(run_id, name)
        assert sorted((metric.step, metric.value) for metric in history) == list(enumerate(values, 1))
    found = client.get_run(run_id)
    assert (found.info.run_name, found.info.status, found.data.params["lr"]) == ("first try", "FINISHED", "0.5")
    tags = {"es": "true", "ca": "true", "group": "ours", "mlflow.note.content": "notes of ours"}
    assert tags.items() <= found.data.tags.items()
    assert client.get_experiment(found.info.experiment_id).name == "project of ours"
    (stored,) = (run / "mlruns").rglob("artifacts")
    files = {path.relative_to(stored).as_posix(): path.read_text() for path in stored.rglob("*") if path.is_file()}
    assert files == {
        **{f"samples/step-{step:08d}.txt": f"To be▸or not\n\nSer▸o no {step}" for step in (1, 2, 3)},
        "report.html": "<p>the whole page",
        "step-00000002/model.safetensors": "weights of the model",
        "step-00000002/tokenizer/tokenizer.json": "{}",
    }


@needs["trackio"]
def test_trackio_has_each_step_once_and_everything_else(
    tmp_path: Path, checkpoint: Path, forked_runs: ForkedRuns
) -> None:
    run = tmp_path / "run"
    own = tmp_path / "trackio"
    log_and_resume("trackio", run, checkpoint, forked_runs, {"TRACKIO_DIR": str(own)})
    (database,) = own.glob("*.db")
    with closing(sqlite3.connect(database)) as opened:
        rows = opened.execute("select step, run_name, metrics from metrics order by id").fetchall()
        (config,) = opened.execute("select config from configs").fetchone()
    logged = [(step, json.loads(metrics)) for step, _, metrics in rows]
    steps = [(step, row) for step, row in logged if "train/loss" in row]
    assert [(step, row["train/loss"], row["val/a|b/loss"]) for step, row in steps] == [
        (step, step / 2, 1.5) for step in (1, 2, 3)
    ]
    assert [row["samples"]["_value"][1] for _, row in steps] == [
        {"prompt": "Ser", "text": f"o no {step}"} for step in (1, 2, 3)
    ]
    assert logged[-1] == (3, {"report": {"_type": "trackio.markdown", "_value": "# The report"}})
    assert {name for _, name, _ in rows} == {f"first try-{(run / 'trackio_run_id').read_text()}"}
    assert {"notes": "notes of ours", "tags": ["es", "ca"], "_Group": "ours"}.items() <= json.loads(config).items()
    stored = {path.read_bytes() for path in own.rglob("*") if path.is_file()}
    assert {b"<p>the whole page", b"weights of the model", b"{}"} <= stored
    assert b"moments of the optimizer" not in stored


# --------------------------------------------------------------------------------------------------------- failures

LOG_WITHOUT = f"""
import atexit, json, psutil, resource, signal, sys
from pathlib import Path
from fabric_train.training import trackers
from fabric_train.training.logger import LoggedRun, Outputs, Sample
from fabric_train.training.loggers import open_loggers
from fabric_train.training.metrics import Metrics
from fabric_train.training.run_log import quiet_libraries, start_log

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
if "disk" in sys.argv:
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
start_log()
quiet_libraries()
trackers._SECONDS_TO_FINISH = 1.0
run = Path(sys.argv[1])
outputs = Outputs(open_loggers(sys.argv[2].split(), LoggedRun(run, 0, {TRACKED})), "none")
for step in range(1, 6):
    outputs.log_samples([Sample(step, "prompt", "text " * 900)] if step == 2 and "server" not in sys.argv else [])
    outputs.log(Metrics(step=step, epoch=0, train_loss=step / 2))
    outputs.flush()
(run / "report.html").write_text("page")
if "server" in sys.argv:
    outputs.close()
    assert not psutil.Process().children()  # Python would wait for them
    atexit._run_exitfuncs()
    raise SystemExit
outputs.log_report(run / "report.html", "# The report " * 900)
outputs.close()
raise SystemExit
"""
INSTALLED = [name for name in ("trackio", "mlflow") if find_spec(name)]


def lines_of_failures(without: str, names: list[str], folder: Path, runs: ForkedRuns, env: dict[str, str]) -> list[str]:
    """Return the lines of a process that logs five steps without a disk or network; metrics.csv has all of them."""
    run = folder / "run"
    run.mkdir()
    words = [run, " ".join(names), without]
    started = runs.start(words, 1, before=LOG_WITHOUT, env={"TRACKIO_DIR": str(folder / "own"), **env}, cwd=folder)
    started.finish()
    assert started.stderr() == ""
    assert [row["step"] for row in rows_of(run / "metrics.csv")] == ["1", "2", "3", "4", "5"]
    return started.lines()


@pytest.mark.slow
def test_a_full_disk_costs_each_logger_one_line(tmp_path: Path, forked_runs: ForkedRuns) -> None:
    names = ["tensorboard", "wandb", *INSTALLED]
    lines = lines_of_failures("disk", names, tmp_path, forked_runs, {"WANDB_MODE": "offline"})
    failed = ["samples.jsonl", *(f"--loggers {name}" for name in names)]
    assert sorted(line.split(": ")[1] for line in lines) == sorted(failed)
    assert all(line.startswith("warning: ") and line.endswith("metrics.csv has every step") for line in lines), lines


@pytest.mark.slow
def test_a_dead_network_costs_each_tracker_one_line(tmp_path: Path, forked_runs: ForkedRuns) -> None:
    names = ["wandb", *INSTALLED]
    dead = f"http://127.0.0.1:{free_port()}"
    environment = {
        "WANDB_MODE": "online",
        "WANDB_API_KEY": "a" * 40,
        "WANDB_BASE_URL": dead,
        "WANDB_INIT_TIMEOUT": "2",
        "MLFLOW_TRACKING_URI": dead,
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "TRACKIO_SPACE_ID": "some/space",
        "HF_TOKEN": "hf_none",
        "HF_ENDPOINT": dead,
        "HF_HUB_OFFLINE": "0",
    }
    lines = lines_of_failures("network", names, tmp_path, forked_runs, environment)
    assert sorted(line.split(": ")[1] for line in lines) == sorted(f"--loggers {name}" for name in names)
    assert all(line.startswith("warning: ") and line.endswith("metrics.csv has every step") for line in lines), lines


class OpensARun(BaseHTTPRequestHandler):
    """A stand-in for a server of W&B and MLflow: it answers what they ask to open a run, and then it is gone."""

    ANSWERS: ClassVar = {
        "upsertBucket": {"data": {"upsertBucket": {"bucket": {"id": "1", "name": "run"}, "inserted": True}}},
        "graphql": {"data": {}},
        "get-by-name": {"experiment": {"experiment_id": "1", "name": "ours", "lifecycle_stage": "active"}},
        "runs/create": {"run": {"info": {"run_id": "abc", "experiment_id": "1", "artifact_uri": "file:none"}}},
        "runs/update": {"run_info": {"run_id": "abc", "experiment_id": "1", "status": "RUNNING"}},
        "": {},
    }

    def do_POST(self) -> None:
        asked = self.path + self.rfile.read(int(self.headers.get("Content-Length", 0))).decode(errors="replace")
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(next(self.ANSWERS[part] for part in self.ANSWERS if part in asked)).encode())
        if "upsertBucket" in asked or "get-history" in asked:
            assert isinstance(self.server, HTTPServer)
            self.server.socket.close()

    do_GET = do_POST  # noqa: N815 - its name in the library

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("tracker", ["wandb", pytest.param("mlflow", marks=needs["mlflow"])])
def test_a_server_that_dies_in_a_run_costs_one_line_and_no_waiting(
    tmp_path: Path, forked_runs: ForkedRuns, tracker: str
) -> None:
    server = HTTPServer(("127.0.0.1", 0), OpensARun)
    Thread(target=server.serve_forever, daemon=True).start()
    place = f"http://127.0.0.1:{server.server_port}"
    environment = {
        "WANDB_MODE": "online",
        "WANDB_API_KEY": "a" * 40,
        "WANDB_BASE_URL": place,
        "MLFLOW_TRACKING_URI": place,
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    }
    (line,) = lines_of_failures("server", [tracker], tmp_path, forked_runs, environment)
    assert line.startswith(f"warning: --loggers {tracker}: ")
    assert server.socket.fileno() == -1  # it was opened, and then lost


# --------------------------------------------------------------------------------------------------- time and memory


def test_stopwatch_counts_everything_since_its_last_reading() -> None:
    stopwatch = Stopwatch(peak_flops=1e9)
    stopwatch.waited(1000.0)
    stopwatch.restart()  # an evaluation: the time before does not count
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
    reading = stopwatch.read()
    assert "slowest_rank" not in reading  # a single rank
    assert "sampling_time" not in reading  # no rows are sampled
    for sampling in (3.0, 4.0):
        stopwatch.rolled_out(RolloutSeconds(weights=1.0, sampling=sampling, rewards=0.5, total=9.0))
        stopwatch.stepped(1, 1, 1.0)
    reading = stopwatch.read()
    assert (reading["weights_time"], reading["sampling_time"], reading["rewards_time"]) == (1.0, 3.5, 0.5)


@pytest.mark.skipif(sys.platform != "linux", reason="compares with /proc")
def test_memory_on_cpu_is_the_most_that_this_process_held() -> None:
    measured = peak_memory_gb(torch.device("cpu"))
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    assert measured == pytest.approx(int(status["VmHWM"].removesuffix(" kB")) * 1024 / 1e9, rel=0.02)
