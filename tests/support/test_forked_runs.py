"""Forked ranks are what a launcher starts: processes of their own with its variables, that end as they would there."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.forked_runs import ForkedRuns, start_forked_runs
from tests.support.ports import free_port
from tests.support.programs import ROOT

pytestmark = pytest.mark.slow

TELL = """
import json, os, sys, torch
names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "GIVEN", "LT_DEVICES")
found = {name: os.environ.get(name) for name in names}
found |= {"threads": torch.get_num_threads(), "own session": os.getsid(0) == os.getpid(), "argv": sys.argv}
print(json.dumps(found))
print("an error of rank", rank, file=sys.stderr)
sys.exit(3 + rank)
"""
SLEEP = """
import os, time
print("asleep", flush=True)
if rank == 1 and os.fork() == 0:
    print("child", os.getpid(), flush=True)
time.sleep(600)
"""


STARTED_IN_THE_BACKGROUND = """
import signal, subprocess, sys
ignored = (signal.SIGINT, signal.SIGHUP)
for number in ignored:
    signal.signal(number, signal.SIG_IGN)
import tests.conftest
signal.raise_signal(signal.SIGHUP)
shown = "import signal; print([signal.getsignal(number) == signal.SIG_IGN for number in (2, 1)])"
subprocess.run([sys.executable, "-c", shown], check=True)
"""


def test_programs_receive_the_signals_that_a_shell_lets_the_tests_ignore() -> None:
    told = [sys.executable, "-c", STARTED_IN_THE_BACKGROUND]
    ended = subprocess.run(told, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, "[False, False]\n"), ended.stderr


def test_two_processes_never_get_one_port() -> None:
    program = "from tests.support.ports import free_port; print([free_port() for _ in range(50)], flush=True); input()"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    ports = [free_port() for _ in range(50)]
    for process in started:
        assert process.stdout is not None
        ports += json.loads(process.stdout.readline())
    for process in started:
        process.communicate("\n", timeout=60)
    assert len(ports) == len(set(ports)) == 150


def test_ranks_know_their_place_and_what_they_say_is_kept(
    forked_runs: ForkedRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("LT_DEVICES", "7")
    run = forked_runs.start(["--lr", 1e-3], 2, before=TELL, env={"GIVEN": "yes"})
    assert run.wait() == [3, 4]
    first, second = (json.loads(run.stdout(rank)) for rank in (0, 1))
    assert (first["RANK"], second["RANK"]) == ("0", "1")
    assert first | {"RANK": "1"} == second
    assert (first["WORLD_SIZE"], first["LOCAL_WORLD_SIZE"], first["TORCHELASTIC_RUN_ID"]) == ("2", "2", "none")
    assert (first["GIVEN"], first["LT_DEVICES"], first["threads"], first["own session"]) == ("yes", None, 1, True)
    assert first["argv"] == ["fabric_train", "--lr", "0.001"]
    assert [run.stderr(rank) for rank in (0, 1)] == ["an error of rank 0\n", "an error of rank 1\n"]
    alone = forked_runs.start([], 1, before=TELL)
    assert alone.wait() == [3]
    assert json.loads(alone.stdout())["RANK"] is None


def test_a_run_over_two_ranks_trains_and_leaves_no_process(
    forked_runs: ForkedRuns, tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path
) -> None:
    line = f"--model_name {tiny_model_dir} --train_data_dir {tiny_tokens_dir} --output_dir run --max_step 2"
    line += " --accelerator cpu --total_batch_size 4 --loggers csv --num_workers 1"
    run = forked_runs.start(line.split(), 2, cwd=tmp_path, draws=True)
    run.finish()
    assert "2 × fsdp" in run.stdout(0)
    assert run.stdout(1) == run.stderr(1) == ""
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").is_dir()
    assert (tmp_path / "run" / "loss_curves.png").is_file()
    assert not any(psutil.pid_exists(pid) for pid in run.pids)


def test_killed_rank_ends_its_workers_and_leaves_the_others(forked_runs: ForkedRuns) -> None:
    run = forked_runs.start([], 2, before=SLEEP)
    assert run.wait_until(lambda: "asleep" in run.stdout(0) and re.search(r"child \d+\n", run.stdout(1)) is not None)
    child = psutil.Process(int(run.stdout(1).split()[-1]))
    run.kill(ranks=[1])
    assert run.wait_until(lambda: run.codes() == [None, -9])
    child.wait(10)
    run.kill(signal.SIGTERM)
    assert run.wait() == [-15, -9]
    with pytest.raises(AssertionError, match="asleep"):
        run.finish()


def test_closing_ends_what_still_runs(tmp_path: Path) -> None:
    runs = start_forked_runs(tmp_path / "output", imports=())
    run = runs.start([], 2, before="import time; time.sleep(600)")
    runs.close()
    deadline = time.monotonic() + 30  # the kernel may still be ending them
    while any(psutil.pid_exists(pid) for pid in run.pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(psutil.pid_exists(pid) for pid in run.pids)


def test_run_that_does_not_end_is_killed_and_its_output_shown(forked_runs: ForkedRuns) -> None:
    run = forked_runs.start([], 1, before="import time; print('hanging', flush=True); time.sleep(600)")
    assert run.wait_until(lambda: "hanging" in run.stdout())
    with pytest.raises(TimeoutError, match="hanging"):
        run.wait(timeout=0.1)
    assert run.codes() == [-9]


def test_a_fork_of_the_server_has_further_imports_and_ends_with_its_ranks(
    forked_runs: ForkedRuns, tmp_path: Path
) -> None:
    told = "import sys; print('cmd' in sys.modules, 'fabric_train.arguments' in sys.modules); sys.exit(5)"
    fork = forked_runs.with_imports(tmp_path / "fork", ["cmd"])
    assert (run := fork.start([], 1, before=told)).wait() == [5]
    assert run.stdout() == "True True\n"
    assert (run := forked_runs.start([], 1, before=told)).wait() == [5]  # and the server has not
    assert run.stdout() == "False True\n"
    asleep = fork.start([], 2, before=SLEEP)
    assert asleep.wait_until(lambda: "asleep" in asleep.stdout(0))
    fork.close()
    assert not any(map(psutil.pid_exists, asleep.pids))
