"""Sampling with a real vLLM server: its weights, its log-probabilities, and its failures.

``make install-vllm`` creates the environment; ``VLLM_PYTHON`` names another one.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from lightning import Fabric
from transformers import LlamaConfig

from fabric_train.cli.errors import RunError
from fabric_train.model.hf_model import ModelShape, read_shape
from fabric_train.rollouts.sampler import Completion, SampleRequest, SamplingSettings
from fabric_train.rollouts.transfer_check import log_probability_tolerance
from fabric_train.rollouts.vllm_sampler import VllmSampler, open_vllm_sampler
from fabric_train.sample_data import real_data
from tests.support.programs import ROOT
from tests.support.tiny_model import random_llama

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

PYTHON = Path(os.environ.get("VLLM_PYTHON", real_data.CACHE / "vllm" / "bin" / "python"))
TEMPERATURE = 0.7
SETTINGS = SamplingSettings(TEMPERATURE, max_new_tokens=24, end_ids=(1, 7))
PROMPT = tuple(range(5, 45))
"""Longer than a block of vLLM's prefix cache, which has 32 tokens on a CPU with AVX512 and 16 otherwise."""
CONFIG = LlamaConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    max_position_embeddings=128,
    tie_word_embeddings=True,
    bos_token_id=0,
    eos_token_id=1,
    initializer_range=0.2,  # far from uniform distributions
)


@pytest.fixture(scope="module", autouse=True)
def _small_cache() -> Iterator[None]:
    """Give vLLM one GB for keys and values; its default on a CPU is a share of the machine's memory."""
    if not PYTHON.exists():
        pytest.fail(f"there is no {os.path.relpath(PYTHON, ROOT)}: make install-vllm", pytrace=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        yield


@pytest.fixture(scope="module")
def fabric() -> Fabric:
    return Fabric(accelerator="cpu", devices=1)


@pytest.fixture(scope="module")
def model(fabric: Fabric) -> Any:
    return fabric.setup_module(random_llama(CONFIG))


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory, model: Any) -> ModelShape:
    folder = tmp_path_factory.mktemp("model")
    model.module.save_pretrained(folder)
    return read_shape(str(folder))


def open_sampler(fabric: Fabric, shape: ModelShape, run_dir: Path, **options: Any) -> VllmSampler:
    arguments = {"max_prompt_length": 64, "probe_ids": PROMPT, "dtype": torch.float32, "python": PYTHON, **options}
    arguments |= {"devices": None, "on_batch": lambda: None}
    return open_vllm_sampler(fabric, shape, SETTINGS, run_dir=run_dir, **arguments)


@pytest.fixture(scope="module")
def sampler(fabric: Fabric, shape: ModelShape, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmSampler]:
    """The sampler of all tests in this file: a server takes half a minute to start."""
    sampler = open_sampler(fabric, shape, tmp_path_factory.mktemp("run"))
    yield sampler
    processes = vllm_processes()
    assert processes
    sampler.close()
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive


def requests(number: int) -> list[SampleRequest]:
    return [SampleRequest(PROMPT[: 33 + seed % 5], seed) for seed in range(number)]


def own_log_probabilities(model: Any, request: SampleRequest, completion: Completion) -> np.ndarray:
    """Return transformers' log-probabilities of a completion at the temperature, fp32 [tokens]."""
    token_ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
    with torch.no_grad():
        logits = model(input_ids=token_ids).logits[0, len(request.prompt_ids) - 1 : -1].float()
    log_probabilities = torch.log_softmax(logits / TEMPERATURE, dim=1)
    return log_probabilities.gather(1, torch.from_numpy(completion.token_ids)[:, None])[:, 0].numpy()


def check_completions(model: Any, sent: list[SampleRequest], completions: list[Completion]) -> None:
    """Check the log-probabilities, and where completions end."""
    assert len(completions) == len(sent)
    deviation = 10.0  # of the logits: larger than it can be here
    tolerance = 4 * log_probability_tolerance(torch.float32, 2, 256, deviation)  # the largest of many, not the mean
    for request, completion in zip(sent, completions, strict=True):
        expected = own_log_probabilities(model, request, completion)
        np.testing.assert_allclose(completion.log_probabilities, expected, rtol=0, atol=tolerance)
        ends = np.isin(completion.token_ids, SETTINGS.end_ids)
        assert not ends[:-1].any()
        assert completion.finish_reason == ("stop" if ends[-1] else "length")
        assert ends[-1] or len(completion.token_ids) == SETTINGS.max_new_tokens


def train(model: Any, amount: float) -> None:
    """Change all weights by a share of them."""
    generator = torch.Generator().manual_seed(int(amount * 1e6))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1 + amount * torch.randn(parameter.shape, generator=generator)


def vllm_processes() -> list[psutil.Process]:
    """Return the processes of vLLM's engine, which the server of this process has started."""
    descendants = psutil.Process().children(recursive=True)
    return [process for process in descendants if process.name().startswith("VLLM")]


def test_every_version_of_the_weights_is_the_one_that_samples(sampler: VllmSampler, model: Any, tmp_path: Path) -> None:
    """Also after a change that is smaller than what a comparison in bf16 could tell, and with a tied head."""
    sent = requests(24)
    first = []
    for step, change in enumerate((0.0, 0.1, 1e-3)):
        train(model, change)
        sampler.update_weights(model, step)
        completions = sampler.sample(sent)
        check_completions(model, sent, completions)
        again = sampler.sample(sent)  # as for a refill; the prompts come from the prefix cache
        check_completions(model, sent, again)
        first.append(completions[0].log_probabilities[0])
        if step == 0:
            reasons = {completion.finish_reason for completion in completions}
            assert reasons == {"stop", "length"}
    assert len(set(first)) == 3
    assert not list(Path("/dev/shm").glob(f"fabric-train-weights-*-{os.getpid()}"))


def test_weights_that_do_not_arrive_stop_the_step(
    sampler: VllmSampler, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model changes between the transfer and the comparison."""
    write = sampler._folder.write

    def write_and_train(model: Any, step: int) -> Path:
        written = write(model, step)
        train(model, 0.1)
        return written

    monkeypatch.setattr(sampler._folder, "write", write_and_train)
    with pytest.raises(
        RunError, match="vLLM does not have the weights of step 1: its log-probabilities of a text differ"
    ):
        sampler.update_weights(model, 1)


def test_a_server_that_is_killed_is_started_again_and_samples_what_is_missing(
    sampler: VllmSampler, model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    sampler.update_weights(model, 0)
    engines = vllm_processes()
    assert engines
    for engine in engines:
        engine.kill()
    psutil.wait_procs(engines, timeout=30)
    sent = requests(8)
    check_completions(model, sent, sampler.sample(sent))
    assert "; vLLM is started again" in caplog.text


def test_a_server_that_refuses_its_arguments_is_reported_with_its_error(
    fabric: Fabric, model: Any, shape: ModelShape, tmp_path: Path
) -> None:
    """The model has 128 positions."""
    sampler = open_sampler(fabric, shape, tmp_path, max_prompt_length=1000)
    with pytest.raises(RunError, match=r"vLLM ended while it was starting: .*max_model_len.*\(log: .*vllm\.log\)"):
        sampler.update_weights(model, 0)
    sampler.close()
