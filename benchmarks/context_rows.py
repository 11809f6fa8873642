"""Plan rows that several GPUs compute together, and measure how evenly real documents are dealt among them.

Nothing is trained. The sizes of the models are from the published config.json files.
"""

import json
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
from rich import box
from rich.table import Table

from benchmarks.measure import Command
from benchmarks.plan_table import DEVICE_MEMORY, INTERCONNECT, NETWORK, read_model
from benchmarks.report import Report
from fabric_train.arguments import TrainArguments, parse
from fabric_train.cli.argument_types import parse_size, show_size
from fabric_train.model.attention import VARLEN, register_attention
from fabric_train.model.context_parallel import CONTEXT_VARLEN
from fabric_train.model.flops import ModelFlops
from fabric_train.preflight.memory_forecast import RunRequest
from fabric_train.preflight.memory_plan import busiest_rank
from fabric_train.sample_data import real_data
from fabric_train.training.step_plan import StepPlan

K = 1024
_OPTIONS = "--parallelism fsdp2 --activation_checkpointing full --gradient_reduction micro_batch"
_CHARACTERS_PER_TOKEN = 4
_ROWS = 64


@dataclass(frozen=True)
class Planned:
    """The plan of a run with one row a step and group of ranks: bytes of a device, and bytes that a rank sends.

    ``busiest`` has the FLOPs of the busiest rank as a multiple of the mean, by the documents of the rows.
    """

    device_bytes: int
    fits: bool
    weights_sent: int
    keys_sent: int
    seconds_for_keys: float
    tflop_of_step: float
    busiest: dict[str, float]


@dataclass(frozen=True)
class Worst:
    """The largest FLOPs of the busiest rank, as a multiple of the mean, in all plans."""

    busiest: float


@dataclass(frozen=True)
class _Case:
    model: str
    length: int
    num_nodes: int
    context_size: int
    options: str = ""

    @property
    def name(self) -> str:
        given = f"{self.model}, {self.length // K}k, {self.num_nodes} × 8, {self.context_size} a row"
        return f"{given}, {self.options}" if self.options else given


CASES = (
    _Case("8B", 32 * K, 1, 1),
    _Case("8B", 32 * K, 1, 2),
    _Case("8B", 128 * K, 1, 4),
    _Case("8B", 128 * K, 1, 8),
    _Case("8B", 256 * K, 1, 8),
    _Case("8B", 512 * K, 1, 8),
    _Case("8B", 512 * K, 1, 8, "--activation_offload true"),
    _Case("70B", 128 * K, 8, 8),
    _Case("70B", 128 * K, 8, 16),
)


def measure(work: Path) -> Report:
    """Plan each case, and deal rows of real documents; ``work`` is not used.

    The documents are one for a row; pages of manuals and guides, and plays, as they come; and the same with a book of
    half a row before every fiftieth of them.
    """
    places = (real_data.catalan(), real_data.guide("es"), real_data.guide("en"), real_data.shakespeare())
    lengths = [max(1, size // _CHARACTERS_PER_TOKEN) for place in places for size in _sizes(place)]
    runs = {case.name: [_plan(case, lengths)] for case in CASES}
    worst = Worst(max(max(one.busiest.values()) for (one,) in runs.values()))
    settings = {
        "device": f"{DEVICE_MEMORY}, {INTERCONNECT} to the others of a machine, {NETWORK} to other machines",
        "options": f"--precision bf16-true {_OPTIONS}",
        "rows": f"{_ROWS} of each kind; characters / {_CHARACTERS_PER_TOKEN} as tokens",
        "documents": f"{len(lengths):,} of the sample data, mean {np.mean(lengths):,.0f} tokens",
    }
    return Report("context_rows", settings, dict[str, Command](), runs, worst)


def table(report: Report) -> Table:
    """Return a table of the plans."""
    title = "Rows computed by several GPUs: plans for 80 GB, nothing trained"
    shown = Table("run", "of a GPU", "fits", "keys sent a step", "takes at least", title=title, box=box.SIMPLE)
    for kind in next(iter(report.runs.values()))[0].busiest:
        shown.add_column(f"busiest rank, {kind}", justify="right")
    for name, (one,) in report.runs.items():
        sent, seconds = (show_size(one.keys_sent), f"{one.seconds_for_keys:.2f} s") if one.keys_sent else ("", "")
        busiest = (f"{value:.3f}" for value in one.busiest.values())
        shown.add_row(name, show_size(one.device_bytes), "yes" if one.fits else "no", sent, seconds, *busiest)
    return shown


def _sizes(place: Path) -> list[int]:
    """Return the number of characters of each document."""
    return [len(json.loads(line)["text"]) for line in place.read_text(encoding="utf-8").splitlines()]


def _plan(case: _Case, lengths: list[int]) -> Planned:
    size = case.context_size
    world_size = 8 * case.num_nodes
    words = ["--train_data_dir", "tokens", "--output_dir", "run", "--num_nodes", str(case.num_nodes)]
    words += [*_OPTIONS.split(), *case.options.split(), "--context_parallel_size", str(size)]
    arguments = parse(TrainArguments, words)
    groups = world_size // size
    plan = StepPlan(None, world_size, groups, 1, 1, groups, None, 1, case.length)
    memory = parse_size(DEVICE_MEMORY)
    assert memory is not None
    shape = read_model(case.model)
    register_attention()
    shape.config._attn_implementation = VARLEN if size == 1 else CONTEXT_VARLEN  # as on a GPU
    request = RunRequest(arguments, (shape,), plan, "fsdp2", True, True, memory, is_elsewhere=True)
    forecast = request.forecast()
    of_keys = [one for one in forecast.collectives if "keys" in one.name or "their" in one.name]
    lines = [float(parse_size(line) or 0) for line in (INTERCONNECT, NETWORK)]
    return Planned(
        device_bytes=forecast.device_bytes,
        fits=forecast.device_bytes <= memory,
        weights_sent=sum(one.sent for one in forecast.collectives if one not in of_keys),
        keys_sent=sum(one.sent for one in of_keys),
        seconds_for_keys=sum(one.seconds(*lines) for one in of_keys),
        tflop_of_step=forecast.flops_of_step / 1e12,
        busiest=_busiest(shape.flops, case.length, size, lengths),
    )


def _busiest(flops: ModelFlops, length: int, size: int, lengths: list[int]) -> dict[str, float]:
    """Return the most FLOPs of a rank as a multiple of the mean, the worst of all rows, by their documents."""
    rows = {"one document": [np.array([0, length])], "pages": _pack(lengths, length)}
    mixed = [part for number, one in enumerate(lengths) for part in ([length // 2, one] if number % 50 == 0 else [one])]
    rows["pages and books"] = _pack(mixed, length)
    return {kind: max(busiest_rank(flops, borders, size) for borders in of_kind) for kind, of_kind in rows.items()}


def _pack(lengths: list[int], length: int) -> list[np.ndarray]:
    """Return the borders of rows that the documents fill one after the other, and that cut them."""
    ends = np.array([*accumulate(lengths * (1 + _ROWS * length // sum(lengths)))])
    rows = []
    for begin in range(0, _ROWS * length, length):
        inside = ends[(ends > begin) & (ends < begin + length)] - begin
        rows.append(np.array([0, *inside, length]))
    return rows
