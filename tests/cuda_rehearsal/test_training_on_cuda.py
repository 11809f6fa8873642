"""Training and saving on pretended CUDA devices: the cases that catch the most, each kind of check with its defect."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.checkpoint_examples import TOKENIZER_FILES
from tests.support.exports import VERIFY_IN_PROCESS
from tests.support.pretended_cuda.rehearsal import (
    LATE,
    STEP_WAITS,
    Rehearsal,
    foreign_contexts,
    losses,
    tensor_files,
    waits_in_steps,
)
from tests.support.pretended_cuda.run import PretendedRun, run_pretended

pytestmark = [pytest.mark.slow, pytest.mark.cuda_rehearsal]
SAVES = {"parallelism": "fsdp", "state_dict_type": "sharded", "max_step": 3, "lr_decay": "false"}
SHARDED = {"parallelism": "fsdp2", "precision": "bf16-true", "max_step": 2}
OFFLOADED = {"parallelism": "fsdp2", "cpu_offload": "true", "precision": "bf16-mixed"}
# the optimizer's step no longer waits for the copies of a background save
NO_WAIT = """
from fabric_train.checkpoint.rank_writer import RankWriter
RankWriter.wait_until_copied = lambda self: self._is_copied.wait()
"""
ITEM = """
from fabric_train.training import step
clip = step.clip_grad_norm
def clip_and_read(*arguments):
    norm = clip(*arguments)
    norm.item()
    return norm
step.clip_grad_norm = clip_and_read
"""
CPU_TENSOR = """
import torch
from fabric_train.training import step
sum_over_data_ranks = step.sum_over_data_ranks
def sum_and_more(*arguments):
    torch.distributed.all_reduce(torch.ones(1))
    return sum_over_data_ranks(*arguments)
step.sum_over_data_ranks = sum_and_more
"""
FIRST_DEVICE = """
import torch
from fabric_train.training import step
seed_step = step.seed_step
def seed_step_on_first(*arguments):
    with torch.cuda.device(0):
        torch.empty(1, device="cuda")
    seed_step(*arguments)
step.seed_step = seed_step_on_first
"""


@pytest.fixture(scope="module")
def losses_on_the_cpu(rehearsal: Rehearsal) -> list[float]:
    """The losses of one process: they do not depend on the number of ranks, as tests/distributed claims."""
    return rehearsal.cpu_losses("cpu", {"parallelism": "single"}, 1)


@pytest.fixture(scope="module")
def sharded(rehearsal: Rehearsal) -> PretendedRun:
    """A run of two steps with fully sharded weights, in the folder ``sharded``."""
    return rehearsal.run("sharded", SHARDED)


@pytest.mark.parametrize(
    ("options", "devices"),
    [
        ({"parallelism": "fsdp", "limit_all_gathers": "false"}, 2),
        ({"parallelism": "ddp", "activation_checkpointing": "full", "activation_offload": "true"}, 3),
        ({"parallelism": "single", "compile": "true"}, 1),
    ],
    ids=["fsdp", "ddp", "compiled"],
)
def test_losses_on_devices_are_those_on_the_cpu(
    rehearsal: Rehearsal, losses_on_the_cpu: list[float], options: Mapping[str, object], devices: int
) -> None:
    name = f"{options['parallelism']}-losses"
    run = rehearsal.run(name, options, devices)
    assert losses(rehearsal.folder / name) == pytest.approx(losses_on_the_cpu, abs=1e-5)
    assert len(run.notes) == devices
    assert not foreign_contexts(run)


def test_host_waits_in_a_step_at_the_named_lines_only(rehearsal: Rehearsal, sharded: PretendedRun) -> None:
    assert waits_in_steps(sharded) == STEP_WAITS
    read = rehearsal.run("reads", {**SHARDED, "max_step": 1}, before=ITEM)
    assert waits_in_steps(read) == {*STEP_WAITS, "item in clip_and_read"}


def test_background_saves_with_late_copies_equal_synchronous_ones(rehearsal: Rehearsal) -> None:
    rehearsal.run("synchronous", {**SAVES, "async_save": "false"})
    late = rehearsal.run("background", SAVES, copy_delay=LATE)
    assert all(notes.late_copies for notes in late.notes.values())
    rehearsal.run("not waited", SAVES, copy_delay=LATE, before=NO_WAIT)
    expected = tensor_files(rehearsal.checkpoint("synchronous", 2))
    assert tensor_files(rehearsal.checkpoint("background", 2)) == expected
    assert tensor_files(rehearsal.checkpoint("not waited", 2)) != expected
    rehearsal.run("offloaded-shards", {**SAVES, "cpu_offload": "true", "max_step": 2})
    assert tensor_files(rehearsal.checkpoint("offloaded-shards", 2)) == expected


def test_offloaded_run_resumes_on_devices_as_if_never_stopped(rehearsal: Rehearsal) -> None:
    first = rehearsal.run("offloaded", OFFLOADED)
    resumed = rehearsal.run("resumed", {**OFFLOADED, "checkpoint": rehearsal.checkpoint("offloaded", 2)})
    assert not foreign_contexts(first)  # a background save touches no other device
    assert not foreign_contexts(resumed)
    whole = losses(rehearsal.folder / "offloaded")
    assert losses(rehearsal.folder / "resumed") == whole[-len(losses(rehearsal.folder / "resumed")) :]
    expected = tensor_files(rehearsal.checkpoint("offloaded", 4))
    assert tensor_files(rehearsal.checkpoint("resumed", 4)) == expected


def test_offloaded_tensor_parallel_run_trains_and_saves_as_on_devices(rehearsal: Rehearsal) -> None:
    options = {"parallelism": "fsdp2", "tensor_parallel_size": 2, "max_step": 2}
    rehearsal.run("tensor-parallel", options)
    rehearsal.run("tensor-parallel-offloaded", {**options, "cpu_offload": "true"}, copy_delay=LATE)
    on_cpu = pytest.approx(rehearsal.cpu_losses("tensor-parallel-cpu", options), abs=1e-5)
    assert losses(rehearsal.folder / "tensor-parallel") == on_cpu
    expected = tensor_files(rehearsal.checkpoint("tensor-parallel", 2))
    assert tensor_files(rehearsal.checkpoint("tensor-parallel-offloaded", 2)) == expected


@pytest.mark.parametrize(
    ("parallelism", "precision", "base_weights", "devices"),
    [("single", "16-mixed", "nf4", 1), ("fsdp2", "bf16-true", "nf4_double", 2)],
)
def test_an_adapter_of_weights_in_4_bits_has_the_losses_of_the_cpu(
    rehearsal: Rehearsal, parallelism: str, precision: str, base_weights: str, devices: int
) -> None:
    options: dict[str, object] = {"parallelism": parallelism, "precision": precision, "max_step": 2}
    options |= {"lora_rank": 4, "base_weights": base_weights}
    name = f"{parallelism}-{base_weights}"
    rehearsal.run(name, options, devices)
    on_cpu = rehearsal.cpu_losses(f"{name}-cpu", options, devices)
    assert losses(rehearsal.folder / name) == pytest.approx(on_cpu, abs=4e-3)


def test_cpu_tensor_given_to_nccl_ends_the_run(rehearsal: Rehearsal) -> None:
    run = rehearsal.run("cpu-tensor", {"parallelism": "ddp", "max_step": 1}, before=CPU_TENSOR, returncode=1)
    assert "No backend type associated with device type cpu" in run.stderr


def test_context_on_the_device_of_another_rank_is_noted(rehearsal: Rehearsal) -> None:
    run = rehearsal.run("first-device", {"parallelism": "ddp", "max_step": 1}, before=FIRST_DEVICE)
    assert list(foreign_contexts(run)) == [1]
    assert "seed_step_on_first" in foreign_contexts(run)[1][0]


@pytest.mark.usefixtures("sharded")
def test_evaluation_export_and_generation_run_on_a_device(rehearsal: Rehearsal) -> None:
    trained = rehearsal.checkpoint("sharded", 2)
    export = rehearsal.folder / "export"
    evaluated = rehearsal.run("evaluated", {"eval_only": "true", "checkpoint": trained, "precision": "bf16-true"})
    assert "validation loss" in evaluated.stdout
    words = ["fabric_train.programs.convert_to_hf", "--checkpoint", trained, "--output_dir", export]
    converted = run_pretended(words, 1, before=VERIFY_IN_PROCESS)
    assert converted.returncode == 0, converted.stderr
    words = ["fabric_train.programs.generate", "--model_name", export, "--prompt", "To be", "--num_tokens", 8]
    generated = run_pretended(words, 1)
    assert generated.returncode == 0, generated.stderr
    assert "(cuda, bfloat16)" in generated.stderr
    assert generated.stdout.startswith("To be")


def test_a_model_too_large_for_a_gpu_is_spread_over_two_and_the_host(tmp_path: Path, tiny_model_dir: Path) -> None:
    config = LlamaConfig.from_pretrained(tiny_model_dir, num_hidden_layers=8)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    for name in TOKENIZER_FILES:
        shutil.copy(tiny_model_dir / name, tmp_path)
    argv = ["fabric_train.programs.generate", "--model_name", tmp_path, "--prompt", "To be", "--num_tokens", 8]
    whole = run_pretended(argv)
    two, host = (run_pretended([*argv, "--device_memory", size]) for size in ("500KB", "300KB"))
    assert [run.returncode for run in (whole, two, host)] == [0, 0, 0], two.stderr + host.stderr
    assert whole.stdout == two.stdout == host.stdout
    assert "note: the model does not fit in one GPU and is spread over 2\n" in two.stderr
    assert "is spread over 2; 0.2 MB of the weights stay in host memory" in host.stderr
    assert list(whole.notes[0].contexts) == ["0"]
    assert sorted(two.notes[0].contexts) == ["0", "1"]
    assert two.notes[0].peak_bytes < whole.notes[0].peak_bytes
