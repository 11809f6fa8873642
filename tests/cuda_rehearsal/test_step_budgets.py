"""What a step on a GPU may take: kernels, host waits, memory. Counted on fake tensors, which have no content."""

from dataclasses import replace
from functools import cache

import pytest

from benchmarks import adapter_steps
from benchmarks.fake_rank import FakeRun
from benchmarks.measure import ROOT
from benchmarks.op_counts import PRODUCTS
from benchmarks.rehearsal import CASES, TOLERANCE, Case, num_kernels, plan_error, read_fake_run
from tests.support.pretended_cuda.run import run_pretended

pytestmark = [pytest.mark.slow, pytest.mark.cuda_rehearsal]

LAYERS = 3
MOST_KERNELS = {
    "optimizer": 4,  # one launch for the weights of each kind of storage, and the counts of steps
    "clip": 50,  # operations on lists of gradients, not on each one
    "head": 649,  # for 8,192 tokens: twelve for each chunk of the logits, and nine for each slice of 64 MiB
}
MOST_WAITS = 1
"""The reading of the step's results."""


MOST_PER_TEXT = 1.1
"""Kernels of a step on pairs over one on as many tokens of texts."""
MOST_MORE_FOR_PAIRS = 150
"""However many layers: the metrics, and the head's chunks, which the backward pass computes again."""


@cache
def fake_step(case: Case, *options: str) -> FakeRun:
    argv = ["benchmarks.fake_rank", *case.argv, *options]
    run = run_pretended(argv, devices=8, ranks=1, cwd=ROOT, timeout=600)
    assert run.returncode == 0, run.stderr
    return read_fake_run(run.stdout.splitlines()[-1])


@pytest.mark.parametrize(("parallelism", "checkpointing"), [("fsdp", "full"), ("fsdp2", "none")])
def test_step_takes_no_more_than_its_budget(parallelism: str, checkpointing: str) -> None:
    case = Case("llama-3-8b", 1, parallelism, checkpointing)
    found = fake_step(case, "--num_layers", str(LAYERS))
    kernels = {part: found.step.parts[part].number for part in MOST_KERNELS}
    over = {part: number for part, number in kernels.items() if number > MOST_KERNELS[part]}
    assert over == {}
    assert sum(found.step.host_waits.values()) <= MOST_WAITS, found.step.host_waits
    assert plan_error(found) == pytest.approx(0, abs=TOLERANCE)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plan_is_within_5_percent_of_tensors_on_a_gpu(case: Case) -> None:
    found = fake_step(case)
    assert plan_error(found) == pytest.approx(0, abs=TOLERANCE)
    if case.is_dpo:
        assert num_kernels(found) <= MOST_PER_TEXT * num_kernels(fake_step(replace(case, is_dpo=False)))
        assert found.step.peak_bytes < 78e9  # of 80 GB, 2 for CUDA: there is no second model


@pytest.mark.parametrize(
    "case",
    [
        Case("llama-3-8b", 1, "fsdp", "full", is_dpo=True),
        Case("llama-3-8b", 1, "fsdp2", "none", "LoRA", is_dpo=True),
    ],
    ids=str,
)
def test_step_on_pairs_takes_few_kernels_more_than_one_on_texts(case: Case) -> None:
    pairs, texts = (fake_step(each, "--num_layers", str(LAYERS)) for each in (case, replace(case, is_dpo=False)))
    assert 0 < num_kernels(pairs) - num_kernels(texts) <= MOST_MORE_FOR_PAIRS
    assert sum(pairs.step.host_waits.values()) <= MOST_WAITS, pairs.step.host_waits
    assert plan_error(pairs) == pytest.approx(0, abs=TOLERANCE)


@pytest.mark.parametrize("case", [case for case in CASES if case.adapter], ids=str)
def test_step_of_an_adapter_has_no_work_for_frozen_weights(case: Case) -> None:
    found = fake_step(case, "--num_layers", str(LAYERS))
    whole = fake_step(replace(case, adapter=None), "--num_layers", str(LAYERS))
    assert found.step.parts["optimizer"].number <= MOST_KERNELS["optimizer"]
    gradients, of_adapter = (
        sum(work.read for name, work in each.step.collectives.items() if "reduce" in name) for each in (whole, found)
    )
    assert 0 < of_adapter <= 0.01 * gradients
    assert plan_error(found) == pytest.approx(0, abs=TOLERANCE)


def adapter_step(name: str) -> FakeRun:
    """Return a step of two layers of a case of the benchmark adapter_steps."""
    words = adapter_steps.cases()[name].words[2:]  # without python -m
    run = run_pretended([*words, "--num_layers", "2"], devices=1, ranks=1, cwd=ROOT, timeout=600)
    assert run.returncode == 0, run.stderr
    return read_fake_run(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("adapter", adapter_steps.ADAPTERS)
def test_compiled_layers_compute_the_same_products_in_fewer_kernels(adapter: str) -> None:
    eager = adapter_step(f"{adapter}, eager")
    compiled = adapter_step(f"{adapter}, compiled")
    for part in (PRODUCTS, "attention", "head"):
        assert compiled.step.parts[part].flops == eager.step.parts[part].flops, part
    assert num_kernels(compiled) < num_kernels(eager)
    assert plan_error(eager) == pytest.approx(0, abs=TOLERANCE)
