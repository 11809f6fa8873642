"""Pretended CUDA devices are as strict as real ones, and compute as the CPU does."""

import json
import shutil
from typing import Any

import pytest

from tests.support.pretended_cuda import build
from tests.support.pretended_cuda.run import PretendedRun, run_pretended

pytestmark = [pytest.mark.slow, pytest.mark.cuda_rehearsal]
REPORT = """
import json, os, sys, torch

def error_of(function):
    try:
        function()
    except Exception as error:
        return str(error)

def compute(device):
    torch.manual_seed(0)
    weight = torch.randn(8, 8, device=device, requires_grad=True)
    rows = torch.randn(4, 8, device=device)
    hidden = torch.nn.functional.dropout(torch.softmax(rows @ weight, -1), 0.5)[torch.tensor([2, 0], device=device)]
    hidden.pow(2).mean().backward()
    return [*hidden.flatten().tolist(), *weight.grad.flatten().tolist()]

def child_error():
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.write(writing, (error_of(lambda: torch.ones(1, device="cuda")) or "").encode())
        os.kill(os.getpid(), 9)
    os.wait()
    os.close(writing)
    return os.read(reading, 1000).decode()

on_first, on_second, on_host = torch.ones(3, device="cuda"), torch.ones(3, device="cuda:1"), torch.ones(3)
report = {
    "host and device": error_of(lambda: on_first + on_host),
    "two devices": error_of(lambda: on_first + on_second),
    "a number of the host": (on_first + torch.tensor(1.0)).tolist(),
    "numpy": error_of(on_first.numpy),
    "device": error_of(lambda: torch.ones(1, device="cuda:2")),
    "unwritten": torch.empty(3, device="cuda").isnan().all().item(),
    "pinned": [on_host.is_pinned(), on_host.pin_memory()[1:].is_pinned()],
    "on device": compute("cuda"),
    "on CPU": compute("cpu"),
    "in a fork": child_error(),
}
before = torch.cuda.memory_allocated()
block = torch.zeros(1000, device="cuda")
report["allocated"] = torch.cuda.memory_allocated() - before
del block
report["freed"] = torch.cuda.memory_allocated() - before
"""
LATE_COPY = """
import json, sys, torch

def copy_to_host(stream):
    source, target = torch.ones(2, device="cuda"), torch.zeros(2).pin_memory()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        event = stream.record_event()
    return source, target, event

stream = torch.cuda.Stream()
source, target, event = copy_to_host(stream)
report = {"before": target.tolist(), "arrived": event.query()}
event.synchronize()
report["after"] = target.tolist()
source, target, event = copy_to_host(stream)
source.fill_(2)  # nothing has waited for the copy
event.synchronize()
report["not waited"] = target.tolist()
source, target, event = copy_to_host(stream)
torch.cuda.current_stream().wait_event(event)
source.fill_(2)
report["stream waited"] = target.tolist()
"""
PRINT = "print(json.dumps(report)); sys.stdout.flush(); sys.exit(0)"


def told(source: str, **options: Any) -> tuple[dict[str, Any], PretendedRun]:
    """Return what a process on two devices reports."""
    run = run_pretended(["fabric_train"], 2, before=source + PRINT, ranks=1, **options)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout), run


@pytest.fixture(scope="module")
def report(pretended_devices: None) -> dict[str, Any]:
    return told(REPORT)[0]


def test_tensors_of_different_devices_do_not_mix(report: dict[str, Any]) -> None:
    assert "same device" in report["host and device"]
    assert "same device" in report["two devices"]
    assert report["a number of the host"] == [2, 2, 2]
    assert "can't convert cuda:0 device type tensor to numpy" in report["numpy"]
    assert "invalid device ordinal" in report["device"]


def test_results_and_gradients_are_those_of_the_cpu(report: dict[str, Any]) -> None:
    assert report["on device"] == report["on CPU"]


def test_memory_is_counted_and_shows_when_it_is_read_unwritten(report: dict[str, Any]) -> None:
    assert (report["allocated"], report["freed"]) == (4000, 0)
    assert report["unwritten"]
    assert report["pinned"] == [False, True]


def test_devices_cannot_be_used_in_a_fork_of_a_process_that_uses_them(report: dict[str, Any]) -> None:
    assert "Cannot re-initialize CUDA in forked subprocess" in report["in a fork"]


def test_copy_arrives_when_something_waits_for_it_and_not_before() -> None:
    report, run = told(LATE_COPY, copy_delay=0.01)
    assert (report["before"], report["arrived"], report["after"]) == ([0, 0], False, [1, 1])
    assert report["not waited"] == [2, 2]
    assert report["stream waited"] == [1, 1]
    waits = run.notes[0].waits
    assert [count for place, count in waits.items() if place.startswith("event.synchronize at <string>")] == [1, 1]


def test_machine_without_a_compiler_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler: neither g\\+\\+ nor clang"):
        build.build.__wrapped__()
