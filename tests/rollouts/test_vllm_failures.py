"""A server that is killed or stopped in each phase of a step is started again once. No vLLM is needed."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lightning import Fabric
from transformers import AutoModelForCausalLM

from fabric_train.cli.errors import RunError
from fabric_train.model.hf_model import read_shape
from fabric_train.rollouts import vllm_client, vllm_sampler, vllm_server
from fabric_train.rollouts.sampler import SampleRequest, SamplingSettings
from fabric_train.rollouts.vllm_client import ServerFailedError
from fabric_train.rollouts.vllm_end import ON_CPU
from fabric_train.rollouts.vllm_sampler import VllmSampler, open_vllm_sampler
from tests.support.vllm_stand_in import write_stand_in

pytestmark = pytest.mark.slow  # a stopped server takes 15 s to end

REQUESTS = [SampleRequest((index + 2, 3), seed=index) for index in range(6)]


@pytest.fixture(scope="module")
def fabric() -> Fabric:
    return Fabric(accelerator="cpu", devices=1)


@pytest.fixture(scope="module")
def model(fabric: Fabric, tiny_model_dir: Path) -> Any:
    return fabric.setup_module(AutoModelForCausalLM.from_pretrained(tiny_model_dir))


@pytest.fixture
def open_sampler(
    fabric: Fabric, model: Any, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., VllmSampler]]:
    """Opens a sampler whose server has the weights, and which sleeps as on a GPU of the run."""
    monkeypatch.setattr(vllm_sampler, "_HANG_SECONDS", 0.5)
    monkeypatch.setattr(vllm_sampler, "_WATCH_SECONDS", 0.1)
    monkeypatch.setattr(vllm_sampler, "_END_SECONDS", 1.0)
    monkeypatch.setattr(vllm_client, "CONTROL_SECONDS", 1.0)

    def open_sampler(before: str = "") -> VllmSampler:
        sampler = open_vllm_sampler(
            fabric,
            read_shape(str(tiny_model_dir)),
            SamplingSettings(1.0, max_new_tokens=4, end_ids=(1,)),
            run_dir=tmp_path,
            max_prompt_length=8,
            probe_ids=(5, 6, 7, 8),
            dtype=torch.float32,
            python=write_stand_in(tmp_path / "python", before),
            devices=None,
            on_batch=lambda: None,
        )
        stack.enter_context(closing(sampler))
        assert sampler._server is not None
        sampler._server._settings = replace(sampler._server._settings, sleeps=True)
        sampler.update_weights(model, 0)
        return sampler

    with ExitStack() as stack:
        yield open_sampler
    assert not servers()


@pytest.fixture
def sampler(open_sampler: Callable[..., VllmSampler]) -> VllmSampler:
    return open_sampler()


def servers() -> list[psutil.Process]:
    """Return the server that this process has started."""
    return [process for process in psutil.Process().children(recursive=True) if is_server(process)]


def is_server(process: psutil.Process) -> bool:
    """Return whether a process that may have ended meanwhile, such as one of another test, runs the server."""
    try:
        return any("vllm_stand_in" in word for word in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def send_to_server(signal_number: int) -> None:
    (server,) = [process for process in servers() if "--uds" in process.cmdline() and process.ppid() != os.getpid()]
    os.kill(server.pid, signal_number)
    if signal_number == signal.SIGKILL:
        psutil.wait_procs([server], timeout=10)


def count_starts(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return a list to which each later start of a server adds its weights."""
    start = vllm_server.VllmServer.start
    starts: list[Path] = []

    def count_and_start(server: vllm_server.VllmServer, model_dir: Path) -> None:
        starts.append(model_dir)
        start(server, model_dir)

    monkeypatch.setattr(vllm_server.VllmServer, "start", count_and_start)
    return starts


def fail_before(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, signal_number: int) -> None:
    """Send a signal to the server before the first call of a function."""
    original: Callable[..., Any] = getattr(owner, name)
    calls = []

    def call(*arguments: Any, **options: Any) -> Any:
        calls.append(name)
        if len(calls) == 1:
            send_to_server(signal_number)
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize(
    ("phase", "signal_number"),
    [
        ("wake", signal.SIGKILL),
        ("reload", signal.SIGSTOP),
        ("_ask_probe", signal.SIGKILL),
        ("_request", signal.SIGKILL),
        ("_request", signal.SIGSTOP),
        ("_request", signal.SIGUSR1),  # it answers about its state, but computes nothing
        ("sleep", signal.SIGKILL),
    ],
)
def test_a_server_that_fails_in_a_phase_is_started_again(
    sampler: VllmSampler,
    model: Any,
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
    signal_number: int,
) -> None:
    expected = [completion.token_ids.tolist() for completion in sampler.sample(REQUESTS)]
    owner = VllmSampler if phase.startswith("_") else vllm_server.VllmServer
    fail_before(monkeypatch, owner, phase, signal_number)
    starts = count_starts(monkeypatch)
    for step in (1, 2):
        sampler.update_weights(model, step)
        completions = sampler.sample(REQUESTS)
        assert [completion.token_ids.tolist() for completion in completions] == expected
    assert len(starts) == 1


def test_a_server_that_does_not_fall_asleep_is_started_again_for_more_completions_of_the_step(
    sampler: VllmSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that are replaced are completed after the others, with the same weights."""
    expected = [completion.token_ids.tolist() for completion in sampler.sample(REQUESTS)]
    fail_before(monkeypatch, vllm_server.VllmServer, "sleep", signal.SIGKILL)
    starts = count_starts(monkeypatch)
    sampler.sample(REQUESTS)
    assert [completion.token_ids.tolist() for completion in sampler.sample(REQUESTS)] == expected
    assert len(starts) == 1


def test_a_server_that_fails_twice_in_a_step_ends_the_run(
    sampler: VllmSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = VllmSampler._request

    def request_and_kill(*arguments: Any) -> RunError | None:
        send_to_server(signal.SIGKILL)
        return request(*arguments)

    monkeypatch.setattr(VllmSampler, "_request", request_and_kill)
    starts = count_starts(monkeypatch)
    killed = r"vLLM ended: killed by signal 9 \(often out of memory\); .*VLLM_CPU_KVCACHE_SPACE.*\(log: .*vllm\.log\)"
    with pytest.raises(RunError, match=killed):
        sampler.sample(REQUESTS)
    assert len(starts) == 1


INSTEAD_OF_COMPLETIONS = """
import os

def generate(self, prompt_ids, parameters, original=vllm_stand_in.Engine.generate):
    if "prompt_logprobs" in parameters:  # the probe
        return original(self, prompt_ids, parameters)
    {action}

vllm_stand_in.Engine.generate = generate
"""


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (
            'raise vllm_stand_in.RequestRefusedError("the prompt is too long")',
            r"vLLM answered /inference/v1/generate with 400: the prompt is too long; install vLLM 0\.32\.0,",
        ),
        ("return {}", r"in an unknown form \(KeyError: 'choices'\); install vLLM 0\.32\.0,"),
    ],
)
def test_an_answer_that_would_recur_ends_the_run_at_once(
    open_sampler: Callable[..., VllmSampler], monkeypatch: pytest.MonkeyPatch, action: str, message: str
) -> None:
    sampler = open_sampler(INSTEAD_OF_COMPLETIONS.format(action=action))
    starts = count_starts(monkeypatch)
    with pytest.raises(RunError, match=message):
        sampler.sample(REQUESTS)
    assert not starts


def test_a_server_that_runs_out_of_memory_twice_names_what_to_change(
    open_sampler: Callable[..., VllmSampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail = 'os.write(2, b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\\n"); os._exit(1)'
    sampler = open_sampler(INSTEAD_OF_COMPLETIONS.format(action=fail))
    starts = count_starts(monkeypatch)
    with pytest.raises(
        RunError, match=r"Tried to allocate 2\.00 GiB\.; free memory on this machine, or set VLLM_CPU_KV"
    ):
        sampler.sample(REQUESTS)
    assert len(starts) == 1


def test_a_server_that_fails_for_lack_of_memory_but_runs_names_what_to_change(
    open_sampler: Callable[..., VllmSampler],
) -> None:
    sampler = open_sampler()
    answered = ServerFailedError("vLLM answered /collective_rpc with 500: CUDA out of memory")
    assert str(sampler._explain(answered)).endswith("CUDA out of memory; " + ON_CPU.if_out_of_memory)
