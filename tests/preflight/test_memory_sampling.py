"""The plan of a run with --prompts counts what sampling takes, as the sampler itself allocates it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Fabric
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from fabric_train.arguments import TrainArguments, parse
from fabric_train.cli.argument_types import show_size
from fabric_train.model.hf_model import read_shape
from fabric_train.preflight.memory_activations import SamplingBatch, _LiveBytes, trace_sampling
from fabric_train.preflight.memory_forecast import SAMPLING, RunRequest, make_request
from fabric_train.preflight.memory_plan import faults_of
from fabric_train.preflight.memory_samplers import VllmForecast
from fabric_train.preflight.memory_sampling import SamplingWork
from fabric_train.preflight.prepare import prepare
from fabric_train.rollouts.process_sampler import ProcessSampler
from fabric_train.rollouts.sampler import SampleRequest, SamplingSettings
from fabric_train.training.build_run import _open_sampling_copy
from fabric_train.training.prepared_run import PreparedRun
from tests.support.programs import option_words
from tests.support.vllm_stand_in import write_stand_in

SETTINGS: dict[str, Any] = {
    "objective": "rl",
    "rewards": "exact_answer",
    "max_length": 256,
    "max_new_tokens": 192,
    "prompts_per_step": 16,
    "group_size": 8,
    "number_epochs": 1,
    "parallelism": "fsdp2",
    "devices": 8,
    "precision": "bf16-mixed",
}

MOST_INTEGERS = 16
"""The tensors of one integer for each token that ``generate`` has at once."""


def prepare_run(folder: Path, model: Path, **options: Any) -> PreparedRun:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": "a b c", "answer": "d"}) + "\n" for _ in range(16)))
    settings = {**SETTINGS, "model_name": model, "prompts": prompts, "output_dir": folder / "run", **options}
    words = option_words({name: value for name, value in settings.items() if value is not None})
    return prepare(parse(TrainArguments, words, {}))


def planned(folder: Path, model: Path, **options: Any) -> RunRequest:
    plan = {"accelerator": "cuda", "plan": "true", "device_memory": "80GB"}
    return make_request(prepare_run(folder, model, **{**plan, **options}))


@pytest.fixture(scope="module")
def wide_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which a token has 8 kB of keys and values, in fp32."""
    folder = tmp_path_factory.mktemp("wide")
    config = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("prompt_length", "max_new_tokens"), [(6, 90), (90, 6), (20, 1)])
def test_the_plan_counts_the_bytes_that_the_sampler_allocates(
    wide_model_dir: Path, prompt_length: int, max_new_tokens: int
) -> None:
    """The plan leaves out the ids, masks and positions of all tokens, which ``generate`` keeps."""
    num_rows = 8
    shape = read_shape(str(wide_model_dir), attention="sdpa")
    arguments = parse(TrainArguments, ["--train_data_dir", "x", "--output_dir", "y"])
    batch = SamplingBatch(num_rows, prompt_length, max_new_tokens, torch.float32, None, on_gpu=False, has_copy=False)
    traced = trace_sampling(shape, arguments, batch)

    fabric = Fabric(accelerator="cpu", devices=1)
    model = fabric.setup(AutoModelForCausalLM.from_pretrained(wide_model_dir))
    settings = SamplingSettings(1.0, max_new_tokens, end_ids=())
    sampler = ProcessSampler(fabric, settings, num_rows, open_copy=lambda: None, on_batch=lambda: None)
    sampler.update_weights(model, 0)
    requests = [SampleRequest((0,) * (prompt_length - row % 2), row) for row in range(num_rows)]
    with _LiveBytes(model) as live:
        sampler.sample(requests)
    left_out = MOST_INTEGERS * 8 * num_rows * (prompt_length + max_new_tokens)  # int64
    assert traced.total <= live.most <= traced.total + left_out
    assert traced.total == pytest.approx(live.most, rel=0.02)


def test_a_sharded_model_has_a_copy_in_the_dtype_of_gathered_weights(tiny_model_dir: Path, tmp_path: Path) -> None:
    request = planned(tmp_path, tiny_model_dir)
    forecast = request.forecast()
    copy_bytes = 2 * request.largest.num_parameters
    assert [phase.parts["copy that samples"] for phase in forecast.budget.phases] == [copy_bytes] * 5
    assert forecast.budget.phases[0].name == SAMPLING

    run = prepare_run(tmp_path, tiny_model_dir, accelerator="cpu", devices=1)
    copy = _open_sampling_copy(Fabric(accelerator="cpu", devices=1), run)
    assert sum(parameter.nbytes for parameter in copy.parameters()) == copy_bytes
    assert {buffer.dtype for buffer in copy.buffers()} == {torch.float32}  # of the rotary embedding


@pytest.mark.parametrize("options", [{"devices": 1}, {"devices": 2, "tensor_parallel_size": 2}])
def test_the_copy_is_counted_where_fsdp2_shards_nothing(
    tiny_model_dir: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    request = planned(tmp_path, tiny_model_dir, **options)
    assert request.layout().num_shards == 1
    copy_bytes = 2 * request.largest.num_parameters
    assert request.forecast().budget.phases[0].parts["copy that samples"] == copy_bytes


def test_vllm_shares_prompts_and_completions_among_all_devices(tiny_model_dir: Path, tmp_path: Path) -> None:
    """In process, each rank completes whole prompts; here two of eight ranks have one."""
    options = {"prompts_per_step": 2, "group_size": 8, "devices": 8}
    works = {}
    for sampler in ("in_process", "vllm"):
        forecast = planned(tmp_path, tiny_model_dir, sampler=sampler, **options).forecast()
        assert forecast.sampling is not None
        works[sampler] = forecast.sampling.work
    assert works["in_process"].batch_sizes == (8,)
    assert works["vllm"].batch_sizes == (2,)
    assert works["in_process"].prompt_flops == 8 * 4 * works["vllm"].prompt_flops
    assert works["vllm"].num_further_tokens == SETTINGS["max_new_tokens"] - 1


def test_a_model_that_is_not_sharded_samples_itself(tiny_model_dir: Path, tmp_path: Path) -> None:
    forecast = planned(tmp_path, tiny_model_dir, parallelism="ddp", precision="bf16-true").forecast()
    sampling, *others = forecast.budget.phases
    assert sampling.parts["copy that samples"] == 0
    assert sampling.parts["keys and values"] > 0
    assert not any("keys and values" in phase.parts for phase in others)
    assert sampling.parts["gradients"] == others[1].parts["gradients"]  # DDP keeps its buckets


def test_a_batch_that_does_not_fit_is_refused_with_one_that_fits(tiny_model_dir: Path, tmp_path: Path) -> None:
    """A batch of 1,024 completions of the tiny model takes 0.2 GB; 2 GB are set aside for CUDA."""
    options = {"devices": 1, "parallelism": "single", "group_size": 64, "sampler_batch_size": 1024}
    request = planned(tmp_path, tiny_model_dir, device_memory="2.1GB", **options)
    (fault,) = faults_of(request, request.forecast())
    assert "with --sampler_batch_size 256 it would need" in fault


def test_vllm_takes_its_share_of_the_gpus_of_the_run_only(tiny_model_dir: Path, tmp_path: Path) -> None:
    """A plan starts no server, so it needs no environment with vLLM."""
    shared = planned(tmp_path, tiny_model_dir, sampler="vllm").forecast()
    sampling, *others = shared.budget.phases
    assert sampling.parts["vLLM"] == 32_000_000_000
    assert {phase.parts["vLLM"] for phase in others} == {2_000_000_000}
    own = planned(tmp_path, tiny_model_dir, sampler="vllm", sampler_devices="8,9").forecast()
    assert isinstance(own.sampling, VllmForecast)
    assert own.sampling.weight_bytes == 2 * own.units.total
    assert own.budget.phases[0].parts["vLLM"] == 0


def test_the_plan_of_vllm_on_cpus_says_that_it_does_not_count_its_memory(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"accelerator": "cpu", "device_memory": None, "precision": "32-true", "sampler": "vllm"}
    options |= {"devices": 2, "vllm_python": write_stand_in(tmp_path / "python")}
    forecast = planned(tmp_path, tiny_model_dir, **options).forecast()
    sampling = forecast.sampling
    assert isinstance(sampling, VllmForecast)
    assert sampling.weight_bytes == 4 * forecast.units.total
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    text = sampling.describe(0)
    assert f"memory that this plan does not count: {show_size(sampling.weight_bytes)} of weights" in text
    assert "half of the memory that is free" in text
    assert "GPU" not in text
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    assert sampling.describe(0).endswith("4 GB of keys and values (VLLM_CPU_KVCACHE_SPACE)")


def test_each_machine_has_a_server(tiny_model_dir: Path, tmp_path: Path) -> None:
    """With one machine, the file that the server reads is in its memory."""
    options: dict[str, Any] = {"sampler": "vllm", "sampler_devices": "8,9", "group_size": 8}
    machine = planned(tmp_path, tiny_model_dir, devices=4, **options).forecast().sampling
    machines = planned(tmp_path, tiny_model_dir, devices=2, num_nodes=2, **options).forecast().sampling
    assert isinstance(machine, VllmForecast)
    assert isinstance(machines, VllmForecast)
    assert sum(machine.work.batch_sizes) == 2 * sum(machines.work.batch_sizes)
    assert machine.host_bytes == machine.weight_bytes // 4
    assert machines.host_bytes == 0


def test_the_least_time_is_that_of_reading_weights_or_of_computing() -> None:
    work = SamplingWork(
        batch_sizes=(4, 2), prompt_flops=600, token_flops=10, weight_bytes=1000, cached_bytes=50, num_further_tokens=5
    )
    assert work.least_seconds(peak=100, bandwidth=100) == 6 + 5 * (12 + 11)
    assert work.least_seconds(peak=1, bandwidth=1e9) == pytest.approx(600 + 5 * (40 + 20))
