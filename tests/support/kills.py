"""Kill runs, resume them until they finish, and compare them with runs that nobody killed.

A kill comes from outside at a random moment, or at a chosen one: then a rank kills itself there, and the others are
killed as a launcher would kill them.
"""

import csv
import json
import random
import signal
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.support.forked_runs import ForkedRun, ForkedRuns

MEASURED_COLUMNS = (
    *("tokens_per_second", "samples_per_second", "step_time", "data_wait", "mfu", "peak_memory_gb"),
    *("slowest_rank", "rank_lag"),
)
"""Columns of metrics.csv that differ in every repetition."""

_LONGEST_SECONDS = 120.0
_SHARE_OF_STARTS = 0.25
_MOST_TIMES = 3
_LONGEST_SAVE_SECONDS = 0.02
_DYING = """
import functools, importlib, os, pathlib, shutil, signal

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def change(place, make):
    module, _, names = place.partition(":")
    owner = importlib.import_module(module)
    *parts, name = names.split(".")
    for part in parts:
        owner = getattr(owner, part)
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original)))

def die_in(place, nth=1, about="", after=False):
    def make(original):
        calls = 0
        def dying(*args, **options):
            nonlocal calls
            calls += about in str(args)
            dies = about in str(args) and calls == nth
            if dies and not after:
                die()
            result = original(*args, **options)
            if dies:
                die()
            return result
        return dying
    change(place, make)
"""
_IN_BACKWARD = """
def make(original):
    calls = 0
    def dying(self, tensor, *args, **options):
        nonlocal calls
        calls += 1
        if calls == {nth}:
            tensor.register_hook(die)
        return original(self, tensor, *args, **options)
    return dying
change("lightning:Fabric.backward", make)
"""
_IN_A_ROW = """
def make(original):
    calls = 0
    def dying(self, metrics):
        nonlocal calls
        calls += 1
        if calls == {nth}:
            self._file.write(f"{{metrics.step}},{{metrics.epoch}},2.71")
            self._file.flush()
            die()
        return original(self, metrics)
    return dying
change("fabric_train.training.loggers:CSVLogger.log", make)
"""
_IN_PRUNING = """
def make(original):
    def dying(path, *args, **options):
        if ".removed" in str(path):
            next(file for file in pathlib.Path(path).rglob("*") if file.is_file()).unlink()
            die()
        return original(path, *args, **options)
    return dying
change("shutil:rmtree", make)
"""


@dataclass(frozen=True)
class Moment:
    """Source that makes a rank die there the ``{nth}`` time; with ``only_rank_0`` only rank 0 gets there."""

    source: str
    only_rank_0: bool = False


MOMENTS: Mapping[str, Moment] = {
    "forward pass": Moment('die_in("transformers.models.llama.modeling_llama:LlamaMLP.forward", {nth})'),
    "backward pass": Moment(_IN_BACKWARD),
    "optimizer step, half the parameters changed": Moment('die_in("torch:_fused_adamw_", 2 * {nth})'),
    "validation": Moment('die_in("fabric_train.training.evaluation:hash_supervised", {nth})'),
    "between two steps": Moment('die_in("fabric_train.data.step_sampler:WindowOrder.rows_hash_after", {nth})'),
    "row of metrics.csv": Moment(_IN_A_ROW, only_rank_0=True),
    "start, metrics.csv cut to the checkpoint": Moment(
        'die_in("pathlib:Path.replace", 1, "metrics")', only_rank_0=True
    ),
    "before a checkpoint gets its name": Moment('die_in("pathlib:Path.rename", 1, "incomplete")', only_rank_0=True),
    "after a checkpoint got its name": Moment(
        'die_in("pathlib:Path.rename", 1, "incomplete", after=True)', only_rank_0=True
    ),
    "removal of an old checkpoint": Moment(_IN_PRUNING, only_rank_0=True),
}
IN_A_SAVE = "save"
AT_RANDOM = "random moment"


@dataclass(frozen=True)
class Kill:
    """A kill: ``rank`` is None where all ranks were killed at once.

    It came ``seconds`` after the start, with ``steps`` logged and ``saved_steps`` of them in a checkpoint.
    """

    moment: str
    rank: int | None
    seconds: float
    steps: int
    saved_steps: int


@dataclass(frozen=True)
class Training:
    """A run's ``options`` except --output_dir and --resume, on ``num_ranks``."""

    options: Mapping[str, object]
    num_ranks: int

    def line(self, run: Path, resume: bool = True) -> list[str]:
        """Return the command line's words."""
        given = {**self.options, "output_dir": run} | ({"resume": "true"} if resume else {})
        words = []
        for name, value in given.items():
            words += [f"--{name}", *(str(part) for part in (value if isinstance(value, list) else [value]))]
        return words


@dataclass(frozen=True)
class Course:
    """Times of a run that nobody killed: seconds to its first step, and seconds per step after it with its saves."""

    starting_seconds: float
    step_seconds: float
    num_steps: int


def train_at_once(runs: ForkedRuns, training: Training, run: Path) -> Course:
    """Train without a kill and return how long it took."""
    started = time.monotonic()
    process = runs.start(training.line(run, resume=False), training.num_ranks)
    table = _Table(run)
    process.wait_until(lambda: table.last_step() > 0, _LONGEST_SECONDS)
    first_step = time.monotonic()
    process.finish(_LONGEST_SECONDS)
    num_steps = table.last_step()
    return Course(first_step - started, (time.monotonic() - first_step) / num_steps, num_steps)


def train_through(
    runs: ForkedRuns, training: Training, run: Path, moments: Sequence[str], random_: random.Random, whole: Course
) -> list[Kill]:
    """Train with a kill at each of these moments, and then to the end.

    Args:
        runs: starts the ranks.
        training: the run's arguments.
        run: its folder.
        moments: names of MOMENTS, IN_A_SAVE or AT_RANDOM. Where the run ends before one of them, the rest is left out.
        random_: draws ranks and random moments: one in four before training starts, the others in training, spread
            so that all ``moments`` are likely to be reached.
        whole: times of the run without kills.

    Raises:
        AssertionError: a start neither ended well nor by a kill.
    """
    most_steps = max(1, whole.num_steps // (len(moments) + 1))
    kills: list[Kill] = []
    for moment in moments:
        kill = _start_and_kill(runs, training, run, moment, random_, whole, most_steps)
        if kill is None:
            return kills
        kills.append(kill)
    runs.start(training.line(run), training.num_ranks).finish(_LONGEST_SECONDS)
    return kills


def differences(run: Path, whole: Path) -> list[str]:
    """Return the differences between a finished run and one that nobody killed.

    Compared bit for bit: all metrics that are not times, the counters of all checkpoints, the last one's tensors.
    """
    found = [
        f"metrics.csv, row {number}: {here} instead of {there}"
        for number, (here, there) in enumerate(_pairs(metrics(run), metrics(whole)), 1)
        if here != there
    ]
    checkpoints, wanted = (sorted((folder / "checkpoints").iterdir()) for folder in (run, whole))
    if [path.name for path in checkpoints] != [path.name for path in wanted]:
        found.append(f"checkpoints: {[path.name for path in checkpoints]} instead of {[path.name for path in wanted]}")
        return found
    for here, there in zip(checkpoints, wanted, strict=True):
        if counters(here) != counters(there):
            found.append(f"{here.name}: {counters(here)} instead of {counters(there)}")
    last = wanted[-1]
    for file in sorted(last.rglob("*.safetensors")):
        name = file.relative_to(last)
        tensors = load_file(checkpoints[-1] / name)
        wanted_tensors = load_file(file)
        if tensors.keys() != wanted_tensors.keys():
            found.append(f"{last.name}/{name}: tensors of other names")
            continue
        others = [key for key, tensor in tensors.items() if not torch.equal(tensor, wanted_tensors[key])]
        found += [f"{last.name}/{name}: {key} has other values" for key in others]
    return found


def metrics(run: Path) -> list[dict[str, str]]:
    """Return the rows of metrics.csv without ``MEASURED_COLUMNS``."""
    with (run / "metrics.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [{name: cell for name, cell in row.items() if name not in MEASURED_COLUMNS} for row in rows]


def counters(checkpoint: Path) -> dict[str, object]:
    """Return the counters, row hash and losses of trainer.json, and the positions of a stream's lanes."""
    content = json.loads((checkpoint / "trainer.json").read_text(encoding="utf-8"))
    names = ("step", "epoch", "num_tokens", "num_samples", "skipped_steps", "rows_hash", "train_loss", "val_loss")
    stream = checkpoint / "stream.json"
    return {name: content[name] for name in names} | {"stream": stream.read_text() if stream.exists() else None}


def _start_and_kill(
    runs: ForkedRuns,
    training: Training,
    run: Path,
    moment: str,
    random_: random.Random,
    whole: Course,
    most_steps: int,
) -> Kill | None:
    """Start a run and kill it; return None where it ended before that."""
    rank = _victim(moment, training.num_ranks, random_)
    table = _Table(run)
    started = time.monotonic()
    process = runs.start(training.line(run), training.num_ranks, before=_source(moment, rank, random_))
    if moment == AT_RANDOM:
        _wait_for_random_moment(process, table, random_, whole, most_steps)
    elif moment == IN_A_SAVE:
        _wait_for_save(process, run, random_)
    else:
        process.wait_until(process.has_ended, _LONGEST_SECONDS)
    if process.has_ended() and set(process.codes()) <= {0, None}:
        process.finish(_LONGEST_SECONDS)
        return None
    seconds = time.monotonic() - started
    process.kill()
    codes = process.wait(30)
    if not any(codes):  # it ended just before the kill
        return None
    died = -signal.SIGKILL in codes if rank is None else codes[rank] == -signal.SIGKILL
    assert died, f"{moment}: exit codes {codes}\n{process.report()}"
    return Kill(moment, rank, round(seconds, 3), table.last_step(), _last_saved_step(run))


def _victim(moment: str, num_ranks: int, random_: random.Random) -> int | None:
    """Draw the rank that kills itself, None where all are killed from outside."""
    if moment not in MOMENTS:
        return None
    return 0 if MOMENTS[moment].only_rank_0 else random_.randrange(num_ranks)


def _source(moment: str, rank: int | None, random_: random.Random) -> str:
    """Return source that makes the rank kill itself; nothing where the kill comes from outside."""
    if moment not in MOMENTS:
        return ""
    source = _DYING + MOMENTS[moment].source.format(nth=random_.randint(1, _MOST_TIMES))
    return f"if rank == {rank}:\n" + textwrap.indent(source, "    ")


def _wait_for_random_moment(
    process: ForkedRun, table: "_Table", random_: random.Random, whole: Course, most_steps: int
) -> None:
    if random_.random() < _SHARE_OF_STARTS:
        process.wait_until(process.has_ended, random_.uniform(0, whole.starting_seconds))
        return
    num_steps = random_.randint(1, most_steps)
    process.wait_until(lambda: process.has_ended() or table.has_new_rows(num_steps), _LONGEST_SECONDS)
    process.wait_until(process.has_ended, random_.uniform(0, 2 * whole.step_seconds))


def _wait_for_save(process: ForkedRun, run: Path, random_: random.Random) -> None:
    before = _checkpoints_being_written(run)
    process.wait_until(lambda: process.has_ended() or bool(_checkpoints_being_written(run) - before), _LONGEST_SECONDS)
    process.wait_until(process.has_ended, random_.uniform(0, _LONGEST_SAVE_SECONDS))


def _checkpoints_being_written(run: Path) -> set[str]:
    return {path.name for path in (run / "checkpoints").glob(".step-*incomplete*")}


def _last_saved_step(run: Path) -> int:
    saved = [int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*")]
    return max(saved, default=0)


class _Table:
    """The metrics.csv of a run that is about to start, watched from outside."""

    def __init__(self, run: Path) -> None:
        self._path = run / "metrics.csv"
        self._saved_step = _last_saved_step(run)
        self._before = self._identity()

    def has_new_rows(self, num_steps: int) -> bool:
        """Return whether this start has cut the file to its checkpoint, as a new file, and logged so many steps."""
        return self._identity() != self._before and self.last_step() >= self._saved_step + num_steps

    def last_step(self) -> int:
        """Return the last step logged, 0 where there is none."""
        if not self._path.exists():
            return 0
        steps = [row.split(",")[0] for row in self._path.read_text(encoding="utf-8").splitlines()[1:]]
        return max((int(step) for step in steps if step.isdigit()), default=0)

    def _identity(self) -> int | None:
        return self._path.stat().st_ino if self._path.exists() else None


def _pairs(here: list[dict[str, str]], there: list[dict[str, str]]) -> Iterable[tuple[object, object]]:
    length = max(len(here), len(there))
    padded = [[*rows, *["no row"] * (length - len(rows))] for rows in (here, there)]
    return zip(*padded, strict=True)
