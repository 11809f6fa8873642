"""Kill runs with SIGKILL and resume them until they finish.

A kill comes from outside at a random moment, or at a chosen one: then a rank kills itself there, and the others are
killed as a launcher would kill them.
"""

import random
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.forked_runs import ForkedRun, ForkedRuns
from tests.support.kill_moments import MOMENTS, source_of_death
from tests.support.programs import option_words

IN_A_SAVE = "save"
"""A moment: all ranks are killed from outside while a checkpoint is written."""
AT_RANDOM = "random moment"
"""A moment: all ranks are killed from outside."""

_TIMEOUT = 120.0
_SHARE_BEFORE_TRAINING = 0.25
"""Of the kills at random moments: those that come before the first step."""
_MAX_TIMES = 3
"""A rank dies when it gets to a moment for the first to the third time."""
_SAVE_SECONDS = 0.02
"""The time that a save of the tiny model takes, at most."""


@dataclass(frozen=True)
class Kill:
    """A kill that has happened."""

    moment: str
    rank: int | None
    """The rank that killed itself; None where all ranks were killed at once."""
    seconds: float
    """Since the start."""
    steps: int
    """The last step that was logged."""
    saved_steps: int
    """The last step with a checkpoint."""


@dataclass(frozen=True)
class Training:
    """A run's ``options`` except --output_dir and --resume, on ``num_ranks``."""

    options: Mapping[str, object]
    num_ranks: int

    def line(self, run: Path, resume: bool = True) -> list[str]:
        """Return the words of the command line."""
        options = {**self.options, "output_dir": run}
        if resume:
            options["resume"] = "true"
        return option_words(options)


@dataclass(frozen=True)
class RunTimes:
    """How long a run took that nobody killed."""

    starting_seconds: float
    """From the start until the first step is logged."""
    step_seconds: float
    """For each step, with evaluations and saves."""
    num_steps: int


def train_uninterrupted(runs: ForkedRuns, training: Training, run: Path) -> RunTimes:
    """Train into the folder ``run`` without a kill and return how long it took."""
    started_at = time.monotonic()
    process = runs.start(training.line(run, resume=False), training.num_ranks)
    metrics_file = _MetricsFile(run)
    process.wait_until(lambda: metrics_file.last_step() > 0, _TIMEOUT)
    first_step_at = time.monotonic()
    process.finish(_TIMEOUT)
    training_seconds = time.monotonic() - first_step_at
    num_steps = metrics_file.last_step()
    return RunTimes(first_step_at - started_at, training_seconds / num_steps, num_steps)


def train_with_kills(
    runs: ForkedRuns,
    training: Training,
    run: Path,
    moments: Sequence[str],
    rng: random.Random,
    uninterrupted: RunTimes,
) -> list[Kill]:
    """Train with a kill at each of these moments, and then to the end.

    Args:
        runs: starts the ranks.
        training: the run's arguments.
        run: its folder.
        moments: names of MOMENTS, IN_A_SAVE or AT_RANDOM. Where the run ends before one of them, the rest is left out.
        rng: draws ranks and random moments: one in four before training starts, the others in training, spread
            so that all ``moments`` are likely to be reached.
        uninterrupted: times of the run without kills.

    Returns:
        The kills that have happened.

    Raises:
        AssertionError: a start neither ended well nor by a kill.
    """
    killing = _Killing(runs, training, run, rng, uninterrupted, num_kills=len(moments))
    kills: list[Kill] = []
    for moment in moments:
        kill = killing.start_and_kill(moment)
        if kill is None:
            return kills
        kills.append(kill)
    runs.start(training.line(run), training.num_ranks).finish(_TIMEOUT)
    return kills


class _Killing:
    """Starts a run again and again, and kills it."""

    def __init__(
        self,
        runs: ForkedRuns,
        training: Training,
        run: Path,
        rng: random.Random,
        uninterrupted: RunTimes,
        num_kills: int,
    ) -> None:
        self._runs = runs
        self._training = training
        self._run = run
        self._rng = rng
        self._uninterrupted = uninterrupted
        self._max_steps = max(1, uninterrupted.num_steps // (num_kills + 1))
        """A start is killed after at most so many steps, so that some are left for the kills to come."""

    def start_and_kill(self, moment: str) -> Kill | None:
        """Start the run and kill it; return None where it ended before that."""
        rank = self._draw_rank(moment)
        source = ""
        if rank is not None:
            source = source_of_death(moment, rank, nth=self._rng.randint(1, _MAX_TIMES))

        metrics_file = _MetricsFile(self._run)
        started_at = time.monotonic()
        process = self._runs.start(self._training.line(self._run), self._training.num_ranks, before=source)
        if moment == AT_RANDOM:
            self._wait_for_random_moment(process, metrics_file)
        elif moment == IN_A_SAVE:
            self._wait_for_save(process)
        else:
            process.wait_until(process.has_ended, _TIMEOUT)  # the rank kills itself
        if process.has_ended() and set(process.codes()) <= {0, None}:
            process.finish(_TIMEOUT)
            return None

        seconds = time.monotonic() - started_at
        process.kill()
        codes = process.wait(30)
        if not any(codes):  # it ended just before the kill
            return None
        codes_of_victims = codes if rank is None else [codes[rank]]
        assert -signal.SIGKILL in codes_of_victims, f"{moment}: exit codes {codes}\n{process.report()}"
        return Kill(moment, rank, round(seconds, 3), metrics_file.last_step(), _last_saved_step(self._run))

    def _draw_rank(self, moment: str) -> int | None:
        """Draw the rank that kills itself, None where all are killed from outside."""
        if moment not in MOMENTS:
            return None
        if MOMENTS[moment].only_rank_0:
            return 0
        return self._rng.randrange(self._training.num_ranks)

    def _wait_for_random_moment(self, process: ForkedRun, metrics_file: "_MetricsFile") -> None:
        if self._rng.random() < _SHARE_BEFORE_TRAINING:
            process.wait_until(process.has_ended, self._rng.uniform(0, self._uninterrupted.starting_seconds))
            return
        num_steps = self._rng.randint(1, self._max_steps)
        process.wait_until(lambda: process.has_ended() or metrics_file.has_new_rows(num_steps), _TIMEOUT)
        process.wait_until(process.has_ended, self._rng.uniform(0, 2 * self._uninterrupted.step_seconds))

    def _wait_for_save(self, process: ForkedRun) -> None:
        # an incomplete checkpoint of an earlier start may be there
        names_at_start = _incomplete_checkpoints(self._run)

        def is_saving() -> bool:
            return bool(_incomplete_checkpoints(self._run) - names_at_start)

        process.wait_until(lambda: process.has_ended() or is_saving(), _TIMEOUT)
        process.wait_until(process.has_ended, self._rng.uniform(0, _SAVE_SECONDS))


class _MetricsFile:
    """The metrics.csv of a run that is about to start, watched from outside."""

    def __init__(self, run: Path) -> None:
        self._path = run / "metrics.csv"
        self._saved_step = _last_saved_step(run)
        self._inode_at_start = self._inode()

    def has_new_rows(self, num_steps: int) -> bool:
        """Return whether this start has logged so many steps after the checkpoint that it began with.

        Rows of an earlier start do not count: this start first cuts the file to its checkpoint, as a new file.
        """
        return self._inode() != self._inode_at_start and self.last_step() >= self._saved_step + num_steps

    def last_step(self) -> int:
        """Return the last step logged, 0 where there is none."""
        if not self._path.exists():
            return 0
        last_step = 0
        for row in self._path.read_text(encoding="utf-8").splitlines()[1:]:
            step = row.split(",")[0]
            if step.isdigit():
                last_step = max(last_step, int(step))
        return last_step

    def _inode(self) -> int | None:
        return self._path.stat().st_ino if self._path.exists() else None


def _incomplete_checkpoints(run: Path) -> set[str]:
    return {path.name for path in (run / "checkpoints").glob(".step-*incomplete*")}


def _last_saved_step(run: Path) -> int:
    steps = [int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*")]
    return max(steps, default=0)
