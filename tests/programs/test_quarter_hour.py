"""The quarter of an hour with a GPU skips what it has no time for, and compares what it has measured with its bars."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import quarter_hour
from benchmarks.__main__ import main
from benchmarks.gpu import OF_PEFT
from benchmarks.gpu_sizes import SIZES
from benchmarks.measure import ROOT
from benchmarks.quarter_hour import BAR_GPU, MINUTES, PARTS, compute_bars, compute_ratios, conclude, our_part_name
from benchmarks.quarter_hour_parts import (
    LONG_STEPS,
    LORA,
    QLORA,
    RECOMPUTED,
    STEPS,
    adapter_command,
    float8_command,
    long_command,
    trl_command,
)
from benchmarks.report import Machine
from benchmarks.timed_parts import Attempt, Measurement, Outcome, Part, Record, Status, run_parts
from fabric_train.arguments import TrainArguments, parse
from fabric_train.cli.errors import InputError, RunError

MACHINE = Machine("a-gpu", "A GPU", 2, "a CPU", 1, "Linux", "3.11", 0.0)
COMPILED = our_part_name(LORA, "nothing", compiles=True)
EAGER = our_part_name(LORA, "nothing", compiles=False)
RECOMPUTED_COMPILED = our_part_name(LORA, "everything", compiles=True)


def finds(attempt: Attempt) -> None:
    attempt.outcome = Outcome({"number": 1}, "found 1")


def is_stopped(attempt: Attempt) -> None:
    raise KeyboardInterrupt


def sleeps(attempt: Attempt) -> None:
    attempt.run("sleeps", "python -c __import__('time').sleep(60)")


def record(speed: float, memory: float = 1e9, status: Status = "done") -> Record:
    figures: dict[str, Any] = {}
    if status == "done":
        figures = {"tokens_per_second": {"median": speed}, "peak_bytes": memory}
    return Record(status, f"{speed:g} tokens/s", 1.0, [], figures, {}, None, "2026-11-28")


def read_records(folder: Path) -> dict[str, dict[str, Any]]:
    (result,) = (folder / "a-gpu-tiny").glob("a-name-*.json")
    return {name: found for name, (found,) in json.loads(result.read_text())["runs"].items()}


# ------------------------------------------------------------------------------------------------------ time and files


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.usefixtures("gpu")
def test_a_part_without_enough_time_is_skipped_and_a_shorter_one_runs(tmp_path: Path) -> None:
    minutes = 0.05  # 30 s with the patience of tiny sizes
    parts = (Part("long", 9, finds, expected_seconds=31), Part("short", 9, finds, expected_seconds=20))
    path = run_parts(Measurement("a-name", "A title", parts, {}, minutes), "tiny", tmp_path, MACHINE, None)
    records = read_records(tmp_path)
    assert [found["status"] for found in records.values()] == ["skipped", "done"]
    assert records["long"]["line"] == "skipped, since it takes about 31 s and 30 s are left"
    assert "| long | skipped | skipped, since it takes about 31 s and 30 s are left | 0 |" in path.read_text()


@pytest.mark.usefixtures("gpu")
def test_a_part_is_stopped_when_the_time_of_all_parts_is_over(tmp_path: Path) -> None:
    minutes = 0.5 / 60 / SIZES["tiny"].patience  # half a second
    measurement = Measurement("a-name", "A title", (Part("a", 9, sleeps),), {}, minutes)
    with pytest.raises(RunError, match="of 1 parts, 1 did not pass: a; "):
        run_parts(measurement, "tiny", tmp_path, MACHINE, None)
    assert read_records(tmp_path)["a"]["status"] == "stopped"


@pytest.mark.usefixtures("gpu")
def test_a_stop_loses_no_part_that_has_ended(tmp_path: Path) -> None:
    parts = (Part("a", 1, finds), Part("b", 1, is_stopped))
    with pytest.raises(KeyboardInterrupt):
        run_parts(Measurement("a-name", "A title", parts, {}), "tiny", tmp_path, MACHINE, None)
    assert [found["figures"] for found in read_records(tmp_path).values()] == [{"number": 1}]


def test_parts_fit_into_the_time_up_to_what_the_bars_need() -> None:
    seconds = 0.0
    for part in PARTS:
        assert part.expected_seconds <= 60 * part.minutes
        seconds += part.expected_seconds
        if part.name == our_part_name(QLORA, "everything", compiles=True):
            break
    assert seconds <= 60 * MINUTES * 0.75


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["training", "--quarter_hour"], "--quarter_hour is of the benchmark gpu; give: python -m benchmarks gpu --q"),
        (["gpu", "--quarter_hour", "--first_hour"], "are two measurements; give one of them"),
    ],
)
def test_the_quarter_of_an_hour_is_of_the_gpu_alone(
    monkeypatch: pytest.MonkeyPatch, words: list[str], fault: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", *words])
    with pytest.raises(InputError, match=fault):
        main()


# --------------------------------------------------------------------------------------------------- ratios and bars


def test_ratios_are_to_trl_with_the_same_adapter() -> None:
    records = {
        COMPILED: record(16_000, 42e9),
        EAGER: record(12_000, 44e9),
        RECOMPUTED_COMPILED: record(0, status="skipped"),
        f"{LORA}{OF_PEFT}": record(8_000, 20e9),
        our_part_name(QLORA, "nothing", compiles=True): record(15_000, 32e9),  # beside no run of TRL
    }
    ratios = compute_ratios(records)
    assert ratios == {
        COMPILED: quarter_hour.Ratio(speed=2.0, memory=2.1),
        EAGER: quarter_hour.Ratio(speed=1.5, memory=2.2),
    }


@pytest.mark.parametrize(
    ("speed", "gpu", "is_met"),
    [(16_000, BAR_GPU, True), (15_999, BAR_GPU, False), (16_000, "NVIDIA H100 80GB HBM3", None)],
)
def test_the_faster_run_is_compared_with_the_bar_of_its_device(speed: float, gpu: str, is_met: bool | None) -> None:
    bars = compute_bars({COMPILED: record(speed), EAGER: record(12_000)}, gpu)
    bar = bars[f"{LORA}, nothing recomputed"]
    assert (bar.value, bar.is_met) == (f"{speed:,.0f} tokens/s", is_met)
    unmeasured = bars[f"{QLORA}, nothing recomputed"]
    assert (unmeasured.value, unmeasured.is_met) == (None, None)


@pytest.mark.parametrize(
    ("speed", "memory", "is_fast", "is_small"),
    [(9_000, 19e9, True, True), (8_999, 19e9, False, True), (9_000, 20e9, True, False)],
)
def test_at_the_memory_of_trl_speed_and_memory_are_bars(
    speed: float, memory: float, is_fast: bool, is_small: bool
) -> None:
    records = {RECOMPUTED_COMPILED: record(speed, memory), f"{LORA}{OF_PEFT}": record(6_000, 19e9)}
    bars = compute_bars(records, "any")
    assert bars[f"{LORA}, everything recomputed"].is_met is is_fast
    assert bars[f"{LORA}, everything recomputed, memory"].is_met is is_small
    lines = conclude(records, "any").lines
    assert f"| {RECOMPUTED_COMPILED} | {speed / 6000:.2f} × | {memory / 19e9:.2f} × |" in lines


# ------------------------------------------------------------------------------------------------------------ commands


@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.parametrize("recomputed", RECOMPUTED)
@pytest.mark.parametrize("kind", [LORA, QLORA])
def test_every_adapter_command_does_what_the_name_of_its_part_says(kind: str, recomputed: str, compiles: bool) -> None:
    words = adapter_command(kind, recomputed, Path("rows"), Path("base"), Path("run"), compiles=compiles).words
    arguments = parse(TrainArguments, list(words[3:]))
    assert (arguments.adapter.base_weights == "nf4") == ("QLoRA" in kind)
    assert arguments.fsdp.activation_checkpointing == RECOMPUTED[recomputed]
    assert arguments.fsdp.compile is compiles
    assert arguments.training.max_step == STEPS
    assert our_part_name(kind, recomputed, compiles=compiles) in [part.name for part in PARTS]


@pytest.mark.parametrize("kind", [LORA, QLORA])
def test_trl_recomputes_everything_in_as_many_steps(kind: str) -> None:
    words = trl_command(kind, Path("rows"), Path("base")).words
    script = (ROOT / "benchmarks" / "peers" / "huggingface_gpu.py").read_text(encoding="utf-8")
    assert {word for word in words if word.startswith("--")} <= set(re.findall(r'"(--\w+)"', script))
    assert {"--trl", "--gradient_checkpointing", "--lora_rank"} <= set(words)
    assert ("--nf4" in words) == ("QLoRA" in kind)
    assert words[words.index("--steps") + 1] == str(STEPS)


@pytest.mark.parametrize("sizes", SIZES)
def test_commands_without_an_adapter_are_valid(sizes: str) -> None:
    options = SIZES[sizes].options
    float8 = parse(TrainArguments, list(float8_command(options, Path("rows"), Path("run")).words[3:]))
    assert (float8.model.float8, float8.fsdp.compile, float8.training.max_step) == (True, True, STEPS)
    length = SIZES[sizes].long_length
    long = parse(TrainArguments, list(long_command(options, length, Path("rows"), Path("run")).words[3:]))
    assert long.model.max_context_width == length
    assert (long.training.max_step, long.training.gradient_accumulation_steps) == (LONG_STEPS, 1)
