"""Attention by document borders: the borders are the mask's, and it is used wherever torch's kernel takes the model."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    FalconConfig,
    GPT2Config,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
)

from fabric_train.arguments import TrainArguments, parse
from fabric_train.data.batch import Batch, find_targets, isolate
from fabric_train.distributed.decoder_layers import checkpoint_layers
from fabric_train.model.attention import VARLEN, forward
from fabric_train.model.attention_choice import choose_attention, why_not_varlen
from fabric_train.model.varlen_kernel import grouped_query_arguments
from fabric_train.training.objective import CrossEntropy
from tests.support.forked_runs import ForkedRuns
from tests.support.unequal_rows import argv, metrics, write_model, write_rows
from tests.support.varlen_kernel import CALLS, varlen_kernel_on_cpu

LENGTH = 20
SMALL: dict[str, Any] = {"vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 2, "pad_token_id": 0}
LLAMA: dict[str, Any] = {**SMALL, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def kernel() -> Iterator[None]:
    with varlen_kernel_on_cpu():
        yield


@pytest.fixture(scope="module")
def batch() -> Batch:
    """Three rows: one begins within a document, one has documents of one token, one is a single document."""
    ids = np.random.default_rng(0).integers(1, 50, (3, LENGTH))
    return isolate(ids, ids.copy(), [np.array([3, 12]), np.array([0, 1, 2, 19]), np.array([0])])


def build(config: PretrainedConfig, attention: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype).train()


def loss_and_gradients(model: Any, batch: Batch, isolates: bool = True) -> list[torch.Tensor]:
    loss = CrossEntropy().loss(model, Batch(batch.input_ids, batch.labels, batch.documents if isolates else None)).total
    loss.backward()
    return [loss.detach(), *(weight.grad for weight in model.parameters())]


def mask_of(model: Any, batch: Batch) -> torch.Tensor:
    """Return the mask [B, T, T] that the first layer gets from transformers."""
    masks: list[torch.Tensor] = []
    layer = model.model.layers[0]
    layer.register_forward_pre_hook(lambda _, __, given: masks.append(given["attention_mask"]), with_kwargs=True)
    with torch.no_grad():
        forward(model, batch.input_ids, batch.documents)
    return masks[0].expand(len(batch.input_ids), 1, LENGTH, LENGTH)[:, 0]


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("config", [LlamaConfig(**LLAMA), MistralConfig(**LLAMA, sliding_window=5)])
def test_every_layer_gets_the_borders_that_the_mask_has(config: PretrainedConfig, batch: Batch) -> None:
    masks = mask_of(build(config, "sdpa"), batch)
    loss_and_gradients(build(config, VARLEN), batch)
    assert [CALLS[0]] * config.num_hidden_layers == CALLS
    borders, longest = CALLS[0]
    window = getattr(config, "sliding_window", None) or LENGTH
    document = np.searchsorted(borders, np.arange(masks[:, 0].numel()), side="right").reshape(len(masks), LENGTH)
    distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    seen = (document[:, :, None] == document[:, None]) & (distance >= 0) & (distance < window)
    assert masks.numpy().tolist() == seen.tolist()
    assert longest == LENGTH


@pytest.mark.numerical
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("isolates", [True, False])
@pytest.mark.parametrize("config", [LlamaConfig(**LLAMA), MistralConfig(**LLAMA, sliding_window=5)])
def test_loss_and_gradients_are_those_with_a_mask(config: PretrainedConfig, batch: Batch, isolates: bool) -> None:
    expected = loss_and_gradients(build(config, "sdpa"), batch, isolates)
    for found, reference in zip(loss_and_gradients(build(config, VARLEN), batch, isolates), expected, strict=True):
        torch.testing.assert_close(found, reference, rtol=1e-5, atol=1e-5)
    uses_kernel = isolates or getattr(config, "sliding_window", None) is not None
    assert len(CALLS) == (config.num_hidden_layers if uses_kernel else 0)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("budget", [0, 0.8])
def test_recomputed_layers_get_the_same_borders(batch: Batch, budget: float) -> None:
    expected = loss_and_gradients(build(LlamaConfig(**LLAMA), VARLEN), batch)
    model = build(LlamaConfig(**LLAMA), VARLEN)
    checkpoint_layers(model.model.layers, budget)
    for _ in range(2):  # the first pass with a budget makes the plan
        model.zero_grad()
        CALLS.clear()
        found = loss_and_gradients(model, batch)
    assert len(CALLS) == 2 * (2 if budget == 0 else 1)  # a budget keeps what attention returns
    assert [CALLS[0]] * len(CALLS) == CALLS
    assert all(map(torch.equal, found, expected))


class AttentionCalls(TorchDispatchMode):
    """Records which attention is asked for, and with which types."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "attn" in func.name():
            self.names.append(func.overloadpacket.__name__)
            self.dtypes |= {tensor.dtype for tensor in args[:3]}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("autocasts", [False, True])
def test_torch_checks_shapes_and_types_of_the_calls(batch: Batch, autocasts: bool) -> None:
    """On fake tensors nothing is computed: torch's own registrations check and type what would be."""
    targets = find_targets(batch.labels)
    with FakeTensorMode(allow_non_fake_inputs=True), AttentionCalls() as calls:
        model = build(LlamaConfig(**LLAMA), VARLEN, torch.float32 if autocasts else torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
            loss = CrossEntropy().loss(model, Batch(batch.input_ids, batch.labels, batch.documents, targets)).total
        loss.backward()
    assert calls.names == ["_varlen_attn"] * 2 + ["_varlen_attn_backward"] * 2
    assert calls.dtypes == {torch.bfloat16}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (LlamaConfig(**LLAMA), None),
        (MistralConfig(**LLAMA, sliding_window=5), None),
        (MixtralConfig(**LLAMA), None),
        (GPT2Config(vocab_size=50, n_embd=64, n_layer=2, n_head=2, attn_pdrop=0), None),
        (
            GPT2Config(vocab_size=50, n_embd=64, n_layer=2, n_head=2),
            "does not support dropout, but the model's attention has dropout 0.1",
        ),
        (LlamaConfig(**LLAMA, head_dim=20), "does not support heads of size 20"),
        (
            DeepseekV3Config(**SMALL, num_attention_heads=2, num_key_value_heads=2, n_routed_experts=8),
            "does not support heads of size 128 and 192",
        ),
        (Llama4TextConfig(**LLAMA, head_dim=16), "contain more than document borders"),
        (FalconConfig(**SMALL, num_attention_heads=2), "cannot be replaced"),
    ],
    ids=lambda value: value.model_type if isinstance(value, PretrainedConfig) else value or "takes it",
)
def test_model_whose_attention_the_kernel_does_not_compute_is_named(
    config: PretrainedConfig, reason: str | None
) -> None:
    config._attn_implementation = "sdpa"
    found = why_not_varlen(SimpleNamespace(config=config, longest_row=None), torch.bfloat16)  # type: ignore[arg-type]
    assert (found is None) if reason is None else (found and reason in found), found
    assert config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("options", "capability", "chosen", "reason"),
    [
        ([], (8, 0), VARLEN, None),
        ([], (7, 5), "sdpa", "torch's kernel for documents needs an Ampere or newer GPU"),
        (["--precision", "32-true"], (9, 0), "sdpa", "torch's kernel for documents computes in 16 bits only"),
        (["--attention", "eager"], (9, 0), "sdpa", None),
    ],
)
def test_gpu_that_has_the_kernel_uses_it_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    capability: tuple[int, int],
    chosen: str,
    reason: str | None,
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0) if index else capability)
    arguments = parse(TrainArguments, ["--train_data_dir", "tokens", "--output_dir", "run", *options])
    config = LlamaConfig(**LLAMA)
    config._attn_implementation = "sdpa"
    assert choose_attention(SimpleNamespace(config=config, longest_row=None), arguments, "cuda") == reason  # type: ignore[arg-type]
    assert config._attn_implementation == chosen


def test_torch_without_a_flag_for_grouped_heads_gets_none() -> None:
    """torch 2.11 has this signature; its kernel takes grouped heads as they are."""

    def of_torch_2_11(query: Any, *_: Any, return_aux: Any = None, scale: Any = None, window_size: Any = None) -> None:
        pass

    def of_torch_2_12(query: Any, *_: Any, enable_gqa: bool = False) -> None:
        pass

    assert grouped_query_arguments(of_torch_2_11) == {}
    assert grouped_query_arguments(of_torch_2_12) == {"enable_gqa": True}


def test_run_says_why_it_needs_masks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fabric_train.__main__ import main

    model = write_model(tmp_path / "model")
    tokens = write_rows(tmp_path / "tokens", packed_every=1)
    words = argv(model, tokens, tmp_path / "run", max_step=5, accelerator="cuda", devices=1)
    words += ["--plan", "true", "--device_memory", "80GB"]
    main([*words, "--precision", "32-true"])
    slow = "attention is slow: it isolates documents with a mask of "
    assert slow in capsys.readouterr().out
    main([*words, "--precision", "bf16-true"])
    assert slow not in capsys.readouterr().out


WITH_KERNEL = """
from fabric_train.model.attention import VARLEN
from fabric_train.preflight import prepare
from tests.support.varlen_kernel import varlen_kernel_on_cpu
kernel = varlen_kernel_on_cpu()
kernel.__enter__()
prepare.choose_attention = lambda shape, *_: setattr(shape.config, "_attn_implementation", VARLEN)
"""
"""Code for a rank: use the kernel's stand-in."""


@pytest.mark.slow
def test_sharded_and_tensor_parallel_runs_have_the_losses_of_masks(forked_runs: ForkedRuns, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    tokens = write_rows(tmp_path / "tokens", packed_every=1)
    usual: dict[str, Any] = {"max_step": 2, "micro_batch_size": 2, "total_batch_size": 8, "precision": "32-true"}
    ways: dict[str, dict[str, Any]] = {
        "fsdp": {"parallelism": "fsdp", "activation_checkpointing": "full"},
        "tensor": {"parallelism": "fsdp2", "tensor_parallel_size": 2},
    }
    forked_runs.start(argv(model, tokens, tmp_path / "masks", **usual), 1).finish()
    expected = [(float(row["train_loss"]), float(row["grad_norm"])) for row in metrics(tmp_path / "masks")]
    for name, options in ways.items():
        words = argv(model, tokens, tmp_path / name, devices=2, **usual, **options)
        forked_runs.start(words, 2, before=WITH_KERNEL).finish()
        rows = metrics(tmp_path / name)
        found = [(float(row["train_loss"]), float(row["grad_norm"])) for row in rows]
        assert np.array(found) == pytest.approx(np.array(expected), rel=1e-5)
