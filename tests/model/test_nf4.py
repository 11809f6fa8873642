"""Weights in 4 bits: their scales in 8 bits, what a layer keeps between passes, what bitsandbytes logs when loaded."""

import importlib.util
import logging
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig

from fabric_train.checkpoint.trainer_json import read_trainer_json
from fabric_train.export.merged_adapter import open_unmerged
from fabric_train.inference.devices import load_onto_devices
from fabric_train.inference.load_model import describe
from fabric_train.model.nf4 import (
    BLOCK,
    NF4Linear,
    _dequantize_scales,
    _quantize_scales,
    check_installed,
    quantize_layers,
    quantize_rows,
)
from fabric_train.preflight.memory_activations import _LiveBytes
from tests.support.forked_runs import ForkedRuns
from tests.support.plain_training import LR
from tests.support.rounding import assert_same_training, num_sums_of_gradient, rounding_tolerance
from tests.support.unequal_rows import LENGTH, argv, metrics, write_model, write_rows

WARNING = "Failed to load CPU gemm_4bit_forward from kernels-community: %s. Please make sure"
CPU_OPERATORS = "bitsandbytes.backends.cpu.ops"


# ------------------------------------------------------------------------------------------------ double quantization


def scales_of_rows() -> torch.Tensor:
    """Return fp32 scales [rows, 9] of many sizes; one row has an outlier, one has equal scales, and one has zeros."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.linspace(-30, 10, 200)[:, None]
    scales = torch.rand(200, 9, generator=generator) * 2**exponents
    scales[0, 3] = 1.0
    scales[1] = 0.3
    scales[2] = 0.0
    return scales


def test_a_scale_in_8_bits_is_at_most_half_a_step_off() -> None:
    scales = scales_of_rows()
    restored = _dequantize_scales(_quantize_scales(scales), scales.shape[1])
    smallest = scales.amin(1, keepdim=True)
    largest = scales.amax(1, keepdim=True)
    # 255 steps between the smallest and the largest scale of a row; the step is rounded up to 16 significant bits
    steps = (largest - smallest) / 255 * (1 + 2**-15)
    rounding = torch.finfo(torch.float32).eps * largest
    assert ((restored - scales).abs() <= steps / 2 + rounding).all()
    assert torch.equal(restored.amin(1, keepdim=True), smallest)
    assert torch.equal(restored[1:3], scales[1:3])  # equal scales


def test_a_fused_multiplication_and_addition_restores_the_same_scales() -> None:
    scales = scales_of_rows()
    stored = _quantize_scales(scales)
    smallest, steps = stored.view(torch.float32)[:, :2].double().split(1, dim=1)  # [rows, 1] each
    codes = stored[:, 8:17].double()
    fused = (smallest + codes * steps).float()  # rounded once
    assert torch.equal(_dequantize_scales(stored, scales.shape[1]), fused)


def test_rows_are_quantized_as_the_whole_matrix_is() -> None:
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    codes, state = quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
    for begin, end in ((0, 96), (0, 1), (17, 60), (95, 96), (5, 5)):
        row_codes, scales = quantize_rows(weight[begin:end])
        assert torch.equal(row_codes, codes.view(96, 64)[begin:end])
        assert torch.equal(scales.view(torch.float32), state.absmax.view(96, 2)[begin:end])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_with_scales_in_8_bits_are_quantized_as_the_whole_matrix_is(dtype: torch.dtype) -> None:
    weight = torch.randn(96, 5 * BLOCK, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed, scales = quantize_rows(weight, has_8bit_scales=True)
    expected_packed, state = quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
    assert torch.equal(packed.flatten(), expected_packed.flatten())
    restored = _dequantize_scales(scales, 5)
    torch.testing.assert_close(restored, state.absmax.view(96, 5), rtol=0.01, atol=0)
    for begin, end in ((0, 1), (17, 60), (95, 96), (5, 5)):
        rank_packed, rank_scales = quantize_rows(weight[begin:end], has_8bit_scales=True)
        assert torch.equal(rank_packed, packed[begin:end])
        assert torch.equal(rank_scales, scales[begin:end])
        # stored in the dtype of the weights and sent as such
        sent = rank_scales.view(dtype).clone()
        assert torch.equal(_dequantize_scales(sent, 5), restored[begin:end])


@pytest.mark.parametrize("has_8bit_scales", [False, True])
def test_a_layer_keeps_nothing_between_passes_but_its_parameters(has_8bit_scales: bool) -> None:
    matrix = torch.randn(192, 4 * BLOCK, generator=torch.Generator().manual_seed(0))
    holder: Any = nn.Sequential(nn.Linear(4 * BLOCK, 192))
    quantize_layers([holder], torch.float32, has_8bit_scales=has_8bit_scales)
    layer: NF4Linear = holder[0]
    packed, scales = quantize_rows(matrix, has_8bit_scales=has_8bit_scales)
    layer.weight = nn.Parameter(packed.view(torch.float32), requires_grad=False)
    layer.weight_scales = nn.Parameter(scales.view(torch.float32), requires_grad=False)
    layer.bias.requires_grad = False
    inputs = torch.randn(2, 7, 4 * BLOCK, requires_grad=True)
    grad_output = torch.randn(2, 7, 192)

    layer(inputs)  # the table of the 16 values of NF4 is made once
    live = _LiveBytes(layer)
    with live:
        output = layer(inputs)
    assert live.now == output.nbytes
    output.backward(grad_output)

    # the product with the dequantized weight, and its gradient
    weight = layer.dequantized()
    torch.testing.assert_close(weight, matrix, rtol=0, atol=0.6)
    torch.testing.assert_close(output, nn.functional.linear(inputs, weight, layer.bias))
    torch.testing.assert_close(inputs.grad, grad_output @ weight)


# ---------------------------------------------------------------------------------------------------------- whole runs

ROWS_PER_WINDOW = 6  # on one, two or three ranks
STEPS = 3
SETTINGS: dict[str, Any] = {
    "adapter": "lora",
    "lora_rank": 4,
    "lr": LR,
    "max_step": STEPS,
    "save_step_interval": 1,
    "total_batch_size": ROWS_PER_WINDOW,
    "micro_batch_size": 1,
}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("tokens") / "rows", num_rows=21)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose matrices have 3 or 5 blocks of NF4 in a row."""
    return write_model(tmp_path_factory.mktemp("model"), hidden_size=3 * BLOCK, intermediate_size=5 * BLOCK)


@pytest.fixture(scope="module")
def dequantized_model(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """The same model in fp32, with the values that double quantization leaves of the matrices of its layers."""
    folder = tmp_path_factory.mktemp("dequantized")
    shutil.copytree(model, folder, dirs_exist_ok=True)
    weights = load_file(model / "model.safetensors")
    for name, weight in weights.items():
        if not name.endswith("_proj.weight"):
            continue
        packed, state = quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
        scales = state.absmax.view(len(weight), -1)  # [out, blocks]
        state.absmax = _dequantize_scales(_quantize_scales(scales), scales.shape[1]).flatten()
        assert not torch.equal(state.absmax.view_as(scales), scales)
        weights[name] = dequantize_4bit(packed, state)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def run_on_dequantized_model(
    tmp_path_factory: pytest.TempPathFactory, forked_runs: ForkedRuns, dequantized_model: Path, tokens: Path
) -> Path:
    """A run with LoRA on the dequantized model, whose weights are plain fp32."""
    run = tmp_path_factory.mktemp("plain") / "run"
    forked_runs.start(argv(dequantized_model, tokens, run, parallelism="single", **SETTINGS), 1).finish()
    return run


def checkpoint_of(run: Path, step: int = STEPS) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


@pytest.mark.slow
@pytest.mark.parametrize(("parallelism", "num_ranks"), [("single", 1), ("ddp", 2), ("fsdp2", 2), ("fsdp", 3)])
def test_double_quantization_trains_on_the_same_weights_on_any_ranks(
    forked_runs_in_4_bits: ForkedRuns,
    tmp_path: Path,
    model: Path,
    dequantized_model: Path,
    tokens: Path,
    run_on_dequantized_model: Path,
    parallelism: str,
    num_ranks: int,
) -> None:
    run = tmp_path / "run"
    words = argv(model, tokens, run, parallelism=parallelism, base_weights="nf4_double", **SETTINGS)
    forked_runs_in_4_bits.start(words, num_ranks).finish()

    # the first loss is of the frozen weights alone, since the adapter begins with zeros
    rows = metrics(run)
    expected_rows = metrics(run_on_dequantized_model)
    assert rows[0]["train_loss"] == expected_rows[0]["train_loss"]
    num_sums = num_sums_of_gradient(AutoConfig.from_pretrained(model), LENGTH, ROWS_PER_WINDOW * LENGTH)
    adapter = load_file(checkpoint_of(run) / "adapter_model.safetensors")
    expected_adapter = load_file(checkpoint_of(run_on_dequantized_model) / "adapter_model.safetensors")
    assert_same_training(adapter, expected_adapter, LR, STEPS, rounding_tolerance(num_sums))

    # a merge and the loaded model have the weights of the training
    assert read_trainer_json(checkpoint_of(run)).arguments["base_weights"] == "nf4_double"
    expected_weights = load_file(dequantized_model / "model.safetensors")
    merged_into = open_unmerged(checkpoint_of(run), torch.float32, "dequantized")[0].weights
    assert merged_into is not None
    loaded = load_onto_devices(describe(str(checkpoint_of(run)), checkpoint_of(run)).open())
    for name, weight in expected_weights.items():
        assert torch.equal(merged_into.read_block(name, (0,) * weight.dim(), weight.shape), weight)
        if name.endswith("_proj.weight"):
            layer = loaded.get_submodule(name.removesuffix(".weight"))
            assert torch.equal(layer.dequantized(), weight)


@pytest.mark.slow
def test_a_run_with_double_quantization_resumes_bit_for_bit_and_never_without_it(
    forked_runs_in_4_bits: ForkedRuns, tmp_path: Path, model: Path, tokens: Path
) -> None:
    def words(run: Path, base_weights: str, **options: object) -> list[str]:
        return argv(model, tokens, run, parallelism="single", base_weights=base_weights, **SETTINGS, **options)

    whole = tmp_path / "whole"
    forked_runs_in_4_bits.start(words(whole, "nf4_double"), 1).finish()
    first_step = checkpoint_of(whole, step=1)
    resumed = tmp_path / "resumed"
    forked_runs_in_4_bits.start(words(resumed, "nf4_double", checkpoint=first_step), 1).finish()
    adapter = load_file(checkpoint_of(resumed) / "adapter_model.safetensors")
    for name, expected in load_file(checkpoint_of(whole) / "adapter_model.safetensors").items():
        assert torch.equal(adapter[name], expected), name

    refused = forked_runs_in_4_bits.start(words(tmp_path / "refused", "nf4", checkpoint=first_step), 1)
    assert refused.wait() == [2]
    assert "--base_weights nf4_double" in refused.stderr()


# -------------------------------------------------------------------------------------------------------- bitsandbytes


def test_only_the_warning_about_a_kernel_that_is_not_used_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # given the warning that bitsandbytes has, and another one
    spec = importlib.util.find_spec("bitsandbytes")
    assert spec is not None
    assert spec.origin is not None
    operators = Path(spec.origin).parent / "backends" / "cpu" / "ops.py"
    assert WARNING in operators.read_text(encoding="utf-8")
    # a package that logs as bitsandbytes does when it is imported on a CPU with AVX512-BF16
    source = f"import logging\nlogger = logging.getLogger({CPU_OPERATORS!r})\n"
    source += f"logger.warning({WARNING!r}, 'no kernels')\nlogger.warning('the library is broken')\n"
    (tmp_path / "bitsandbytes.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    # setitem, so that the test's package is forgotten afterwards even if bitsandbytes was not imported before
    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
    del sys.modules["bitsandbytes"]

    check_installed()

    assert caplog.messages == ["the library is broken"]
    assert logging.getLogger(CPU_OPERATORS).filters == []
