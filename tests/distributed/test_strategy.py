"""Devices are counted; what they cannot do is refused before a process group exists; groups have the run's timeout."""

from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.accelerators import CUDAAccelerator
from transformers import LlamaConfig

from fabric_train.arguments import TrainArguments, parse
from fabric_train.cli.errors import InputError
from fabric_train.distributed.strategy import collective_timeout, count_devices, resolve_parallelism
from fabric_train.distributed.watchdog import SLOW_PHASE_FACTOR
from fabric_train.model.parallelize import check_tensor_parallel
from tests.support.forked_runs import ForkedRuns
from tests.support.short_runs import argv, at_point
from tests.support.two_nodes import on_nodes

PRINT_TIMEOUTS = (
    "from torch.distributed import distributed_c10d as c10d; import torch; groups = c10d._world.pg_map; "
    "print('timeouts', len(groups), "
    "{group._get_backend(torch.device('cpu')).options._timeout.total_seconds() for group in groups})"
)
OLD_GPU = """
import torch
from lightning.fabric.accelerators import CUDAAccelerator
CUDAAccelerator.is_available = staticmethod(lambda: True)
CUDAAccelerator.auto_device_count = staticmethod(lambda: 2)
torch.cuda.get_device_capability = lambda index: (8, 0) if index == 0 else (7, 5)
torch.cuda.get_device_name = lambda index: "A100" if index == 0 else "Tesla T4"
"""


@pytest.mark.parametrize(
    ("devices", "number"), [("auto", 4), (-1, 4), (3, 3), ("2,3", 2), ("0,3", 2), ("0,1,3", 3), (4, 4)]
)
def test_numbers_and_indices_of_gpus_are_counted(
    monkeypatch: pytest.MonkeyPatch, devices: int | str, number: int
) -> None:
    monkeypatch.setattr(CUDAAccelerator, "auto_device_count", lambda: 4)
    assert count_devices(devices, "cuda") == number


@pytest.mark.parametrize("devices", [5, "1,4"])
def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, devices: int | str) -> None:
    monkeypatch.setattr(CUDAAccelerator, "auto_device_count", lambda: 4)
    with pytest.raises(InputError, match=rf"--devices {devices}: this machine has only 4 GPUs; give fewer"):
        count_devices(devices, "cuda")


@pytest.mark.parametrize("parallelism", ["fsdp", "auto"])
def test_fsdp1_is_refused_where_it_would_lose_gradients(parallelism: str) -> None:
    """It would keep the gradient of the last micro-batch instead of the sum."""
    options = ["--train_data_dir", "unused", "--output_dir", "unused", "--cpu_offload", "true"]
    reduced = [*options, "--gradient_reduction", "micro_batch"]
    with pytest.raises(InputError, match="use --parallelism fsdp2"):
        resolve_parallelism(parse(TrainArguments, [*reduced, "--parallelism", parallelism]), 2, "cuda")
    for accepted in ([*options, "--parallelism", parallelism], [*reduced, "--parallelism", "fsdp2"]):
        resolve_parallelism(parse(TrainArguments, accepted), 2, "cuda")


def test_replicas_in_mixed_precision_are_left_to_ddp() -> None:
    """FSDP1 would end in the second micro-batch."""
    given = ["--train_data_dir", "unused", "--output_dir", "unused", "--sharding_strategy", "NO_SHARD"]
    for precision in ("32-true", "bf16-true"):
        resolve_parallelism(parse(TrainArguments, [*given, "--precision", precision]), 2, "cuda")
    for precision in ("16-mixed", "bf16-mixed"):
        with pytest.raises(InputError, match="use --parallelism ddp"):
            resolve_parallelism(parse(TrainArguments, [*given, "--precision", precision]), 2, "cuda")


@pytest.mark.parametrize("option", [("--gradient_reduction", "micro_batch"), ("--cpu_offload", "true")])
def test_compiled_layers_with_gradients_elsewhere_need_fsdp2(option: tuple[str, str]) -> None:
    """FSDP1 would end in the second micro-batch."""
    given = ["--train_data_dir", "unused", "--output_dir", "unused", *option]
    for options in (["--parallelism", "fsdp"], ["--parallelism", "fsdp2", "--compile", "true"]):
        resolve_parallelism(parse(TrainArguments, [*given, *options]), 2, "cuda")
    for compiled in ("compile", "float8"):  # float8 compiles by itself
        with pytest.raises(InputError, match=f"--{compiled} true .*; use --parallelism fsdp2"):
            resolve_parallelism(
                parse(TrainArguments, [*given, "--parallelism", "fsdp", f"--{compiled}", "true"]), 2, "cuda"
            )


def test_fp16_is_refused_where_its_scale_may_arrive_too_late() -> None:
    """GradScaler's copy of the scale for gradients in host memory is used before it has arrived."""
    given = ["--train_data_dir", "unused", "--output_dir", "unused", "--parallelism", "fsdp", "--precision", "16-mixed"]
    with pytest.raises(InputError, match="use bf16-mixed"):
        resolve_parallelism(parse(TrainArguments, [*given, "--cpu_offload", "true"]), 2, "cuda")
    resolve_parallelism(parse(TrainArguments, given), 2, "cuda")


@pytest.mark.slow
@pytest.mark.parametrize(("parallelism", "others"), [("fsdp", "16-mixed or 32-true"), ("fsdp2", "32-true")])
def test_bf16_is_refused_on_gpus_without_it(
    tmp_path: Path,
    tiny_model_dir: Path,
    tiny_tokens_dir: Path,
    forked_runs: ForkedRuns,
    parallelism: str,
    others: str,
) -> None:
    given = {"accelerator": "cuda", "parallelism": parallelism, "precision": "bf16-true", "devices": "0,1"}
    line = argv(tiny_model_dir, tiny_tokens_dir, tmp_path / "run", **given)
    run = forked_runs.start(line, 1, before=OLD_GPU)
    reason = "Tesla T4 does not support bf16, which needs compute capability 8.0 or higher, not 7.5"
    assert run.wait() == [2]
    assert run.stderr() == f"error: --precision bf16-true: {reason}; use {others}\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "num_groups"),
    [
        ({"parallelism": "fsdp", "sharding_strategy": "HYBRID_SHARD", "num_nodes": 2}, 3),
        ({"parallelism": "fsdp2", "tensor_parallel_size": 2}, 5),
    ],
    ids=["hybrid", "tensor parallel"],
)
def test_every_group_has_the_timeout_of_the_run(
    tmp_path: Path,
    forked_runs: ForkedRuns,
    tiny_model_dir: Path,
    tiny_tokens_dir: Path,
    options: dict[str, object],
    num_groups: int,
) -> None:
    before = at_point(PRINT_TIMEOUTS, 1, "OPTIMIZER", ranks=(0,)) + (on_nodes(2) if "num_nodes" in options else "")
    given = {
        "devices": 4 // int(str(options.get("num_nodes", 1))),
        "max_step": 1,
        "eval_iters": 1,
        "rank_timeout": 77,
        **options,
    }
    run = forked_runs.start(argv(tiny_model_dir, tiny_tokens_dir, tmp_path / "run", **given), 4, before=before)
    run.finish()
    assert f"timeouts {num_groups} {{{77.0 * SLOW_PHASE_FACTOR}}}" in run.stdout()


def test_only_layers_are_sharded_by_tensor_parallelism() -> None:
    """Some versions of transformers add the tied embedding to the plan, in a style that is not used here."""
    config: Any = LlamaConfig(num_attention_heads=4, num_key_value_heads=4, intermediate_size=64)
    config.base_model_tp_plan = {**config.base_model_tp_plan, "embed_tokens": "embedding_rowwise"}
    check_tensor_parallel(config, "model", 2)
    config.base_model_tp_plan = {"layers.*.experts": "grouped"}
    with pytest.raises(InputError, match="does not support tensor parallelism"):
        check_tensor_parallel(config, "model", 2)


def test_ranks_wait_as_long_as_rewards_of_one_of_them_may_take() -> None:
    words = ["--objective", "rl", "--prompts", "p.jsonl", "--output_dir", "run", "--reward_timeout", "3600"]
    arguments = parse(TrainArguments, [*words, "--rewards", "regex", "length"])
    # a call of both at the same time, and then single completions of one after the other
    seconds_of_rewards = 3600 + 2 * 4 * 3600
    waiting = collective_timeout(arguments)
    assert waiting.total_seconds() == SLOW_PHASE_FACTOR * arguments.device.rank_timeout + seconds_of_rewards
