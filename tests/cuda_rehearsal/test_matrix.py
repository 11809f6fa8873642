"""The whole matrix on pretended CUDA devices: ``make test-cuda-rehearsal``, which also writes its table."""

import datetime
import json
import os
import platform
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from tests.support.forked_runs import ForkedRuns
from tests.support.pair_datasets import tokenize, write_model, write_source
from tests.support.pretended_cuda.matrix import FACTORS, Case, cases
from tests.support.pretended_cuda.rehearsal import (
    LATE,
    STEP_WAITS,
    Rehearsal,
    foreign_contexts,
    losses,
    tensor_files,
    waits_in_steps,
)

pytestmark = pytest.mark.cuda_rehearsal
TOLERANCE = {"32-true": 1e-5, "bf16-mixed": 4e-3, "bf16-true": 4e-3, "16-mixed": 4e-3}
SECONDS = 600
# where the host may read from the device in some modes only
FURTHER_READS = {
    "copy to host in forward",  # DDP's first forward pass
    "item in take_step",  # the GradScaler of 16-mixed
    "copy to host in _scale",  # of the clip, for offloaded gradients
}
INTRODUCTION = """\
# Rehearsal on pretended CUDA devices

`make test-cuda-rehearsal` runs the program on CUDA devices whose memory is the host's and whose kernels are the CPU's
(`tests/support/pretended_cuda/`), and writes this page. Each pair of values of two factors that the program takes
together is in at least one case. Values that a case does not name are the first ones: {defaults}.

A case trains four steps with background saves whose copies arrive as late as CUDA's streams allow, trains again with
synchronous saves, trains on CPU ranks, and resumes from step 2. *Loss* is the last training loss, *CPU* the loss on CPU
ranks (16-mixed: in fp32), *largest difference* is over losses and gradient norms of all steps. *Saves* compares the
files with weights and optimizer states of both kinds of saves byte for byte. *Resumed* is the largest difference of
the resumed run's losses from the first run's. A case also fails if a rank makes a context on the device of another, or
if the host reads from the device in a step anywhere but at the named places.
Each kind of check is seen to fail on a deliberate defect: `tests/cuda_rehearsal/test_training_on_cuda.py`.

The devices say nothing about CUDA's own kernels, NCCL, Inductor's code for CUDA, or time.

{machine}

| case | loss | CPU | largest difference | saves | resumed | result |
|---|---|---|---|---|---|---|
"""
ROWS: list[tuple[str, ...]] = []


@pytest.fixture(scope="module", autouse=True)
def table(request: pytest.FixtureRequest) -> Iterator[None]:
    """Write the table into the file that ``CUDA_REHEARSAL_TABLE`` names, after the last case."""
    started = time.monotonic()
    yield
    file = os.environ.get("CUDA_REHEARSAL_TABLE")
    if file:
        minutes = (time.monotonic() - started) / 60
        here = Path(__file__)
        total = sum(item.path == here for item in request.session.items)  # others have no row
        where = f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}"
        took = f"{len(ROWS)} of {total} cases in {minutes:.0f} minutes"
        machine = f"{datetime.date.today():%d %B %Y}: {took} on {where}, torch {torch.__version__}."
        first = "2 devices, 32-true, no offload, no checkpointing, gradients reduced once a step, full saves"
        text = INTRODUCTION.format(defaults=first, machine=machine)
        Path(file).write_text(text + "".join(f"| {' | '.join(row)} |\n" for row in ROWS), encoding="utf-8")


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_case(rehearsal: Rehearsal, case: Case) -> None:
    row = [case.name, "", "", "", "", ""]
    result = "**failed**"
    try:
        rehearse(rehearsal, case, row)
        result = "passed"
    finally:
        ROWS.append((*row, result))


def rehearse(rehearsal: Rehearsal, case: Case, row: list[str], further: Mapping[str, object] = {}) -> None:
    """Run one case, with ``further`` options, and fill in its row of the table."""
    name = row[0]
    devices = case.num_devices
    options = {**case.options, **further}
    if case["data"] == "stream":
        options |= {"streaming_dataset": rehearsal.tokens.parent / "slice.jsonl", "max_length": 64}
    late = rehearsal.run(f"{name}, late", options, devices, copy_delay=LATE, timeout=SECONDS)
    on_devices = losses(rehearsal.folder / f"{name}, late")
    on_cpu = rehearsal.cpu_losses(f"{name}, cpu", options, devices)
    row[1] = f"{on_devices[-3]:.5f}"
    row[2] = f"{on_cpu[-3]:.5f}"
    row[3] = largest_difference(on_devices, on_cpu)
    assert on_devices == pytest.approx(on_cpu, abs=TOLERANCE[case["precision"]])

    rehearsal.run(f"{name}, synchronous", {**options, "async_save": "false"}, devices, timeout=SECONDS)
    saved = {
        step: [tensor_files(rehearsal.checkpoint(f"{name}, {kind}", step)) for kind in ("late", "synchronous")]
        for step in (2, 4)
    }
    row[4] = "equal" if all(one == other for one, other in saved.values()) else "differ"
    assert row[4] == "equal"
    if devices > 1:
        assert any(notes.late_copies for notes in late.notes.values())

    after = {**options, "checkpoint": rehearsal.checkpoint(f"{name}, late", 2)}
    rehearsal.run(f"{name}, resumed", after, case.num_devices_after, timeout=SECONDS)
    resumed = losses(rehearsal.folder / f"{name}, resumed")
    row[5] = largest_difference(resumed, on_devices[-len(resumed) :])
    # with three ranks or more, the order of a sum depends on its place in a bucket; DDP rebuilds buckets after a step
    exact = case.num_devices_after == devices and not (case["strategy"] == "ddp" and devices > 2)
    assert resumed == pytest.approx(on_devices[-len(resumed) :], abs=0 if exact else TOLERANCE[case["precision"]])

    assert not foreign_contexts(late)
    reads = {wait for wait in waits_in_steps(late) if wait.startswith(("copy to host", "item", "nonzero"))}
    assert reads <= STEP_WAITS | FURTHER_READS


@pytest.fixture(scope="module")
def on_pairs(tmp_path_factory: pytest.TempPathFactory, pretended_devices: None, forked_runs: ForkedRuns) -> Rehearsal:
    """Starts runs on preference pairs."""
    folder = tmp_path_factory.mktemp("pairs")
    model = write_model(folder / "model")
    source = write_source(folder / "pairs.jsonl", range(150))
    return Rehearsal(folder, model, tokenize(folder / "tokens", model, [source]), forked_runs)


@pytest.mark.parametrize(
    "chosen",
    [{"strategy": "fsdp2", "precision": "bf16-true"}, {"strategy": "single", "devices": "1", "trained": "lora"}],
    ids=lambda chosen: chosen["strategy"],
)
def test_preference(on_pairs: Rehearsal, chosen: Mapping[str, str]) -> None:
    case = Case(tuple(chosen.get(factor, values[0]) for factor, values in FACTORS.items()))
    row = [f"{case.name}, dpo", "", "", "", "", ""]
    result = "**failed**"
    try:
        rehearse(on_pairs, case, row, {"objective": "dpo"})
        result = "passed"
    finally:
        ROWS.append((*row, result))


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2", "ddp", "single"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_evaluation_and_self_check(rehearsal: Rehearsal, strategy: str, precision: str) -> None:
    name = f"{strategy} {precision}"
    devices = 1 if strategy == "single" else 2
    options = {"parallelism": strategy, "precision": precision}
    checked = rehearsal.run(f"{name}, self-check", {**options, "self_check": "true"}, devices)
    assert checked.returncode == 0
    rehearsal.run(f"{name}, evaluated", {**options, "eval_only": "true"}, devices)
    rehearsal.cpu_losses(f"{name}, evaluated on CPU", {**options, "eval_only": "true"}, devices)
    loss, expected = (
        json.loads((rehearsal.folder / f"{name}, evaluated{where}" / "evaluation.json").read_text())["loss"]
        for where in ("", " on CPU")
    )
    assert loss == pytest.approx(expected, abs=TOLERANCE[precision])
    case = f"{devices} x {strategy}, {precision}: --eval_only and --self_check"
    difference = abs(loss - expected)
    ROWS.append((case, f"{loss:.5f}", f"{expected:.5f}", f"{difference:.0e}", "", "", "passed"))


def largest_difference(one: list[float], other: list[float]) -> str:
    """Return the largest difference of two lists of numbers, as text."""
    return f"{max(abs(first - second) for first, second in zip(one, other, strict=True)):.0e}"
