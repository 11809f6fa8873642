"""Train SmolLM2-135M on CPU without a teacher, with one that is live, and with its stored values: speed and memory."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich import box
from rich.table import Table

from benchmarks.measure import ROOT, Command, Spread, interleave, run, spread
from benchmarks.report import Report
from benchmarks.training import TrainingRun, run_ours
from fabric_train.sample_data import real_data

REPETITIONS = 3
ROW_LENGTH = 512
NUM_DOCUMENTS = 30
ROWS_PER_STEP = 2
NUM_STEPS = 6
WARM_UP_STEPS = 1
TOP_K = 64
THREADS = 2
WITHOUT = "without a teacher"
SYSTEMS = (WITHOUT, f"top {TOP_K} stored", "hidden states stored", "live teacher")


@dataclass(frozen=True)
class DistillationSystem:
    """A way to train over its repetitions; ``tokens_per_second`` is from medians over the steps."""

    tokens_per_second: Spread
    peak_rss_bytes: Spread


@dataclass(frozen=True)
class DistillationSummary:
    """All ways to train, and the speed of each relative to training without a teacher, of medians."""

    systems: dict[str, DistillationSystem]
    speed_ratios: dict[str, float]


def measure(work: Path) -> Report:
    """Store the values of the teacher, which is the model itself, and measure all ways to train in turn.

    Args:
        work: folder for the files, relative to the project's root.

    Raises:
        ChildProcessError: a command failed.
    """
    model = real_data.smollm2().relative_to(ROOT)
    texts = work / "es.jsonl"
    lines = real_data.bible_es().read_text(encoding="utf-8").splitlines(keepends=True)
    (ROOT / texts).write_text("".join(lines[:NUM_DOCUMENTS]), encoding="utf-8")
    tokens = work / "tokens"
    print("distillation: making the token dataset and the teacher's values", flush=True)
    words = f"python tokenize_dataset.py --dataset {texts} --tokenizer_name {model} --output_dir {tokens}"
    run(Command(tuple(f"{words} --max_length {ROW_LENGTH} --validation_split 0".split())))
    stored = {SYSTEMS[1]: ("top", f"--top_k {TOP_K}"), SYSTEMS[2]: ("hidden", "--hidden true")}
    options = {WITHOUT: "", SYSTEMS[3]: f"--objective distill --teacher {model}"}
    for name, (folder, form) in stored.items():
        words = f"python -m fabric_train.teacher_states --teacher {model} --train_data_dir {tokens} {form}"
        run(Command(tuple(f"{words} --precision 32-true --output_dir {work / folder}".split())))
        options[name] = f"--objective distill --teacher_states {work / folder}"

    commands = {}
    systems = {}
    for index, name in enumerate(SYSTEMS):
        target = work / f"run-{index}"
        commands[name] = our_command(model, tokens, target, options[name])
        systems[name] = partial(run_ours, commands[name], target)
    runs: dict[str, list[TrainingRun]] = interleave(systems, dict.fromkeys(systems, REPETITIONS), "distillation")
    measured_systems = {}
    for name, system_runs in runs.items():
        speeds = [spread(training.tokens_per_second[WARM_UP_STEPS:]).median for training in system_runs]
        peaks = [training.peak_rss_bytes for training in system_runs]
        measured_systems[name] = DistillationSystem(spread(speeds), spread(peaks))
    base_speed = measured_systems[WITHOUT].tokens_per_second.median
    ratios = {name: system.tokens_per_second.median / base_speed for name, system in measured_systems.items()}
    settings = {
        "model and teacher": "SmolLM2-135M",
        "precision": "fp32",
        "row_length": ROW_LENGTH,
        "rows in a step": ROWS_PER_STEP,
        "steps": NUM_STEPS,
        "warm_up_steps": WARM_UP_STEPS,
        "threads": THREADS,
    }
    return Report("distillation", settings, commands, runs, DistillationSummary(measured_systems, ratios))


def our_command(model: Path, tokens: Path, target: Path, options: str) -> Command:
    """Return the command that trains in micro-batches of one row, into the run folder ``target``."""
    words = "python -m fabric_train --parallelism single --accelerator cpu --precision 32-true"
    words += f" --model_name {model} --train_data_dir {tokens} --output_dir {target} --loggers csv --report false"
    words += f" --max_step {NUM_STEPS} --micro_batch_size 1 --total_batch_size {ROWS_PER_STEP} --log_step_interval 1"
    return Command(tuple(f"{words} {options}".split()), {"OMP_NUM_THREADS": str(THREADS)})


def table(report: Report) -> Table:
    """Return a table of the medians."""
    summary: DistillationSummary = report.summary
    title = f"Distillation of SmolLM2-135M from itself, fp32, {THREADS} threads, {REPETITIONS} runs each"
    columns = ("training", "tokens/s", "lowest–highest", "of the first", "RSS, GB")
    shown = Table(*columns, title=title, title_justify="left", box=box.SIMPLE)
    for name, system in summary.systems.items():
        speeds = system.tokens_per_second
        shown.add_row(
            name,
            f"{speeds.median:.1f}",
            f"{speeds.lowest:.1f}–{speeds.highest:.1f}",
            f"{summary.speed_ratios[name]:.2f}",
            f"{system.peak_rss_bytes.median / 1e9:.2f}",
        )
    return shown
