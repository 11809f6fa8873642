"""The plan's time follows from FLOPs, the peaks of GPUs, and the measured share of the peak."""

import json

import pytest
import torch

from fabric_train.model.flops import peak_flops
from fabric_train.preflight.duration import HIGHEST_UTILIZATION, LOWEST_UTILIZATION, USUAL_GPUS, describe_duration
from tests.support.programs import ROOT


def test_time_is_that_of_the_lowest_and_the_highest_share_of_the_peak() -> None:
    # an A100 computes 312 TFLOP/s in bf16, so 10 hours at its peak are 16.4 at 61 % and 25.0 at 40 %
    flops = 10 * 3600 * 312e12
    text = describe_duration(flops, ["A100"], torch.bfloat16)
    assert text.startswith("16.4 h to 25.0 h on A100: 40% to 61% of the peak")
    assert describe_duration(flops * 10, ["A100"], torch.bfloat16).startswith("6.8 days to 10.4 days on A100")
    assert describe_duration(flops / 100, ["A100"], torch.bfloat16).startswith("9.8 min to 15.0 min on A100")


def test_a_gpu_without_a_known_peak_has_no_time() -> None:
    text = describe_duration(1e15, ["NVIDIA X1"], torch.bfloat16)
    assert text == "not known: NVIDIA X1 has no known peak speed; the run shows the time left"


@pytest.mark.parametrize("name", USUAL_GPUS)
def test_usual_gpus_have_a_known_peak(name: str) -> None:
    assert peak_flops(name, torch.bfloat16)


def test_the_shares_of_the_peak_are_the_measured_ones() -> None:
    results = ROOT / "benchmarks/results"
    shares = []
    for path in results.glob("gpu-2026-*-nvidia-h200.json"):
        ways = json.loads(path.read_text())["summary"]["ways"]
        peers = ("transformers", "TRL")
        shares += [way["mfu"] for name, way in ways.items() if not any(peer in name for peer in peers)]
    first_hour = json.loads((results / "gpu-first-hour-2026-11-22-nvidia-h200.json").read_text())
    shares += [run["figures"]["mfu"] for run in first_hour["runs"]["llama-3-8b, fabric_train"]]
    assert min(shares) == pytest.approx(LOWEST_UTILIZATION, abs=0.005)
    assert max(shares) == pytest.approx(HIGHEST_UTILIZATION, abs=0.005)
