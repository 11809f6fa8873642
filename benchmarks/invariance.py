"""Compare losses and gradient norms of ``fabric_train`` and transformers' Trainer with plain PyTorch's.

SmolLM2-135M in fp32. ``fabric_train`` splits the same windows in several ways. The rows have very different numbers of
labels, the last window of the epoch is short, and gradients are clipped.
"""

import csv
import json
import shutil
import socket
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from datasets import Dataset, DatasetDict, load_from_disk
from rich import box
from rich.table import Table

from benchmarks.measure import ROOT, Command, interleave, run
from benchmarks.report import Report
from fabric_train.sample_data import real_data

# four full windows, and one of two rows
NUM_ROWS = 18
MAX_LENGTH = 64
ROWS_PER_WINDOW = 4
LR = 2e-5
GRAD_CLIP = 1.0
THREADS = 2
TOLERANCE = 1e-5
PLAIN = "plain_pytorch"
TRAINER = "transformers_trainer"
SPLITS = (  # parallelism, ranks, micro-batch size
    ("single", 1, 1),
    ("single", 1, 4),
    ("ddp", 2, 1),
    ("ddp", 2, 2),
    ("fsdp", 2, 1),
    ("fsdp", 2, 2),
    ("fsdp2", 2, 1),
    ("fsdp2", 2, 2),
)


@dataclass(frozen=True)
class Steps:
    """The loss (nats per token) and the gradient norm before clipping of every optimizer step."""

    losses: list[float]
    grad_norms: list[float]


@dataclass(frozen=True)
class Difference:
    """The largest relative difference from plain PyTorch over all steps."""

    loss: float
    grad_norm: float


@dataclass(frozen=True)
class InvarianceSummary:
    """All systems; ``ours`` is the largest difference over all our splits."""

    systems: dict[str, Difference]
    ours: Difference


def measure(work: Path) -> Report:
    """Train with every system on the same rows.

    Args:
        work: folder for the files, relative to the project's root.

    Raises:
        ChildProcessError: a system failed, or one of our splits differs by more than ``TOLERANCE``.
    """
    model = real_data.smollm2().relative_to(ROOT)
    print("invariance: making the token dataset", flush=True)
    _write_rows(model, work)
    options = f"--model_name {model} --lr {LR} --grad_clip {GRAD_CLIP}".split()
    commands = {PLAIN: _peer_command("plain_windows", work, options)}
    commands |= {_name(*split): _our_command(*split, work, options) for split in SPLITS}
    commands[TRAINER] = _peer_command("transformers_trainer", work, [*options, "--output_dir", str(work / TRAINER)])
    systems = {
        name: partial(_run_peer if name in (PLAIN, TRAINER) else partial(_run_ours, work / name), command)
        for name, command in commands.items()
    }
    runs = interleave(systems, dict.fromkeys(systems, 1), "invariance")
    settings = {
        "model": "SmolLM2-135M",
        "precision": "fp32",
        "rows": NUM_ROWS,
        "max_length": MAX_LENGTH,
        "rows_per_window": ROWS_PER_WINDOW,
        "labels of four rows in turn": "none, one, all, half",
        "lr": LR,
        "grad_clip": GRAD_CLIP,
        "tolerance": TOLERANCE,
    }
    return Report("invariance", settings, commands, runs, _summarize(runs))


def table(report: Report) -> Table:
    """Return a table of the differences."""
    summary: InvarianceSummary = report.summary
    title = f"Largest difference from plain PyTorch over {-(-NUM_ROWS // ROWS_PER_WINDOW)} steps: SmolLM2-135M, fp32"
    shown = Table("system", "loss", "gradient norm", title=title, title_justify="left", box=box.SIMPLE)
    for name, difference in summary.systems.items():
        shown.add_row(name, f"{difference.loss:.1e}", f"{difference.grad_norm:.1e}")
    return shown


def _name(parallelism: str, num_ranks: int, micro_batch_size: int) -> str:
    accumulation = ROWS_PER_WINDOW // (num_ranks * micro_batch_size)
    return f"{parallelism}, {num_ranks} × {micro_batch_size} × {accumulation}"


def _write_rows(model: Path, work: Path) -> None:
    """Write rows of Shakespeare, once for ``fabric_train`` and once in the order in which it trains on them."""
    words = f"python tokenize_dataset.py --dataset {real_data.shakespeare().relative_to(ROOT)} --tokenizer_name {model}"
    words += f" --output_dir {work / 'whole'} --max_length {MAX_LENGTH} --validation_split 0 --max_tokens 10000"
    run(Command(tuple(words.split())))
    random = np.random.default_rng(0)
    input_ids = np.array(load_from_disk(str(ROOT / work / "whole"))["train"][:NUM_ROWS]["input_ids"])
    labels = input_ids.copy()
    labels[0::4] = -100
    labels[1::4, np.arange(MAX_LENGTH) != MAX_LENGTH // 2] = -100
    labels[3::4][random.random(labels[3::4].shape) < 0.5] = -100
    order = np.random.default_rng([0, 0]).permutation(NUM_ROWS)  # seed and epoch
    for name, rows in (("rows", slice(None)), ("in-order", order)):
        columns = {"input_ids": input_ids[rows].tolist(), "labels": labels[rows].tolist()}
        DatasetDict({"train": Dataset.from_dict(columns)}).save_to_disk(str(ROOT / work / name))


def _peer_command(script: str, work: Path, options: list[str]) -> Command:
    rows = ("--train_data_dir", str(work / "in-order"), "--rows_per_window", str(ROWS_PER_WINDOW))
    return Command(("python", f"benchmarks/peers/{script}.py", *rows, *options), {"OMP_NUM_THREADS": str(THREADS)})


def _our_command(parallelism: str, num_ranks: int, micro_batch_size: int, work: Path, options: list[str]) -> Command:
    target = work / _name(parallelism, num_ranks, micro_batch_size)
    given = f"--parallelism {parallelism} --micro_batch_size {micro_batch_size} --total_batch_size {ROWS_PER_WINDOW}"
    given += f" --accelerator cpu --precision 32-true --train_data_dir {work / 'rows'} --number_epochs 1"
    given += " --lr_schedule constant --loggers csv --num_workers 0"
    launcher = ["python", "-m", "fabric_train"]
    if num_ranks > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        launcher = f"fabric run --main-port {port} --devices {num_ranks} fabric_train".split()
    words = (*launcher, *given.split(), *options, "--output_dir", str(target))
    return Command(words, {"OMP_NUM_THREADS": str(THREADS // num_ranks)})


def _run_peer(command: Command) -> Steps:
    printed = json.loads(run(command).output.splitlines()[-1])
    return Steps(printed["losses"], printed["grad_norms"])


def _run_ours(target: Path, command: Command) -> Steps:
    run(command)
    with (ROOT / target / "metrics.csv").open(newline="", encoding="utf-8") as file:
        steps = list(csv.DictReader(file))
    shutil.rmtree(ROOT / target)  # the checkpoint is 1.6 GB
    return Steps([float(step["train_loss"]) for step in steps], [float(step["grad_norm"]) for step in steps])


def _summarize(runs: dict[str, list[Steps]]) -> InvarianceSummary:
    plain = runs[PLAIN][0]
    systems = {name: _difference(steps[0], plain) for name, steps in runs.items() if name != PLAIN}
    splits = [difference for name, difference in systems.items() if name != TRAINER]
    ours = Difference(max(split.loss for split in splits), max(split.grad_norm for split in splits))
    if not max(ours.loss, ours.grad_norm) <= TOLERANCE:
        raise ChildProcessError(f"fabric_train differs from plain PyTorch by more than {TOLERANCE}: {systems}")
    return InvarianceSummary(systems, ours)


def _difference(steps: Steps, plain: Steps) -> Difference:
    pairs = ((steps.losses, plain.losses), (steps.grad_norms, plain.grad_norms))
    loss, norm = (
        max(abs(value - expected) / expected for value, expected in zip(values, wanted, strict=True))
        for values, wanted in pairs
    )
    return Difference(loss, norm)
