"""Checkpointed layers keep as much as they may, recompute the rest, and give the same loss and gradients bit by bit."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from fabric_train.arguments import TrainArguments, parse
from fabric_train.cli.errors import InputError
from fabric_train.distributed.decoder_layers import checkpoint_layers
from fabric_train.distributed.strategy import resolve_parallelism
from tests.support.forked_runs import ForkedRuns
from tests.support.unequal_rows import argv, metrics, write_model, write_rows

LAYERS = 6
LENGTH = 256
LINEARS = 7  # of a layer: q, k, v, o, gate, up, down
SIZES: dict[str, Any] = {
    "use_cache": False,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class Watched(TorchDispatchMode):
    """Counts operations, and the bytes of the tensors that were created in it on a device and are still alive."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device
        self.counts: Counter[str] = Counter()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        """A weak reference to each storage and its bytes, by its address, which later storages may have again."""

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        output = func(*args, **(kwargs or {}))
        self.counts[func.overloadpacket.__name__] += 1
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == self._device:
                storage = leaf.untyped_storage()
                self._storages[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        return output

    def living_bytes(self) -> int:
        return sum(num_bytes for reference, num_bytes in self._storages.values() if not reference.expired())


class Step:
    """The second of two forward and backward passes of a model; the first may plan.

    Attributes:
        kept_bytes: that the forward pass of the decoder keeps for its backward pass.
        products: matrix products in the backward pass of a layer: two for each linear layer, and the recomputed ones.
        loss: the output of the decoder.
        gradients: of all parameters of its layers.
    """

    def __init__(self, budget: float | None, dropout: float = 0.0, device: str = "cpu", **options: Any) -> None:
        torch.zeros(0, device=device)  # CUDA seeds its generator when it begins
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=64, num_hidden_layers=LAYERS, **SIZES)
        config.attention_dropout = dropout
        if device == "cuda":
            config._attn_implementation = "eager"  # the others may add gradients in any order there
        model = LlamaForCausalLM(config).train().to(device)
        if budget is not None:
            checkpoint_layers(model.model.layers, budget, **options)
        ids = torch.randint(64, (2, LENGTH)).to(device)
        hidden = torch.randn(2, LENGTH, SIZES["hidden_size"]).to(device).requires_grad_()
        model(ids).logits.sum().backward()
        model.zero_grad()
        with Watched(device) as watched:
            output = model.model(inputs_embeds=hidden).last_hidden_state
            self.kept_bytes = watched.living_bytes()
            forward_counts = watched.counts.copy()
            (output**2).sum().backward()
        backward_counts = watched.counts - forward_counts
        self.products = backward_counts["mm"] // LAYERS
        self.loss = output.detach()
        self.gradients = [weight.grad for weight in model.model.layers.parameters()]


@pytest.fixture(scope="module")
def plain() -> Step:
    return Step(None)


@pytest.fixture(scope="module")
def with_dropout() -> Step:
    return Step(None, dropout=0.1)


@pytest.fixture(scope="module")
def full() -> Step:
    return Step(0)


def test_a_frozen_first_layer_leaves_the_choice_to_the_first_that_trains() -> None:
    def products(budget: float) -> int:
        model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=LAYERS, **SIZES)).train()
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[0].requires_grad_(False)
        checkpoint_layers(model.model.layers, budget)
        ids = torch.zeros(1, 8, dtype=torch.int64)
        model(ids).logits.sum().backward()
        loss = model(ids).logits.sum()
        with Watched("cpu") as watched:
            loss.backward()
        return watched.counts["mm"]

    assert products(0.9) < products(0)


@pytest.mark.parametrize("budget", [0, 0.4, 0.9])
def test_loss_and_gradients_are_the_same_bit_for_bit(with_dropout: Step, budget: float) -> None:
    step = Step(budget, dropout=0.1)
    assert torch.equal(step.loss, with_dropout.loss)
    for gradient, expected in zip(step.gradients, with_dropout.gradients, strict=True):
        assert gradient is not None
        assert torch.equal(gradient, expected)


def test_full_keeps_inputs_and_recomputes_all_but_the_last_product(plain: Step, full: Step) -> None:
    assert plain.products == 2 * LINEARS
    assert full.products == 2 * LINEARS + LINEARS - 1
    assert full.kept_bytes < 0.15 * plain.kept_bytes


@pytest.mark.parametrize(("budget", "num_recomputed"), [(0.2, 5), (0.4, 2), (0.6, 0)])
def test_selective_keeps_the_costliest_results_within_its_budget(
    plain: Step, full: Step, budget: float, num_recomputed: int
) -> None:
    step = Step(budget)
    assert step.products == 2 * LINEARS + num_recomputed
    # something of the model around the layers always stays
    assert step.kept_bytes - full.kept_bytes < budget * plain.kept_bytes


@pytest.mark.cuda
def test_offloaded_inputs_come_back_as_they_were() -> None:
    on_device = Step(0, device="cuda", offloads=False)
    offloaded = Step(0, device="cuda", offloads=True)
    num_moved = LAYERS - 2  # the first layer's input is not counted, and the last one's is on its way
    input_bytes = 4 * 2 * LENGTH * SIZES["hidden_size"]  # fp32 [2, LENGTH, hidden_size]
    assert offloaded.kept_bytes == on_device.kept_bytes - num_moved * input_bytes
    assert torch.equal(offloaded.loss, on_device.loss)
    for gradient, expected in zip(offloaded.gradients, on_device.gradients, strict=True):
        assert gradient is not None
        assert torch.equal(gradient, expected)


def test_evaluation_recomputes_and_plans_nothing() -> None:
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, **SIZES))
    checkpoint_layers(model.model.layers, 0.5)
    with torch.no_grad():
        model(torch.zeros(1, 4, dtype=torch.int64))
    model(torch.zeros(1, 4, dtype=torch.int64)).logits.sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_offload_is_refused_where_nothing_is_kept_that_it_could_move() -> None:
    options = ["--train_data_dir", "unused", "--output_dir", "unused", "--activation_offload", "true"]
    for kept in ("none", "selective"):
        with pytest.raises(InputError, match="--activation_offload true needs --activation_checkpointing full"):
            parse(TrainArguments, [*options, "--activation_checkpointing", kept])
    arguments = parse(TrainArguments, [*options, "--activation_checkpointing", "full"])
    with pytest.raises(InputError, match="nothing to offload on CPU"):
        resolve_parallelism(arguments, 1, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallelism", "recomputed"), [("fsdp", ["full", "selective"]), ("fsdp2", ["selective"]), ("ddp", ["full"])]
)
def test_ranks_compute_the_same_whatever_they_recompute(
    forked_runs: ForkedRuns, tmp_path: Path, parallelism: str, recomputed: list[str]
) -> None:
    model = write_model(tmp_path / "model")
    tokens = write_rows(tmp_path / "tokens")

    def train(checkpointing: str) -> list[tuple[str, str]]:
        """Return the loss and the gradient norm of each step."""
        run = tmp_path / checkpointing
        settings = {"parallelism": parallelism, "devices": 2, "max_step": 2, "micro_batch_size": 2}
        forked_runs.start(argv(model, tokens, run, **settings, activation_checkpointing=checkpointing), 2).finish()
        return [(row["train_loss"], row["grad_norm"]) for row in metrics(run)]

    expected = train("none")
    assert len(expected) == 2
    for checkpointing in recomputed:
        assert train(checkpointing) == expected, checkpointing
