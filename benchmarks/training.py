"""SmolLM2-135M on this machine's CPU: ``fabric_train`` beside a bare PyTorch loop, and sharded over two ranks."""

import csv
import json
import shutil
import socket
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich import box
from rich.table import Table

from benchmarks.measure import ROOT, Command, Measurement, Spread, interleave, run, spread
from benchmarks.report import Report
from demo import real_data
from fabric_train.batches import WindowOrder, open_dataset

REPETITIONS = 3
STEPS = 5
WARM_UP_STEPS = 1  # measured by nobody: memory is allocated and the data workers start
ACCUMULATION = 4
MAX_LENGTH = 256
NUM_TOKENS = 100_000  # of Shakespeare, more than the steps need
LR = 2e-5
THREADS = 2
NUM_RANKS = 2
OURS, PEER, SHARDED = "fabric_train", "bare_pytorch", "fsdp_2_ranks"
_LARGEST_DIFFERENCE = 1e-3  # of two losses in fp32 that are meant to be the same


@dataclass(frozen=True)
class TrainingRun:
    """One run of one system; speeds and losses of every step, the first ones included.

    ``peak_rss_bytes`` is of each rank: as the process itself tells after its last step and before it saves, or for the
    sharded run as sampled over the whole command. ``command_*`` are the whole command's, with its data workers, and for
    ours also with the checkpoint that ends a run.
    """

    tokens_per_second: list[float]
    losses: list[float]
    peak_rss_bytes: list[int]
    command_seconds: float
    command_peak_rss_bytes: int
    command_peak_pss_bytes: int | None


@dataclass(frozen=True)
class SystemSummary:
    """``tokens_per_second`` is the spread of the repetitions' medians over the steps; ``peak_rss_bytes`` the median
    over the repetitions of the largest rank's.
    """

    tokens_per_second: Spread
    peak_rss_bytes: Spread
    largest_loss_difference: float


@dataclass(frozen=True)
class TrainingSummary:
    """``speed_ratio`` and ``rss_ratio`` are ours over the peer's, of the medians; loss differences are to the peer."""

    systems: dict[str, SystemSummary]
    speed_ratio: float
    rss_ratio: float


def measure(work: Path) -> Report:
    """Measure the systems on the same rows, with their files in ``work``, relative to the project's root.

    Raises:
        ChildProcessError: a system failed, or the losses are not the same.
    """
    tokens, model = work / "tokens", real_data.smollm2().relative_to(ROOT)
    print("training: making the token dataset", flush=True)
    run(_tokenize_command(model, tokens))
    commands = {
        OURS: _our_command(model, tokens, work / OURS),
        PEER: _peer_command(model, tokens),
        SHARDED: _sharded_command(model, tokens, work / SHARDED),
    }
    systems = {OURS: partial(_run_ours, commands[OURS], work / OURS), PEER: partial(_run_peer, commands[PEER])}
    runs = interleave(systems, dict.fromkeys(systems, REPETITIONS), "training")
    runs |= interleave(
        {SHARDED: partial(_run_ours, commands[SHARDED], work / SHARDED, NUM_RANKS)}, {SHARDED: 1}, "training"
    )
    settings = {
        "model": "SmolLM2-135M",
        "precision": "fp32",
        "max_length": MAX_LENGTH,
        "micro_batch_size": 1,
        "accumulation": ACCUMULATION,
        "steps": STEPS,
        "warm_up_steps": WARM_UP_STEPS,
        "threads": THREADS,
        "ranks of the sharded run, a thread each": NUM_RANKS,
        "repetitions": REPETITIONS,
    }
    return Report("training", settings, commands, runs, _summarize(runs))


def table(report: Report) -> Table:
    """Show the medians, and the lowest and highest values behind them."""
    summary: TrainingSummary = report.summary
    title = (
        f"Training: SmolLM2-135M, fp32, rows of {MAX_LENGTH}, micro-batch 1, accumulation {ACCUMULATION}, "
        f"{THREADS} threads in all, median of {REPETITIONS} runs, of 1 where sharded"
    )
    columns = ("system", "tokens/s", "lowest–highest", "RSS, GB", "losses differ by")
    shown = Table(*columns, title=title, title_justify="left", box=box.SIMPLE)
    for name, system in summary.systems.items():
        speeds = system.tokens_per_second
        between = f"{speeds.lowest:.1f}–{speeds.highest:.1f}"
        difference = "" if name == PEER else f"{system.largest_loss_difference:.1e}"
        shown.add_row(name, f"{speeds.median:.1f}", between, f"{system.peak_rss_bytes.median / 1e9:.2f}", difference)
    shown.add_row("ours / peer", f"{summary.speed_ratio:.3f}×", "", f"{summary.rss_ratio:.2f}×", "")
    return shown


def _tokenize_command(model: Path, tokens: Path) -> Command:
    words = f"python tokenize_dataset.py --dataset {real_data.shakespeare().relative_to(ROOT)} --tokenizer_name {model}"
    words += f" --output_dir {tokens} --max_length {MAX_LENGTH} --validation_split 0 --max_tokens {NUM_TOKENS}"
    return Command(tuple(words.split()))


def _our_command(model: Path, tokens: Path, target: Path) -> Command:
    words = ("python", "-m", "fabric_train", "--parallelism", "single", *_our_options(model, tokens, target))
    return Command(words, {"OMP_NUM_THREADS": str(THREADS)})


def _sharded_command(model: Path, tokens: Path, target: Path) -> Command:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = f"fabric run --main-port {port} --devices {NUM_RANKS} fabric_train --parallelism fsdp".split()
    words = (*launcher, *_our_options(model, tokens, target))
    return Command(words, {"OMP_NUM_THREADS": str(THREADS // NUM_RANKS)})


def _our_options(model: Path, tokens: Path, target: Path) -> list[str]:
    options = f"--accelerator cpu --precision 32-true --model_name {model} --train_data_dir {tokens}"
    options += f" --output_dir {target} --max_step {STEPS} --micro_batch_size 1 --total_batch_size {ACCUMULATION}"
    options += f" --lr {LR} --lr_schedule constant --loggers csv --isolate_documents false"  # nor does the peer
    return options.split()


def _peer_command(model: Path, tokens: Path) -> Command:
    """Give the peer the rows in the order that ours takes them in."""
    dataset = open_dataset(str(ROOT / tokens))
    order = WindowOrder(len(dataset.train), ACCUMULATION, 1, world_size=1, rank=0, seed=0)
    rows = ",".join(str(row) for row in order.epoch_order(0)[: STEPS * ACCUMULATION])
    words = f"python benchmarks/peers/bare_pytorch.py --model_name {model} --train_data_dir {tokens}"
    words += f" --rows {rows} --accumulation {ACCUMULATION} --lr {LR}"
    return Command(tuple(words.split()), {"OMP_NUM_THREADS": str(THREADS)})


def _run_ours(command: Command, target: Path, num_ranks: int = 1) -> TrainingRun:
    shutil.rmtree(ROOT / target, ignore_errors=True)
    measured = run(command)
    with (ROOT / target / "metrics.csv").open(newline="", encoding="utf-8") as file:
        steps = list(csv.DictReader(file))
    of_process = [round(float(steps[-1]["peak_memory_gb"]) * 1e9)]
    return _training_run(
        measured,
        speeds=[float(step["tokens_per_second"]) for step in steps],
        losses=[float(step["train_loss"]) for step in steps],
        peaks=of_process if num_ranks == 1 else list(measured.child_peak_rss_bytes[:num_ranks]),
    )


def _run_peer(command: Command) -> TrainingRun:
    measured = run(command)
    told = json.loads(measured.output.splitlines()[-1])
    return _training_run(measured, told["tokens_per_second"], told["losses"], [told["peak_rss_bytes"]])


def _training_run(measured: Measurement, speeds: list[float], losses: list[float], peaks: list[int]) -> TrainingRun:
    return TrainingRun(
        tokens_per_second=speeds,
        losses=losses,
        peak_rss_bytes=peaks,
        command_seconds=measured.seconds,
        command_peak_rss_bytes=measured.peak_rss_bytes,
        command_peak_pss_bytes=measured.peak_pss_bytes,
    )


def _summarize(runs: dict[str, list[TrainingRun]]) -> TrainingSummary:
    expected = runs[PEER][0].losses
    systems = {name: _summarize_system(of_system, expected) for name, of_system in runs.items()}
    for name, system in systems.items():
        if not system.largest_loss_difference <= _LARGEST_DIFFERENCE:
            difference = f"the losses of {name} and {PEER} differ by up to {system.largest_loss_difference:.1e}"
            raise ChildProcessError(f"{difference}: they do not compute the same, so nothing can be compared")
    ours, peer = systems[OURS], systems[PEER]
    return TrainingSummary(
        systems=systems,
        speed_ratio=ours.tokens_per_second.median / peer.tokens_per_second.median,
        rss_ratio=ours.peak_rss_bytes.median / peer.peak_rss_bytes.median,
    )


def _summarize_system(runs: list[TrainingRun], expected: list[float]) -> SystemSummary:
    differences = [abs(loss - other) for run in runs for loss, other in zip(run.losses, expected, strict=True)]
    return SystemSummary(
        tokens_per_second=spread([spread(run.tokens_per_second[WARM_UP_STEPS:]).median for run in runs]),
        peak_rss_bytes=spread([max(run.peak_rss_bytes) for run in runs]),
        largest_loss_difference=max(differences),
    )
