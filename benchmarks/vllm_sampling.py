"""Compare vLLM's log-probabilities with the trainer's over sampled completions, and time the way of the weights."""

import os
import statistics
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from lightning import Fabric
from rich import box
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.measure import ROOT
from benchmarks.report import Report
from benchmarks.rollouts import QUESTIONS
from fabric_train.distributed.precision import compute_dtype, weights_dtype
from fabric_train.model.hf_model import ModelShape, read_shape
from fabric_train.model.policy_loss import WEIGHT_CAP
from fabric_train.rollouts.sampler import SampleRequest, SamplingSettings
from fabric_train.rollouts.transfer_check import compute_answer
from fabric_train.rollouts.vllm_sampler import open_vllm_sampler
from fabric_train.rollouts.vllm_server import vllm_python_path
from fabric_train.rollouts.weight_folder import WeightFolder
from fabric_train.sample_data import real_data

PRECISIONS = ("32-true", "bf16-true", "bf16-mixed")
GROUP_SIZE = 8
MAX_NEW_TOKENS = 64
TRANSFERS = 5


@dataclass(frozen=True)
class Agreement:
    """The sampled tokens of one precision, with the difference d of their log-probabilities, trainer's minus vLLM's."""

    num_tokens: int
    mean_difference: float
    """The mean of |d|, in nats."""
    largest_difference: float
    """The largest |d|, in nats."""
    mean_weight: float
    """The mean of w = min(exp d, 2), the weight of a token in the loss."""
    cut_share: float
    """The share of tokens whose exp d is above 2."""
    weight_bytes: int
    """The bytes of the file through which vLLM gets the weights."""
    write_seconds: tuple[float, ...]
    """To write and check this file in memory."""
    transfer_seconds: tuple[float, ...]
    """To write it, load it into the running server, and compare log-probabilities of a text."""

    @property
    def bytes_per_second(self) -> float:
        return self.weight_bytes / statistics.median(self.write_seconds)


@dataclass(frozen=True)
class SamplingSummary:
    """The agreement by precision."""

    agreements: dict[str, Agreement]


def measure(work: Path) -> Report:
    """Sample with a vLLM server of each precision. VLLM_PYTHON names its Python; default: that of make install-vllm.

    Args:
        work: folder for the files, relative to the project's root.

    Raises:
        InputError: there is no such environment.
        RunError: vLLM failed.
    """
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # its default is a share of the machine's memory
    model_dir = real_data.smollm2()
    shape = read_shape(str(model_dir))
    agreements = {}
    for precision in PRECISIONS:
        print(f"vllm_sampling: {precision}", flush=True)
        agreements[precision] = _measure_precision(precision, model_dir, shape, ROOT / work / precision)
    settings = {
        "model": "SmolLM2-135M",
        "completions": len(QUESTIONS) * GROUP_SIZE,
        "max_new_tokens": MAX_NEW_TOKENS,
        "temperature": 1.0,
    }
    runs = {precision: [agreement] for precision, agreement in agreements.items()}
    return Report("vllm_sampling", settings, {}, runs, SamplingSummary(agreements))


def _measure_precision(precision: Any, model_dir: Path, shape: ModelShape, run_dir: Path) -> Agreement:
    """Sample completions with vLLM, and compute their log-probabilities with the model as it trains."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    prompts: list[tuple[int, ...]] = []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        encoded: Any = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        prompts.append(tuple(encoded))
    requests = []
    for prompt_index, prompt_ids in enumerate(prompts):
        for index in range(GROUP_SIZE):
            requests.append(SampleRequest(prompt_ids, seed=prompt_index * GROUP_SIZE + index))

    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    pretrained = AutoModelForCausalLM.from_pretrained(model_dir, dtype=weights_dtype(precision))
    model = fabric.setup_module(pretrained)
    dtype = compute_dtype(precision)
    sampler = open_vllm_sampler(
        fabric,
        shape,
        SamplingSettings(1.0, MAX_NEW_TOKENS, end_ids=(tokenizer.eos_token_id,)),
        run_dir=run_dir,
        max_prompt_length=max(map(len, prompts)),
        probe_ids=prompts[0],
        dtype=dtype,
        python=vllm_python_path(os.environ.get("VLLM_PYTHON", str(real_data.CACHE / "vllm" / "bin" / "python"))),
        devices=None,
        on_batch=lambda: None,
    )
    transfer_seconds = []
    with closing(sampler):
        sampler.update_weights(model, 0)  # starts the server
        completions = sampler.sample(requests)
        for step in range(1, 1 + TRANSFERS):
            started = time.perf_counter()
            sampler.update_weights(model, step)
            transfer_seconds.append(time.perf_counter() - started)

    differences_of_completions = []
    for request, completion in zip(requests, completions, strict=True):
        token_ids = completion.token_ids.tolist()
        answer = compute_answer(fabric, model, request.prompt_ids, token_ids, temperature=1.0)
        differences_of_completions.append(answer.sampled - completion.log_probabilities)
    differences = np.concatenate(differences_of_completions).astype(np.float64)  # [tokens]
    ratios = np.exp(differences)

    weights = WeightFolder(fabric, shape, dtype, None)
    write_seconds = []
    weight_bytes = 0
    for step in range(TRANSFERS):
        started = time.perf_counter()
        written = weights.write(model, step)
        write_seconds.append(time.perf_counter() - started)
        weight_bytes = (written / "model.safetensors").stat().st_size
        weights.remove()
    return Agreement(
        num_tokens=len(differences),
        mean_difference=float(np.abs(differences).mean()),
        largest_difference=float(np.abs(differences).max()),
        mean_weight=float(ratios.clip(max=WEIGHT_CAP).mean()),
        cut_share=float((ratios > WEIGHT_CAP).mean()),
        weight_bytes=weight_bytes,
        write_seconds=tuple(write_seconds),
        transfer_seconds=tuple(transfer_seconds),
    )


def table(report: Report) -> Table:
    """Return a table with a column for each precision; d is the trainer's log-probability minus vLLM's."""
    summary: SamplingSummary = report.summary
    agreements = summary.agreements.values()
    title = f"vLLM beside the trainer: SmolLM2-135M, {report.settings['completions']} completions"
    shown = Table("", *summary.agreements, title=title, title_justify="left", box=box.SIMPLE)
    shown.add_row("sampled tokens", *(f"{agreement.num_tokens:,}" for agreement in agreements))
    shown.add_row("mean |d|", *(f"{agreement.mean_difference:.1e}" for agreement in agreements))
    shown.add_row("largest |d|", *(f"{agreement.largest_difference:.1e}" for agreement in agreements))
    shown.add_row("mean weight w", *(f"{agreement.mean_weight:.6f}" for agreement in agreements))
    shown.add_row("cut weights", *(f"{agreement.cut_share:.2%}" for agreement in agreements))
    shown.add_row("weights, MB", *(f"{agreement.weight_bytes / 1e6:,.0f}" for agreement in agreements))
    shown.add_row("written, GB/s", *(f"{agreement.bytes_per_second / 1e9:.2f}" for agreement in agreements))
    seconds = [statistics.median(agreement.transfer_seconds) for agreement in agreements]
    shown.add_row("handed over in, s", *(f"{value:.2f}" for value in seconds))
    return shown
