"""Documents that share a row are trained as if each were alone: same loss, same gradient, no look across a border."""

import importlib.util
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning import Fabric
from packaging.version import Version
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BloomConfig,
    GPT2Config,
    GptOssConfig,
    JambaConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen2Config,
    modeling_flash_attention_utils,
)

from fabric_train.arguments import DataArguments, ModelArguments, TrainArguments, parse
from fabric_train.cli.errors import InputError
from fabric_train.data.batch import IGNORED_LABEL, Batch, count_supervised, find_targets, isolate, targets_everywhere
from fabric_train.data.step_sampler import Window
from fabric_train.data.token_dataset import Rows
from fabric_train.model.attention import VARLEN, forward
from fabric_train.model.attention_choice import check_attention, check_counted_from_rows
from fabric_train.model.hf_model import read_shape, shape_from_config
from fabric_train.model.lm_head_loss import compute_loss_in_head
from fabric_train.model.load_weights import load_model
from fabric_train.training import isolation_check
from fabric_train.training.evaluation import evaluate
from fabric_train.training.isolation_check import check_isolation
from fabric_train.training.objective import CrossEntropy
from fabric_train.training.step import accumulate
from tests.support.varlen_kernel import varlen_kernel_on_cpu

ROW_LENGTH = 40
PAD = 1
# rows of documents' lengths; the second row begins within a document, the third ends in padding, the last is one piece
LENGTHS = [[7, 1, 19, 13], [23, 17], [5, 2, 1, 12], [40]]
BEGINS_WITHIN = 1

pytestmark = pytest.mark.filterwarnings(
    "ignore:_compile flag on create_block_mask:DeprecationWarning", "ignore:flex_attention called without torch.compile"
)
no_flash = pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="flash-attn is not installed")


@pytest.fixture(scope="module")
def documents() -> list[list[torch.Tensor]]:
    """The documents, or pieces of them, of each row."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for lengths in LENGTHS:
        rows.append([torch.randint(0, 1000, (length,), generator=generator) for length in lengths])
    return rows


@pytest.fixture(scope="module")
def split(documents: list[list[torch.Tensor]]) -> datasets.Dataset:
    """The same documents as rows of a token dataset."""
    columns: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "document_starts": []}
    for row, pieces in enumerate(documents):
        ids = torch.cat(pieces).tolist()
        padding = ROW_LENGTH - len(ids)
        starts = np.cumsum([0, *(len(piece) for piece in pieces[:-1])]).tolist()
        columns["input_ids"].append(ids + [PAD] * padding)
        columns["labels"].append(ids + [IGNORED_LABEL] * padding)
        columns["document_starts"].append(starts[1:] if row == BEGINS_WITHIN else starts)
    return datasets.Dataset.from_dict(columns)


def packed(split: datasets.Dataset, isolate_documents: bool = True) -> Batch:
    return Rows(split, isolate_documents).__getitems__(range(len(split)))


def load(folder: Path, attention: str) -> Any:
    return load_model(read_shape(str(folder), attention=attention), torch.float32)


@contextmanager
def flash_attention_by_definition(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put what flash-attention computes, written with torch's own attention, where transformers calls its kernels."""
    from transformers import modeling_flash_attention_utils as flash

    def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, softmax_scale: float) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, heads, T, head size]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True)
        return out.transpose(1, 2)

    def varlen(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        causal: bool,
        softmax_scale: float,
    ) -> torch.Tensor:
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
        assert cu_seqlens_q[-1] == len(q)
        lengths = cu_seqlens_q.diff().tolist()
        outputs = []
        documents = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
        for document_q, document_k, document_v in documents:
            batch_of_one = (document_q[None], document_k[None], document_v[None])
            outputs.append(dense(*batch_of_one, causal=causal, softmax_scale=softmax_scale)[0])
        return torch.cat(outputs)

    functions = (dense, varlen, None, None, None), (flash._lazy_define_process_function(varlen), None)
    with monkeypatch.context() as patched:
        patched.setattr(flash, "lazy_import_flash_attention", lambda *_, **__: functions)
        yield


@pytest.fixture
def model(request: pytest.FixtureRequest, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The tiny model with the implementation of attention that the test names."""
    if request.param == VARLEN:
        with varlen_kernel_on_cpu():
            yield load(tiny_model_dir, request.param)
        return
    if request.param != "flash_attention_2":
        with torch.compiler.set_stance("force_eager" if request.param == "flex_attention" else "default"):
            yield load(tiny_model_dir, request.param)
        return
    if Version(transformers.__version__) < Version("5.19"):
        pytest.skip("transformers before 5.19 calls flash-attention in another way than its stand-in here")
    loaded = load(tiny_model_dir, "sdpa")
    loaded.config._attn_implementation = request.param  # loading would look for the package
    with flash_attention_by_definition(monkeypatch):
        yield loaded


@dataclass(frozen=True)
class Derived:
    """The mean loss of the supervised tokens, [], and its gradient by parameter."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]


def summed_loss(model: Any, batch: Batch) -> torch.Tensor:
    """Return the sum of the losses of a batch's supervised tokens, fp64 []."""
    return CrossEntropy().loss(model, Batch(batch.input_ids, batch.labels, batch.documents)).total


def loss_and_gradient(model: Any, batches: list[Batch]) -> Derived:
    """Return the mean over the supervised tokens of all batches, and its gradient."""
    model.zero_grad()
    device = next(model.parameters()).device
    num_supervised = sum(int(count_supervised(batch.labels)) for batch in batches)
    losses = [summed_loss(model, batch.to(device)) for batch in batches]
    loss = torch.stack(losses).sum() / num_supervised
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return Derived(loss.detach(), gradients)


def alone(documents: list[list[torch.Tensor]]) -> list[Batch]:
    """Return every document of more than one token in a batch of its own."""
    batches = []
    for row in documents:
        batches += [Batch(piece[None], piece[None]) for piece in row if len(piece) > 1]
    return batches


def largest_difference(gradients: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    return max(float((gradients[name] - expected[name]).abs().max()) for name in gradients)


def assert_same(derived: Derived, expected: Derived, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(derived.loss, expected.loss, rtol=0, atol=tolerance)
    assert derived.gradients.keys() == expected.gradients.keys()
    for name, gradient in derived.gradients.items():
        torch.testing.assert_close(gradient, expected.gradients[name], rtol=0, atol=tolerance)


@pytest.mark.numerical
@pytest.mark.parametrize("model", ["sdpa", "eager", "flash_attention_2", VARLEN], indirect=True)
def test_packed_documents_have_loss_and_gradient_of_the_documents_alone(
    model: Any, documents: list[list[torch.Tensor]], split: datasets.Dataset
) -> None:
    expected = loss_and_gradient(model, alone(documents))
    # all rows in one batch
    assert_same(loss_and_gradient(model, [packed(split)]), expected)
    # each row in a batch of its own; the last one is one document
    rows = Rows(split)
    batches_of_one = [rows.__getitems__([row]) for row in range(len(split))]
    assert [batch.documents is None for batch in batches_of_one] == [False, False, False, True]
    assert_same(loss_and_gradient(model, batches_of_one), expected)


@pytest.mark.parametrize("model", ["sdpa"], indirect=True)
def test_plain_concatenation_has_another_loss_and_another_gradient(
    model: Any, documents: list[list[torch.Tensor]], split: datasets.Dataset
) -> None:
    expected = loss_and_gradient(model, alone(documents))
    concatenated = loss_and_gradient(model, [packed(split, isolate_documents=False)])
    assert abs(concatenated.loss - expected.loss) > 1e-3
    assert largest_difference(concatenated.gradients, expected.gradients) > 1e-3
    # nor is it enough to leave the documents' first tokens unsupervised
    isolated = packed(split)
    only_labels = loss_and_gradient(model, [Batch(isolated.input_ids, isolated.labels)])
    assert largest_difference(only_labels.gradients, expected.gradients) > 1e-3


@pytest.mark.parametrize("model", ["flex_attention"], indirect=True)
def test_flex_attention_has_the_loss_of_the_documents_alone_on_cpu(
    model: Any, documents: list[list[torch.Tensor]], split: datasets.Dataset
) -> None:
    batch = packed(split)
    num_supervised = count_supervised(batch.labels)
    with torch.no_grad():
        loss = summed_loss(model, batch)
        expected = sum(summed_loss(model, document) for document in alone(documents))
    torch.testing.assert_close(loss / num_supervised, expected / num_supervised)


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("attention", "dtype", "tolerance"),
    [
        ("sdpa", torch.float32, 1e-5),
        ("eager", torch.float32, 1e-5),
        ("flex_attention", torch.float32, 1e-5),
        pytest.param("flash_attention_2", torch.bfloat16, 2e-2, marks=no_flash),
    ],
)
def test_on_cuda_packed_documents_have_the_loss_of_single_documents(
    tiny_model_dir: Path,
    documents: list[list[torch.Tensor]],
    split: datasets.Dataset,
    attention: str,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    model: Any = load_model(read_shape(str(tiny_model_dir), attention=attention), dtype)
    model.cuda()
    expected = loss_and_gradient(model, alone(documents))
    assert_same(loss_and_gradient(model, [packed(split)]), expected, tolerance)


@pytest.mark.parametrize("model", ["sdpa", "eager", "flex_attention", "flash_attention_2", VARLEN], indirect=True)
def test_other_tokens_in_one_document_change_no_logits_of_another(model: Any, split: datasets.Dataset) -> None:
    batch = packed(split)
    model.requires_grad_(False)
    logits = forward(model, batch.input_ids, batch.documents).logits
    for row, lengths in enumerate(LENGTHS):
        end = 0
        for length in lengths:
            begin = end
            end = begin + length
            changed_ids = batch.input_ids.clone()
            changed_ids[row, begin:end] = (changed_ids[row, begin:end] + 1) % 1000
            changed_logits = forward(model, changed_ids, batch.documents).logits
            assert (changed_logits[row, begin:end] - logits[row, begin:end]).abs().max() > 0.01

            is_last = end == sum(lengths)
            is_elsewhere = torch.ones_like(changed_ids, dtype=torch.bool)
            is_elsewhere[row, begin : ROW_LENGTH if is_last else end] = False  # padding belongs to the last one
            torch.testing.assert_close(changed_logits[is_elsewhere], logits[is_elsewhere], rtol=0, atol=1e-5)


class WaitsForDevice(TorchDispatchMode):
    """Counts what a GPU would have to be waited for: tensors whose values the program looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.num_waits = 0

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.num_waits += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("computes_loss_in_head", [False, True])
@pytest.mark.parametrize("isolates", [False, True])
@pytest.mark.parametrize("model", ["sdpa", "eager"], indirect=True)
def test_a_window_is_computed_without_waiting_for_the_device(
    model: Any, split: datasets.Dataset, isolates: bool, computes_loss_in_head: bool
) -> None:
    rows = Rows(split, isolates)
    batches = [rows.__getitems__([0, 1]), rows.__getitems__([2]), rows.__getitems__([3])]
    batches = [replace(batch, targets=find_targets(batch.labels)) for batch in batches]  # as where memory is pinned
    if computes_loss_in_head:
        compute_loss_in_head(model, grad_in_place=True)
    fabric = Fabric(accelerator="cpu", devices=1)
    wrapped = fabric.setup_module(model)
    with WaitsForDevice() as waits:
        accumulate(fabric, wrapped, Window(1, 0, False, np.arange(4), 2, batches))
        assert waits.num_waits == 0
        assert bool(torch.ones(1))  # the mode does see a wait
        assert waits.num_waits == 1


@pytest.mark.parametrize("isolates", [False, True])
@pytest.mark.parametrize("model", ["flash_attention_2"], indirect=True)
def test_flash_attention_need_not_look_at_positions(
    model: Any, split: datasets.Dataset, isolates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looks(*_: Any, **__: Any) -> bool:
        raise AssertionError("flash-attention looks at the positions, and waits for the device, in every layer")

    monkeypatch.setattr(modeling_flash_attention_utils, "_is_packed_sequence", looks)
    batch = Rows(split, isolates).__getitems__([0])
    assert (batch.documents is not None) == isolates
    summed_loss(model, batch).backward()


@pytest.mark.numerical
@pytest.mark.parametrize("model", ["sdpa"], indirect=True)
def test_windows_and_evaluations_count_what_isolation_supervises(
    model: Any, documents: list[list[torch.Tensor]], split: datasets.Dataset
) -> None:
    expected = loss_and_gradient(model, alone(documents))
    num_supervised = sum(len(piece) - 1 for piece in itertools.chain(*documents))
    model.zero_grad()
    fabric = Fabric(accelerator="cpu", devices=1)
    wrapped = fabric.setup_module(model)
    rows = Rows(split)
    batches = [rows.__getitems__([0, 1, 2]), rows.__getitems__([3]), rows.__getitems__([])]
    loss = accumulate(fabric, wrapped, Window(1, 0, False, np.arange(4), 3, batches))
    torch.testing.assert_close(loss.mean, expected.loss.double(), rtol=0, atol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected.gradients[name], rtol=0, atol=1e-5)
    evaluation = evaluate(fabric, wrapped, batches)
    assert evaluation is not None
    assert evaluation.whole.num_tokens == num_supervised
    assert evaluation.whole.loss == pytest.approx(float(expected.loss), abs=1e-5)


# ------------------------------------------------------------------------------------------------------------ batches


@st.composite
def rows_with_starts(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    length = draw(st.integers(1, 12))
    row = st.lists(st.integers(0, length - 1), unique=True).map(sorted)
    return length, draw(st.lists(row, min_size=1, max_size=4))


@settings(deadline=None)
@given(rows_with_starts())
def test_positions_labels_and_borders_are_those_counted_token_by_token(case: tuple[int, list[list[int]]]) -> None:
    length, document_starts = case
    num_rows = len(document_starts)
    ids = np.arange(100, 100 + num_rows * length).reshape(num_rows, length)
    positions = []
    labels = []
    borders = []
    for row, starts in enumerate(document_starts):
        position = 0
        for column in range(length):
            if column == 0 or column in starts:
                position = 0
                borders.append(row * length + column)
            else:
                position += 1
            positions.append(position)
            # the first token of a document is no target, and that of a row never is one
            is_after_border = column in starts and column > 0
            labels.append(IGNORED_LABEL if is_after_border else int(ids[row, column]))
    borders.append(len(positions))
    batch = isolate(ids, ids.copy(), [np.array(starts, dtype=np.int32) for starts in document_starts])
    assert batch.documents is not None
    assert batch.documents.position_ids.dtype == torch.int64
    assert batch.documents.position_ids.shape == batch.input_ids.shape
    assert batch.documents.position_ids.flatten().tolist() == positions
    assert batch.labels.flatten().tolist() == labels
    assert batch.documents.borders.tolist() == borders
    assert batch.documents.longest == max(np.diff(borders))


def test_rows_of_one_document_take_the_plain_path() -> None:
    rows = [[1, 2, 3], [4, 5, 6]]
    whole = Rows(datasets.Dataset.from_dict({"input_ids": rows, "document_starts": [[0], []]}))
    older = Rows(datasets.Dataset.from_dict({"input_ids": rows}))
    joined = Rows(datasets.Dataset.from_dict({"input_ids": rows, "document_starts": [[0, 1], []]}), False)
    for split in (whole, older, joined):
        batch = split.__getitems__([0, 1])
        assert batch.documents is None
        assert batch.labels.tolist() == rows
    assert [split.isolates for split in (whole, older, joined)] == [True, False, False]


def test_isolation_is_what_a_run_does_unless_told_otherwise() -> None:
    assert DataArguments(train_data_dir="tokens").isolate_documents
    assert ModelArguments().attention == "sdpa"


# ----------------------------------------------------------------------------------------------------------- refusals


SMALL: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
LLAMA: dict[str, Any] = {**SMALL, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}


HYBRID: dict[str, Any] = {**LLAMA, "layer_types": ["conv", "full_attention"]}
JAMBA: dict[str, Any] = {"num_experts": 2, "attn_layer_offset": 1, "attn_layer_period": 2, "use_mamba_kernels": False}
ROWS_OF_RUN = 200


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        (LlamaConfig(**LLAMA), None),
        (MistralConfig(**LLAMA, sliding_window=30), None),
        (MixtralConfig(**LLAMA, num_local_experts=4), None),
        (Qwen2Config(**LLAMA), None),
        (GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2), None),
        (OPTConfig(**SMALL, ffn_dim=32, num_attention_heads=2, word_embed_proj_dim=32), "document before it"),
        (BloomConfig(vocab_size=50, hidden_size=32, n_layer=2, n_head=2), "does not accept position ids"),
        (MambaConfig(**SMALL), "does not accept position ids"),
        (Lfm2Config(**HYBRID), "document before it"),
        (JambaConfig(**LLAMA, **JAMBA), "document before it"),
        (BertConfig(**SMALL, intermediate_size=32, num_attention_heads=2), "attend to later tokens"),
    ],
    ids=lambda value: value.model_type if isinstance(value, PretrainedConfig) else "refused" if value else "packed",
)
def test_fresh_model_whose_documents_see_each_other_is_refused(config: PretrainedConfig, fault: str | None) -> None:
    torch.manual_seed(0)
    fabric = Fabric(accelerator="cpu", devices=1)
    model = fabric.setup_module(AutoModelForCausalLM.from_config(config)).train()
    if fault is None:
        check_isolation(fabric, model, "model", ROWS_OF_RUN, torch.float32)
        assert model.training
        return
    with pytest.raises(
        InputError, match=rf"^--isolate_documents true: model \({config.model_type}\) cannot .* {fault}"
    ):
        check_isolation(fabric, model, "model", ROWS_OF_RUN, torch.float32)


def test_a_model_passes_where_every_position_has_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on XLA, whose batches have a target for every position, most of which nothing supervises."""

    def place_as_on_xla(fabric: Fabric, batch: Batch) -> Batch:
        return replace(batch.to(fabric.device), targets=targets_everywhere(batch.labels))

    monkeypatch.setattr(isolation_check, "place_batch", place_as_on_xla)
    torch.manual_seed(0)
    fabric = Fabric(accelerator="cpu", devices=1)
    llama = fabric.setup_module(AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA))).train()
    check_isolation(fabric, llama, "model", ROWS_OF_RUN, torch.float32)
    hybrid = fabric.setup_module(AutoModelForCausalLM.from_config(Lfm2Config(**HYBRID))).train()
    with pytest.raises(InputError, match="document before it"):
        check_isolation(fabric, hybrid, "model", ROWS_OF_RUN, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hybrid_is_refused_in_the_dtype_of_the_run(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    fabric = Fabric(accelerator="cpu", devices=1)
    model = fabric.setup_module(AutoModelForCausalLM.from_config(Lfm2Config(**HYBRID), dtype=dtype)).train()
    with pytest.raises(InputError, match="document before it"):
        check_isolation(fabric, model, "model", ROWS_OF_RUN, dtype)


def test_position_that_restarts_only_with_long_documents_is_found() -> None:
    """Within ``floor_scale`` tokens Llama 4 is exact; the check must not stop at a few tokens."""
    torch.manual_seed(0)
    config = Llama4TextConfig(
        **LLAMA, head_dim=16, intermediate_size_mlp=32, num_local_experts=2, floor_scale=40, no_rope_layers=[1, 0]
    )
    shape = shape_from_config(config, "model", "LlamaDecoderLayer", None)
    check_counted_from_rows(shape, 40)
    with pytest.raises(InputError, match=r"floor_scale of 40 from the start of the row.* --max_length 40,"):
        check_counted_from_rows(shape, 41)
    fabric = Fabric(accelerator="cpu", devices=1)
    model = fabric.setup_module(AutoModelForCausalLM.from_config(config)).train()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    check_isolation(fabric, model, "model", 40, torch.float32)
    with pytest.raises(InputError, match="position in the row"):
        check_isolation(fabric, model, "model", ROWS_OF_RUN, torch.float32)


@pytest.mark.parametrize(
    ("options", "accelerator", "fault"),
    [
        (["--attention", "flash_attention_2"], "cpu", "--attention flash_attention_2 needs a GPU; use"),
        (
            ["--attention", "flash_attention_2", "--precision", "32-true"],
            "cuda",
            "--attention flash_attention_2 only computes in 16 bits, not in --precision 32-true; use",
        ),
        (["--attention", "flex_attention"], "cpu", "--attention flex_attention cannot train without a GPU: torch"),
    ],
)
def test_attention_that_cannot_run_here_is_refused(options: list[str], accelerator: str, fault: str) -> None:
    arguments = parse(TrainArguments, ["--train_data_dir", "tokens", "--output_dir", "run", *options])
    with pytest.raises(InputError) as error:
        check_attention(arguments, accelerator)
    assert str(error.value).startswith(fault)
    assert "\n" not in str(error.value)


def test_flex_attention_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = parse(TrainArguments, ["--train_data_dir", "tokens", "--output_dir", "run", "--eval_only", "true"])
    check_attention(arguments, "cpu")
    arguments = parse(
        TrainArguments,
        ["--train_data_dir", "t", "--output_dir", "r", "--eval_only", "true", "--attention", "flex_attention"],
    )
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(InputError, match="finds no compiler no-such-compiler; install"):
        check_attention(arguments, "cpu")


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash-attn is installed")
def test_flash_attention_without_its_package_is_refused_early(tiny_model_dir: Path) -> None:
    with pytest.raises(InputError) as error:
        read_shape(str(tiny_model_dir), attention="flash_attention_2")
    (fault,) = error.value.faults
    assert fault.startswith(f"--model_name {tiny_model_dir} with --attention flash_attention_2: ")
    assert fault.endswith("install it or use --attention sdpa")
    assert "\n" not in fault


@pytest.mark.parametrize(
    "config",
    [BloomConfig(vocab_size=50, hidden_size=32, n_layer=2, n_head=2), GptOssConfig(**LLAMA, num_local_experts=2)],
    ids=lambda config: config.model_type,
)
def test_family_without_this_attention_is_told_the_one_it_has(config: PretrainedConfig) -> None:
    with pytest.raises(InputError) as error:
        shape_from_config(config, "model", "LlamaDecoderLayer", "sdpa")
    assert str(error.value) == (
        f"--model_name model: transformers has no sdpa attention for a {config.model_type}; give --attention eager"
    )
    shape_from_config(config, "model", "LlamaDecoderLayer", "eager")


def test_attention_is_the_one_asked_for_and_not_in_a_checkpoint(tiny_model_dir: Path, tmp_path: Path) -> None:
    for attention in ("sdpa", "eager", "flex_attention"):
        model = load(tiny_model_dir, attention)
        assert model.config._attn_implementation == attention
        model.config.save_pretrained(tmp_path)
        assert attention not in (tmp_path / "config.json").read_text(encoding="utf-8")
