"""SIGTERM, SIGINT and SIGUSR1 to any rank or to the launcher: all ranks save the same step and exit with 75.

The resumed run has the metrics of a run that nobody stopped.
"""

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil
import pytest

from fabric_train.checkpoint import read_trainer_json
from tests.support.forked_runs import ForkedRun, ForkedRuns
from tests.support.launched import Launched, launcher
from tests.support.short_runs import argv, at_point, metrics, saved_steps

pytestmark = pytest.mark.slow

STOPPED = 75
LAST_STEP = 4
SHORT = {"max_step": LAST_STEP, "eval_step_interval": 3, "save_step_interval": 2}
REPLICAS = {"parallelism": "ddp"}  # for what does not depend on the parallelism: they start in less time
HEARD = "any(self.stop_border._is_frozen or time.sleep(0.01) for _ in range(3000))"  # the watchdogs know of the signal
Arguments = Callable[..., list[str]]


@pytest.fixture(scope="module")
def arguments(tiny_model_dir: Path, tiny_tokens_dir: Path) -> Arguments:
    return lambda run, **options: argv(tiny_model_dir, tiny_tokens_dir, run, **{**SHORT, **options})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, forked_runs: ForkedRuns, arguments: Arguments) -> Path:
    """A run on two ranks that nobody stops."""
    run = tmp_path_factory.mktemp("signals") / "whole"
    forked_runs.start(arguments(run)).finish()
    return run


def said(run: ForkedRun) -> list[str]:
    """Return the lines that report the stop, from any rank."""
    lines = [line for rank in (0, 1) for line in run.lines(rank) + run.stderr(rank).splitlines()]
    assert not any("Traceback" in line for line in lines), run.report()
    return [line for line in lines if "stopped by" in line or "error" in line or "again:" in line]


def members(run: ForkedRun) -> list[psutil.Process]:
    """Return all living processes of a run; each rank leads a session."""
    living = [process for process in psutil.process_iter() if process.pid not in (0, os.getpid())]
    return [process for process in living if process.is_running() and _session(process.pid) in run.pids]


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


@pytest.mark.parametrize(
    ("number", "ranks", "step", "phase", "index", "saved"),
    [
        (signal.SIGTERM, (1,), 1, "OPTIMIZER", 0, 1),
        (signal.SIGINT, (0,), 2, "DATA", 0, 1),
        (signal.SIGUSR1, (0, 1), 2, "SAVING", 0, 2),
        (signal.SIGTERM, (1,), 3, "VALIDATION", 1, 3),
        (signal.SIGUSR1, (0,), LAST_STEP, "OPTIMIZER", 0, LAST_STEP),
    ],
    ids=["a step", "waiting for data", "a save", "a validation", "the last step"],
)
def test_a_signal_saves_the_step_and_the_run_resumes_exactly(
    forked_runs: ForkedRuns,
    tmp_path: Path,
    arguments: Arguments,
    whole: Path,
    number: int,
    ranks: tuple[int, ...],
    step: int,
    phase: str,
    index: int,
    saved: int,
) -> None:
    """The step is saved, and the resumed run has the metrics of a run that nobody stopped."""
    run = tmp_path / "run"
    stops = at_point(f"os.kill(os.getpid(), {int(number)}); {HEARD}", step, phase, index, ranks)
    stopped = forked_runs.start(arguments(run), before=stops)
    assert stopped.wait() == [STOPPED, STOPPED], stopped.report()
    name = signal.Signals(number).name
    checkpoint = run / "checkpoints" / f"step-{saved:08d}"
    how = f"stopped by {name} after step {saved} of {LAST_STEP}, saved in {checkpoint}"
    assert said(stopped) == [f"{how}; continue with --resume true"]
    assert saved_steps(run)[-1] == saved
    assert read_trainer_json(checkpoint).scheduled == (saved in saved_steps(whole))
    forked_runs.start(arguments(run, resume="true")).finish()
    assert metrics(run) == metrics(whole)
    assert saved_steps(run)[-1] == LAST_STEP


def test_after_the_last_step_a_signal_changes_nothing(
    forked_runs: ForkedRuns, tmp_path: Path, arguments: Arguments
) -> None:
    stops = at_point("os.kill(os.getpid(), signal.SIGTERM)", 2, "SAVING")
    forked_runs.start(arguments(tmp_path / "run", max_step=2, **REPLICAS), before=stops).finish()
    assert len(metrics(tmp_path / "run")) == 2
    assert saved_steps(tmp_path / "run") == [2]


def test_before_training_a_signal_ends_all_ranks_without_a_save(
    forked_runs: ForkedRuns, tmp_path: Path, arguments: Arguments
) -> None:
    stops = """
import os, signal, socket, time
import fabric_train.training.build_run as building
accept = socket.socket.accept
def accept_slowly(self):
    accepted = accept(self)
    time.sleep(0.5)  # rank 1 is stopped before rank 0 has read its introduction
    return accepted
socket.socket.accept = accept_slowly
def load_and_be_stopped(run):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)
building.open_model = load_and_be_stopped
"""
    stopped = forked_runs.start(arguments(tmp_path / "run"), before=stops)
    assert stopped.wait() == [STOPPED, STOPPED], stopped.report()
    how = "stopped by SIGTERM outside training, with nothing to save"
    assert said(stopped) == [f"{how}; continue with --resume true"]
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_second_signal_ends_all_ranks_at_once(
    forked_runs: ForkedRuns, tmp_path: Path, arguments: Arguments, whole: Path
) -> None:
    run = tmp_path / "run"
    in_the_save = """
import os, signal, time
from fabric_train.checkpoint.rank_writer import RankWriter
write = RankWriter.run
def write_and_be_stopped(self):
    write(self)
    if rank == 1 and "step-00000003" in str(self._folder):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(2.2)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
RankWriter.run = write_and_be_stopped
"""
    stopped = forked_runs.start(arguments(run), before=in_the_save)
    assert stopped.wait(60) == [128 + signal.SIGTERM] * 2, stopped.report()
    assert said(stopped) == ["SIGTERM again: ended immediately without saving; continue with --resume true"]
    assert saved_steps(run) == [2]  # step 3 was evaluated, and would have been the best so far
    forked_runs.start(arguments(run, resume="true")).finish()
    assert metrics(run) == metrics(whole)
    assert not [entry.name for entry in (run / "checkpoints").iterdir() if entry.name.startswith(".")]


def test_data_workers_leave_signals_to_their_rank(
    forked_runs: ForkedRuns, tmp_path: Path, arguments: Arguments
) -> None:
    """torchrun signals a rank's process group, Slurm and a terminal every process there is."""
    stops = at_point(f"os.killpg(os.getpid(), signal.SIGTERM); {HEARD}", 1, "OPTIMIZER")
    stopped = forked_runs.start(arguments(tmp_path / "run", num_workers=1, **REPLICAS), before=stops)
    assert stopped.wait() == [STOPPED, STOPPED], stopped.report()
    assert len(said(stopped)) == 1
    assert saved_steps(tmp_path / "run") == [1]
    assert not members(stopped)
    killed = forked_runs.start(
        arguments(tmp_path / "killed", num_workers=1, **REPLICAS),
        before=at_point("os.kill(os.getpid(), signal.SIGKILL)", 2, "OPTIMIZER"),
    )
    assert -signal.SIGKILL in killed.wait()  # the other may be ended by its watch first
    deadline = time.monotonic() + 30
    while members(killed) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not members(killed)


def test_a_stopped_stream_resumes(
    forked_runs: ForkedRuns, tmp_path: Path, arguments: Arguments, tiny_tokens_dir: Path
) -> None:
    options = {
        "streaming_dataset": tiny_tokens_dir.parent / "slice.jsonl",
        "max_length": 64,
        "save_step_interval": 3,
        **REPLICAS,
    }
    stops = at_point(f"os.kill(os.getpid(), signal.SIGUSR1); {HEARD}", 3, "COMPUTING", 0, (1,))
    stopped = forked_runs.start(arguments(tmp_path / "run", num_workers=1, **options), before=stops)
    at_once = forked_runs.start(arguments(tmp_path / "whole", **options))
    assert stopped.wait() == [STOPPED, STOPPED], stopped.report()
    at_once.finish()
    assert saved_steps(tmp_path / "run") == [2]
    forked_runs.start(arguments(tmp_path / "run", resume="true", **options)).finish()
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


def test_ranks_save_when_their_launcher_ends(forked_runs: ForkedRuns, tmp_path: Path, arguments: Arguments) -> None:
    """SIGUSR1 ends ``fabric run`` itself; here its ranks learn at step 2 that their parent is another process."""
    gone = at_point(f"stop_signals._launcher_pid = 999999; {HEARD}", 2, "DATA", 0, (1,))
    gone = f"from fabric_train.distributed.signals import stop_signals\n{gone}"
    run = tmp_path / "run"
    stopped = forked_runs.start(arguments(run, **REPLICAS), before=gone)
    assert stopped.wait() == [STOPPED, STOPPED], stopped.report()
    (line,) = said(stopped)
    assert line.startswith("stopped by SIGHUP (or the end of its launcher) after step 1 ")
    assert saved_steps(run) == [1]


@pytest.mark.parametrize("parallelism", [pytest.param("fsdp", marks=pytest.mark.launchers), "fsdp2", "ddp"])
def test_a_long_window_is_left_at_the_next_micro_batch(
    forked_runs: ForkedRuns, tmp_path: Path, arguments: Arguments, parallelism: str
) -> None:
    """The signal comes in the second of 4 micro-batches, to one rank; the step before is saved."""
    long = {"total_batch_size": 16, "max_step": 2, "parallelism": parallelism}
    stops = at_point(f"rank and os.kill(os.getpid(), signal.SIGINT); {HEARD}", 2, "COMPUTING", 1)
    late = at_point("print('LATE', flush=True)", 2, "COMPUTING", 3)
    run = tmp_path / "run"
    stopped = forked_runs.start(arguments(run, **long), before=stops + late)
    at_once = forked_runs.start(arguments(tmp_path / "whole", **long))
    assert stopped.wait() == [STOPPED, STOPPED], stopped.report()
    at_once.finish()
    assert "LATE" not in stopped.stdout(0) + stopped.stdout(1)
    how = f"stopped by SIGINT after step 1 of 2, saved in {run / 'checkpoints' / 'step-00000001'}"
    assert said(stopped) == [f"{how}; continue with --resume true"]
    assert stopped.stderr().startswith("SIGINT: stopping and saving; send it again to end without saving\n")
    forked_runs.start(arguments(run, resume="true", **long)).finish()
    assert metrics(run) == metrics(tmp_path / "whole")


def test_a_signal_before_the_first_step_leaves_nothing_to_save(
    forked_runs: ForkedRuns, tmp_path: Path, arguments: Arguments
) -> None:
    stops = at_point(f"os.kill(os.getpid(), signal.SIGINT); {HEARD}", 1, "COMPUTING", 0, (0,))
    stopped = forked_runs.start(arguments(tmp_path / "run", **REPLICAS), before=stops)
    assert stopped.wait() == [STOPPED, STOPPED], stopped.report()
    how = "stopped by SIGINT before the first step, with nothing to save"
    assert said(stopped) == [f"{how}; start the run again"]
    assert saved_steps(tmp_path / "run") == []


def test_a_rank_killed_while_the_run_stops_is_not_out_of_memory(
    forked_runs: ForkedRuns, tmp_path: Path, arguments: Arguments
) -> None:
    """As by a launcher whose grace period is over before the save is."""
    stops = at_point(f"os.kill(os.getpid(), signal.SIGTERM); {HEARD}", 2, "COMPUTING")
    kills = at_point("time.sleep(1); os.kill(os.getpid(), signal.SIGKILL)", 2, "SAVING", 0, (1,))
    stopped = forked_runs.start(arguments(tmp_path / "run", **REPLICAS), before=stops + kills)
    assert stopped.wait() == [1, -signal.SIGKILL], stopped.report()
    (line,) = [line for line in said(stopped) if line.startswith("error: ")]
    assert ", stopping for SIGTERM (a launcher kills ranks that save for longer than its grace period)" in line
    assert "out of memory" not in line


def test_a_reader_that_ends_with_the_signal_loses_nothing(
    forked_runs: ForkedRuns, tmp_path: Path, arguments: Arguments, whole: Path
) -> None:
    """As with ``| tee log`` and Ctrl-C, which ends ``tee`` first: the next line that is printed has no reader."""
    breaks = "r, w = os.pipe(); os.close(r); os.dup2(w, 1); os.dup2(w, 2)"
    stops = at_point(f"{breaks}; os.kill(os.getpid(), signal.SIGINT); {HEARD}", 3, "COMPUTING")
    run = tmp_path / "run"
    stopped = forked_runs.start(arguments(run), before=stops)
    assert stopped.wait() == [STOPPED, STOPPED], stopped.report()
    forked_runs.start(arguments(run, resume="true")).finish()
    assert metrics(run) == metrics(whole)


def listening(processes: Iterable[psutil.Process]) -> set[str]:
    """Return the addresses that some processes accept connections on."""
    sockets = [one for process in processes for one in process.net_connections("inet")]
    return {one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN}


def test_a_run_on_one_machine_cannot_be_reached_from_another(
    forked_runs: ForkedRuns, tmp_path: Path, arguments: Arguments
) -> None:
    """Rank 0 serves the store, for runs that python -m, srun or mpiexec has started."""
    run = forked_runs.start(arguments(tmp_path / "run", **REPLICAS), before=at_point("time.sleep(600)", 2, "COMPUTING"))
    assert run.wait_until(lambda: len(metrics(tmp_path / "run")) == 1)
    assert listening(members(run)) == {"127.0.0.1"}
    run.kill()


@pytest.mark.parametrize(
    ("name", "number", "to_all"),
    [
        ("fabric run", signal.SIGINT, True),  # Ctrl-C in a terminal
        ("fabric run", signal.SIGTERM, False),  # docker stop
        ("python -m", signal.SIGINT, True),
    ],
)
@pytest.mark.launchers
def test_a_signal_to_the_launcher_saves_a_checkpoint(
    tmp_path: Path, arguments: Arguments, free_port: Callable[[], int], name: str, number: int, to_all: bool
) -> None:
    run = tmp_path / "run"
    long = {"max_step": 5000, "number_epochs": 999, "eval_step_interval": 5000, "save_step_interval": 5000}
    command = [*launcher(name, free_port()), *arguments(run, num_workers=1, **long)]
    with Launched(command, tmp_path) as started:
        started.wait_until(lambda: len(metrics(run)) >= 3)
        assert listening([psutil.Process(started.process.pid), *started.ranks()]) == {"127.0.0.1"}
        (os.killpg if to_all else os.kill)(started.process.pid, number)
        assert started.process.wait(30) == STOPPED, started.output()
        assert started.all_gone(10)
    assert "Traceback" not in started.output()
    (line,) = [line for line in started.output().splitlines() if "stopped by" in line]
    assert line.endswith("continue with --resume true")
    (step,) = saved_steps(run)
    assert len(metrics(run)) == step
