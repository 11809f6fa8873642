"""The quarter of an hour with a GPU: adapters of an 8B beside TRL, float8, and rows of 131,072 tokens, in 12 minutes.

The parts begin with the most important. The conclusion compares them with TRL and peft, and with what is aimed at.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.gpu import ACCUMULATION, OF_PEFT, ROWS
from benchmarks.quarter_hour_parts import (
    LONG_STEPS,
    LORA,
    QLORA,
    RECOMPUTED,
    STEPS,
    WARM_UP_STEPS,
    compare_adapters,
    train_adapter,
    train_adapter_with_trl,
    train_in_float8,
    train_long_rows,
    write_weights,
)
from benchmarks.report import Machine
from benchmarks.timed_parts import Conclusion, Measurement, Part, Record, run_parts
from fabric_train.sample_data import real_data

NAME = "gpu-quarter-hour"
WORK = real_data.CACHE / "quarter_hour"
MINUTES = 12
PARITY = "parity of adapters"
# seconds on an H200, from the steps, starts and compilations of earlier measurements
_WEIGHTS = 30
_PARITY = 60
_OURS = 45
_TRL = 50
_FLOAT8 = 70
_LONG = 150


def our_part_name(kind: str, recomputed: str, *, compiles: bool) -> str:
    """Return the name of the part that trains an adapter; ``recomputed`` is a key of ``RECOMPUTED``."""
    return f"{kind}, {recomputed} recomputed, {'compiled' if compiles else 'eager'}"


def _our_part(kind: str, recomputed: str, *, compiles: bool) -> Part:
    name = our_part_name(kind, recomputed, compiles=compiles)
    return Part(name, 2, train_adapter(kind, recomputed, compiles=compiles), _OURS)


def _trl_part(kind: str) -> Part:
    return Part(f"{kind}{OF_PEFT}", 2, train_adapter_with_trl(kind), _TRL)


PARTS = (
    Part("weights", 2, write_weights, _WEIGHTS),
    Part(PARITY, 2, compare_adapters, _PARITY),
    # what the bars need
    _our_part(LORA, "nothing", compiles=True),
    _our_part(QLORA, "nothing", compiles=True),
    _trl_part(LORA),
    _our_part(LORA, "everything", compiles=True),
    _trl_part(QLORA),
    _our_part(QLORA, "everything", compiles=True),
    # what compiling brings
    _our_part(LORA, "nothing", compiles=False),
    _our_part(QLORA, "nothing", compiles=False),
    _our_part(LORA, "everything", compiles=False),
    _our_part(QLORA, "everything", compiles=False),
    Part("all weights, float8", 2, train_in_float8, _FLOAT8),
    Part("all weights, long rows in tiles", 4, train_long_rows, _LONG),
)
SETTINGS = {
    "rows of a micro-batch": ROWS,
    "accumulation": ACCUMULATION,
    "steps": STEPS,
    "warm_up_steps": WARM_UP_STEPS,
    "steps of long rows": LONG_STEPS,
}
BAR_GPU = "NVIDIA H200"
SPEED_BARS = {LORA: 16_000, QLORA: 14_500}
"""Tokens/s on ``BAR_GPU`` with nothing recomputed; 16,000 are 60 % of its peak."""
TIMES_TRL = 1.5
"""How many times as fast as TRL and peft an adapter trains if everything is recomputed, as TRL does."""


@dataclass(frozen=True)
class Ratio:
    """A run of ours relative to the run of TRL and peft with the same adapter."""

    speed: float
    memory: float


@dataclass(frozen=True)
class Bar:
    """What is aimed at.

    Attributes:
        value: what was measured; None if the parts that it needs were not measured.
        is_met: None if that cannot be said, because there is no value or the bar is for another device.
    """

    target: str
    value: str | None
    is_met: bool | None


def run_quarter_hour(sizes: str, work: Path, machine: Machine, commit: str | None) -> Path:
    """Run the parts of the quarter of an hour; see ``run_parts``."""
    measurement = Measurement(NAME, "Quarter of an hour", PARTS, SETTINGS, MINUTES, conclude)
    return run_parts(measurement, sizes, work, machine, commit)


def conclude(records: Mapping[str, Record], gpu: str) -> Conclusion:
    """Return the ratios to TRL and the bars of the parts that are done, and tables of both."""
    ratios = compute_ratios(records)
    bars = compute_bars(records, gpu)
    lines = ["", "| beside TRL with peft | speed | memory |", "|---|---:|---:|"]
    lines += [f"| {name} | {ratio.speed:.2f} × | {ratio.memory:.2f} × |" for name, ratio in ratios.items()]
    lines += ["", "| bar | aimed at | measured | met |", "|---|---|---|---|"]
    words = {True: "yes", False: "no", None: "not known"}
    for name, bar in bars.items():
        lines.append(f"| {name} | {bar.target} | {bar.value or 'not measured'} | {words[bar.is_met]} |")
    figures = {
        "ratios": {name: asdict(ratio) for name, ratio in ratios.items()},
        "bars": {name: asdict(bar) for name, bar in bars.items()},
    }
    return Conclusion(figures, lines)


def compute_ratios(records: Mapping[str, Record]) -> dict[str, Ratio]:
    """Return speed and memory of each of our adapter runs relative to TRL's, by the name of the part."""
    ratios = {}
    for kind in (LORA, QLORA):
        trl = records.get(f"{kind}{OF_PEFT}")
        if trl is None or trl.status != "done":
            continue
        for recomputed in RECOMPUTED:
            for name, ours in _our_records(records, kind, recomputed).items():
                speed = _speed(ours) / _speed(trl)
                ratios[name] = Ratio(speed, ours.figures["peak_bytes"] / trl.figures["peak_bytes"])
    return ratios


def compute_bars(records: Mapping[str, Record], gpu: str) -> dict[str, Bar]:
    """Return the bars; with and without compiled layers, the faster run counts."""
    bars = {PARITY: _parity_bar(records.get(PARITY))}
    for kind, target in SPEED_BARS.items():
        speeds = [_speed(record) for record in _our_records(records, kind, "nothing").values()]
        bar = Bar(f"{target:,} tokens/s on one {BAR_GPU}", None, None)
        if speeds:
            is_met = max(speeds) >= target if gpu == BAR_GPU else None
            bar = Bar(bar.target, f"{max(speeds):,.0f} tokens/s", is_met)
        bars[f"{kind}, nothing recomputed"] = bar
    ratios = compute_ratios(records)
    for kind in (LORA, QLORA):
        names = [name for name in _our_records(records, kind, "everything") if name in ratios]
        speed_bar = Bar(f"{TIMES_TRL} × TRL's speed", None, None)
        memory_bar = Bar("at most TRL's memory", None, None)
        if names:
            fastest = max((ratios[name] for name in names), key=lambda ratio: ratio.speed)
            speed_bar = Bar(speed_bar.target, f"{fastest.speed:.2f} ×", fastest.speed >= TIMES_TRL)
            memory_bar = Bar(memory_bar.target, f"{fastest.memory:.2f} ×", fastest.memory <= 1)
        bars[f"{kind}, everything recomputed"] = speed_bar
        bars[f"{kind}, everything recomputed, memory"] = memory_bar
    return bars


def _parity_bar(record: Record | None) -> Bar:
    target = "losses and gradients equal up to rounding"
    if record is None or record.status not in ("done", "failed"):
        return Bar(target, None, None)
    return Bar(target, record.line, record.status == "done")


def _our_records(records: Mapping[str, Record], kind: str, recomputed: str) -> dict[str, Record]:
    """Return the records of our finished runs with an adapter, compiled and eager, by the name of the part."""
    finished = {}
    for compiles in (True, False):
        name = our_part_name(kind, recomputed, compiles=compiles)
        if name in records and records[name].status == "done":
            finished[name] = records[name]
    return finished


def _speed(record: Record) -> float:
    """Return the median tokens/s of a finished run."""
    return float(record.figures["tokens_per_second"]["median"])
