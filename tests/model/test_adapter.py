"""Adapters train as in peft, under every strategy; what they save is whole, and plain peft opens it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Llama4TextConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from fabric_train.arguments import TrainArguments, parse
from fabric_train.checkpoint.adapter_folder import CONFIG, WEIGHTS, peft_config, read_adapter
from fabric_train.checkpoint.peft_settings import uncomputed_settings
from fabric_train.cli.errors import InputError
from fabric_train.data.batch import Batch, Targets
from fabric_train.export.merged_adapter import MergedTensors
from fabric_train.model.adapter import (
    Adapter,
    adapted_layers,
    adapters_off,
    attach,
    find_targets,
    is_adapter_parameter,
    remove_adapters,
    without_adapters,
)
from fabric_train.model.hf_model import read_shape
from fabric_train.model.lm_head_loss import compute_loss_in_head
from fabric_train.model.origin import AdapterBase
from fabric_train.model.trained_parts import freeze_other_parts
from fabric_train.preflight.prepare import prepare
from fabric_train.training.objective import CrossEntropy
from tests.support.forked_runs import ForkedRuns
from tests.support.plain_training import GRAD_CLIP, LR, WEIGHT_DECAY, train_plainly
from tests.support.rounding import assert_same_training, num_sums_of_gradient, rounding_tolerance
from tests.support.tiny_model import random_llama
from tests.support.unequal_rows import LENGTH, argv, metrics, write_model, write_rows

BF16 = torch.finfo(torch.bfloat16)
ROWS_PER_WINDOW = 6  # on one, two or three ranks
# the fourth window has 3 rows, and the fifth begins the next epoch
NUM_ROWS = 21
STEPS = 5
SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
SETTINGS: dict[str, Any] = {"lr": LR, "grad_clip": GRAD_CLIP, "weight_decay": WEIGHT_DECAY, "max_step": STEPS}
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "rslora": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"], "use_rslora": True},
    "dora": {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "use_dora": True},
    "whole modules": {"r": 2, "lora_alpha": 8, "target_modules": ["v_proj"], "modules_to_save": ["lm_head", "norm"]},
    "dropout": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "lora_dropout": 0.1},
    "4 bits": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "dora in 4 bits": {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "use_dora": True},
    "dora with dropout": {"r": 4, "lora_alpha": 8, "target_modules": ["o_proj"], "lora_dropout": 0.1, "use_dora": True},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose rows are whole blocks of NF4."""
    return write_model(tmp_path_factory.mktemp("wide"), hidden_size=64, intermediate_size=128)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # a document a row: dropout draws the same numbers for a row as for a document
    return write_rows(tmp_path_factory.mktemp("tokens") / "rows", num_rows=NUM_ROWS, packed_every=10**6)


@dataclass(frozen=True)
class PeftTraining:
    """A training of peft's model in a plain loop."""

    start: Path
    """The adapter that it began with."""
    losses: list[float]
    grad_norms: list[float]
    """Before clipping."""
    adapter: dict[str, torch.Tensor]
    """After the last step."""


TrainWithPeft = Callable[..., PeftTraining]


@pytest.fixture(scope="module")
def train_with_peft(
    tmp_path_factory: pytest.TempPathFactory, model: Path, wide_model: Path, tokens: Path
) -> TrainWithPeft:
    """Return ``train(kind, num_ranks, autocast)``, which trains an adapter of one of ``KINDS`` once in each way."""
    trainings: dict[tuple[str, int, torch.dtype | None], PeftTraining] = {}

    def load_base(kind: str, compute_dtype: torch.dtype) -> Any:
        if "4 bits" not in kind:
            return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute_dtype)
        return AutoModelForCausalLM.from_pretrained(
            wide_model, dtype=torch.float32, quantization_config=nf4, device_map="cpu"
        )

    def train(kind: str, num_ranks: int = 1, autocast: torch.dtype | None = None) -> PeftTraining:
        if "dropout" not in kind:
            num_ranks = 1  # the number of ranks decides what dropout draws, and nothing else
        case = (kind, num_ranks, autocast)
        if case in trainings:
            return trainings[case]
        folder = tmp_path_factory.mktemp("peft")
        base = load_base(kind, autocast or torch.float32)
        torch.manual_seed(1)
        config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **KINDS[kind])
        adapted = peft.get_peft_model(base, config)
        adapted.save_pretrained(str(folder / "start"))
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            losses, grad_norms = train_plainly(adapted, tokens, ROWS_PER_WINDOW, STEPS, num_ranks)
        adapted.save_pretrained(str(folder / "end"))
        adapter = load_file(folder / "end" / "adapter_model.safetensors")
        trainings[case] = PeftTraining(folder / "start", losses, grad_norms, adapter)
        return trainings[case]

    return train


@pytest.mark.numerical
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "parallelism", "num_ranks"),
    [
        ("lora", "single", 1),
        ("lora", "fsdp", 3),
        ("rslora", "ddp", 2),
        ("dora", "fsdp2", 2),
        ("whole modules", "fsdp", 2),
        pytest.param("whole modules", "fsdp2", 2, marks=pytest.mark.cuda_rehearsal),
        ("dropout", "single", 1),
        ("dropout", "fsdp", 2),
        pytest.param("4 bits", "fsdp", 2, marks=pytest.mark.cuda_rehearsal),
        ("4 bits", "fsdp2", 2),
        ("dora in 4 bits", "fsdp", 2),
        ("dora with dropout", "single", 1),
    ],
)
def test_losses_gradients_and_adapter_are_those_of_peft(
    forked_runs: ForkedRuns,
    forked_runs_in_4_bits: ForkedRuns,
    tmp_path: Path,
    model: Path,
    wide_model: Path,
    tokens: Path,
    train_with_peft: TrainWithPeft,
    kind: str,
    parallelism: str,
    num_ranks: int,
) -> None:
    # given an adapter that peft has trained
    expected = train_with_peft(kind, num_ranks)
    # when a run begins with the same adapter
    runs = forked_runs
    settings = {
        **SETTINGS,
        "parallelism": parallelism,
        "lora_dropout": KINDS[kind].get("lora_dropout", 0),
        "init_adapter": expected.start,
        "total_batch_size": ROWS_PER_WINDOW,
        # dropout draws numbers for each forward pass, in the plain loop for each row
        "micro_batch_size": 1 if "dropout" in kind else ROWS_PER_WINDOW // num_ranks,
    }
    if "4 bits" in kind:
        runs = forked_runs_in_4_bits
        model = wide_model
        settings["base_weights"] = "nf4"
    runs.start(argv(model, tokens, tmp_path / "run", **settings), num_ranks).finish()
    # then it has the same losses and gradients, and ends with the same adapter
    rows = metrics(tmp_path / "run")
    assert [float(row["train_loss"]) for row in rows] == pytest.approx(expected.losses, abs=1e-5)
    assert [float(row["grad_norm"]) for row in rows] == pytest.approx(expected.grad_norms, rel=1e-4)
    checkpoint = tmp_path / "run" / "checkpoints" / f"step-{STEPS:08d}"
    adapter = load_file(checkpoint / "adapter_model.safetensors")
    assert adapter.keys() == expected.adapter.keys()
    assert_same_training(adapter, expected.adapter, LR, STEPS, gradient_rounding(model))


def gradient_rounding(model: Path) -> float:
    """Return the tolerance of gradients of a window."""
    num_sums = num_sums_of_gradient(AutoConfig.from_pretrained(model), LENGTH, ROWS_PER_WINDOW * LENGTH)
    return rounding_tolerance(num_sums)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dropout"), [("lora", 0.1), ("dora", 0.0)])
def test_a_run_goes_on_with_other_ranks_and_parallelism(
    forked_runs: ForkedRuns, tmp_path: Path, model: Path, tokens: Path, kind: str, dropout: float
) -> None:
    def train(name: str, parallelism: str, num_ranks: int, **options: object) -> dict[str, torch.Tensor]:
        """Train to step 4, with a checkpoint at each step, and return the adapter."""
        settings = {
            "adapter": kind,
            "lora_rank": 4,
            "lora_dropout": dropout,
            "total_batch_size": ROWS_PER_WINDOW,
            "micro_batch_size": ROWS_PER_WINDOW // num_ranks,
            "max_step": 4,
            "save_step_interval": 1,
        }
        words = argv(model, tokens, tmp_path / name, parallelism=parallelism, **settings, **options)
        forked_runs.start(words, num_ranks).finish()
        return load_file(tmp_path / name / "checkpoints" / "step-00000004" / "adapter_model.safetensors")

    def differing(adapter: dict[str, torch.Tensor]) -> list[str]:
        return [name for name, tensor in whole.items() if not torch.equal(adapter[name], tensor)]

    # given a run on one rank, and runs that each take one more step on other ranks
    whole = train("step 1", "single", 1)
    assert any(tensor.any() for name, tensor in whole.items() if "lora_B" in name)
    train("step 2", "fsdp2", 2, checkpoint=tmp_path / "step 1" / "checkpoints" / "step-00000001")
    train("step 3", "fsdp", 3, checkpoint=tmp_path / "step 2" / "checkpoints" / "step-00000002")
    resumed = train("step 4", "single", 1, checkpoint=tmp_path / "step 3" / "checkpoints" / "step-00000003")
    if dropout:  # each rank draws its own numbers: only a run on one rank can be the same
        assert differing(resumed) != []
        resumed = train("again", "single", 1, checkpoint=tmp_path / "step 1" / "checkpoints" / "step-00000002")
        assert differing(resumed) == []
    assert_same_training(resumed, whole, LR, 4, gradient_rounding(model))


@pytest.mark.slow
def test_a_checkpoint_is_an_adapter_that_plain_peft_opens(
    forked_runs: ForkedRuns, tmp_path: Path, model: Path, tokens: Path
) -> None:
    # given a run with an adapter in fp32 on a base in bf16, whose head trains whole
    settings = {"adapter": "lora", "lora_targets": "q_proj", "train_also": "lm_head", "max_step": 3, "lr": 1e-2}
    words = argv(model, tokens, tmp_path / "run", parallelism="fsdp", precision="bf16-true", **settings)
    forked_runs.start(words).finish()
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000003"
    files = {path.name for path in checkpoint.rglob("*.safetensors")}
    assert files == {"adapter_model.safetensors", "optimizer.safetensors"}  # the base is not in it
    stored = load_file(checkpoint / "adapter_model.safetensors")
    adapter_dtypes = {tensor.dtype for name, tensor in stored.items() if ".lora_" in name}
    whole_dtypes = {tensor.dtype for name, tensor in stored.items() if ".lora_" not in name}
    assert adapter_dtypes == {torch.float32}
    assert whole_dtypes == {torch.bfloat16}  # what trains whole has the dtype of the base
    states = load_file(checkpoint / "optimizer" / "optimizer.safetensors")
    assert {tensor.dtype for tensor in states.values()} == {torch.float32}
    assert {name.rpartition(".")[0] for name in states} == {name.removeprefix("base_model.model.") for name in stored}
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    by_peft: Any = peft.PeftModel.from_pretrained(base, str(checkpoint))
    tensors = peft.get_peft_model_state_dict(by_peft)
    assert tensors.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(tensors[name].float(), tensor.float()), name


@pytest.mark.slow
def test_adapter_begins_with_a_run_of_all_weights_or_another_adapter(
    forked_runs: ForkedRuns, tmp_path: Path, model: Path, tokens: Path
) -> None:
    whole = tmp_path / "whole"
    first = tmp_path / "first"
    second = tmp_path / "second"
    forked_runs.start(argv(model, tokens, whole, max_step=2), 1).finish()
    # with a run of all weights
    forked_runs.start(argv(whole, tokens, first, max_step=2, lora_rank=2, lr=1e-2), 1).finish()
    saved = json.loads((first / "checkpoints" / "step-00000002" / "trainer.json").read_text(encoding="utf-8"))
    assert saved["adapter_base"]["location"] == str(whole / "checkpoints" / "step-00000002")
    # with another adapter, which a step with almost no learning rate leaves as it is
    forked_runs.start(argv(whole, tokens, second, max_step=1, init_adapter=first / "latest", lr=1e-9), 1).finish()
    first_adapter = load_file(first / "checkpoints" / "step-00000002" / "adapter_model.safetensors")
    second_adapter = load_file(second / "checkpoints" / "step-00000001" / "adapter_model.safetensors")
    for name, tensor in first_adapter.items():
        torch.testing.assert_close(second_adapter[name], tensor, rtol=0, atol=1e-7)
    # as a branch of a run of all weights
    branch_words = argv(model, tokens, tmp_path / "branch", branch=whole / "latest", max_step=3, lora_rank=2)
    branch = forked_runs.start(branch_words, 1)
    branch.finish()
    assert "the optimizer starts from zero" in branch.stdout()
    assert [row["step"] for row in metrics(tmp_path / "branch")] == ["3"]
    # but an adapter is no model
    run = forked_runs.start(argv(first, tokens, tmp_path / "refused"), 1)
    assert run.wait() == [2]
    assert "step-00000002 holds an adapter; continue with the same --adapter arguments" in run.stderr()


@pytest.mark.slow
def test_a_base_that_moved_is_found_and_one_that_changed_is_refused(
    forked_runs: ForkedRuns, tmp_path: Path, model: Path, tokens: Path
) -> None:
    base = tmp_path / "base"
    elsewhere = tmp_path / "elsewhere"
    run = tmp_path / "run"
    shutil.copytree(model, base)
    settings = {"lora_rank": 2, "save_step_interval": 1, "resume": "true"}
    forked_runs.start(argv(base, tokens, run, max_step=1, **settings), 1).finish()

    # it is not where it was
    base.rename(elsewhere)
    stopped = forked_runs.start(argv(base, tokens, run, max_step=2, **settings), 1)
    assert stopped.wait() == [2]
    settings["allow_changes"] = "true"
    forked_runs.start(argv(elsewhere, tokens, run, max_step=2, **settings), 1).finish()

    # it has another weight
    weights = load_file(elsewhere / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] += 1
    save_file(weights, elsewhere / "model.safetensors", {"format": "pt"})
    stopped = forked_runs.start(argv(elsewhere, tokens, run, max_step=3, **settings), 1)
    assert stopped.wait() == [2]
    assert "elsewhere have changed" in stopped.stderr()


@pytest.mark.slow
def test_a_tied_embedding_that_trained_is_in_the_merged_model(
    forked_runs: ForkedRuns, tmp_path: Path, tokens: Path
) -> None:
    model = write_model(tmp_path / "tied", tie_word_embeddings=True)
    settings = {"lora_rank": 2, "train_also": "embed_tokens", "lr": 1e-2, "max_step": 2}
    forked_runs.start(argv(model, tokens, tmp_path / "run", parallelism="fsdp2", **settings), 2).finish()
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000002"
    merged = MergedTensors(checkpoint)
    name = "model.embed_tokens.weight"
    trained = load_file(checkpoint / "adapter_model.safetensors")
    assert torch.equal(merged.read(name), trained[f"base_model.model.{name}"])
    assert (merged.read(name) - load_file(model / "model.safetensors")[name]).abs().max() > 1e-3
    assert "lm_head.weight" not in set(merged)  # it is the embedding
    grown = trained | {f"base_model.model.{name}": torch.zeros(308, 32)}
    save_file(grown, checkpoint / "adapter_model.safetensors")
    with pytest.raises(InputError, match=r"embed_tokens.weight, \(308, 32\) in the adapter and \(300, 32\) in this"):
        MergedTensors(checkpoint)


def test_dropout_is_of_training_alone() -> None:
    def adapted_model(dropout: float) -> Any:
        model = random_llama(LlamaConfig(vocab_size=64, num_hidden_layers=1, **SMALL))
        attach(model, Adapter("lora", rank=4, alpha=8, dropout=dropout), "the model", "cpu")
        for name, parameter in model.named_parameters():
            if "lora" in name:
                torch.nn.init.constant_(parameter, 0.1)
        return model

    ids = torch.arange(3, 40)[None]
    without_dropout = adapted_model(0.0)
    with_dropout = adapted_model(0.5)
    expected = without_dropout.eval()(ids).logits
    assert torch.equal(without_dropout.train()(ids).logits, expected)
    assert torch.equal(with_dropout.eval()(ids).logits, expected)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        assert not torch.allclose(with_dropout.train()(ids).logits, expected, atol=1e-3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern .* is not supported; merge this adapter with peft"),
        ({"bias": "all"}, "bias all is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights pissa is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights pissa_niter_4 is not supported"),
        ({"init_lora_weights": "olora"}, "init_lora_weights olora is not supported"),
        ({"alora_invocation_tokens": [5, 6]}, "alora_invocation_tokens .* is not supported"),
        ({"layers_to_transform": 0}, "layers_to_transform 0 is not supported"),
        ({"exclude_modules": ["q_proj"]}, "exclude_modules .* is not supported"),
        ({"task_type": "SEQ_CLS"}, "task_type SEQ_CLS is not supported"),
        ({"setting_of_tomorrow": True}, "setting_of_tomorrow True is not supported"),
        ({"peft_type": "IA3"}, "this is a IA3 adapter; give a LORA adapter"),
        ({"r": 0}, "damaged"),
    ],
)
def test_adapters_of_peft_that_are_computed_otherwise_are_refused(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none", **values}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=message):
        read_adapter(tmp_path)


def test_every_default_of_peft_is_accepted() -> None:
    assert uncomputed_settings(json.loads(json.dumps(peft.LoraConfig().to_dict()))) == []


@pytest.mark.slow
def test_weights_in_4_bits_are_multiplied_in_16_bits_under_mixed_precision(
    forked_runs_in_4_bits: ForkedRuns, tmp_path: Path, wide_model: Path, tokens: Path, train_with_peft: TrainWithPeft
) -> None:
    expected = train_with_peft("4 bits", autocast=torch.bfloat16)
    settings = {
        **SETTINGS,
        "init_adapter": expected.start,
        "total_batch_size": ROWS_PER_WINDOW,
        "micro_batch_size": 1,
        "base_weights": "nf4",
        "precision": "bf16-mixed",
        "max_step": 3,
    }
    losses_by_parallelism = {}
    for parallelism, num_ranks in (("single", 1), ("fsdp", 2), ("fsdp2", 2)):
        line = argv(wide_model, tokens, tmp_path / parallelism, parallelism=parallelism, **settings)
        forked_runs_in_4_bits.start(line, num_ranks).finish()
        rows = metrics(tmp_path / parallelism)
        losses_by_parallelism[parallelism] = [float(row["train_loss"]) for row in rows]
        # Only the first step is compared with peft. AdamW's first steps depend on how bf16 gradients are rounded, which
        # our parallelisms do alike. The logits are below 1, where bf16 numbers are at most BF16.eps apart.
        assert float(rows[0]["train_loss"]) == pytest.approx(expected.losses[0], abs=BF16.eps)
        assert float(rows[0]["grad_norm"]) == pytest.approx(expected.grad_norms[0], rel=4 * BF16.eps)
    assert losses_by_parallelism["fsdp"] == pytest.approx(losses_by_parallelism["single"], abs=1e-5)
    assert losses_by_parallelism["fsdp2"] == pytest.approx(losses_by_parallelism["single"], abs=1e-5)


@pytest.mark.numerical
@pytest.mark.slow
@pytest.mark.parametrize("in_4bit", [False, True])
def test_new_magnitudes_are_the_norms_of_the_weights_that_are_multiplied(
    forked_runs: ForkedRuns,
    forked_runs_in_4_bits: ForkedRuns,
    tmp_path: Path,
    wide_model: Path,
    tokens: Path,
    in_4bit: bool,
) -> None:
    settings = {"adapter": "dora", "parallelism": "fsdp", "max_step": 1, "lr": 1e-9, "total_batch_size": 3}
    runs = forked_runs
    if in_4bit:
        settings["base_weights"] = "nf4"
        runs = forked_runs_in_4_bits
    runs.start(argv(wide_model, tokens, tmp_path / "run", **settings), 3).finish()
    adapter = load_file(tmp_path / "run" / "checkpoints" / "step-00000001" / "adapter_model.safetensors")
    base = load_file(wide_model / "model.safetensors")
    magnitudes = {name: tensor for name, tensor in adapter.items() if name.endswith("lora_magnitude_vector")}
    assert len(magnitudes) == 2 * 7  # linear layers
    for name, tensor in magnitudes.items():
        weight = base[name.removeprefix("base_model.model.").replace("lora_magnitude_vector", "weight")]
        if in_4bit:
            weight = dequantize_4bit(*quantize_4bit(weight, blocksize=64, quant_type="nf4"))
        torch.testing.assert_close(tensor, weight.norm(dim=1), rtol=1e-6, atol=0)


def test_layers_are_replaced_below_their_adapters() -> None:
    class Doubled(torch.nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(inputs)

    block = torch.nn.Module()
    block.q_proj = torch.nn.Linear(8, 8, bias=False)
    model: Any = torch.nn.Module()
    model.block = block
    model.get_output_embeddings = lambda: None
    attach(model, Adapter("dora", rank=2, alpha=4), "the model", "cpu")
    layer = model.block.q_proj
    names = list(model.state_dict())
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(0.1, 1)
    with without_adapters(model):
        assert type(model.block.q_proj) is torch.nn.Linear
        assert list(model.state_dict()) == ["block.q_proj.weight"]
        block.q_proj = Doubled(8, 8, bias=False)
        block.q_proj.weight = layer.weight
    assert sorted(model.state_dict()) == sorted(names)
    inputs = torch.randn(3, 8)
    replaced: Any = model.block.q_proj
    # DoRA (arXiv:2402.09353): the output of base and adapter, with the magnitude in place of the norm of their weights
    base_output = 2 * inputs @ layer.weight.t()
    adapter_output = 2 * inputs @ replaced.lora_A.weight.t() @ replaced.lora_B.weight.t()
    norms = (replaced.weight + 2 * replaced.lora_B.weight @ replaced.lora_A.weight).norm(dim=1)
    ratio = replaced.lora_magnitude_vector / norms
    torch.testing.assert_close(replaced(inputs), ratio * (base_output + adapter_output))


TENSOR_PARALLEL = ("--parallelism", "fsdp2", "--tensor_parallel_size", "2")
FSDP2_ON_GPUS = ("--accelerator", "cuda", "--devices", "2", "--parallelism", "fsdp2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lora_alpha", "8"], "--lora_alpha needs --adapter lora or dora"),
        (
            ["--lora_rank", "2", "--lora_targets", "up_prj"],
            "--lora_targets up_prj: .* has no linear layer with that name; it has q_",
        ),
        (
            ["--lora_rank", "2", "--lora_targets", "lm_head"],
            "can only be trained in full; give --train_also lm_head",
        ),
        (
            ["--lora_rank", "2", "--train_also", "head"],
            "--train_also head: .* has no module with that name; it has embed_tokens",
        ),
        (
            ["--lora_rank", "2", "--lora_targets", "(["],
            "it is neither a name nor a regular expression",
        ),
        (
            ["--lora_rank", "2", "--train_also", "o_proj"],
            "o_proj already has an adapter because of --lora_targets all-linear; remove it from one of them",
        ),
        (
            ["--lora_rank", "2", "--base_weights", "nf4", "--float8", "true"],
            "--float8 does not work with --base_weights nf4; leave one of them out",
        ),
        (
            ["--lora_rank", "2", "--base_weights", "nf4", "--precision", "16-mixed"],
            "--precision 16-mixed does not work on CPU; use bf16-mixed",
        ),
        (
            ["--lora_rank", "2", "--base_weights", "nf4", "--precision", "16-mixed", *FSDP2_ON_GPUS],
            "--precision 16-mixed does not work with --parallelism fsdp2; use bf16-mixed",
        ),
        (["--lora_rank", "2", "--lora_dropout", "1"], "--lora_dropout must be below 1"),
        (["--lora_rank", "2", "--from_scratch", "llama"], "--from_scratch llama also needs"),
        (
            ["--lora_rank", "2", "--devices", "2", *TENSOR_PARALLEL],
            "--tensor_parallel_size does not work with an adapter",
        ),
    ],
)
def test_what_an_adapter_cannot_be_is_one_line(
    tmp_path: Path, model: Path, tokens: Path, options: list[str], message: str
) -> None:
    line = [*argv(model, tokens, tmp_path / "run"), "--plan", "check", "--devices", "1", *options]
    with pytest.raises(InputError, match=message) as refused:
        prepare(parse(TrainArguments, line))
    assert "\n" not in str(refused.value)


def test_replicas_of_a_frozen_model_with_a_tied_head_are_refused(tmp_path: Path, tokens: Path) -> None:
    model = write_model(tmp_path / "tied", tie_word_embeddings=True)
    settings = {"lora_rank": 2, "devices": 2, "parallelism": "fsdp", "sharding_strategy": "NO_SHARD", "plan": "check"}
    arguments = parse(TrainArguments, argv(model, tokens, tmp_path / "run", **settings))
    with pytest.raises(InputError, match="NO_SHARD does not work with an adapter of a model that ties its head"):
        prepare(arguments)


def test_scale_and_names_are_as_in_peft(model: Path) -> None:
    adapter = Adapter("lora", rank=4, alpha=8, targets=(r"model\.layers\.0\..*_proj",))
    shape = read_shape(str(model), adapter=adapter)
    adapted = {name.rpartition(".lora_")[0] for name in shape.trained}
    assert len(adapted) == 7
    assert all(name.startswith("model.layers.0.") for name in adapted)
    # alpha / rank, and alpha / √rank (arXiv:2312.03732)
    assert adapter.scale == 2.0
    assert replace(adapter, is_rank_stabilized=True).scale == 4.0
    # rank 4, of inputs and outputs: q and o of 32 and 32, k and v of 32 and 16, the MLP's of 32 and 64
    assert shape.num_trained == 4 * (2 * 64 + 2 * 48 + 3 * 96)
    # two layers with two norms, the last norm, embedding and head of 300 tokens
    num_in_linears = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64
    assert shape.num_parameters == 2 * (num_in_linears + 64) + 32 + 2 * 300 * 32


def biased_model() -> Qwen2ForCausalLM:
    """A model whose queries, keys and values have biases, which are not 0."""
    sizes: dict[str, Any] = {**SMALL, "num_hidden_layers": 2, "num_key_value_heads": 2, "vocab_size": 50}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(Qwen2Config(**sizes)).float()
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.data.normal_()
    return model


@pytest.mark.parametrize(
    ("targets", "dropout", "use_dora"),
    [("all-linear", 0.0, True), (["q_proj"], 0.3, True), (["v_proj"], 0.3, False)],
)
def test_adapted_layers_with_biases_compute_what_those_of_peft_do(
    tmp_path: Path, targets: Any, dropout: float, *, use_dora: bool
) -> None:
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=targets, lora_dropout=dropout, use_dora=use_dora, init_lora_weights=False
    )
    # given a model with an adapter of peft
    torch.manual_seed(1)
    by_peft = peft.get_peft_model(biased_model(), config)
    for name, parameter in by_peft.named_parameters():
        if "magnitude" in name:  # else the ratio is nearly 1
            parameter.data *= 1.5
    by_peft.save_pretrained(str(tmp_path))
    # and ours with the same tensors
    ours = biased_model()
    adapter = read_adapter(tmp_path)
    attach(ours, replace(adapter, dropout=dropout), "the model", device="cpu")
    stored = load_file(tmp_path / "adapter_model.safetensors")
    trained = {name: weight for name, weight in ours.named_parameters() if is_adapter_parameter(name)}
    for name, weight in trained.items():
        weight.data.copy_(stored[f"base_model.model.{name}"])
    assert len(trained) == len(stored)

    # then both have the same logits in training
    ids = torch.arange(24).view(2, 12)
    by_peft.train()
    ours.train()
    torch.manual_seed(3)  # dropout draws the same numbers
    expected_logits = by_peft(ids).logits
    torch.manual_seed(3)
    torch.testing.assert_close(ours(ids).logits, expected_logits, rtol=1e-4, atol=1e-5)

    # and the same gradients
    torch.manual_seed(2)
    by_peft(ids, labels=ids).loss.backward()
    torch.manual_seed(2)
    ours(ids, labels=ids).loss.backward()
    peft_gradients = {name.replace(".default", ""): weight.grad for name, weight in by_peft.named_parameters()}
    for name, weight in trained.items():
        peft_name = f"base_model.model.{name}"
        if name.endswith("vector"):
            peft_name += ".weight"
        torch.testing.assert_close(weight.grad, peft_gradients[peft_name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_nothing_of_an_adapter_stays_when_it_is_taken_off(kind: str) -> None:
    model = biased_model()
    weights_before = {name: weight.clone() for name, weight in model.named_parameters()}
    classes = [type(module) for module in model.modules()]
    attach(model, Adapter(kind, rank=2, alpha=4.0), "the model", device="cpu")
    remove_adapters(model)
    weights_after = dict(model.named_parameters())
    assert weights_after.keys() == weights_before.keys()
    assert all(torch.equal(weight, weights_before[name]) for name, weight in weights_after.items())
    assert [type(module) for module in model.modules()] == classes


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_model_computes_what_its_base_does_while_adapters_are_off(kind: str) -> None:
    model = biased_model()
    ids = torch.arange(3, 40)[None]
    of_base = model(ids).logits
    attach(model, Adapter(kind, rank=2, alpha=4.0), "the model", device="cpu")
    for name, parameter in model.named_parameters():
        if is_adapter_parameter(name):
            torch.nn.init.constant_(parameter, 0.1)
    adapted = model(ids).logits
    parameters = dict(model.named_parameters())
    assert not torch.allclose(adapted, of_base, atol=1e-3)
    with adapters_off(model):
        assert torch.equal(model(ids).logits, of_base)
        assert dict(model.named_parameters()).keys() == parameters.keys()
    assert torch.equal(model(ids).logits, adapted)


def test_an_adapter_of_one_layer_is_read_again_for_that_layer(tmp_path: Path) -> None:
    model = biased_model()
    chosen = Adapter("lora", rank=2, alpha=4.0, targets=(r".*layers\.1\..*q_proj", "up_proj"))
    targets = set(find_targets(model, chosen, "the model"))
    assert targets == {
        "model.layers.1.self_attn.q_proj",
        "model.layers.0.mlp.up_proj",
        "model.layers.1.mlp.up_proj",
    }
    for part_of_a_name in ("_proj", "proj", "ayers.1.mlp.up_proj"):
        with pytest.raises(InputError, match="has no linear layer with that name"):
            find_targets(model, replace(chosen, targets=(part_of_a_name,)), "the model")

    # saved, and read again by us and by peft
    attach(model, chosen, "the model", device="cpu")
    trained = {name: weight.detach() for name, weight in model.named_parameters() if is_adapter_parameter(name)}
    save_file({f"base_model.model.{name}": weight for name, weight in trained.items()}, tmp_path / WEIGHTS)
    (tmp_path / CONFIG).write_text(json.dumps(peft_config(model, AdapterBase("base"))))
    assert set(find_targets(biased_model(), read_adapter(tmp_path), "the model")) == targets
    by_peft = peft.PeftModel.from_pretrained(biased_model(), str(tmp_path)).get_base_model()
    assert {name for name, module in by_peft.named_modules() if hasattr(module, "lora_A")} == targets


def test_frozen_weights_of_an_8b_take_no_product_of_their_own() -> None:
    whole = matrix_flops(None)
    lora = matrix_flops(Adapter("lora", rank=16, alpha=32))
    assert 0.6 < lora / whole < 0.69  # forward, and of the backward pass the gradients of the inputs


def matrix_flops(adapter: Adapter | None) -> int:
    """Return the FLOPs of matrix products in both passes of two layers of Llama-3-8B and its head."""
    sizes: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 14_336, "num_key_value_heads": 8}
    config = LlamaConfig(vocab_size=128_256, num_hidden_layers=2, **sizes)
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        if adapter:
            attach(model, adapter, "the model", "cpu")
            freeze_other_parts(model, adapter)
        compute_loss_in_head(model)
        ids = torch.zeros(1, 512, dtype=torch.int64)
        positions = torch.arange(511)
        batch = Batch(ids, ids, targets=Targets(positions, torch.zeros_like(positions)))
        with FlopCounterMode(display=False) as counter:
            CrossEntropy().loss(model, batch).total.backward()
    flops_by_operation = counter.get_flop_counts()["Global"]
    return sum(flops for operation, flops in flops_by_operation.items() if "mm" in str(operation))


def test_a_router_that_is_linear_by_class_alone_gets_no_adapter() -> None:
    """Llama 4's returns the scores and the chosen experts."""
    sizes: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "intermediate_size_mlp": 32}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    config = Llama4TextConfig(**sizes, **heads, num_hidden_layers=2, num_local_experts=2)
    model: Any = AutoModelForCausalLM.from_config(config)
    attach(model, Adapter("lora", 2, 4.0, targets=("all-linear",)), "model", "cpu")
    names = [name for name, _ in adapted_layers(model)]
    assert "model.layers.0.self_attn.q_proj" in names
    assert not any("router" in name for name in names)
    model(input_ids=torch.ones(1, 4, dtype=torch.int64), use_cache=False).logits.sum().backward()
    with pytest.raises(InputError, match="--lora_targets router: model has no linear layer with that name"):
        attach(AutoModelForCausalLM.from_config(config), Adapter("lora", 2, 4.0, targets=("router",)), "model", "cpu")
