"""Only some parts of a model train: the others keep their bits, and have no gradient and no optimizer state."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from fabric_train.arguments import TrainArguments, TrainingArguments, parse
from fabric_train.cli.errors import InputError
from fabric_train.model import patterns
from fabric_train.model.adapter import Adapter, find_targets
from fabric_train.model.hf_model import ModelShape, read_shape, with_parts
from fabric_train.model.trained_parts import TrainedParts, rates_by_name
from fabric_train.optim.learning_rate import set_learning_rate
from fabric_train.optim.optimizer import build_optimizer
from fabric_train.preflight.memory_layout import bytes_of_states, read_units
from fabric_train.preflight.prepare import prepare
from tests.support.forked_runs import ForkedRuns
from tests.support.rounding import rounding_tolerance
from tests.support.unequal_rows import argv, metrics, write_model, write_rows

IN_LAYER = ("self_attn.q_proj", "mlp.up_proj", "input_layernorm")
NAMES = {
    name: (name,)
    for name in (
        "model.embed_tokens.weight",
        *(f"model.layers.{layer}.{module}.weight" for layer in (0, 1, 3, 10, 13, 31) for module in IN_LAYER),
        "model.layers.0.self_attn.q_proj.bias",
        "model.norm.weight",
    )
} | {"model.embed_tokens.weight": ("model.embed_tokens.weight", "lm_head.weight")}
LAYER = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("embed_tokens", lambda name: "embed_tokens" in name),
        ("model.embed_tokens", lambda name: "embed_tokens" in name),
        ("model.embed_tokens.weight", lambda name: "embed_tokens" in name),
        ("lm_head", lambda name: "embed_tokens" in name),
        ("norm", lambda name: name == "model.norm.weight"),
        (".*norm", lambda name: "norm" in name),
        ("layers.1", lambda name: ".layers.1." in name),
        ("layers.1|layers.3", lambda name: ".layers.1." in name or ".layers.3." in name),
        ("layers.(0|1|31)", lambda name: name.split(".")[2] in ("0", "1", "31")),
        ("layers.[0-9]", lambda name: ".layers." in name and len(name.split(".")[2]) == 1),
        ("layers.*", lambda name: ".layers." in name),
        ("q_proj|up_proj", lambda name: "q_proj" in name or "up_proj" in name),
        ("bias", lambda name: name.endswith(".bias")),
        ("^model.norm.weight$", lambda name: name == "model.norm.weight"),
        ("all", lambda name: True),
    ],
)
def test_pattern_matches_whole_parts_of_a_name(pattern: str, matches: Callable[[str], bool]) -> None:
    chosen = TrainedParts((pattern,)).choose(NAMES, "the model")
    assert chosen == set(filter(matches, NAMES))
    if pattern != "all":
        assert TrainedParts(freeze=(pattern,)).choose(NAMES, "the model") == NAMES.keys() - chosen


SLOW = r"(?:.|..)*[A-Z]"
"""An expression that takes years to find that it does not match a name."""


@pytest.mark.parametrize(
    ("pattern", "fault"),
    [
        (SLOW, "takes longer than 0.1 s"),
        ("((a{99}){99}){99}", "too large"),
        ("a" * 20_000, "too large"),
        ("a)(b", "nor a regular expression"),
    ],
)
def test_an_expression_that_would_take_years_is_refused(
    monkeypatch: pytest.MonkeyPatch, pattern: str, fault: str
) -> None:
    monkeypatch.setattr(patterns, "_SECONDS", 0.1)
    with pytest.raises(InputError, match=fault):
        TrainedParts((pattern,)).choose(NAMES, "the model")
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes))
    with pytest.raises(InputError, match=fault):
        find_targets(model, Adapter("lora", 2, 4.0, targets=(pattern,)), "the model")


def test_freeze_is_taken_from_train_only() -> None:
    chosen = TrainedParts(("layers.(0|1)",), ("bias", "layers.1.mlp")).choose(NAMES, "the model")
    assert chosen == {f"model.layers.{layer}.{module}.weight" for layer in (0, 1) for module in IN_LAYER} - {
        "model.layers.1.mlp.up_proj.weight"
    }


@pytest.mark.parametrize(
    ("train_only", "freeze", "fault"),
    [
        (
            ["embd_tokens"],
            [],
            "--train_only embd_tokens: no parameter of M matches; it has embed_tokens, lm_head, ",
        ),
        (["embd_tokens"], [], "input_layernorm, norm, and layers 0 to 31; did you mean embed_tokens?"),
        (["norm", "layers.7"], [], "--train_only layers.7: no parameter of M matches"),
        ([], ["proj"], "--freeze proj: no parameter of M matches"),
        (["layers.("], [], "--train_only layers.(: it is neither a name nor a regular expression (missing )"),
        (["norm"], ["norm"], "--train_only norm, --freeze norm: no parameter of M would be trained; freeze fewer"),
        ([], ["all"], "--freeze all: no parameter of M would be trained; freeze fewer"),
    ],
)
def test_choice_that_cannot_be_is_refused(train_only: list[str], freeze: list[str], fault: str) -> None:
    with pytest.raises(InputError) as raised:
        TrainedParts(tuple(train_only), tuple(freeze)).choose(NAMES, "M")
    assert fault in str(raised.value)


def test_last_matching_rate_of_a_part_counts() -> None:
    rates = rates_by_name({"layers.*": 1e-5, "layers.0": 1e-6, "lm_head": 1e-4}, NAMES, "M", NAMES)
    assert rates.pop("lm_head.weight") == rates.pop("model.embed_tokens.weight") == 1e-4
    assert rates == {name: 1e-6 if ".layers.0." in name else 1e-5 for name in NAMES if ".layers." in name}


@pytest.mark.parametrize(
    ("rates", "fault"),
    [
        ({"layer.0": 1e-6}, "--lr_of layer.0: no parameter of M matches"),
        ({"norm": 1e-6, "lm_head": 1e-4}, "--lr_of lm_head=0.0001: everything that it matches is frozen; leave it out"),
        (
            {"norm": 1e-6, ".*norm": 1e-5},
            "--lr_of norm=1e-06: later patterns match everything that it matches; give it last",
        ),
    ],
)
def test_rate_that_decides_nothing_is_refused(rates: dict[str, float], fault: str) -> None:
    with pytest.raises(InputError, match=rf"^{fault.replace('.', '[.]').replace('*', '[*]')}"):
        rates_by_name(rates, NAMES, "M", NAMES.keys() - {"model.embed_tokens.weight"})


@pytest.mark.parametrize(
    ("dtype", "given"),
    [
        (torch.float32, {}),
        (torch.bfloat16, {"stochastic_rounding": False}),
        (torch.bfloat16, {"optimizer_states": "float32", "stochastic_rounding": False}),
        (torch.bfloat16, {"optimizer_states": "8bit"}),
    ],
)
def test_every_adamw_takes_the_rate_of_each_part(dtype: torch.dtype, given: dict[str, Any]) -> None:
    """The first step of AdamW changes each weight by the rate, rounded to the type of the weight."""
    arguments = TrainingArguments(lr=1e-2, weight_decay=0.0, **given)
    named = {name: nn.Parameter(torch.zeros(8, 40, dtype=dtype)) for name in ("slow", "fast", "usual")}
    optimizer = build_optimizer(named.items(), set(named), arguments, rates={"slow": 1e-3, "fast": 3e-2})
    assert sorted(group["lr"] for group in optimizer.param_groups) == [1e-3, 1e-2, 3e-2]
    set_learning_rate(optimizer, 5e-3)  # half of the peak
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for name, rate in {"slow": 5e-4, "fast": 1.5e-2, "usual": 5e-3}.items():
        torch.testing.assert_close(
            -named[name].float(), torch.full((8, 40), rate), rtol=rounding_tolerance(1, dtype), atol=0
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, one whose head is its embedding, and rows."""
    folder = tmp_path_factory.mktemp("parts")
    write_model(folder / "model")
    write_model(folder / "tied", tie_word_embeddings=True)
    write_rows(folder / "tokens")
    return folder


@pytest.fixture(scope="module")
def shape(folder: Path) -> ModelShape:
    return read_shape(str(folder / "model"))


def is_top(name: str) -> bool:
    """Whether a parameter is in the last decoder layer or the norm."""
    return name.startswith(("model.layers.1.", "model.norm."))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallelism", "num_ranks", "precision"),
    [("single", 1, "32-true"), ("fsdp", 2, "bf16-mixed"), ("fsdp2", 2, "32-true"), ("ddp", 2, "bf16-true")],
)
def test_frozen_parts_stay_and_the_run_resumes_exactly(
    forked_runs: ForkedRuns, folder: Path, tmp_path: Path, parallelism: str, num_ranks: int, precision: str
) -> None:
    given = {"parallelism": parallelism, "devices": num_ranks, "precision": precision, "max_step": 2}
    more: dict[str, Any] = {}
    for run in ("whole", "resumed"):
        line = argv(folder / "model", folder / "tokens", tmp_path / run, **given, save_step_interval=1, **more)
        parts = ["--lr_schedule", "constant", "--train_only", "layers.1", "norm", "--lr_of", "norm=1e-4"]
        forked_runs.start([*line, *parts], num_ranks).finish()
        more = {"checkpoint": tmp_path / "whole" / "checkpoints" / "step-00000001"}
    start = load_file(folder / "model" / "model.safetensors")
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    whole, resumed = (tmp_path / run / "checkpoints" / "step-00000002" for run in ("whole", "resumed"))
    weights, states = (load_file(whole / name) for name in ("model.safetensors", "optimizer/optimizer.safetensors"))
    assert weights.keys() == start.keys()
    changed = {name for name in weights if not torch.equal(weights[name], start[name].to(dtype))}
    assert changed == set(filter(is_top, start))
    assert {name.rpartition(".")[0] for name in states} == set(filter(is_top, start))
    for name in ("model.safetensors", "optimizer/optimizer.safetensors"):
        one = load_file(whole / name)
        other = load_file(resumed / name)
        assert [key for key in one if not torch.equal(one[key], other[key])] == []
    losses = [[row["train_loss"] for row in metrics(tmp_path / run)] for run in ("whole", "resumed")]
    assert losses[0][1:] == losses[1]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "part"), [("tied", "lm_head"), ("model", "lm_head"), ("model", "embed_tokens")])
def test_embedding_or_head_trains_alone(
    forked_runs: ForkedRuns, folder: Path, tmp_path: Path, model: str, part: str
) -> None:
    line = argv(folder / model, folder / "tokens", tmp_path / "run", max_step=1, train_only=part, weight_decay=0)
    run = forked_runs.start(line, 1)
    run.finish()
    trained = "lm_head" if (model, part) == ("model", "lm_head") else "model.embed_tokens"
    assert f"trained        {trained} 9,600" in run.lines()
    start = load_file(folder / model / "model.safetensors")
    weights = load_file(tmp_path / "run" / "checkpoints" / "step-00000001" / "model.safetensors")
    assert [name for name in weights if not torch.equal(weights[name], start[name])] == [f"{trained}.weight"]


_COUNTS = """
import json
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from fabric_train.training.step import Stepper

class Counted(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._opname in ("_reduce_scatter_base_", "allreduce_"):
            sizes = [leaf.numel() for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            reduced.append(max(sizes))
        return func(*args, **(kwargs or {}))

def take_step(self, window, original=Stepper.take_step):
    with Counted():
        taken = original(self, window)
    print("reduced", sorted(size for size in reduced if size > 20))  # others are counts and losses
    return taken

reduced = []
Stepper.take_step = take_step
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallelism", "part", "reduced"),
    [
        ("ddp", "q_proj", [2 * 1024]),
        ("fsdp2", "q_proj", [1024, 1024]),
        ("fsdp2", "embed_tokens", [9600]),
        ("fsdp", "embed_tokens", [9600]),
        ("fsdp", "layers.1", [LAYER]),
    ],
)
def test_ranks_reduce_gradients_of_what_trains_alone(
    forked_runs: ForkedRuns, folder: Path, tmp_path: Path, parallelism: str, part: str, reduced: list[int]
) -> None:
    given = {"parallelism": parallelism, "devices": 2, "max_step": 1, "train_only": part}
    run = forked_runs.start(argv(folder / "model", folder / "tokens", tmp_path / "run", **given), 2, before=_COUNTS)
    run.finish()
    assert f"reduced {reduced}" in run.lines()


@pytest.mark.slow
def test_parts_of_an_adapter_take_rates_of_their_own(forked_runs: ForkedRuns, folder: Path, tmp_path: Path) -> None:
    """The first step of AdamW changes lora_B, which is zero, by its rate: LoRA+ (arXiv:2402.12354)."""
    given = {"adapter": "lora", "lora_rank": 2, "max_step": 1, "weight_decay": 0, "lr_schedule": "constant"}
    line = argv(folder / "model", folder / "tokens", tmp_path / "run", **given)
    run = forked_runs.start([*line, "--lr_of", "lora_B=5e-3", "layers.1.*lora_B=7e-3"], 1)
    run.finish()
    assert "rates by part  lora_B 0.005, layers.1.*lora_B 0.007" in run.lines()
    weights = load_file(tmp_path / "run" / "checkpoints" / "step-00000001" / "adapter_model.safetensors")
    for name, weight in weights.items():
        if "lora_B" in name:
            rate = torch.tensor(7e-3 if ".layers.1." in name else 5e-3)
            torch.testing.assert_close(weight.abs().max(), rate, rtol=1e-3, atol=0)


def test_note_says_that_fsdp_reduces_whole_layers(folder: Path, tmp_path: Path) -> None:
    def notes(part: str, parallelism: str) -> str:
        given = {"plan": "check", "devices": 2, "train_only": part, "parallelism": parallelism}
        line = argv(folder / "tied", folder / "tokens", tmp_path / "run", **given)
        return "\n".join(prepare(parse(TrainArguments, line)).notes)

    assert "only parts of a layer are trained: fsdp reduces the gradients of entire layers" in notes("q_proj", "fsdp")
    assert "of entire layers" not in notes("q_proj", "fsdp2") + notes("layers.1", "fsdp")


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (
            "--freeze norm --adapter lora",
            "--freeze does not work with an adapter, which freezes all other weights; use --train_also",
        ),
        ("--freeze norm --lr_of norm=1e-3", "--lr_of norm=0.001: everything that it matches is frozen; leave it out"),
        (
            "--freeze embed_tokens --parallelism fsdp",
            "--parallelism fsdp on one device does not work with frozen",
        ),
        ("--train_only []", "--train_only is empty; give parts of the model, or leave it out"),
        ("--lr_of norm=0 lm_head=1e-3", "--lr_of: expected PATTERN=RATE with a rate above 0; got "),
        ("--lr_of norm", "--lr_of: expected PATTERN=RATE with a rate above 0; got "),
    ],
)
def test_contradictions_are_refused_before_the_start(folder: Path, tmp_path: Path, options: str, fault: str) -> None:
    line = argv(folder / "tied", folder / "tokens", tmp_path / "run", plan="check", devices=1)
    with pytest.raises(InputError) as refused:
        prepare(parse(TrainArguments, [*line, *options.split()]))
    assert str(refused.value).startswith(fault)


def test_plan_and_flops_count_what_trains(folder: Path, shape: ModelShape) -> None:
    arguments = parse(TrainArguments, ["--train_data_dir", "tokens", "--output_dir", "run", "--precision", "32-true"])
    top = with_parts(shape, TrainedParts(("layers.1", "norm")))
    assert top.num_trained == LAYER + 32
    assert top.describe_trained() == f"model.norm 32; layer 1 {LAYER:,}"
    assert top.describe_frozen() == f"model.embed_tokens 9,600; lm_head 9,600; layer 0 {LAYER:,}"
    assert bytes_of_states(top, arguments) == (8 * (LAYER + 32), 8 * (LAYER + 32))
    units = read_units(top, arguments)
    assert (units.total, units.trained, units.head) == (shape.num_parameters, LAYER + 32, 0)
    # forward and backward pass of the head, without a gradient of its own; only the forward pass of the first layer
    tokens = 10
    head = 300 * 32
    assert shape.flops.count([tokens]) == tokens * (6 * (2 * LAYER + 32 + head) + 12 * 2 * 32 * tokens)
    expected = 6 * (LAYER + 32) + 4 * head + 2 * LAYER + (12 + 4) * 32 * tokens
    assert top.flops.count([tokens]) == tokens * expected
    some = with_parts(shape, TrainedParts(("q_proj", "layers.0.self_attn")))
    assert some.describe_trained() == (
        "self_attn.q_proj, self_attn.k_proj, self_attn.v_proj, self_attn.o_proj of layer 0 3,072; "
        "self_attn.q_proj of layer 1 1,024"
    )
