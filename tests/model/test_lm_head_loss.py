"""The loss out of the head equals the logits' loss, which never exist; where the logits are more than the head's, they
do.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.modeling_outputs import BaseModelOutputWithPast

from fabric_train.data.batch import IGNORED_LABEL, Batch
from fabric_train.model import lm_head_loss as chunked_loss
from fabric_train.model.lm_head_loss import (
    compute_loss_in_head,
    has_loss_in_head,
    summed_cross_entropy,
    token_cross_entropy,
)
from fabric_train.model.parallelize import use_sparse_embedding_grad
from fabric_train.preflight.memory_activations import _LiveBytes
from fabric_train.training.objective import CrossEntropy
from tests.support.rounding import assert_equal_up_to_rounding, num_sums_of_gradient, rounding_tolerance

VOCABULARY = 96
WIDTH = 16
LENGTH = 40
SIZES = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL = {
    **SIZES,
    "intermediate_size": 32,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "num_key_value_heads": 2,
}
LOSS_IN_HEAD: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, tied": {"tie_word_embeddings": True},
    "gpt2": {"attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0, "n_positions": 64},
    "gpt_neox": {"attention_dropout": 0, "hidden_dropout": 0},
    "mistral": {},
    "mixtral": {"num_local_experts": 2},
    "qwen2": {},
    "gemma": {"head_dim": 8},
    "phi": {"attention_dropout": 0, "embd_pdrop": 0, "resid_pdrop": 0},  # its head has a bias
}
LOSS_OF_OTHER_LOGITS: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 5.0},
    "cohere": {"logit_scale": 0.5},
    "granite": {"logits_scaling": 8.0},
}


def build(family: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family.split(",")[0], **SMALL | options)).train()


def rows() -> Batch:
    """Return three rows: one half supervised, one not at all, one throughout."""
    ids = torch.randint(2, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, : LENGTH // 2] = IGNORED_LABEL
    labels[1] = IGNORED_LABEL
    return Batch(ids, labels)


@dataclass(frozen=True)
class Derived:
    """The sum of the losses of the rows, and the gradient of a seventh of it by parameter."""

    loss: float
    gradients: dict[str, torch.Tensor]


def loss_and_gradients(model: Any) -> Derived:
    model.zero_grad()
    scale = torch.tensor(1 / 7, dtype=torch.float64)
    loss = CrossEntropy().loss(model, rows(), scale).total
    (loss * scale).backward()
    return Derived(loss.item(), {name: weight.grad.clone() for name, weight in model.named_parameters()})


def gradient_rounding(model: Any) -> float:
    """Return the tolerance of gradients of the rows."""
    return rounding_tolerance(num_sums_of_gradient(model.config, LENGTH, rows().input_ids.numel()))


@pytest.fixture(autouse=True)
def chunks_of_seven_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chunked_loss._CHUNK_BYTES, "cpu", 7 * 4 * VOCABULARY)


@pytest.mark.numerical
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("family", LOSS_IN_HEAD)
def test_loss_and_gradients_out_of_the_head_are_those_of_the_logits(family: str, at_once: bool) -> None:
    model = build(family, **LOSS_IN_HEAD[family])
    names = list(model.state_dict())
    expected = loss_and_gradients(model)
    assert compute_loss_in_head(model, grad_in_place=at_once)
    loss_and_gradients(model)
    derived = loss_and_gradients(model)  # of a second pass: what the first one leaves behind does no harm
    assert derived.loss == pytest.approx(expected.loss, rel=1e-6)
    # relative to the largest gradient: those of the keys' biases are 0 but for rounding
    largest = max(float(gradient.abs().max()) for gradient in expected.gradients.values())
    tolerance = gradient_rounding(model) * largest
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(derived.gradients[name], gradient, rtol=0, atol=tolerance)
    assert list(model.state_dict()) == names
    with torch.no_grad():
        assert CrossEntropy().loss(model.eval(), rows()).total.item() == pytest.approx(expected.loss, rel=1e-6)


@pytest.mark.numerical
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_losses_of_tokens_have_a_gradient_of_their_own_each(has_bias: bool, in_place: bool, is_frozen: bool) -> None:
    check_losses_of_tokens(has_bias, in_place, is_frozen)


def check_losses_of_tokens(has_bias: bool, in_place: bool, is_frozen: bool) -> None:
    """Compare the losses of tokens, and the gradients of a weighted sum of them, with the logits' ones."""
    torch.manual_seed(0)
    inputs = [torch.randn(3, LENGTH, WIDTH), torch.randn(VOCABULARY, WIDTH), torch.randn(VOCABULARY)]
    positions = torch.randperm(3 * LENGTH)[:50]
    token_weights = torch.randn(50)
    targets = torch.randint(VOCABULARY, (50,))

    def losses_and_gradients(*, by_logits: bool) -> list[torch.Tensor | None]:
        """Return the losses, and the gradients of hidden states, weight and bias."""
        hidden, weight, bias = (tensor.clone().requires_grad_() for tensor in inputs)
        weight.requires_grad_(not is_frozen)
        used_bias = bias if has_bias else None
        if by_logits:
            logits = F.linear(hidden, weight, used_bias).flatten(0, 1)[positions]
            losses = F.cross_entropy(logits, targets, reduction="none")
        else:
            losses = token_cross_entropy(hidden, weight, used_bias, positions, targets, grad_in_place=in_place)
        (losses * token_weights).sum().backward()
        return [losses.detach(), hidden.grad, weight.grad, bias.grad]

    results = losses_and_gradients(by_logits=False)
    expected_results = losses_and_gradients(by_logits=True)
    for result, expected in zip(results, expected_results, strict=True):
        if expected is None:
            assert result is None
        else:
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", LOSS_OF_OTHER_LOGITS)
def test_a_family_that_goes_on_computing_with_its_logits_keeps_them(family: str) -> None:
    model = build(family, **LOSS_OF_OTHER_LOGITS[family])
    loss = loss_and_gradients(model).loss
    assert not compute_loss_in_head(model)
    assert not has_loss_in_head(model)
    assert loss_and_gradients(model).loss == loss
    batch = rows()
    logits = model(batch.input_ids).logits[:, :-1].flatten(0, 1)
    expected = F.cross_entropy(logits, batch.labels[:, 1:].flatten(), reduction="sum").item()
    assert loss == pytest.approx(expected, rel=1e-6)


def test_logits_can_still_be_had() -> None:
    model = build("llama")
    ids = rows().input_ids
    expected = model(ids).logits
    assert compute_loss_in_head(model)
    torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=0)


def test_no_more_than_a_chunk_of_the_logits_is_ever_there() -> None:
    model = build("llama", vocab_size=4001)
    assert compute_loss_in_head(model)
    ids = rows().input_ids
    with LargestTensor() as largest:
        CrossEntropy().loss(model, Batch(ids, ids)).total.backward()
    # of 117 tokens; a chunk has one, and the weight and its gradient are the largest there is
    assert largest.num_elements == 4001 * WIDTH


def test_head_gradient_is_added_before_the_backward_pass() -> None:
    model = build("llama")
    assert compute_loss_in_head(model, grad_in_place=True)
    scale = torch.tensor(0.5, dtype=torch.float64)
    CrossEntropy().loss(model, rows(), scale)
    address = model.lm_head.weight.grad.data_ptr()
    gradient_of_rows = model.lm_head.weight.grad.clone()
    CrossEntropy().loss(model, rows(), scale)
    assert model.lm_head.weight.grad.data_ptr() == address
    torch.testing.assert_close(model.lm_head.weight.grad, 2 * gradient_of_rows)
    with torch.no_grad():
        CrossEntropy().loss(model, rows(), scale)
    torch.testing.assert_close(model.lm_head.weight.grad, 2 * gradient_of_rows)


@pytest.mark.numerical
def test_tied_embeddings_gradient_is_added_in_the_rows_of_its_tokens() -> None:
    model = build("llama", tie_word_embeddings=True, vocab_size=4001)
    expected = loss_and_gradients(model).gradients["model.embed_tokens.weight"]
    assert compute_loss_in_head(model, grad_in_place=True)
    use_sparse_embedding_grad(model)
    loss_and_gradients(model)
    model.zero_grad()
    scale = torch.tensor(1 / 7, dtype=torch.float64)
    loss = CrossEntropy().loss(model, rows(), scale).total * scale
    with Calls() as calls:
        loss.backward()
    assert_equal_up_to_rounding(model.model.embed_tokens.weight.grad, expected, gradient_rounding(model))
    assert calls.made
    assert torch.ops.aten.embedding_dense_backward.default not in calls.made


def test_an_embedding_of_its_own_has_a_dense_gradient() -> None:
    model = build("llama")
    assert compute_loss_in_head(model, grad_in_place=True)
    use_sparse_embedding_grad(model)
    loss_and_gradients(model)
    assert not model.model.embed_tokens.weight.grad.is_sparse


def test_on_the_meta_device_it_is_found_out_too() -> None:
    with torch.device("meta"):
        assert compute_loss_in_head(build("llama"))
        assert not compute_loss_in_head(build("gemma2", **LOSS_OF_OTHER_LOGITS["gemma2"]))


def test_unsupervised_batch_gives_no_loss_and_every_weight_a_gradient() -> None:
    model = build("llama")
    assert compute_loss_in_head(model)
    ids = rows().input_ids
    loss = CrossEntropy().loss(model, Batch(ids, torch.full_like(ids, IGNORED_LABEL))).total
    loss.backward()
    assert loss == 0
    assert all(weight.grad is not None and not weight.grad.any() for weight in model.parameters())


def test_the_sum_is_not_rounded_to_fp32() -> None:
    hidden = torch.zeros(2**13, WIDTH)
    targets = torch.zeros(2**13, dtype=torch.int64)
    summed = summed_cross_entropy(hidden, torch.zeros(3, WIDTH), None, torch.arange(2**13), targets)[0]
    assert summed.item() == 2**13 * -F.log_softmax(torch.zeros(3), dim=0)[0].double().item()


@pytest.mark.numerical
@pytest.mark.parametrize("is_mixed", [True, False])
def test_in_bf16_it_rounds_as_a_linear_layer_does(is_mixed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weights_dtype = torch.float32 if is_mixed else torch.bfloat16
    hidden = torch.randn(1, LENGTH, WIDTH, generator=generator).to(weights_dtype).requires_grad_()
    head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=weights_dtype)
    targets = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
        loss = summed_cross_entropy(hidden, head.weight, None, torch.arange(LENGTH), targets)[0]
        expected = F.cross_entropy(head(hidden)[0].float(), targets, reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    gradients = torch.autograd.grad(loss, [hidden, head.weight])
    expected_gradients = torch.autograd.grad(expected, [hidden, head.weight])
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert gradient.dtype == weights_dtype
        torch.testing.assert_close(gradient, expected_gradient, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("is_frozen", [True, False])
@pytest.mark.parametrize(
    ("memory_device", "dtype", "expected_lengths"),
    [
        # chunks of 7 and 5 tokens, which a GPU cuts into 3 + 3 + 1 and 3 + 2
        ("cuda", torch.bfloat16, {3, 2, 1}),
        # fp32 logits are overwritten, and a CPU has small chunks
        ("cuda", torch.float32, {7, 5}),
        ("cpu", torch.bfloat16, {7, 5}),
    ],
)
def test_slices_of_a_chunk_change_no_bit(
    monkeypatch: pytest.MonkeyPatch,
    memory_device: str,
    dtype: torch.dtype,
    expected_lengths: set[int],
    is_frozen: bool,
) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, LENGTH, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).to(dtype).requires_grad_(not is_frozen)
    targets = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
    inputs = (hidden, weight, None, torch.arange(LENGTH), targets)
    differentiated = [hidden] if is_frozen else [hidden, weight]

    def losses_and_gradients() -> list[torch.Tensor]:
        total, losses = summed_cross_entropy(*inputs, memory_device=memory_device, is_frozen=is_frozen)
        return [total.detach(), losses, *torch.autograd.grad(total, differentiated)]

    # given chunks of seven tokens for any head, whole and then in slices of three
    bytes_per_logit = 4 if dtype == torch.float32 else 6
    monkeypatch.setitem(chunked_loss._CHUNK_BYTES, memory_device, 7 * bytes_per_logit * VOCABULARY)
    monkeypatch.setattr(chunked_loss, "_FROZEN_LOGITS_BYTES", 7 * dtype.itemsize * VOCABULARY)
    monkeypatch.setattr(chunked_loss, "_has_liger", lambda: False)
    expected_results = losses_and_gradients()
    monkeypatch.setattr(chunked_loss, "_LOG_PROBABILITIES_BYTES", 3 * 4 * VOCABULARY)
    lengths: list[int] = []
    token_losses = chunked_loss._token_losses

    def noted_token_losses(logits: torch.Tensor, *rest: Any) -> torch.Tensor:
        lengths.append(len(logits))
        return token_losses(logits, *rest)

    monkeypatch.setattr(chunked_loss, "_token_losses", noted_token_losses)
    results = losses_and_gradients()

    assert set(lengths) == expected_lengths
    for result, expected in zip(results, expected_results, strict=True):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("is_frozen", [True, False])
def test_the_loss_of_an_8b_takes_little_memory_on_a_gpu_beside_the_gradients(is_frozen: bool) -> None:
    sizes: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 14_336, "num_key_value_heads": 8}
    config = LlamaConfig(vocab_size=128_256, num_hidden_layers=1, **sizes)
    with FakeTensorMode():
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.lm_head.weight.requires_grad_(not is_frozen)
        assert compute_loss_in_head(model, memory_device="cuda")
        model.requires_grad_(requires_grad=False)
        hidden = torch.zeros(2, 2048, 4096, dtype=torch.bfloat16, requires_grad=True)
        model.model.forward = lambda **_: BaseModelOutputWithPast(last_hidden_state=hidden)
        positions = torch.arange(4096)
        with _LiveBytes(model) as live:
            model(positions=positions, targets=torch.zeros_like(positions))
    gradient_of_hidden = 4 * 4096 * 4096  # fp32
    chunks = live.most - gradient_of_hidden
    # logits in bf16, of 523 tokens or of a third of all 4,096, and a slice of them in fp32 and in bf16
    logits = 2 * 128_256 * (512 if is_frozen else 1366)
    slices = 6 * (16 << 20)
    assert logits < chunks < logits + slices + 0.05e9


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_cuda_the_loss_is_that_of_the_logits(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setitem(chunked_loss._CHUNK_BYTES, "cuda", 7 * 6 * VOCABULARY)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, LENGTH, WIDTH, generator=generator).to("cuda", dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).to("cuda", dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator).cuda()
    loss = summed_cross_entropy(hidden, weight, None, torch.arange(LENGTH, device="cuda"), targets)[0]
    expected = F.cross_entropy(F.linear(hidden, weight)[0].float(), targets, reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    tolerance = 1e-4 if dtype == torch.float32 else 2**-5
    gradients = torch.autograd.grad(loss, [hidden, weight])
    expected_gradients = torch.autograd.grad(expected, [hidden, weight])
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=tolerance, atol=tolerance)


def test_ligers_kernel_gives_the_same_losses_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # on the CPU
    pytest.importorskip("liger_kernel.ops.cross_entropy")
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, 299, 3, 3, 150])
    gradients = logits.clone()
    losses = chunked_loss._liger_losses(gradients, targets, True)
    logits.requires_grad_()
    expected = F.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.sum(), logits)[0], rtol=1e-5, atol=1e-6)
    monkeypatch.setattr(chunked_loss, "_token_losses", chunked_loss._liger_losses)
    check_losses_of_tokens(has_bias=True, in_place=False, is_frozen=False)


class Calls(TorchDispatchMode):
    """Notes which operations are called."""

    def __init__(self) -> None:
        super().__init__()
        self.made: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made.add(func)
        return func(*args, **(kwargs or {}))


class LargestTensor(TorchDispatchMode):
    """Notes how many elements the largest tensor has that any operation returns."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(returned) if isinstance(leaf, torch.Tensor)]
        self.num_elements = max(self.num_elements, *sizes, 0)
        return returned
