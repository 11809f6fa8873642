"""Save SmolLM2-135M on two CPU ranks under FSDP: how long the training loop waits, and how much memory a save takes."""

import json
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich import box
from rich.table import Table

from benchmarks.measure import ROOT, Command, Spread, interleave, run, spread
from benchmarks.report import Report
from fabric_train.sample_data import real_data

NUM_RANKS = 2
OURS = ("ours_full_sync", "ours_full_async", "ours_sharded_sync", "ours_sharded_async")
PEERS = ("torch_full", "dcp_sync", "dcp_async")


@dataclass(frozen=True)
class SaveRun:
    """The saves of one run, without the first one, which allocates.

    Attributes:
        stall_seconds: how long the slower rank's loop waited for each save.
        step_seconds: the steps after each save on rank 0; the first one runs during a background save.
        extra_bytes: each rank's peak of extra memory: while the loop waited for a save, over the memory just before;
            or in the steps after a save, over the steps without one, whichever is larger.
        disk_bytes: the size of a checkpoint.
    """

    stall_seconds: list[float]
    step_seconds: list[list[float]]
    extra_bytes: list[int]
    disk_bytes: int


@dataclass(frozen=True)
class SystemSummary:
    """One method; ``extra_share`` is a rank's largest extra memory relative to its shard of model and optimizer."""

    stall_seconds: Spread
    first_step_seconds: Spread
    last_step_seconds: Spread
    extra_share: float
    disk_bytes: int


@dataclass(frozen=True)
class CheckpointSummary:
    """All methods; ``stall_ratio`` is the median stall of background saves over the median of synchronous ones."""

    systems: dict[str, SystemSummary]
    stall_ratio: dict[str, float]


def measure(work: Path) -> Report:
    """Measure every method.

    Args:
        work: folder for the files, relative to the project's root.

    Raises:
        ChildProcessError: a method failed.
    """
    commands = {name: _command(name, work / name) for name in (*OURS, *PEERS)}
    systems = {name: partial(_run, command, work / name) for name, command in commands.items()}
    runs = interleave(systems, dict.fromkeys(systems, 1), "checkpoint")
    settings = {"model": "SmolLM2-135M", "precision": "fp32", "ranks, a thread each": NUM_RANKS, "parallelism": "fsdp"}
    return Report("checkpoint", settings, commands, runs, _summarize({name: of[0] for name, of in runs.items()}))


def table(report: Report) -> Table:
    """Return a table of what each method costs."""
    summary: CheckpointSummary = report.summary
    ratios = ", ".join(f"{ratio:.1%} ({kind})" for kind, ratio in summary.stall_ratio.items())
    title = (
        f"Saving SmolLM2-135M and AdamW in fp32 on {NUM_RANKS} CPU ranks under FSDP; "
        f"our stall in the background over a synchronous save's: {ratios}"
    )
    columns = ("method", "stall, s", "lowest–highest", "first step after, s", "last, s", "memory, shards", "disk, GB")
    shown = Table(*columns, title=title, title_justify="left", box=box.SIMPLE)
    for name, system in summary.systems.items():
        stalls = system.stall_seconds
        shown.add_row(
            name,
            f"{stalls.median:.3f}",
            f"{stalls.lowest:.3f}–{stalls.highest:.3f}",
            f"{system.first_step_seconds.median:.2f}",
            f"{system.last_step_seconds.median:.2f}",
            f"{system.extra_share:.2f}",
            f"{system.disk_bytes / 1e9:.2f}",
        )
    return shown


def _command(name: str, target: Path) -> Command:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = f"torchrun --nproc-per-node {NUM_RANKS} --master-port {port} benchmarks/peers/save_checkpoints.py {name}"
    words += f" {target} --accelerator cpu --precision 32-true --parallelism fsdp --output_dir unused"
    words += f" --model_name {real_data.smollm2().relative_to(ROOT)} --train_data_dir unused"
    return Command(tuple(words.split()), {"OMP_NUM_THREADS": "1"})


def _run(command: Command, target: Path) -> SaveRun:
    output = run(command).output
    ranks = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    ranks.sort(key=lambda rank: rank["rank"])
    newest = max((ROOT / target).iterdir(), key=lambda entry: entry.name)
    disk_bytes = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    shutil.rmtree(ROOT / target)
    saves = list(zip(*(rank["saves"] for rank in ranks), strict=True))[1:]
    return SaveRun(
        stall_seconds=[max(save["stall_seconds"] for save in of_ranks) for of_ranks in saves],
        step_seconds=[of_ranks[0]["step_seconds"] for of_ranks in saves],
        extra_bytes=[rank["extra_bytes"] for rank in ranks],
        disk_bytes=disk_bytes,
    )


def _summarize(runs: Mapping[str, SaveRun]) -> CheckpointSummary:
    systems = {name: _summarize_system(of_system) for name, of_system in runs.items()}
    ratios = {
        kind: systems[f"ours_{kind}_async"].stall_seconds.median / systems[f"ours_{kind}_sync"].stall_seconds.median
        for kind in ("full", "sharded")
    }
    return CheckpointSummary(systems, ratios)


def _summarize_system(of_system: SaveRun) -> SystemSummary:
    return SystemSummary(
        stall_seconds=spread(of_system.stall_seconds),
        first_step_seconds=spread([seconds[0] for seconds in of_system.step_seconds]),
        last_step_seconds=spread([seconds[-1] for seconds in of_system.step_seconds]),
        extra_share=max(of_system.extra_bytes) / (of_system.disk_bytes / NUM_RANKS),
        disk_bytes=of_system.disk_bytes,
    )
