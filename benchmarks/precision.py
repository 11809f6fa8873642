"""Fine-tune SmolLM2-135M at a small learning rate in every precision, to see where rounding loses small updates."""

import csv
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich import box
from rich.table import Table

from benchmarks.measure import ROOT, Command, run
from benchmarks.report import Report
from fabric_train.pages import charts
from fabric_train.pages.charts import Chart, Series
from fabric_train.sample_data import real_data

STEPS = 100
LR = 2e-5
MAX_LENGTH = 32  # tokens per step: bf16 products take four times as long on a CPU without bf16 instructions
HELD_OUT_BATCHES = 2
EVAL_BATCH_SIZE = 16
EVAL_STEP_INTERVAL = 20
NUM_TOKENS = 60_000  # of the Spanish Bible, which is new to the model; more than the steps need
REFERENCE = "32-true"
SHIPPED = "bf16-true"
VARIANTS = {
    REFERENCE: "--precision 32-true",
    "bf16-mixed": "--precision bf16-mixed",
    "bf16-true, to the nearest": "--precision bf16-true --stochastic_rounding false",
    SHIPPED: "--precision bf16-true",
}
LARGEST_SHARE = 0.005  # largest difference of bf16-true's final held-out loss from fp32's, relative
PICTURE = ROOT / "docs" / "precision.png"


@dataclass(frozen=True)
class Curve:
    """Losses in nats per token: ``train`` of every step, ``held_out`` after each of ``steps``."""

    train: list[float]
    steps: list[int]
    held_out: list[float]


@dataclass(frozen=True)
class PrecisionSummary:
    """The held-out loss after the last step, and its relative difference from fp32's."""

    held_out: dict[str, float]
    above_fp32: dict[str, float]
    shipped_learns: bool


def measure(work: Path) -> Report:
    """Train in every precision on the same rows and draw the held-out losses into docs/precision.png.

    Args:
        work: folder for the files, relative to the project's root.

    Raises:
        ChildProcessError: a run failed.
    """
    tokens = work / "tokens"
    model = real_data.smollm2().relative_to(ROOT)
    print("precision: making the token dataset", flush=True)
    run(_tokenize_command(model, tokens))
    commands = {
        name: command(options, model, tokens, work / f"run-{number}")
        for number, (name, options) in enumerate(VARIANTS.items())
    }
    with ThreadPoolExecutor(len(commands)) as pool:
        curves = dict(zip(commands, pool.map(_run, commands.values()), strict=True))
    settings = {
        "model": "SmolLM2-135M",
        "text": "the Spanish Bible",
        "lr": f"{LR:g}, cosine to 0",
        "steps": STEPS,
        "tokens a step": MAX_LENGTH,
        "held-out tokens": MAX_LENGTH * EVAL_BATCH_SIZE * HELD_OUT_BATCHES,
        "threads of a run": 1,
    }
    draw(curves, PICTURE)
    return Report("precision", settings, commands, {name: [curve] for name, curve in curves.items()}, summarize(curves))


def table(report: Report) -> Table:
    """Return a table of the final held-out losses."""
    summary: PrecisionSummary = report.summary
    title = f"Held-out loss after {STEPS} steps at lr {LR:g}: SmolLM2-135M on the Spanish Bible"
    shown = Table("precision", "nats a token", "above fp32's", title=title, title_justify="left", box=box.SIMPLE)
    for name, loss in summary.held_out.items():
        shown.add_row(name, f"{loss:.4f}", f"{summary.above_fp32[name]:+.3%}")
    return shown


def summarize(curves: dict[str, Curve]) -> PrecisionSummary:
    """Compare the final held-out losses."""
    held_out = {name: curve.held_out[-1] for name, curve in curves.items()}
    above = {name: loss / held_out[REFERENCE] - 1 for name, loss in held_out.items()}
    return PrecisionSummary(held_out, above, shipped_learns=abs(above[SHIPPED]) <= LARGEST_SHARE)


def draw(curves: dict[str, Curve], picture: Path) -> None:
    """Draw the held-out losses over the steps as a PNG."""
    series = tuple(
        Series(f"{name}: {curve.held_out[-1]:.3f}", np.array(curve.steps), np.array(curve.held_out), kind="points")
        for name, curve in curves.items()
    )
    title = f"SmolLM2-135M on the Spanish Bible, lr {LR:g}"
    charts.draw([Chart("precision", "Held-out loss", "nats per token", series)], picture, title=title, heights=[360])


def _tokenize_command(model: Path, tokens: Path) -> Command:
    words = f"python tokenize_dataset.py --dataset {real_data.bible_es().relative_to(ROOT)} --tokenizer_name {model}"
    words += f" --output_dir {tokens} --max_length {MAX_LENGTH} --validation_split 0.05 --max_tokens {NUM_TOKENS}"
    return Command(tuple(words.split()))


def command(options: str, model: Path, tokens: Path, target: Path) -> Command:
    """Return the command that trains with these options into ``target``."""
    words = f"python -m fabric_train {options} --accelerator cpu --parallelism single --model_name {model}"
    words += f" --train_data_dir {tokens} --output_dir {target} --max_step {STEPS} --lr {LR}"
    words += " --micro_batch_size 1 --total_batch_size 1 --loggers csv --num_workers 0 --rank_timeout 0"
    words += f" --eval_batch_size {EVAL_BATCH_SIZE} --eval_iters {HELD_OUT_BATCHES}"
    words += f" --eval_step_interval {EVAL_STEP_INTERVAL} --save_step_interval {STEPS} --eval_at_start false"
    return Command(tuple(words.split()), {"OMP_NUM_THREADS": "1"})


def _run(training: Command) -> Curve:
    print(f"precision: {training}", flush=True)
    run(training)
    target = ROOT / training.words[training.words.index("--output_dir") + 1]
    with (target / "metrics.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    shutil.rmtree(target)  # the checkpoint is up to 1.6 GB
    evaluated = [row for row in rows if row["val_loss"]]
    return Curve(
        train=[float(row["train_loss"]) for row in rows],
        steps=[int(row["step"]) for row in evaluated],
        held_out=[float(row["val_loss"]) for row in evaluated],
    )
