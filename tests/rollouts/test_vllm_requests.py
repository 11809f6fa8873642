"""Requests of the sampler to a server that answers in vLLM's form: batches, faults and replicas. No vLLM is needed."""

import json
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Fabric
from transformers import AutoModelForCausalLM

from fabric_train.cli.errors import InputError, RunError
from fabric_train.distributed.machines import find_machines
from fabric_train.distributed.signals import RunStopped
from fabric_train.model.hf_model import read_shape
from fabric_train.rollouts import vllm_sampler
from fabric_train.rollouts.sampler import SampleRequest, SamplingSettings
from fabric_train.rollouts.transfer_check import TransferCheck, compute_answer
from fabric_train.rollouts.vllm_client import VllmClient
from fabric_train.rollouts.vllm_sampler import VllmSampler, open_vllm_sampler, physical_device
from fabric_train.rollouts.vllm_server import ServerSettings, VllmServer
from fabric_train.rollouts.weight_folder import WeightFolder

PROBE = (5, 6, 7, 8)
SAMPLED = [9, 10]
Answer = Callable[[Mapping[str, str], dict[str, Any]], bytes]
"""Returns the body of an answer to a request, given its headers and its JSON."""


def completion(token_ids: list[int], log_probabilities: list[float]) -> dict[str, Any]:
    tokens = [{"logprob": value} for value in log_probabilities]
    choice = {
        "token_ids": token_ids,
        "logprobs": {"content": tokens},
        "finish_reason": "length",
        "weight_versions": [{"version": "step-0"}],
    }
    return {"choices": [choice]}


def repeat_prompt(_: Mapping[str, str], content: dict[str, Any]) -> bytes:
    token_ids = content["token_ids"]
    return json.dumps(completion(token_ids, [-1.0] * len(token_ids))).encode()


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 64
    answer: Answer = staticmethod(repeat_prompt)


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_POST(self) -> None:
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = self.server.answer(dict(self.headers), content)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Write no log: the address of a Unix socket has no host."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[_Server]:
    with _Server(str(tmp_path / "socket"), _Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def fabric() -> Fabric:
    return Fabric(accelerator="cpu", devices=1)


@pytest.fixture
def open_sampler(server: _Server, fabric: Fabric, tiny_model_dir: Path) -> Callable[..., VllmSampler]:
    def open_sampler(
        on_batch: Callable[[], None] = lambda: None, num_replicas: int = 1, vllm: VllmServer | None = None
    ) -> VllmSampler:
        return VllmSampler(
            fabric,
            find_machines(fabric),
            SamplingSettings(1.0, max_new_tokens=4, end_ids=(1,)),
            probe_ids=PROBE,
            server=vllm,
            client=VllmClient(Path(str(server.server_address))),
            folder=WeightFolder(fabric, read_shape(str(tiny_model_dir)), torch.float32, None),
            checks=[TransferCheck(torch.float32, 2, 64, 1.0) for _ in range(num_replicas)],
            on_batch=on_batch,
        )

    return open_sampler


def requests(number: int) -> list[SampleRequest]:
    return [SampleRequest((index + 2, 3), seed=index) for index in range(number)]


def test_batches_are_counted_and_completions_keep_their_order(
    open_sampler: Callable[..., VllmSampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_sampler, "REQUESTS_PER_REPLICA", 2)
    batches: list[None] = []
    sampler = open_sampler(lambda: batches.append(None), num_replicas=2)
    completions = sampler.sample(requests(9))
    assert len(batches) == 3  # of 4 completions
    assert [tuple(completion.token_ids) for completion in completions] == [(index + 2, 3) for index in range(9)]


def test_a_stop_waits_for_no_request_of_a_later_batch(
    server: _Server, open_sampler: Callable[..., VllmSampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_sampler, "REQUESTS_PER_REPLICA", 2)
    stopped = threading.Event()
    received = []
    batches: list[None] = []

    def answer(headers: Mapping[str, str], content: dict[str, Any]) -> bytes:
        received.append(content)
        if len(received) > 2:
            stopped.wait(0.5)
        return repeat_prompt(headers, content)

    def stop_at_the_second() -> None:
        batches.append(None)
        if len(batches) == 2:
            raise RunStopped

    server.answer = answer
    with pytest.raises(RunStopped):
        open_sampler(stop_at_the_second).sample(requests(20))
    assert len(received) < 20


def test_a_rank_whose_requests_fail_counts_the_batches_of_the_others(
    server: _Server, open_sampler: Callable[..., VllmSampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_sampler, "REQUESTS_PER_REPLICA", 2)
    received = []

    def answer(_: Mapping[str, str], content: dict[str, Any]) -> bytes:
        received.append(content)
        return b"{}"

    server.answer = answer
    batches: list[None] = []
    error = open_sampler(lambda: batches.append(None))._request(requests(20), {})
    assert "in an unknown form (KeyError: 'choices')" in str(error)
    assert len(batches) == 10
    assert len(received) < 20


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"<html>", "with text that is not JSON: <html>"),
        (b"[]", "in an unknown form (TypeError"),
        (json.dumps(completion([], [])).encode(), "it has no tokens"),
        (json.dumps(completion([2, 3], [-1.0])).encode(), "2 tokens have 1 log-probabilities"),
    ],
)
def test_malformed_answers_are_errors_of_the_run(
    body: bytes, message: str, server: _Server, open_sampler: Callable[..., VllmSampler]
) -> None:
    server.answer = lambda *_: body
    error = open_sampler()._request(requests(1), {})
    assert message in str(error)


def test_a_probe_needs_the_log_probabilities_of_its_text(
    server: _Server, open_sampler: Callable[..., VllmSampler]
) -> None:
    sampler = open_sampler()
    with pytest.raises(RunError, match=r"in an unknown form \(KeyError: 'prompt_logprobs'\)"):
        sampler._ask_probe(VllmClient(Path(str(server.server_address))), 0)


def test_each_replica_must_have_the_weights(
    server: _Server, open_sampler: Callable[..., VllmSampler], fabric: Fabric, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """The second one computes other log-probabilities."""
    model = fabric.setup_module(AutoModelForCausalLM.from_pretrained(tiny_model_dir))
    trainer = compute_answer(fabric, model, PROBE, SAMPLED, 1.0)

    def answer(headers: Mapping[str, str], _: dict[str, Any]) -> bytes:
        error = 0.0 if headers["X-data-parallel-rank"] == "0" else 0.1
        content = completion(SAMPLED, trainer.sampled.tolist())
        prompt_logprobs: list[Any] = [None]
        for token_id, value in zip(PROBE[1:], trainer.text.tolist(), strict=True):
            prompt_logprobs.append({str(token_id): {"logprob": value + error}})
        return json.dumps({**content, "prompt_logprobs": prompt_logprobs}).encode()

    server.answer = answer
    vllm = VllmServer(ServerSettings(tmp_path / "python", tmp_path / "vllm.log", "float32", max_length=64))
    vllm.client = VllmClient(Path(str(server.server_address)))
    sampler = open_sampler(num_replicas=1, vllm=vllm)
    sampler._model = model
    sampler._compare()
    sampler = open_sampler(num_replicas=2, vllm=vllm)
    sampler._model = model
    with pytest.raises(RunError, match="vLLM does not have the weights of step 0: its log-probabilities of a text"):
        sampler._compare()


def test_gpus_of_a_run_on_a_cpu_are_refused(fabric: Fabric, tiny_model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--sampler_devices 6,7 names GPUs, but the run trains on cpu"):
        open_vllm_sampler(
            fabric,
            read_shape(str(tiny_model_dir)),
            SamplingSettings(1.0, max_new_tokens=4, end_ids=(1,)),
            run_dir=tmp_path,
            max_prompt_length=8,
            probe_ids=PROBE,
            dtype=torch.float32,
            python=tmp_path / "missing",
            devices=("6", "7"),
            on_batch=lambda: None,
        )


def test_gpus_are_compared_by_their_numbers_on_the_machine() -> None:
    assert physical_device(1, None) == "1"
    assert physical_device(1, "4, 6") == "6"
