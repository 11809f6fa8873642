"""One kernel launch updates all parameters: it moves no more bytes than it must, and its results are the formula's."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fabric_train.arguments import TrainingArguments
from fabric_train.optim.adamw import LowPrecisionAdamW
from fabric_train.optim.kernel_trial import use_triton
from fabric_train.optim.optimizer import build_optimizer
from fabric_train.optim.tensor_table import Row, TensorTable
from tests.support import launch_on_cpu
from tests.support.device_operations import DeviceOperations
from tests.support.forked_runs import ForkedRuns
from tests.support.sharded_8b import NUM_ELEMENTS, SHAPES, eight_ranks, sharded_parameters
from tests.support.unequal_rows import argv, write_model

ROOT = Path(__file__).resolve().parents[2]
BF16 = torch.bfloat16
FP32 = torch.float32
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: torch's CPU build comes without it"
)

# ------------------------------------------------------------------------------------------------ launches and bytes


@pytest.mark.parametrize("fsdp2", [False, True])
def test_step_of_an_8b_moves_only_what_it_must_in_few_launches(fsdp2: bool) -> None:
    with eight_ranks():
        parameters = sharded_parameters(fsdp2)
        decayed = {name for name, shape in SHAPES.items() if len(shape) == 2}
        optimizer = build_optimizer(parameters.items(), decayed, TrainingArguments())
    assert isinstance(optimizer, LowPrecisionAdamW)
    counted = DeviceOperations()

    def launch(table: TensorTable) -> None:
        storage = table.storage  # weights and moments are read and written, the gradient is read
        moved = 2 * storage.weights.itemsize + storage.gradient.itemsize + 4 * storage.moments.itemsize
        counted.add("kernel", table.numel * moved)

    optimizer.launch = launch
    optimizer.step()  # the first step makes the moments
    counted = DeviceOperations()
    with counted:
        optimizer.step()
    needed = 7 * BF16.itemsize * NUM_ELEMENTS
    assert counted.launches.total() <= 40, counted.launches
    assert counted.launches["kernel"] == 1
    assert needed <= counted.bytes <= 1.1 * needed


# --------------------------------------------------------------------------------------------------- equal results


@needs_triton
@pytest.mark.slow
def test_kernel_equals_the_formula_bit_for_bit_in_the_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-m", "tests.support.kernel_in_interpreter"]
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    differing = json.loads(ran.stdout)
    assert len(differing) == 8
    assert not any(differing.values()), differing


@needs_triton
@pytest.mark.slow
def test_compiled_kernel_reads_and_writes_once_in_widest_loads() -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fabric_train.optim.triton_adamw import _adamw_kernel as kernel

    pointers = {"rows": "*i64", "factors": "*fp32", "owners": "*i32", "signed_levels": "*fp32"}
    pointers["unsigned_levels"] = "*fp32"
    constants = {"WEIGHTS": 1, "GRADIENT": 1, "MOMENTS": 1, "STOCHASTIC": True, "ALIGNED": True}
    places = {name: (kernel.arg_names.index(name),) for name in (*pointers, *constants)}
    source = ASTSource(
        fn=kernel,
        signature=pointers | dict.fromkeys(constants, "constexpr"),
        constexprs={places[name]: value for name, value in constants.items()},
        attrs={places[name]: [["tt.divisibility", 16]] for name in pointers},
    )
    options = {"num_warps": 4, "enable_fp_fusion": False}
    assembly = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    # whole blocks: a thread's 8 numbers of bfloat16 are four words of 32 bits
    assert len(re.findall(r"ld\.global\.v4\.b32", assembly)) == 4
    assert len(re.findall(r"st\.global\.v4\.b32", assembly)) == 3
    # the last block of a parameter, with a mask
    assert len(re.findall(r"ld\.global\.b16", assembly)) == 4 * 8
    assert len(re.findall(r"st\.global\.b16", assembly)) == 3 * 8
    assert not re.findall(r"\bfma\.", assembly)


def do_nothing(table: TensorTable) -> None:
    """A kernel that a broken compiler has made."""


def with_other_keys(table: TensorTable) -> None:
    """A kernel that rounds with other random numbers."""
    table.rows[:, Row._fields.index("key")] += 1
    launch_on_cpu.launch(table)


@pytest.mark.parametrize("launch", [launch_on_cpu.launch, do_nothing, with_other_keys])
@pytest.mark.parametrize(
    ("weights", "states"), [(BF16, "bfloat16"), (BF16, "float32"), (FP32, "bfloat16"), (FP32, "8bit"), (BF16, "8bit")]
)
def test_kernel_is_used_only_if_its_results_are_right(
    monkeypatch: pytest.MonkeyPatch, launch: Callable[[TensorTable], None], weights: torch.dtype, states: Any
) -> None:
    if launch is with_other_keys and (weights, states) == (FP32, "8bit"):
        pytest.skip("nothing is rounded")
    monkeypatch.setitem(sys.modules, "fabric_train.optim.triton_adamw", SimpleNamespace(launch=launch))
    parameter = nn.Parameter(torch.zeros(2, 2, dtype=weights))
    optimizer = build_optimizer([("matrix", parameter)], {"matrix"}, TrainingArguments(optimizer_states=states))
    assert isinstance(optimizer, LowPrecisionAdamW)
    fault = use_triton(optimizer)
    if launch is launch_on_cpu.launch:
        assert fault is None
        assert optimizer.launch is launch
    else:
        assert fault is not None
        assert "of torch's kernel" in fault
        assert optimizer.launch is None


# ------------------------------------------------------------------------------------------------- on real ranks

TOGETHER = """
import tests.support.steps_with_given_gradients as steps
from tests.support.launch_on_cpu import launch
build = steps.build_optimizer
def build_and_set(*arguments, **options):
    optimizer = build(*arguments, **options)
    optimizer.launch = launch
    return optimizer
steps.build_optimizer = build_and_set
"""


@pytest.mark.slow
def test_table_gives_every_rank_the_elements_of_its_shards(forked_runs: ForkedRuns, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")

    def saved(name: str, num_ranks: int, **options: object) -> dict[str, torch.Tensor]:
        given = {"devices": num_ranks, "max_step": 2, "precision": "bf16-true", "optimizer_states": "float32"}
        line = argv(model, Path("unused"), tmp_path / name, **given, **options)
        program = "tests.support.steps_with_given_gradients"
        forked_runs.start(line, num_ranks, program=program, before=TOGETHER).finish()
        (folder,) = (tmp_path / name).glob("step-*")
        return load_file(folder / "model.safetensors") | load_file(folder / "optimizer" / "optimizer.safetensors")

    whole = saved("single", 1, parallelism="single")
    for name, num_ranks, options in (
        ("fsdp", 3, {"parallelism": "fsdp"}),
        ("fsdp2", 3, {"parallelism": "fsdp2"}),
        ("tensor-parallel", 4, {"parallelism": "fsdp2", "tensor_parallel_size": 2}),
    ):
        sharded = saved(name, num_ranks, **options)
        assert sharded.keys() == whole.keys()
        assert [each for each in whole if not torch.equal(sharded[each], whole[each])] == [], name
