"""``python -m fabric_train.runs`` lists runs that train, have ended, are copies or are damaged."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fabric_train import runs
from fabric_train.cli.errors import InputError
from fabric_train.run_folder.run_state import find_state
from fabric_train.run_folder.run_summary import summarize_run
from tests.support.forked_runs import ForkedRuns
from tests.support.short_runs import argv, at_point

OPTIONS: dict[str, object] = {"parallelism": "single", "max_step": 4, "eval_step_interval": 2, "save_step_interval": 2}
OPTIONS |= {"async_save": "false"}
FAILS = at_point("raise OSError(28, 'No space left on device')", 2, "OPTIMIZER")
STOPS = at_point("os.kill(os.getpid(), signal.SIGSTOP)", 3, "COMPUTING")


@dataclass(frozen=True)
class Found:
    """Real runs in ``folder``, and the list of them while ``stopped`` was training."""

    folder: Path
    listed: dict[str, dict[str, Any]]


def listed_in(folder: Path, capsys: Any, *words: str) -> dict[str, dict[str, Any]]:
    """Return the listed runs below a folder by the path from there, in the order of the rows."""
    runs.main([str(folder), "--json", *words])
    return {os.path.relpath(run["run"], folder): run for run in json.loads(capsys.readouterr().out)}


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(6000):
        if condition():
            return
        signal.sigtimedwait([], 0.01)
    raise TimeoutError


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory, forked_runs: ForkedRuns, tiny_model_dir: Path, tiny_tokens_dir: Path
) -> Found:
    """``done``, ``failed``, ``sub/stopped``, and ``copy``: of that run while it trained."""
    folder = tmp_path_factory.mktemp("runs")

    def start(name: str, before: str = "") -> Any:
        line = argv(tiny_model_dir, tiny_tokens_dir, folder / name, **OPTIONS)
        return forked_runs.start(line, 1, before=before)

    start("done").finish()
    assert start("failed", FAILS).wait() == [1]
    training = start("sub/stopped", STOPS)
    state = Path(f"/proc/{training.pids[0]}/stat")
    wait_until(lambda: " T " in state.read_text() and (folder / "sub/stopped/checkpoints/step-00000002").is_dir())
    shutil.copytree(folder / "sub" / "stopped", folder / "copy")
    listed = subprocess.run(
        [sys.executable, "-m", "fabric_train.runs", folder, "--json"], capture_output=True, text=True, check=True
    )
    os.kill(training.pids[0], signal.SIGTERM)
    os.kill(training.pids[0], signal.SIGCONT)
    assert training.wait() == [75]
    return Found(folder, {os.path.relpath(run["run"], folder): run for run in json.loads(listed.stdout)})


def test_every_state_of_a_run_is_known(found: Found, capsys: pytest.CaptureFixture[str]) -> None:
    states = {"done": "done", "failed": "failed", "copy": "stopped?", "sub/stopped": "running"}
    assert {name: run["state"] for name, run in found.listed.items()} == states
    states["sub/stopped"] = "stopped"
    listed = listed_in(found.folder, capsys)
    assert {name: run["state"] for name, run in listed.items()} == states
    assert {name: (run["step"], run["num_steps"]) for name, run in listed.items()} == {
        "done": (4, 4),
        "failed": (1, 4),
        "copy": (2, 4),
        "sub/stopped": (listed["sub/stopped"]["step"], 4),
    }
    assert next(iter(listed)) == "sub/stopped"  # it changed last


def test_a_run_of_several_ranks_that_ended_with_an_error_has_failed(tmp_path: Path) -> None:
    """The launcher kills rank 0 after another rank has ended, so its lock file stays."""
    (tmp_path / ".lock").write_text(f"process {2**22 + 1} on {socket.gethostname()}\n")  # above Linux's largest id
    log = tmp_path / "run.log"
    log.write_text("2026-01-01 00:00:00+0000 vm rank 0: error: a reward failed\n")
    assert find_state(tmp_path, changed=0.0) == "failed"
    log.write_text("2026-01-01 00:00:00+0000 vm rank 0: saved step-00000002\n")
    assert find_state(tmp_path, changed=0.0) == "stopped?"


def test_a_row_has_what_the_run_has_logged(
    found: Found, tiny_model_dir: Path, tiny_tokens_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = listed_in(found.folder, capsys)["done"]
    saved = [
        json.loads((found.folder / f"done/checkpoints/step-0000000{step}/trainer.json").read_text()) for step in (2, 4)
    ]
    best = min(saved, key=lambda content: content["val_loss"])
    assert (done["best"], done["best_step"]) == (pytest.approx(best["val_loss"]), best["step"])
    assert (done["model"], done["data"]) == (str(tiny_model_dir), str(tiny_tokens_dir))
    assert done["speed"] > 0
    assert done["damage"] == []


def test_rows_are_sorted_and_filtered(found: Found, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(listed_in(found.folder, capsys, "--sort", "run")) == ["copy", "done", "failed", "sub/stopped"]
    by_best = [run["best"] for run in listed_in(found.folder, capsys, "--sort", "best").values()]
    assert by_best == [*sorted(best for best in by_best if best is not None), None]
    assert list(listed_in(found.folder, capsys, "--filter", "STOPPED", "sub/")) == ["sub/stopped"]
    runs.main([str(found.folder), "--filter", "nothing"])
    assert capsys.readouterr().out == f"no matching runs under {found.folder}\n"
    runs.main([str(found.folder / "done")])
    table = capsys.readouterr().out
    assert table.splitlines()[1].split()[:3] == ["done", "done", "4/4"]
    with pytest.raises(InputError, match="no such folder; give a folder that contains runs"):
        runs.main([str(found.folder / "none")])


NEWEST = "checkpoints/step-00000004"
DAMAGES: dict[str, tuple[str, bytes | None, str]] = {
    "trainer": (f"{NEWEST}/trainer.json", b'{"step": 4, "argum', "step-00000004/trainer.json: damaged"),
    "other": (f"{NEWEST}/trainer.json", b"[1]", "step-00000004/trainer.json: damaged"),
    "types": (
        f"{NEWEST}/trainer.json",
        b'{"step": 4, "arguments": {}, "evaluation": 3}',
        "checkpoints: ",
    ),
    "absent": (f"{NEWEST}/trainer.json", None, "step-00000004/trainer.json: "),
    "metrics": ("metrics.csv", b"\x89PNG\0\n\xff\xfe\n", "metrics.csv: damaged"),
    "words": ("metrics.csv", b"step,epoch,val_loss\n1,0,low\n", "metrics.csv: damaged"),
    "other header": ("metrics.csv", b"\0step,epoch\n1,0\n", "metrics.csv: damaged"),
    "endless step": ("metrics.csv", b"step,epoch\n1e999,0\n", "metrics.csv: damaged"),
    "endless step of a checkpoint": (
        f"{NEWEST}/trainer.json",
        b'{"step": 1e999, "arguments": {}}',
        "step-00000004/trainer.json: damaged",
    ),
    "config": ("config.yaml", b"a: [", "config.yaml: damaged"),
    "gone": ("config.yaml", None, "config.yaml: No such file or directory"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_the_rest_is_shown(
    found: Found, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file, content, fault = DAMAGES[damage]
    for name in ("damaged", "whole"):
        shutil.copytree(found.folder / "done", tmp_path / name)
    if content is None:
        (tmp_path / "damaged" / file).unlink()
    else:
        (tmp_path / "damaged" / file).write_bytes(content)
    listed = listed_in(tmp_path, capsys)
    assert len(listed["damaged"]["damage"]) == 1
    assert fault in listed["damaged"]["damage"][0]
    assert (listed["damaged"]["step"], listed["damaged"]["state"]) == (4, "done")
    assert listed["whole"]["damage"] == []
    runs.main([str(tmp_path)])
    assert "cannot" in capsys.readouterr().out


def test_only_the_end_of_a_long_metrics_csv_is_read(
    found: Found, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hole of 1 TB is before the last rows."""
    shutil.copytree(found.folder / "done", tmp_path / "run")
    header, *_, last = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    rows = [f"{step},{last.partition(',')[2]}\n" for step in range(9_000, 10_001)]
    with (tmp_path / "run" / "metrics.csv").open("wb") as file:
        file.write(f"{header}\n".encode())
        file.seek(1 << 40)
        file.write("".join(["\n", *rows, "10001,0,2."]).encode())
    run = listed_in(tmp_path, capsys)["run"]
    assert (run["step"], run["damage"]) == (10_000, [])


def test_the_list_needs_no_torch(found: Found) -> None:
    code = "import sys; from fabric_train import runs; runs.main(sys.argv[1:]); print('torch' in sys.modules)"
    listed = subprocess.run([sys.executable, "-c", code, found.folder], capture_output=True, text=True, check=True)
    assert listed.stdout.splitlines()[-1] == "False"


def test_arguments_of_training_are_columns_and_in_json(found: Found, capsys: pytest.CaptureFixture[str]) -> None:
    runs.main([str(found.folder), "--columns", "max_step", "eval_step_interval", "--sort", "run"])
    header, _, done, *_ = capsys.readouterr().out.splitlines()
    assert header.split()[4:6] == ["max_step", "eval_step_interval"]
    assert done.split()[:2] == ["done", "done"]
    assert done.split()[6:8] == ["4", "2"]
    assert listed_in(found.folder, capsys)["done"]["arguments"]["eval_step_interval"] == 2
    with pytest.raises(InputError, match="--columns warmup_step: no run has this argument; did you mean warmup_steps"):
        runs.main([str(found.folder), "--columns", "warmup_step"])


def test_the_best_run_is_first_where_higher_is_better_too(found: Found) -> None:
    done = summarize_run(found.folder / "done")
    of_loss = [replace(done, best=loss) for loss in (2.0, 1.0)]
    of_accuracy = []
    for accuracy in (0.5, 0.9):
        of_accuracy.append(replace(done, best_by="accuracy", best=accuracy, higher_is_better=True))
    ordered = sorted([*of_accuracy, *of_loss], key=lambda run: runs._sort_key(run, "best"))
    assert [(run.best_by, run.best) for run in ordered] == [
        ("accuracy", 0.9),
        ("accuracy", 0.5),
        ("all", 1.0),
        ("all", 2.0),
    ]


def test_no_word_is_broken_in_a_narrow_terminal(
    found: Found, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "_REDIRECTED_WIDTH", 60)
    runs.main([str(found.folder)])
    *rows, last = capsys.readouterr().out.splitlines()
    assert [len(row) <= 60 for row in rows] == [True] * 5
    assert last.startswith("no room for data, model")
    monkeypatch.setattr(runs, "_REDIRECTED_WIDTH", 1000)
    runs.main([str(found.folder)])
    assert str(tiny_model_dir) in capsys.readouterr().out
