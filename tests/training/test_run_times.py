"""times.jsonl: the parts of a run's time add up, also through kills; steps that are done again are told apart."""

import json
import re
import time
from pathlib import Path

import pytest

from fabric_train.cli.errors import InputError
from fabric_train.distributed.signals import Heartbeat, StepPhase
from fabric_train.training.metrics import Metrics
from fabric_train.training.run_times import TIMES, TimesFile, TimesLine, read_times, seconds_by_part
from tests.support.forked_runs import ForkedRuns
from tests.support.short_runs import argv, at_point

KILL = "os.kill(os.getpid(), signal.SIGKILL)"


def test_the_parts_of_a_run_killed_twice_add_up_to_its_time(
    tmp_path: Path, forked_runs: ForkedRuns, tiny_model_dir: Path, tiny_tokens_dir: Path
) -> None:
    run = tmp_path / "run"
    given = {"async_save": "false", "save_best": "false", "max_step": 8, "resume": "true"}
    words = argv(tiny_model_dir, tiny_tokens_dir, run, **given)
    began = time.time()
    for step in (6, 8):
        # rank 0, which writes the times; the other rank then ends by itself
        killed = forked_runs.start(words, 2, before=at_point(KILL, step, "COMPUTING", ranks=(0,)))
        assert killed.wait() == [-9, 1]
    forked_runs.start(words, 2).finish()
    ended = time.time()
    lines = [TimesLine(**json.loads(line)) for line in (run / TIMES).read_text().splitlines()]
    assert [line.step for line in lines if line.event == "start"] == [0, 3, 6]
    assert [line.step for line in lines if line.event == "saved"] == [3, 6, 8]
    assert lines[-1].event == "end"
    times = read_times(run)
    assert times is not None
    assert times.total == pytest.approx(lines[-1].time - lines[0].time, abs=0.02)
    assert began <= lines[0].time <= lines[-1].time <= ended
    assert all(seconds >= 0 for seconds in times.parts.values())
    assert min(times.training, times.saving, times.starting, times.restarting, times.repeated, times.idle) > 0
    # of the first start, steps 4 and 5; of the second one, step 7
    done_again = sum(
        attempt[-1].seconds[part] - [line for line in attempt if line.step == kept][-1].seconds[part]
        for attempt, kept in zip(attempts_of(lines), (3, 6), strict=False)
        for part in ("training", "data", "evaluation")
    )
    assert times.repeated == pytest.approx(done_again, abs=0.01)
    assert len(times.starts) == 3
    assert len(times.stalls) == len(times.saves) == 3


def write_lines(run: Path, *lines: tuple[object, ...], end: str = "") -> Path:
    """Write times.jsonl of lines with event, time, step and seconds of training and of saving after 1 s of starting."""
    run.mkdir(exist_ok=True)
    text = ""
    for event, when, step, *spent in lines:
        seconds = dict(zip(("training", "saving"), spent, strict=True), starting=1.0) if spent else {}
        text += json.dumps({"event": event, "time": when, "step": step, "num_devices": 1, "seconds": seconds}) + "\n"
    (run / TIMES).write_text(text + end)
    return run


def test_steps_after_the_earliest_later_start_were_done_again(tmp_path: Path) -> None:
    """The second start finds the newest checkpoint damaged only in the third one: that goes back to step 10."""
    run = write_lines(
        tmp_path,
        ("start", 100, 0),
        *[("step", 101, 1, 0, 0), ("save", 110, 10, 9, 0), ("saved", 112, 10, 9, 2)],
        *[("save", 122, 20, 19, 2), ("saved", 124, 20, 19, 4), ("step", 129, 25, 24, 4)],
        *[("start", 140, 20), ("step", 151, 30, 10, 0)],
        *[("start", 150.5, 10), ("step", 161.5, 20, 10, 0), ("end", 161.5, 20, 10, 0)],
        end='{"event": "st',
    )
    times = read_times(run)
    assert times is not None
    assert (times.training, times.repeated) == (9 + 10, 15 + 10)
    assert (times.starting, times.restarting, times.saving) == (1, 2, 4)
    assert times.idle == 11  # the clock of the third start was behind: that is no negative time
    assert (times.stalls, times.saves, times.starts) == ((2, 2), (2, 2), (1, 1, 1))
    assert times.step == (24 + 10 + 10) / (24 + 9 + 9)
    assert times.goodput == 19 / (19 + 25 + 3 + 4 + 11)


def test_a_save_ends_before_the_next_one_although_its_line_follows(tmp_path: Path) -> None:
    begun = [("start", 0, 0), ("save", 10, 10, 9, 0), ("save", 20, 20, 18, 1), ("saved", 22, 20, 18, 3)]
    times = read_times(write_lines(tmp_path, *begun, ("saved", 24, 20, 18, 5), ("end", 24, 20, 18, 5)))
    assert times is not None
    assert (times.saves, times.stalls) == ((12, 4), (1, 4))


def test_a_start_that_took_no_step_is_no_start_to_plan_with(tmp_path: Path) -> None:
    times = read_times(write_lines(tmp_path, ("start", 0, 0), ("step", 1, 0, 0, 0)))
    assert times is not None
    assert (times.start, times.stall, times.save, times.step, times.goodput) == (None, None, None, None, 0)
    assert times.describe() == "0.0% of 1 s; starting 100.0%"


def test_run_of_an_earlier_version_has_no_times_and_damage_is_named(tmp_path: Path) -> None:
    assert read_times(tmp_path) is None
    for text, fault in (("{}\n", "line 1: damaged"), ('{"event": "step"', ""), ("", "")):
        (tmp_path / TIMES).write_text(text)
        if fault:
            with pytest.raises(InputError, match=fault):
                read_times(tmp_path)
        else:
            assert read_times(tmp_path) is None
    line = {"event": "start", "time": 1.0, "step": 0, "num_devices": 1, "seconds": {}}
    for wrong in ({"num_devices": 0}, {"step": -1}, {"time": -1.0}, {"time": 1e30}, {"seconds": {"saving": -1.0}}):
        (tmp_path / TIMES).write_text(json.dumps(line | wrong) + "\n")
        with pytest.raises(InputError, match="line 1: damaged"):
            read_times(tmp_path)
    write_lines(tmp_path, ("step", 1, 0, 0, 0))
    with pytest.raises(InputError, match="first line is not a start"):
        read_times(tmp_path)


def test_only_lines_of_saves_and_starts_stay_and_a_cut_line_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / TIMES
    heartbeat = Heartbeat()
    path.write_text('{"event": "start", "time": 1, "step": 0, "num_devices": 1, "seconds": {}}\n{"eve')
    times = TimesFile(path, heartbeat, 7, 2)
    for step in range(8, 12):
        for phase in (StepPhase.DATA, StepPhase.COMPUTING, StepPhase.COMPLETING):
            heartbeat.enter(phase, step=step)
        times.log(Metrics(step=step, epoch=0))
        if step == 9:
            times.flush()
    heartbeat.enter(StepPhase.DATA, step=12)  # of a step that a signal interrupts
    heartbeat.enter(StepPhase.SAVING)
    times.close()
    lines = [(line["event"], line["step"]) for line in map(json.loads, path.read_text().splitlines())]
    assert lines == [("start", 0), ("start", 7), ("save", 9), ("end", 11)]


ON_A_FULL_DISK = """
import resource, signal, sys
from fabric_train.distributed.signals import Heartbeat
from fabric_train.training.logger import GuardedLogger
from fabric_train.training.metrics import Metrics
from fabric_train.training.run_log import start_log
from fabric_train.training.run_times import TimesFile
from pathlib import Path

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
start_log()
times = GuardedLogger("times.jsonl", lambda: TimesFile(Path(sys.argv[1]), Heartbeat(), 0, 1))
for step in range(9):
    times.log(Metrics(step=step, epoch=0))
    times.flush()
times.close()
raise SystemExit
"""


def test_a_full_disk_costs_one_line_and_leaves_what_can_be_read(tmp_path: Path, forked_runs: ForkedRuns) -> None:
    run = forked_runs.start([tmp_path / TIMES], 1, before=ON_A_FULL_DISK)
    run.finish()
    assert run.stderr() == ""
    (line,) = run.lines()
    assert re.fullmatch(
        r"warning: times\.jsonl: .*; the run continues without it, and metrics\.csv has every step", line
    )
    times = read_times(tmp_path)
    assert times is not None
    assert 1 <= len(times.stalls) < 9


def test_the_first_step_is_part_of_the_start_and_phases_add_up() -> None:
    heartbeat = Heartbeat(time.monotonic() - 5)
    for step in (1, 2):
        for phase in (StepPhase.DATA, StepPhase.COMPUTING, StepPhase.OPTIMIZER, StepPhase.COMPLETING):
            heartbeat.enter(phase, step=step)
    heartbeat.count_as(StepPhase.SAVING, 3.0)
    spent = heartbeat.seconds
    elapsed = time.monotonic() - heartbeat.started
    assert spent[StepPhase.LOADING] >= 5
    assert spent[StepPhase.SAVING] == 3
    assert sum(spent.values()) == pytest.approx(elapsed, abs=0.1)
    assert seconds_by_part(spent).keys() == {
        *("starting", "training", "rollouts", "data", "evaluation", "saving", "ending")
    }


def attempts_of(lines: list[TimesLine]) -> list[list[TimesLine]]:
    starts = [number for number, line in enumerate(lines) if line.event == "start"]
    return [lines[begin:end] for begin, end in zip(starts, [*starts[1:], None], strict=True)]
