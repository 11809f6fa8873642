"""Kill runs with SIGKILL, resume them until they finish, and compare them with uninterrupted runs."""

import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table

from benchmarks.measure import ROOT, Command, run
from benchmarks.report import Report
from fabric_train.sample_data import real_data
from tests.support.forked_runs import ForkedRuns, start_forked_runs
from tests.support.kill_moments import MOMENTS
from tests.support.kills import AT_RANDOM, IN_A_SAVE, RunTimes, Training, train_uninterrupted, train_with_kills
from tests.support.run_comparison import differences, metrics
from tests.support.tiny_model import write_tiny_model

NUM_KILLS = 200
NUM_RANKS = 2
NUM_STEPS = 40
NUM_RANDOM_MOMENTS = 8  # in a run, in addition to each chosen moment
MAX_LENGTH = 64
NUM_DOCUMENTS = 40
DOCUMENT_CHARACTERS = 400
OPTIONS = {
    "accelerator": "cpu",
    "precision": "32-true",
    "micro_batch_size": 2,
    "total_batch_size": 24,
    "number_epochs": 100,
    "max_step": NUM_STEPS,
    "lr": 1e-3,
    "warmup_steps": 2,
    "eval_iters": 4,
    "eval_at_start": "false",
    "save_step_interval": 3,
    "keep_checkpoints": 2,
    "num_workers": 0,
    "loggers": "csv",
}
SYSTEMS: dict[str, dict[str, object]] = {
    "fsdp_full": {"parallelism": "fsdp", "state_dict_type": "full"},
    "fsdp2_sharded": {"parallelism": "fsdp2", "state_dict_type": "sharded"},
    "ddp_full": {"parallelism": "ddp", "num_workers": 1},
    "fsdp_sharded": {"parallelism": "fsdp", "state_dict_type": "sharded"},
    "fsdp2_tensor_parallel": {"parallelism": "fsdp2", "tensor_parallel_size": 2},
    "fsdp2_context_parallel": {"parallelism": "fsdp2", "context_parallel_size": 2},
    "fsdp_stream": {"parallelism": "fsdp", "max_length": MAX_LENGTH},
    "single": {"parallelism": "single"},
}


@dataclass(frozen=True)
class KilledRun:
    """A run that was killed and resumed until it finished.

    Attributes:
        kills: where and when it was killed.
        seconds: its whole duration.
        steps: the number of steps in metrics.csv.
        steps_lost: steps that were logged but not saved when a kill came, and were computed again.
        differences: to the uninterrupted run, in metrics, counters, row hash, weights and moments, compared exactly.
    """

    kills: list[dict[str, object]]
    seconds: float
    steps: int
    steps_lost: int
    differences: list[str]


@dataclass(frozen=True)
class FaultsSummary:
    """All runs; ``kills_at`` counts kills by moment, ``seed`` is the seed of the random moments and ranks."""

    seed: int
    kills: int
    kills_at: dict[str, int]
    kills_of: dict[str, int]
    runs: int
    steps_compared: int
    steps_lost_and_computed_again: int
    differences: int


def measure(work: Path) -> Report:
    """Kill runs of every system and compare them.

    Args:
        work: folder for the files, relative to the project's root.

    Raises:
        AssertionError: a process ended neither by its kill nor with exit code 0.
    """
    folder = ROOT / work
    trainings = _prepare(folder)
    seed = random.SystemRandom().randrange(2**32)
    print(f"faults: kills are drawn from seed {seed}", flush=True)
    runs = start_forked_runs(folder / "output")
    try:
        results = {name: list(_kill(runs, name, trainings[name], folder, seed)) for name in SYSTEMS}
    finally:
        runs.close()
    settings = {
        **{name: value for name, value in OPTIONS.items() if name != "loggers"},
        "model": "Llama, 2 layers, hidden 64, random",
        "ranks": {name: training.num_ranks for name, training in trainings.items()},
        "moments chosen in every run": [*MOMENTS, IN_A_SAVE],
        "random moments a run": NUM_RANDOM_MOMENTS,
        "resumed by": "--resume true",
    }
    commands = {
        name: Command(
            tuple(
                word.replace(f"{ROOT}/", "") for word in ("python", "-m", "fabric_train", *training.line(work / name))
            )
        )
        for name, training in trainings.items()
    }
    return Report("faults", settings, commands, results, _summarize(seed, results))


def table(report: Report) -> Table:
    """Return a table of the kills by moment, with the number of differences in its title."""
    summary: FaultsSummary = report.summary
    title = (
        f"Faults: {summary.kills} kills in {summary.runs} runs of {NUM_RANKS} ranks or one; {summary.steps_compared} "
        f"steps compared, {summary.differences} differences"
    )
    shown = Table("killed in", "times", title=title, title_justify="left", box=box.SIMPLE)
    for moment, count in summary.kills_at.items():
        shown.add_row(moment, str(count))
    return shown


def _prepare(folder: Path) -> dict[str, Training]:
    """Write model, texts and tokens; return the training of each system."""
    with real_data.shakespeare().open(encoding="utf-8") as lines:
        texts = [json.loads(next(lines))["text"] for _ in range(4)]
    model = folder / "model"
    tokens = folder / "tokens"
    documents = folder / "documents.jsonl"
    write_tiny_model(model, texts)
    pieces = [texts[0][start : start + DOCUMENT_CHARACTERS] for start in range(0, len(texts[0]), DOCUMENT_CHARACTERS)]
    lines_ = [json.dumps({"text": piece}) + "\n" for piece in pieces[:NUM_DOCUMENTS]]
    documents.write_text("".join(lines_), encoding="utf-8")
    words = f"python tokenize_dataset.py --dataset {documents} --tokenizer_name {model} --output_dir {tokens}"
    run(Command(tuple(f"{words} --max_length {MAX_LENGTH} --validation_split 0.2 --num_proc 1".split())))
    common = {**OPTIONS, "model_name": model, "train_data_dir": tokens}
    trainings = {
        name: Training({**common, **options}, 1 if name == "single" else NUM_RANKS) for name, options in SYSTEMS.items()
    }
    streamed = {**trainings["fsdp_stream"].options, "streaming_dataset": documents}
    return {**trainings, "fsdp_stream": Training(streamed, NUM_RANKS)}


def _kill(runs: ForkedRuns, name: str, training: Training, folder: Path, seed: int) -> Iterator[KilledRun]:
    """Yield killed runs of one system until it has had its share of the kills."""
    random_ = random.Random(f"{seed} {name}")
    uninterrupted = folder / f"{name}-whole"
    course = train_uninterrupted(runs, training, uninterrupted)
    left = NUM_KILLS // len(SYSTEMS)
    while left > 0:
        killed = _kill_one(runs, training, folder / f"{name}-{left}", uninterrupted, course, random_, left)
        left -= len(killed.kills)
        progress = f"{len(killed.kills)} kills, {len(killed.differences)} differences, {left} kills left"
        print(f"faults, {name}: {progress}", flush=True)
        yield killed


def _kill_one(
    runs: ForkedRuns,
    training: Training,
    folder: Path,
    uninterrupted: Path,
    course: RunTimes,
    random_: random.Random,
    max_kills: int,
) -> KilledRun:
    moments = [*MOMENTS, IN_A_SAVE, *[AT_RANDOM] * NUM_RANDOM_MOMENTS]
    random_.shuffle(moments)
    started = time.monotonic()
    kills = train_with_kills(runs, training, folder, moments[:max_kills], random_, course)
    return KilledRun(
        kills=[vars(kill) for kill in kills],
        seconds=round(time.monotonic() - started, 1),
        steps=len(metrics(folder)),
        steps_lost=sum(max(kill.steps - kill.saved_steps, 0) for kill in kills),
        differences=differences(folder, uninterrupted),
    )


def _summarize(seed: int, results: dict[str, list[KilledRun]]) -> FaultsSummary:
    runs = [run_ for of_system in results.values() for run_ in of_system]
    moments = Counter(str(kill["moment"]) for run_ in runs for kill in run_.kills)
    return FaultsSummary(
        seed=seed,
        kills=moments.total(),
        kills_at=dict(moments.most_common()),
        kills_of={name: sum(len(run_.kills) for run_ in of_system) for name, of_system in results.items()},
        runs=len(runs),
        steps_compared=sum(run_.steps for run_ in runs),
        steps_lost_and_computed_again=sum(run_.steps_lost for run_ in runs),
        differences=sum(len(run_.differences) for run_ in runs),
    )
