"""Continue the training of a bf16 model in every precision at three learning rates, to see what rounding loses.

A published model is stored in bf16, so each weight starts on the grid of bf16 numbers. How much a precision loses
depends on how far training moves the weights, measured in steps of that grid. Only a long run shows that, so the model
is small: it is pretrained here on English, exported in bf16 as published models are, and then taught Spanish.
"""

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

STEPS = 800
LEARNING_RATES = (1e-5, 3e-5, 1e-4)
PRETRAINING_STEPS = 800
PRETRAINING_LR = 2e-3
MAX_LENGTH = 128
ROWS_PER_STEP = 2
EVAL_BATCH_SIZE = 16
EVAL_BATCHES = 4
EVAL_STEP_INTERVAL = 100
EARLY_STEP = 100  # of which the table shows the loss beside the last
SIZES = "--hidden_width 256 --num_layers 4 --num_heads 4 --num_key_value_heads 2 --intermediate_size 704"
VOCABULARY = 1000  # ids of the tokenizer that tests.support.tiny_model trains
REFERENCE = "32-true"
DEFAULT_BF16 = "bf16-true"
VARIANTS = {
    REFERENCE: "--precision 32-true",
    "bf16-mixed": "--precision bf16-mixed",
    "bf16-true, to the nearest": "--precision bf16-true --stochastic_rounding false",
    DEFAULT_BF16: "--precision bf16-true",
}
LARGEST_SHARE = 0.005  # largest difference of bf16-true's final held-out loss from fp32's, relative
CONCURRENT_RUNS = 2
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
BF16_SIGNIFICANT_BITS = 8
PICTURE = ROOT / "docs" / "precision.png"


@dataclass(frozen=True)
class PrecisionRun:
    """Losses in nats per token: ``train`` of every step, ``held_out`` after each of ``steps``.

    ``moved`` is the share of the weights that are at least half a step of bf16 from where they started. A precision
    that rounds fp32 weights to the nearest bf16 number sees only their changes.
    """

    train: list[float]
    steps: list[int]
    held_out: list[float]
    moved: float


@dataclass(frozen=True)
class PrecisionSummary:
    """By run: the last held-out loss, its excess over fp32's at the same rate early and at the end, and what moved."""

    held_out: dict[str, float]
    above_fp32_early: dict[str, float]
    above_fp32: dict[str, float]
    moved: dict[str, float]
    default_learns: bool


def run_name(learning_rate: float, variant: str) -> str:
    """Return the name of the run of a variant at a peak learning rate."""
    return f"lr {learning_rate:g}, {variant}"


def measure(work: Path) -> Report:
    """Train in every precision and at every rate on the same rows; draw the held-out losses into docs/precision.png.

    Args:
        work: folder for the files, relative to the project's root.

    Raises:
        ChildProcessError: a run failed.
    """
    tokenizer = work / "tokenizer"
    english = work / "english"
    spanish = work / "spanish"
    print("precision: making the token datasets and the model", flush=True)
    _write_tokenizer(ROOT / tokenizer)
    run(_tokenize_command(real_data.shakespeare(), tokenizer, english))
    run(_tokenize_command(real_data.bible_es(), tokenizer, spanish))
    model = _pretrain(english, work)
    commands = {
        run_name(learning_rate, variant): command(
            options, learning_rate, model, spanish, work / f"run-{rate_index}-{index}"
        )
        for rate_index, learning_rate in enumerate(LEARNING_RATES)
        for index, (variant, options) in enumerate(VARIANTS.items())
    }
    with ThreadPoolExecutor(CONCURRENT_RUNS) as pool:
        runs = pool.map(lambda training: _run(training, ROOT / model), commands.values())
        curves = dict(zip(commands, runs, strict=True))
    settings = {
        "model": f"Llama, {SIZES}, {VOCABULARY:,} ids; Shakespeare, {PRETRAINING_STEPS} steps; exported in bf16",
        "text": "the Spanish Bible",
        "learning rates": ", ".join(f"{rate:g}" for rate in LEARNING_RATES) + ", cosine to 0",
        "steps": STEPS,
        "tokens a step": MAX_LENGTH * ROWS_PER_STEP,
        "held-out tokens": MAX_LENGTH * EVAL_BATCH_SIZE * EVAL_BATCHES,
        "threads of a run": 1,
    }
    draw(curves, PICTURE)
    return Report("precision", settings, commands, {name: [curve] for name, curve in curves.items()}, summarize(curves))


def table(report: Report) -> Table:
    """Return a table of the held-out losses."""
    summary: PrecisionSummary = report.summary
    title = f"Held-out loss after {STEPS:,} steps on the Spanish Bible"
    columns = ("run", "nats a token", f"above fp32's, step {EARLY_STEP}", "at the end", "weights moved")
    shown = Table(*columns, title=title, title_justify="left", box=box.SIMPLE)
    for name, loss in summary.held_out.items():
        early = f"{summary.above_fp32_early[name]:+.2%}"
        shown.add_row(name, f"{loss:.4f}", early, f"{summary.above_fp32[name]:+.2%}", f"{summary.moved[name]:.0%}")
    return shown


def summarize(curves: dict[str, PrecisionRun]) -> PrecisionSummary:
    """Compare the held-out losses with those of fp32 at the same learning rate."""
    above_early = {}
    above_at_end = {}
    for learning_rate in LEARNING_RATES:
        reference = curves[run_name(learning_rate, REFERENCE)]
        early = reference.steps.index(EARLY_STEP)
        for variant in VARIANTS:
            name = run_name(learning_rate, variant)
            above_early[name] = curves[name].held_out[early] / reference.held_out[early] - 1
            above_at_end[name] = curves[name].held_out[-1] / reference.held_out[-1] - 1
    default_names = [run_name(learning_rate, DEFAULT_BF16) for learning_rate in LEARNING_RATES]
    return PrecisionSummary(
        held_out={name: curve.held_out[-1] for name, curve in curves.items()},
        above_fp32_early=above_early,
        above_fp32=above_at_end,
        moved={name: curve.moved for name, curve in curves.items()},
        default_learns=all(abs(above_at_end[name]) <= LARGEST_SHARE for name in default_names),
    )


def draw(curves: dict[str, PrecisionRun], picture: Path) -> None:
    """Draw the held-out losses over the steps as a PNG, one chart a learning rate."""
    drawn = []
    for learning_rate in LEARNING_RATES:
        series = []
        for variant in VARIANTS:
            curve = curves[run_name(learning_rate, variant)]
            label = f"{variant}: {curve.held_out[-1]:.3f}"
            series.append(Series(label, np.array(curve.steps), np.array(curve.held_out), kind="points"))
        drawn.append(
            Chart(f"lr {learning_rate:g}", f"Held-out loss, lr {learning_rate:g}", "nats per token", tuple(series))
        )
    charts.draw(drawn, picture, title="A bf16 model learns Spanish in four precisions", heights=[240] * len(drawn))


def moved_share(start: Path, end: Path) -> float:
    """Return the share of all weights that are at least half a step of bf16 from where they started.

    Args:
        start: safetensors file of the first weights, in bf16.
        end: safetensors file of the last weights, in bf16 or fp32, with the same names.
    """
    import torch
    from safetensors.torch import load_file

    first_weights = load_file(start)
    last_weights = load_file(end)
    num_moved = 0
    num_weights = 0
    for name, first in first_weights.items():
        first = first.float()
        distance = (last_weights[name].float() - first).abs()
        _, exponent = torch.frexp(first)  # first = mantissa · 2^exponent with 0.5 <= |mantissa| < 1
        bf16_step = torch.ldexp(torch.ones_like(first), exponent - BF16_SIGNIFICANT_BITS)
        num_moved += int((distance >= bf16_step / 2).sum())
        num_weights += first.numel()
    return num_moved / num_weights


def _write_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE tokenizer on a part of both texts, so that Spanish words are not cut into bytes."""
    import json

    from tests.support.tiny_model import write_tokenizer

    texts: list[str] = []
    for path in (real_data.shakespeare(), real_data.bible_es()):
        with path.open(encoding="utf-8") as file:
            texts.extend(json.loads(line)["text"][:20_000] for line in file)
    folder.mkdir(parents=True)
    write_tokenizer(folder, texts)


def _tokenize_command(text: Path, tokenizer: Path, tokens: Path) -> Command:
    words = f"python tokenize_dataset.py --dataset {text.relative_to(ROOT)} --tokenizer_name {tokenizer}"
    words += f" --output_dir {tokens} --max_length {MAX_LENGTH} --validation_split 0.05"
    return Command(tuple(words.split()))


def _pretrain(tokens: Path, work: Path) -> Path:
    """Train the small Llama from scratch in fp32 and export it in bf16; return the export's folder."""
    pretraining = work / "pretraining"
    model = work / "model"
    training = f"python -m fabric_train --from_scratch llama {SIZES} --vocab_size {VOCABULARY}"
    training += f" --max_context_width {MAX_LENGTH} {_training_options()}"
    training += f" --train_data_dir {tokens} --output_dir {pretraining} --max_step {PRETRAINING_STEPS}"
    training += f" --lr {PRETRAINING_LR} --warmup_steps 50 --save_step_interval {PRETRAINING_STEPS}"
    training += f" --eval_step_interval {PRETRAINING_STEPS}"
    run(Command(tuple(training.split()), ONE_THREAD))
    export = f"python convert_to_hf.py --checkpoint {pretraining}/latest --dtype bfloat16 --output_dir {model}"
    run(Command(tuple(export.split())))
    return model


def _training_options() -> str:
    """Return what the pretraining and all runs share."""
    options = f"--accelerator cpu --parallelism single --micro_batch_size {ROWS_PER_STEP}"
    options += f" --total_batch_size {ROWS_PER_STEP} --loggers csv --num_workers 0 --rank_timeout 0"
    options += f" --eval_batch_size {EVAL_BATCH_SIZE} --eval_iters {EVAL_BATCHES} --eval_at_start false"
    return options


def command(options: str, learning_rate: float, model: Path, tokens: Path, target: Path) -> Command:
    """Return the command that trains with these options into ``target``."""
    words = f"python -m fabric_train {options} {_training_options()} --model_name {model} --train_data_dir {tokens}"
    words += f" --output_dir {target} --max_step {STEPS} --lr {learning_rate}"
    words += f" --eval_step_interval {EVAL_STEP_INTERVAL} --save_step_interval {STEPS} --keep_checkpoints 1"
    return Command(tuple(words.split()), ONE_THREAD)


def _run(training: Command, model: Path) -> PrecisionRun:
    print(f"precision: {training}", flush=True)
    run(training)
    target = ROOT / training.words[training.words.index("--output_dir") + 1]
    with (target / "metrics.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    checkpoint = target / "checkpoints" / f"step-{STEPS:08}"
    moved = moved_share(model / "model.safetensors", checkpoint / "model.safetensors")
    shutil.rmtree(target)
    evaluated = [row for row in rows if row["val_loss"]]
    return PrecisionRun(
        train=[float(row["train_loss"]) for row in rows],
        steps=[int(row["step"]) for row in evaluated],
        held_out=[float(row["val_loss"]) for row in evaluated],
        moved=moved,
    )
