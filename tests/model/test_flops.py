"""What a token costs the model, worked out by hand for real configurations, and the peaks of devices by name."""

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma4TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3Config,
)

from fabric_train.model.flops import Attention, ModelFlops, model_flops, peak_flops
from tests.support.forked_runs import ForkedRuns
from tests.support.unequal_rows import LENGTH, ROWS_PER_WINDOW, argv, metrics, write_model, write_rows


def flops_of(config: PretrainedConfig) -> ModelFlops:
    with torch.device("meta"):
        return model_flops(AutoModelForCausalLM.from_config(config))


def test_an_8b_llama_costs_51_5_gflop_a_token_at_4096() -> None:
    """So do 54.5 % of an H200 give the 10,471 tokens/s that were published for it, by the same formula."""
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    flops = flops_of(config)
    assert flops.num_used == 8_030_261_248 - 128_256 * 4096  # the embeddings are looked up
    assert flops.count([4096]) / 4096 == 6 * flops.num_used + 12 * 32 * 4096 * 4096
    peak = peak_flops("NVIDIA H200", torch.bfloat16)
    assert peak is not None
    assert 10_471 * flops.count([4096]) / 4096 / peak == pytest.approx(0.545, abs=5e-4)
    assert str(flops) == "6 × 7,504,924,672 parameters + 12 × 32 layers × 4,096 × context"


def test_heads_of_several_sizes_are_counted_by_layer() -> None:
    """Every sixth layer of Gemma 4 sees all tokens, with larger heads."""
    flops = flops_of(Gemma4TextConfig(num_hidden_layers=12, vocab_size=64, vocab_size_per_layer_input=64))
    assert flops.attention == (Attention(2, 8 * 512, None), Attention(10, 8 * 256, 512))


def test_a_tied_head_is_used_and_learned_positions_are_looked_up() -> None:
    flops = flops_of(GPT2Config())
    assert flops.num_used == 124_439_808 - 1024 * 768
    assert flops.attention == (Attention(12, 768, None),)


def test_a_token_is_multiplied_with_its_own_experts_alone() -> None:
    flops = flops_of(MixtralConfig())  # Mixtral 8x7B: 46.7 billion, 12.9 of them active, published
    assert flops.num_used + 32_000 * 4096 == 12_879_925_248


def test_flops_count_wide_heads_and_a_sliding_window() -> None:
    wide = flops_of(Qwen3Config(hidden_size=64, num_attention_heads=4, head_dim=128, num_hidden_layers=3))
    assert wide.attention == (Attention(3, 512, None),)
    sliding = flops_of(MistralConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=2, sliding_window=100))
    assert sliding.attention == (Attention(2, 64, 100),)
    matrices = 6 * sliding.num_used
    assert sliding.count([100, 50, 300]) == 450 * matrices + 12 * 2 * 64 * (100**2 + 50**2 + 300 * 100)


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756),
        ("NVIDIA H200", torch.float32, 66.9),
        ("NVIDIA H200 NVL", torch.bfloat16, 835.5),
        ("NVIDIA GH200 480GB", torch.bfloat16, 989.4),
        ("NVIDIA B200", torch.bfloat16, 2250),
        ("NVIDIA L40S", torch.bfloat16, 362),
        ("NVIDIA L4", torch.bfloat16, 121),
        ("NVIDIA A10G", torch.float16, 70),
        ("NVIDIA A10", torch.float16, 125),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, 165.2),
        ("Tesla V100-SXM2-32GB", torch.bfloat16, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", torch.bfloat16, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", torch.bfloat16, None),
        ("NVIDIA A1000", torch.bfloat16, None),
        ("AMD Instinct MI300X", torch.bfloat16, None),
    ],
)
def test_peaks_are_dense_and_known_by_the_name_that_torch_gives(
    name: str, dtype: torch.dtype, tflops: float | None
) -> None:
    assert peak_flops(name, dtype) == (tflops * 1e12 if tflops else None)


def test_a_run_counts_real_tokens_of_all_ranks_and_prints_what_one_costs(
    forked_runs: ForkedRuns, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model")
    tokens = write_rows(tmp_path / "tokens")
    run = forked_runs.start(argv(model, tokens, tmp_path / "run", devices=2, max_step=7))
    run.finish()
    logged = metrics(tmp_path / "run")
    windows = [ROWS_PER_WINDOW] * 6 + [3]  # the epoch ends with a short one
    assert [int(row["num_tokens"]) for row in logged] == [LENGTH * sum(windows[: step + 1]) for step in range(7)]
    for row, num_rows in zip(logged, windows, strict=True):
        assert float(row["samples_per_second"]) * float(row["step_time"]) == pytest.approx(num_rows)
        assert float(row["tokens_per_second"]) * float(row["step_time"]) == pytest.approx(LENGTH * num_rows)
        assert row["mfu"] == ""
    assert "peak FLOP/s is unknown; a token takes 6 × 28,192 parameters + 12 × 2 layers × 32" in run.stdout()
