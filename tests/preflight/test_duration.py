"""The plan's time follows from FLOPs, the peaks of GPUs, and the measured share of the peak."""

import json
from collections import defaultdict

import pytest
import torch

from fabric_train.arguments import TrainArguments, parse
from fabric_train.model.flops import peak_flops
from fabric_train.preflight.duration import USUAL_GPUS, describe_duration
from fabric_train.training.expected_speed import (
    ADAPTER,
    ANY_KIND,
    COMPILED,
    PAIRS,
    UNCOMPILED,
    PeakShare,
    measured_peak_share,
)
from tests.support.programs import ROOT


def test_time_is_that_of_the_lowest_and_the_highest_share_of_the_peak() -> None:
    # an A100 computes 312 TFLOP/s in bf16, so 10 hours at its peak are 16.4 at 61 % and 25.0 at 40 %
    flops = 10 * 3600 * 312e12
    num_tokens = 90_000_000
    text = describe_duration(flops, num_tokens, ["A100"], torch.bfloat16, ANY_KIND)
    speeds = "1,000 to 1,525 tokens/s"  # 90 million tokens in 25.0 and 16.4 hours
    assert text.startswith(f"16.4 h to 25.0 h on A100 ({speeds}): 40% to 61% of the peak, as measured on one H200")
    ten_times = describe_duration(flops * 10, num_tokens, ["A100"], torch.bfloat16, ANY_KIND)
    assert ten_times.startswith("6.8 days to 10.4 days on A100")
    hundredth = describe_duration(flops / 100, num_tokens, ["A100"], torch.bfloat16, ANY_KIND)
    assert hundredth.startswith("9.8 min to 15.0 min on A100")


def test_a_gpu_without_a_known_peak_has_no_time() -> None:
    text = describe_duration(1e15, 1000, ["NVIDIA X1"], torch.bfloat16, ANY_KIND)
    assert text == "not known: NVIDIA X1 has no known peak speed; the run shows the time left"


@pytest.mark.parametrize("name", USUAL_GPUS)
def test_usual_gpus_have_a_known_peak(name: str) -> None:
    assert peak_flops(name, torch.bfloat16)


def kind_of(way: str) -> PeakShare:
    """Return the kind of steps of a way to train, by its name in the benchmark's results."""
    if "DPO" in way:
        return PAIRS
    if "LoRA" in way:
        return ADAPTER
    return COMPILED if "compiled" in way else UNCOMPILED


def test_the_shares_of_the_peak_are_the_measured_ones() -> None:
    results = ROOT / "benchmarks/results"
    shares: dict[PeakShare, list[float]] = defaultdict(list)
    for path in results.glob("gpu-2026-*-nvidia-h200.json"):
        ways = json.loads(path.read_text())["summary"]["ways"]
        for name, way in ways.items():
            if not any(peer in name for peer in ("transformers", "TRL")):
                shares[kind_of(name)].append(way["mfu"])
    first_hour = json.loads((results / "gpu-first-hour-2026-11-22-nvidia-h200.json").read_text())
    shares[COMPILED] += [run["figures"]["mfu"] for run in first_hour["runs"]["llama-3-8b, fabric_train"]]
    assert shares.keys() == {COMPILED, UNCOMPILED, ADAPTER, PAIRS}
    for kind, measured in shares.items():
        assert min(measured) == pytest.approx(kind.lowest, abs=0.005), kind
        assert max(measured) == pytest.approx(kind.highest, abs=0.005), kind
    assert min(kind.lowest for kind in shares) == ANY_KIND.lowest
    assert max(kind.highest for kind in shares) == ANY_KIND.highest


@pytest.mark.parametrize(
    ("options", "is_partly_frozen", "kind"),
    [
        ("--compile true", False, COMPILED),
        ("--compile false", False, UNCOMPILED),
        ("--compile false --precision bf16-mixed", False, ANY_KIND),
        ("--compile false", True, ANY_KIND),
        ("--compile false --adapter lora --base_weights nf4", True, ADAPTER),
        ("--compile true --adapter lora", True, ANY_KIND),
        ("--compile false --adapter lora --objective dpo", True, PAIRS),
        ("--compile false --objective distill --teacher larger", False, ANY_KIND),
    ],
)
def test_the_share_of_the_peak_is_that_of_steps_of_the_same_kind(
    options: str, is_partly_frozen: bool, kind: PeakShare
) -> None:
    words = f"--train_data_dir rows --output_dir run --model_name model --precision bf16-true {options}"
    arguments = parse(TrainArguments, words.split())
    assert measured_peak_share(arguments, is_partly_frozen=is_partly_frozen) is kind
