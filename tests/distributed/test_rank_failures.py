"""A dead or hanging rank ends the run in time, with one line that names it; torchrun's restarts resume by themselves;
two runs do not share a folder.
"""

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fabric_train.distributed import watchdog
from fabric_train.distributed.rank_connections import ConnectedRank, encode, this_process_as_rank
from fabric_train.distributed.signals import Heartbeat, Position, StepPhase
from fabric_train.distributed.watchdog import Watchdog
from tests.support.forked_runs import ForkedRun, ForkedRuns
from tests.support.launched import Launched, launcher
from tests.support.short_runs import argv, at_point, metrics, saved_steps

pytestmark = pytest.mark.slow

Arguments = Callable[..., list[str]]
HOST = socket.gethostname()
GO_ON = "the other ranks have ended; continue with --resume true (docs/reference/errors.md#lost-rank)"


@pytest.fixture(scope="module")
def arguments(tiny_model_dir: Path, tiny_tokens_dir: Path) -> Arguments:
    return lambda run, **options: argv(tiny_model_dir, tiny_tokens_dir, run, **options)


def only_line(run: ForkedRun) -> str:
    """Return the one line that all ranks together print on standard error, apart from gloo's."""
    lines = [line for rank in (0, 1) for line in run.stderr(rank).splitlines() if "gloo" not in line]
    assert len(lines) == 1, run.report()
    return lines[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_is_named_at_once(
    forked_runs: ForkedRuns, tmp_path: Path, arguments: Arguments, rank: int
) -> None:
    dies = at_point("os.kill(os.getpid(), signal.SIGKILL)", 2, "COMPUTING", 1, (rank,))
    given = arguments(
        tmp_path / "run", async_save="false", save_step_interval=1, rank_timeout=100_000
    )  # no timeout notices it
    run = forked_runs.start(given, before=dies)
    codes = run.wait()
    assert (codes[rank], codes[1 - rank]) == (-signal.SIGKILL, 1)
    line = only_line(run)
    assert re.match(rf"error: rank {rank} \({HOST}, process {run.pids[rank]}\) died while the run was at step 2,", line)
    assert line.endswith(GO_ON)
    assert saved_steps(tmp_path / "run") == [1]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_named_in_time_and_ended(
    forked_runs: ForkedRuns, tmp_path: Path, arguments: Arguments, rank: int
) -> None:
    stops = at_point("os.kill(os.getpid(), signal.SIGSTOP)", 2, "COMPUTING", 1, (rank,))
    run = forked_runs.start(arguments(tmp_path / "run", rank_timeout=1), before=stops)
    codes = run.wait()
    assert (codes[rank], codes[1 - rank]) == (-signal.SIGKILL, 1)
    who = (
        f"error: rank {rank} ({HOST}, process {run.pids[rank]}) sent no heartbeat for 1 s (stopped or unreachable) "
        "while the run was at step 2, "
    )
    assert only_line(run).startswith(who)


@pytest.mark.parametrize(
    ("rank", "phase", "where"),
    [
        (1, "DATA", "step 2, waiting for data"),
        (0, "COMPUTING", "step 2, forward and backward pass 1"),
        (1, "VALIDATION", "step 2, validation batch 1"),
    ],
)
def test_a_hanging_main_thread_is_named_in_time(
    forked_runs: ForkedRuns, tmp_path: Path, arguments: Arguments, rank: int, phase: str, where: str
) -> None:
    index = 0 if phase == "DATA" else 1
    hangs = at_point("time.sleep(600)", 2, phase, index, (rank,))
    run = forked_runs.start(arguments(tmp_path / "run", rank_timeout=1, eval_step_interval=2), before=hangs)
    assert run.wait()[1 - rank] == 1
    who = rf"error: rank {rank} \({HOST}, process {run.pids[rank]}\) hung at {where} for \d+ s, in .*, enter; "
    assert re.fullmatch(who + re.escape(GO_ON), only_line(run))


def test_rank_0_prints_the_error_of_another_rank_in_one_line(
    forked_runs: ForkedRuns, tmp_path: Path, arguments: Arguments
) -> None:
    full = at_point("raise OSError(28, 'No space left on device', 'a file')", 2, "COMPUTING", 1, (1,))
    run = forked_runs.start(arguments(tmp_path / "run"), before=full)
    assert run.wait() == [1, 1]
    assert run.stderr(1) == ""
    assert only_line(run).startswith("error (rank 1): No space left on device: a file; ")


def test_an_end_that_follows_a_heartbeat_arrives() -> None:
    """Rank 0 ends at once, with a message of the other rank unread: the kernel then drops what it has not sent."""
    rank_0 = ConnectedRank(1)
    rank_1 = ConnectedRank(0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        rank_0.open(socket.create_connection(server.getsockname()))
        rank_1.open(server.accept()[0])
    for _ in range(30):  # until the kernel delays acknowledgements, as in a long run
        rank_0.send(encode(beat=True))
        assert rank_1.read() == [{"beat": True}]
        time.sleep(0.01)
        rank_1.send(encode(beat=True))
        assert rank_0.read() == [{"beat": True}]
    time.sleep(0.1)
    rank_1.send(encode(beat=True))
    rank_0.send(encode(beat=True))
    rank_0.send(encode(end=1))
    rank_0.close()
    messages = []
    while (received := rank_1.read()) is not None:
        messages += received
    assert messages[-1] == {"end": 1}


def test_long_saves_and_first_steps_are_no_hang(forked_runs: ForkedRuns, tmp_path: Path, arguments: Arguments) -> None:
    """A long save, and a first step that compiles: the watchdog would end any other wait after a second."""
    lasts = at_point("time.sleep(2)", 2, "SAVING", 0, (1,)) + at_point("time.sleep(2)", 1, "COMPUTING", 1, (0,))
    given = arguments(tmp_path / "run", rank_timeout=1, save_step_interval=2, max_step=3)
    forked_runs.start(given, before=lasts).finish()
    assert len(metrics(tmp_path / "run")) == 3


def test_a_rank_that_writes_its_profile_does_not_hang(
    forked_runs: ForkedRuns, tmp_path: Path, arguments: Arguments
) -> None:
    """The other rank has no profile to write, and waits in the next step."""
    slowly = """
import time, torch.profiler
write = torch.profiler.profile.export_chrome_trace
torch.profiler.profile.export_chrome_trace = lambda *each: (time.sleep(2), write(*each))
"""
    given = arguments(tmp_path / "run", rank_timeout=1, profile="1:1", max_step=2)
    forked_runs.start(given, before=slowly).finish()
    assert len(list((tmp_path / "run" / "profile").iterdir())) == 1


def test_a_rank_that_has_waited_long_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the slow rank passes it, only the time counts that it keeps that rank waiting."""
    heartbeat = Heartbeat()
    ended: list[str] = []
    watchdog = Watchdog(0, 2, heartbeat, timeout=0.5)
    rank_1 = ConnectedRank(1)
    watchdog._connected_ranks[1] = rank_1
    monkeypatch.setattr(watchdog, "_end_without", lambda _, reason: ended.append(reason))

    def beat() -> list[str]:
        rank_1.update(Position(4, StepPhase.COMPUTING, 0, is_slow=False), "loop.py", True, 0.0)
        watchdog._beat()
        return ended

    heartbeat.enter(StepPhase.COMPUTING, step=3)
    heartbeat.enter(StepPhase.DATA, step=4)
    heartbeat.take_time()
    assert beat() == []
    time.sleep(0.6)
    assert beat() == []
    heartbeat.enter(StepPhase.COMPUTING, 1)
    assert beat() == []
    time.sleep(0.6)
    (how,) = beat()
    assert how.startswith("hung at step 4, forward and backward pass 0 for 1 s")


class WatchedPair:
    """Rank 0's watchdog and rank 1, on a clock of their own; ``ended`` gets the reasons for which the run would end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.ended: list[str] = []
        self.heartbeat = Heartbeat()
        self.rank_1 = ConnectedRank(1)
        self.watchdog = Watchdog(0, 2, self.heartbeat, timeout=10)
        self.watchdog._connected_ranks[1] = self.rank_1
        monkeypatch.setattr(self.watchdog, "_end_without", lambda _, reason: self.ended.append(reason))

    def beat_until(self, end: float, *, rank_1_until: float | None = None, **position: Any) -> list[str]:
        """Beat each second, rank 1 at step 1 perhaps not to the end; return why the run would end."""
        of_rank_1 = Position(1, StepPhase.COMPUTING, 0, position.get("is_slow", False))
        while self.now < end and not self.ended:
            self.now += 1
            if rank_1_until is None or self.now <= rank_1_until:
                self.rank_1.update(of_rank_1, "loop.py", False, position.get("pass_seconds", 0.0))
            self.watchdog._beat()
        return self.ended


@pytest.mark.parametrize(
    ("is_slow", "own_pass", "pass_seconds", "limit"),
    [(False, 0.0, 0.0, 10), (True, 0.0, 0.0, 100), (False, 4.0, 0.0, 20), (False, 0.0, 4.0, 20), (False, 1.0, 1.0, 10)],
)
def test_a_rank_may_keep_others_waiting_for_the_timeout_or_five_passes(
    monkeypatch: pytest.MonkeyPatch, is_slow: bool, own_pass: float, pass_seconds: float, limit: int
) -> None:
    """Of the slowest rank's passes; in a slow phase ten times as long."""
    pair = WatchedPair(monkeypatch)
    pair.heartbeat.position = Position(2, StepPhase.COMPUTING, 0, is_slow=False)
    pair.heartbeat.min_pass_seconds = own_pass
    assert pair.beat_until(limit, is_slow=is_slow, pass_seconds=pass_seconds) == []  # first seen there after a second
    (how,) = pair.beat_until(limit + 2, is_slow=is_slow, pass_seconds=pass_seconds)
    assert how == f"hung at step 1, forward and backward pass 0 for {limit} s, in loop.py"


def test_a_rank_that_falls_silent_is_said_to_be_silent_and_not_to_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = WatchedPair(monkeypatch)
    pair.heartbeat.position = Position(2, StepPhase.COMPUTING, 0, is_slow=False)
    (how,) = pair.beat_until(40, rank_1_until=7)
    assert how.startswith("sent no heartbeat for 10 s")
    assert pair.now == 7 + 10 + 2


def test_all_ranks_stop_after_the_latest_border_once_each_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeat = Heartbeat()
    heartbeat.stop_border.enter(3, 1)
    rank_0 = Watchdog(0, 3, heartbeat, timeout=0)
    others = [ConnectedRank(1), ConnectedRank(2)]
    rank_0._connected_ranks = {other.rank: other for other in others}
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(rank_0, "_send_to_all", lambda **message: sent.append(message))
    rank_0._ask_to_stop(signal.SIGTERM)
    assert sent == [{"freeze": signal.SIGTERM}]
    rank_0._handle_message(others[0], {"passed": [3, 2]})
    assert len(sent) == 1
    rank_0._handle_message(others[1], {"passed": [2, 3]})
    assert sent[1:] == [{"stop_after": (3, 2)}]


@pytest.mark.parametrize("is_here", [True, False])
def test_only_a_rank_of_this_pid_namespace_is_killed(monkeypatch: pytest.MonkeyPatch, *, is_here: bool) -> None:
    """In another container, the lost rank's number may be that of any process here."""
    monkeypatch.setattr(watchdog, "exit_process", sys.exit)
    namespace = this_process_as_rank(0).pid_namespace
    assert namespace
    with subprocess.Popen(["sleep", "60"]) as process, socket.socket() as connection:
        lost = ConnectedRank(1, HOST, process.pid, namespace if is_here else f"{namespace} of another", connection)
        with pytest.raises(SystemExit):
            Watchdog(0, 2, Heartbeat(), timeout=0)._end_without([lost], "died")
        if is_here:
            assert process.wait(30) == -signal.SIGKILL
        else:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)
        process.kill()


def test_a_rank_does_not_outlive_its_launcher(forked_runs: ForkedRuns, tmp_path: Path, arguments: Arguments) -> None:
    """The launcher that the rank knows is not its parent, as after the launcher's death."""
    run = forked_runs.start(arguments(tmp_path / "run"), env={"FABRIC_TRAIN_LAUNCHER": "999999"})
    codes = run.wait(60)
    assert codes == [75, 75], run.report()
    assert "stopped by SIGHUP (or the end of its launcher)" in run.stdout() + run.stderr()


@pytest.mark.launchers
@pytest.mark.parametrize("seconds", [0.5, 4.0])
def test_no_rank_outlives_a_launcher_killed_at_the_start(
    tmp_path: Path, arguments: Arguments, free_port: Callable[[], int], seconds: float
) -> None:
    """The launcher is killed so long after it has started the first rank."""
    with Launched([*launcher("fabric run", free_port()), *arguments(tmp_path / "run")], tmp_path) as started:
        started.wait_until(lambda: bool(started.ranks()))
        time.sleep(seconds)
        started.wait_until(lambda: True)  # remembers the processes that are there
        started.process.kill()
        assert started.all_gone(5), started.output()


@pytest.mark.launchers
def test_torchrun_restarts_from_the_newest_checkpoint(
    forked_runs: ForkedRuns, tmp_path: Path, arguments: Arguments, free_port: Callable[[], int]
) -> None:
    options = {"max_step": 24, "eval_step_interval": 12, "save_step_interval": 4, "num_workers": 1}
    whole = tmp_path / "whole"
    run = tmp_path / "run"
    undisturbed = forked_runs.start(arguments(whole, **options))
    with Launched([*launcher("torchrun", free_port()), *arguments(run, **options)], tmp_path) as started:
        _wait_for_step(started, run, 6)
        started.wait_until(lambda: bool(saved_steps(run)))  # the first one is written in the background
        _kill_and_wait_for_restart(started, 0)
        assert started.process.wait(100) == 0, started.output()
        assert started.all_gone(10)
    undisturbed.finish()
    assert metrics(run) == metrics(whole)
    assert len(re.findall(r"^error: rank \d .* died ", started.output(), re.MULTILINE)) == 1
    starts = re.findall(r"^start  .*\n(?: .*\n)*", started.output(), re.MULTILINE)
    assert ["/step-000000" in start for start in starts] == [False, True]


def test_a_restart_before_the_first_save_starts_again(
    forked_runs: ForkedRuns, tmp_path: Path, arguments: Arguments
) -> None:
    whole = tmp_path / "whole"
    run = tmp_path / "run"
    dies = at_point("os.kill(os.getpid(), signal.SIGKILL)", 3, "COMPUTING")
    arguments = partial(arguments, max_step=3)
    assert forked_runs.start(arguments(run), 1, before=dies).wait() == [-signal.SIGKILL]
    assert metrics(run)
    assert not saved_steps(run)
    forked_runs.start(arguments(run), 1, env={"TORCHELASTIC_RESTART_COUNT": "1"}).finish()
    forked_runs.start(arguments(whole), 1).finish()
    assert metrics(run) == metrics(whole)


def _wait_for_step(started: Launched, run: Path, step: int) -> None:
    started.wait_until(lambda: len(metrics(run)) >= step and len(started.ranks()) == 2)


def _kill_and_wait_for_restart(started: Launched, rank: int) -> None:
    before = started.ranks()
    before[rank].kill()
    started.wait_until(lambda: len(started.ranks()) == 2 and not set(started.ranks()) & set(before))


def test_a_second_run_into_a_folder_is_refused_until_the_first_ends(
    forked_runs: ForkedRuns, tmp_path: Path, arguments: Arguments
) -> None:
    folder = tmp_path / "run"
    first = forked_runs.start(arguments(folder), 1, before=at_point("time.sleep(600)", 1, "SAVING"), cwd=tmp_path)
    waits = at_point("open('there', 'w'); time.sleep(600)", 2, "COMPUTING", 0, (0,))
    first.kill()
    first.wait()
    first = forked_runs.start(arguments(folder, resume="true"), 1, before=waits, cwd=tmp_path)
    assert first.wait_until((tmp_path / "there").exists)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    for num_devices in (1, 2):
        options = {"resume": "true", "devices": num_devices}
        second = forked_runs.start(arguments(folder, **options), 1)
        assert second.wait(60) == [2]
        assert second.stderr() == (
            f"error: --output_dir {folder}: another run is writing to it (process {first.pids[0]} on {HOST}); wait "
            "for it, stop it, or give another --output_dir\n"
        )
        assert second.stdout() == ""
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    first.kill()
    first.wait()
    forked_runs.start(arguments(folder, resume="true", max_step=2), 1).finish()
    assert len(metrics(folder)) == 2
    assert not (folder / ".lock").exists()
