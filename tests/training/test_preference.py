"""Preference objectives: their formulas, and runs on pairs that do not depend on packing, ranks or interruptions."""

import csv
import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import torch.nn.functional as F
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from fabric_train.arguments import PreferenceArguments, TrainArguments, parse
from fabric_train.checkpoint import Evaluation, TokenLoss, TrainerState, find_checkpoint
from fabric_train.cli.errors import InputError
from fabric_train.data.batch import Batch
from fabric_train.data.token_dataset import Rows, open_dataset
from fabric_train.model.lm_head_loss import compute_loss_in_head
from fabric_train.preflight.prepare import prepare
from fabric_train.training.preference import LOSSES, Pairs, Preference, log1mexp
from fabric_train.training.source_losses import sum_by_source
from fabric_train.training.summary import warn_of_displacement
from tests.support import short_runs
from tests.support.forked_runs import ForkedRuns
from tests.support.pair_datasets import ROW_LENGTH, tokenize, write_model, write_source
from tests.support.rounding import num_sums_of_loss, rounding_tolerance

GIVEN = {
    "dpo": PreferenceArguments(objective="dpo", dpo_beta=0.3, label_smoothing=0.2, sft_weight=0.5),
    "dpo_norm": PreferenceArguments(objective="dpo", dpo_beta=5.0, length_normalised=True),
    "ipo": PreferenceArguments(objective="ipo", dpo_beta=0.4),
    "simpo": PreferenceArguments(objective="simpo", dpo_beta=2.0, simpo_gamma=1.1, label_smoothing=0.1),
    "orpo": PreferenceArguments(objective="orpo", dpo_beta=0.7),
    "apo_zero": PreferenceArguments(objective="apo_zero", dpo_beta=0.3, sft_weight=0.5),
    "dpop": PreferenceArguments(objective="dpop", dpo_beta=0.3, dpop_lambda=5.0),
}
FIGURES = ("train_loss", "grad_norm", "train_margin", "train_logp_chosen", "train_accuracy", "train_length_rejected")


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def by_hand(name: str, logs: tuple[float, float], reference: tuple[float, float], tokens: tuple[int, int]) -> float:
    """Return the loss of a pair as TRL computes it, without the part of ``sft_weight``."""
    given = GIVEN[name]
    beta = given.dpo_beta
    smoothing = given.label_smoothing
    mean = [value / count for value, count in zip(logs, tokens, strict=True)]
    ratios = [value - other for value, other in zip(logs, reference, strict=True)]
    mean_ratios = [value / count for value, count in zip(ratios, tokens, strict=True)]
    if name == "ipo":
        return (mean_ratios[0] - mean_ratios[1] - 1 / (2 * beta)) ** 2
    if name == "orpo":
        odds = [math.log(math.exp(one) / (1 - math.exp(one))) for one in mean]
        return -mean[0] - beta * log_sigmoid(odds[0] - odds[1])
    if name == "apo_zero":
        return 1 - math.exp(log_sigmoid(beta * ratios[0])) + math.exp(log_sigmoid(beta * ratios[1]))
    if name == "dpop":
        lost = max(0.0, reference[0] - logs[0])
        return -log_sigmoid(beta * (ratios[0] - ratios[1] - given.dpop_lambda * lost))
    if name == "simpo":
        margin = beta * (mean[0] - mean[1]) - given.simpo_gamma
    else:
        chosen, rejected = mean_ratios if name == "dpo_norm" else ratios
        margin = beta * (chosen - rejected)
    return -(1 - smoothing) * log_sigmoid(margin) - smoothing * log_sigmoid(-margin)


@pytest.mark.parametrize("name", GIVEN)
def test_a_loss_is_that_of_its_paper(name: str) -> None:
    pairs = [((-9.0, -11.5), (-10.0, -10.2), (5, 8)), ((-2.0, -1.0), (-1.5, -2.5), (4, 2))]
    columns = zip(*((*logs, *reference, *tokens) for logs, reference, tokens in pairs), strict=True)
    given = GIVEN[name]
    losses = LOSSES[given.objective](Pairs(*(torch.tensor(one, dtype=torch.float64) for one in columns)), given)
    assert losses.tolist() == pytest.approx([by_hand(name, *pair) for pair in pairs], rel=1e-12)


@pytest.mark.parametrize("name", ["dpo", "dpo_norm", "ipo", "apo_zero", "dpop"])
def test_rewards_and_kl_are_as_by_hand(name: str) -> None:
    logs = (-9.0, -12.0)
    reference = (-10.0, -10.0)
    tokens = (5, 8)
    values = [torch.tensor([value], dtype=torch.float64) for value in (*logs, *reference, *tokens)]
    metrics = {of: value.item() for of, value in Preference(GIVEN[name]).compute_metrics(Pairs(*values)).items()}
    # beyond the reference: 1 for the chosen answer, -2 for the rejected one; per token 1 / 5 and -2 / 8
    chosen, rejected = (0.2, -0.25) if name in ("dpo_norm", "ipo") else (1.0, -2.0)
    beta = GIVEN[name].dpo_beta
    assert metrics["reward_chosen"] == pytest.approx(beta * chosen)
    assert metrics["reward_rejected"] == pytest.approx(beta * rejected)
    assert metrics["margin"] == pytest.approx(beta * (chosen - rejected))
    assert metrics["kl"] == pytest.approx(-(0.2 - 0.25) / 2)  # per token, whatever the loss is of
    assert metrics["sft_loss"] == pytest.approx(9 / 5)
    assert (metrics["accuracy"], metrics["ties"]) == (1.0, 0.0)
    assert (metrics["logp_chosen"], metrics["logp_rejected"]) == logs
    assert (metrics["length_chosen"], metrics["length_rejected"]) == tokens


def test_orpo_is_exact_for_nearly_certain_and_nearly_impossible_answers() -> None:
    logs = torch.tensor([-1e-12, -1e-3, -0.6, -0.8, -40.0], dtype=torch.float64)
    expected = [-27.631021115929, -6.9082552373155, -0.7958703683463, -0.596617679189, -4.2483542552916e-18]
    assert log1mexp(logs).tolist() == pytest.approx(expected, rel=1e-9, abs=0)


def test_an_answer_without_tokens_gives_finite_figures() -> None:
    values = [torch.tensor([value], dtype=torch.float64) for value in (0.0, -6.0, 0.0, -7.0, 0, 3)]
    for name in GIVEN:
        metrics = Preference(GIVEN[name]).compute_metrics(Pairs(*values))
        assert all(value.isfinite().all() for value in metrics.values()), name


def test_a_tie_is_half_an_accurate_pair() -> None:
    values = [torch.tensor([value], dtype=torch.float64) for value in (-4.0, -6.0, -5.0, -7.0, 3, 3)]
    metrics = Preference(GIVEN["dpo"]).compute_metrics(Pairs(*values))
    assert (metrics["accuracy"].item(), metrics["ties"].item(), metrics["margin"].item()) == (0.5, 1.0, 0.0)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("sources")
    return [write_source(folder / "a.jsonl", range(12)), write_source(folder / "b.jsonl", range(40, 47))]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, model_dir: Path, sources: list[Path]) -> Path:
    return tokenize(tmp_path_factory.mktemp("packed") / "tokens", model_dir, sources)


@pytest.fixture(scope="module")
def one_a_row(tmp_path_factory: pytest.TempPathFactory, model_dir: Path, sources: list[Path]) -> Path:
    return tokenize(tmp_path_factory.mktemp("padded") / "tokens", model_dir, sources, packing="none", max_length=96)


@pytest.fixture(scope="module")
def rounding(model_dir: Path) -> float:
    """How much the log-probability of an answer may differ, relative."""
    return rounding_tolerance(num_sums_of_loss(AutoConfig.from_pretrained(model_dir), ROW_LENGTH))


LARGEST_LOG_PROBABILITY = 60.0
"""Nats that an answer of the sources has at most before the model has learned."""


@pytest.fixture(scope="module")
def reward_rounding(rounding: float) -> float:
    """How much a reward and the loss may differ with the default beta: a reward is beta times a difference of sums."""
    return PreferenceArguments().dpo_beta * rounding * LARGEST_LOG_PROBABILITY


def sums_alone(model: Any, batch: Batch) -> torch.Tensor:
    """Return the log-probabilities of both answers of each pair, [P, 2]: each sequence alone, by full logits."""
    assert batch.documents is not None
    ids = batch.input_ids.flatten()
    labels = batch.labels.flatten()
    sums = []
    for begin, end in zip(batch.documents.borders[:-1].tolist(), batch.documents.borders[1:].tolist(), strict=True):
        logits = model(input_ids=ids[None, begin:end]).logits[0, :-1]
        losses = F.cross_entropy(logits, labels[begin + 1 : end], reduction="none", ignore_index=-100)
        sums.append(-losses.double().sum())
    return torch.stack(sums).view(-1, 2)


@torch.no_grad()
def plain_values(model: Any, rows: Rows) -> np.ndarray:
    """Return the log-probabilities of a split's pairs in the order of its document index, [pairs, 2]."""
    assert rows.index is not None
    found: dict[int, Any] = {}
    for row in range(len(rows)):
        documents = rows.index.pieces(np.array([row])).documents.tolist()
        found |= zip(documents, sums_alone(model, rows.__getitems__([row])), strict=True)
    return torch.stack([found[document] for document in sorted(found)]).numpy()


def without_reference(tokens: Path, copy: Path) -> Path:
    """Copy a token dataset without the reference log-probabilities that other runs have written."""
    return Path(shutil.copytree(tokens, copy, ignore=shutil.ignore_patterns("reference")))


def stored_values(tokens: Path, others: Sequence[str] = ()) -> dict[str, Any]:
    """Return the log-probabilities of the only reference besides ``others`` of a token dataset, by split."""
    (folder,) = (one for one in (tokens / "reference").iterdir() if one.name not in others)
    return {file.stem: np.load(file) for file in folder.glob("*.npy")}


@pytest.mark.numerical
@pytest.mark.parametrize("name", GIVEN)
def test_loss_and_gradient_are_those_of_each_answer_alone_by_full_logits(
    name: str, model_dir: Path, packed: Path
) -> None:
    batch = open_dataset(str(packed)).train.__getitems__([0, 1, 2])
    reference = torch.randn(batch.num_pairs, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) - 30
    model, plain = (LlamaForCausalLM.from_pretrained(model_dir).eval() for _ in range(2))
    assert compute_loss_in_head(model)
    objective = Preference(GIVEN[name])
    found = objective.loss(model, replace(batch, reference=reference))
    found.total.backward()
    by_logits = objective.loss(plain, replace(batch, reference=reference))  # of a family whose head is left alone
    assert by_logits.total.item() == pytest.approx(found.total.item(), rel=1e-6)
    sums = sums_alone(plain, batch)
    tokens = torch.tensor([(part != -100).sum() for part in _answers(batch)]).double().view(-1, 2)
    pairs = Pairs(*sums.T, *(reference if GIVEN[name].needs_reference else 0 * reference).T, *tokens.T)
    losses = LOSSES[GIVEN[name].objective](pairs, GIVEN[name])
    losses = losses - GIVEN[name].sft_weight * sums[:, 0] / tokens[:, 0]
    losses.sum().backward()
    assert batch.pieces is not None
    assert found.piece_losses is not None
    torch.testing.assert_close(found.piece_losses, losses.detach(), rtol=1e-5, atol=1e-6)
    by_source = sum_by_source(found.piece_losses, batch.pieces.sources, 2)
    assert by_source.sum().item() == pytest.approx(float(found.total.detach()), rel=1e-12)
    for (parameter, weight), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert weight.grad is not None and other.grad is not None  # noqa: PT018 - of one weight
        difference = (weight.grad - other.grad).norm() / other.grad.norm()
        assert difference < 1e-5, (parameter, difference)


def _answers(batch: Batch) -> list[torch.Tensor]:
    assert batch.documents is not None
    return list(batch.labels.flatten().tensor_split(batch.documents.borders[1:-1].tolist()))


def test_a_rank_without_rows_takes_part_in_the_backward_pass(model_dir: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(model_dir)
    compute_loss_in_head(model)
    empty = Batch(torch.zeros(1, 2, dtype=torch.int64), torch.full((1, 2), -100))
    loss = Preference(GIVEN["orpo"]).loss(model, empty)
    loss.total.backward()
    assert (loss.total.item(), loss.piece_losses) == (0, None)
    assert not any(weight.grad.any() for weight in model.parameters() if weight.grad is not None)


def argv(model: Path, tokens: Path, run: Path, **options: object) -> list[str]:
    given: dict[str, object] = {
        "objective": "dpo",
        "eval_at_start": "true",
        "eval_iters": None,
        "max_step": 3,
        "number_epochs": 9,
    }
    given |= {"total_batch_size": None, "save_step_interval": 2, "eval_step_interval": 3, "lr": 3e-3}
    return short_runs.argv(model, tokens, run, **(given | options))


def table(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def whole_windows(tokens: Path, ranks: int, rows: int) -> dict[str, object]:
    """Return the options with which a window has all rows, so that it has the same pairs however they are packed."""
    together = ranks * rows
    accumulation = -(-len(open_dataset(str(tokens)).train) // together)
    return {"micro_batch_size": rows, "gradient_accumulation_steps": accumulation, "eval_batch_size": rows}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, forked_runs: ForkedRuns, model_dir: Path, packed: Path) -> Path:
    """A run on packed pairs by one process."""
    run = tmp_path_factory.mktemp("straight") / "run"
    forked_runs.start(argv(model_dir, packed, run, **whole_windows(packed, 1, 2)), 1).finish()
    return run


@pytest.mark.numerical
def test_the_first_loss_is_ln_2_and_the_reward_0(straight: Path, reward_rounding: float) -> None:
    start, first, *_ = table(straight)
    for row, split in ((start, "val"), (first, "train")):
        assert float(row[f"{split}_loss"]) == pytest.approx(math.log(2), abs=reward_rounding)
        assert float(row[f"{split}_margin"]) == pytest.approx(0, abs=reward_rounding)
    assert float(table(straight)[-1]["train_loss"]) < 0.65


@pytest.mark.numerical
@pytest.mark.parametrize(
    ("layout", "ranks", "parallelism", "rows", "options"),
    [
        ("packed", 3, "fsdp", 1, {}),
        ("packed", 2, "fsdp2", 2, {"tensor_parallel_size": 2}),
        ("one_a_row", 2, "fsdp2", 2, {}),
        ("one_a_row", 2, "ddp", 3, {}),
        ("one_a_row", 1, "single", 1, {}),
        ("packed", 2, "fsdp2", 2, {"context_parallel_size": 2}),
    ],
)
def test_losses_do_not_depend_on_packing_ranks_or_micro_batches(
    request: pytest.FixtureRequest,
    forked_runs: ForkedRuns,
    tmp_path: Path,
    model_dir: Path,
    straight: Path,
    rounding: float,
    reward_rounding: float,
    layout: str,
    ranks: int,
    parallelism: str,
    rows: int,
    options: dict[str, int],
) -> None:
    tokens = without_reference(request.getfixturevalue(layout), tmp_path / "tokens")
    data_ranks = ranks // math.prod(options.values())
    given = {"parallelism": parallelism, "devices": ranks, **options, **whole_windows(tokens, data_ranks, rows)}
    forked_runs.start(argv(model_dir, tokens, tmp_path / "run", **given), ranks).finish()
    for row, other in zip(table(straight), table(tmp_path / "run"), strict=True):
        columns = [name for name in row if name in FIGURES or name.startswith(("train_loss/", "val_"))]
        if int(row["step"]) <= 1:
            # the policy still is the reference: rounding alone decides which of two rewards of 0 is larger
            columns = [name for name in columns if "ties" not in name and "accuracy" not in name]
        found = [float(other[name] or "nan") for name in columns]
        expected = [float(row[name] or "nan") for name in columns]
        tolerated = pytest.approx(expected, rel=rounding, abs=reward_rounding, nan_ok=True)
        assert found == tolerated, dict(zip(columns, found, strict=True))
    dataset = open_dataset(str(tokens))
    stored = stored_values(tokens)
    assert dataset.validation is not None
    model = LlamaForCausalLM.from_pretrained(model_dir).eval()
    for name, split in {"train": dataset.train, "validation": dataset.validation}.items():
        np.testing.assert_allclose(stored[name], plain_values(model, split), rtol=rounding)


def test_killed_run_whose_reference_is_deleted_resumes_bit_for_bit(
    forked_runs: ForkedRuns, tmp_path: Path, model_dir: Path, packed: Path, straight: Path
) -> None:
    tokens = Path(shutil.copytree(packed, tmp_path / "tokens"))
    run = tmp_path / "run"
    shutil.rmtree(tokens / "reference", ignore_errors=True)
    given = argv(model_dir, tokens, run, **whole_windows(tokens, 1, 2))
    kill = short_runs.at_point("os.kill(os.getpid(), signal.SIGKILL)", 3, "OPTIMIZER", ranks=(0,))
    assert forked_runs.start(given, 1, before=kill).wait() == [-9]
    assert short_runs.saved_steps(run)[-1] in (1, 2)
    (folder,) = (tokens / "reference").iterdir()
    before = (folder / "train.npy").read_bytes()
    shutil.rmtree(tokens / "reference")
    forked_runs.start([*given, "--resume", "true"], 1).finish()
    assert (folder / "train.npy").read_bytes() == before
    assert short_runs.metrics(run) == short_runs.metrics(straight)
    weights = (one / "checkpoints" / "step-00000003" / "model.safetensors" for one in (run, straight))
    first, second = (one.read_bytes() for one in weights)
    assert first == second


def test_a_reference_of_something_else_is_refused_by_name(
    forked_runs: ForkedRuns, tmp_path: Path, model_dir: Path, packed: Path, straight: Path
) -> None:
    del straight  # has written the reference
    tokens = Path(shutil.copytree(packed, tmp_path / "tokens"))
    (folder,) = (tokens / "reference").iterdir()
    content = json.loads((folder / "reference.json").read_text())
    assert content["made_of"]["dtype"] == "32-true"
    for what in ("model", "dtype", "token dataset", "attention"):
        changed = content | {"made_of": content["made_of"] | {what: "another"}}
        (folder / "reference.json").write_text(json.dumps(changed))
        run = forked_runs.start(argv(model_dir, tokens, tmp_path / "run"), 1)
        assert run.wait() == [2]
        assert f"reference.json: of another {what}" in run.stderr()
    (folder / "reference.json").write_text(json.dumps(content))
    values = bytearray((folder / "train.npy").read_bytes())
    values[-1] ^= 1
    (folder / "train.npy").write_bytes(values)
    run = forked_runs.start(argv(model_dir, tokens, tmp_path / "run"), 1)
    assert run.wait() == [2]
    assert "train.npy: damaged" in run.stderr()


def test_dropout_is_off_in_the_reference_and_on_in_training(
    forked_runs: ForkedRuns, tmp_path: Path, model_dir: Path, packed: Path, reward_rounding: float
) -> None:
    model = Path(shutil.copytree(model_dir, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    forked_runs.start(argv(model, packed, tmp_path / "run", **whole_windows(packed, 1, 2), max_step=1), 1).finish()
    start, first, *_ = table(tmp_path / "run")
    assert float(start["val_loss"]) == pytest.approx(math.log(2), abs=reward_rounding)
    assert abs(float(first["train_loss"]) - math.log(2)) > 2 * reward_rounding
    shutil.rmtree(next(one for one in (packed / "reference").iterdir() if str(model) in _text(one)))


def _text(folder: Path) -> str:
    return (folder / "reference.json").read_text()


@pytest.fixture(scope="module")
def adapted(
    tmp_path_factory: pytest.TempPathFactory, forked_runs: ForkedRuns, model_dir: Path, packed: Path, straight: Path
) -> Path:
    """A run with an adapter, after the run of all weights has written the reference."""
    del straight
    run = tmp_path_factory.mktemp("adapted") / "run"
    given = {**whole_windows(packed, 1, 2), "adapter": "lora", "lora_rank": 4, "lr": 3e-2}
    started = forked_runs.start(argv(model_dir, packed, run, **given), 1)
    started.finish()
    assert "reference log-probabilities of" not in started.stdout()
    return run


def test_the_reference_of_an_adapter_is_its_base(
    adapted: Path, straight: Path, packed: Path, reward_rounding: float
) -> None:
    assert len(list((packed / "reference").iterdir())) == 1  # the one of the run of all weights is read
    start, first, *_ = table(adapted)
    assert float(start["val_loss"]) == float(table(straight)[0]["val_loss"])
    assert float(first["train_loss"]) == pytest.approx(math.log(2), abs=reward_rounding)  # B of the adapter is 0


def of_peft(folder: Path, model_dir: Path) -> Any:
    """Save an adapter with peft whose matrices are not 0, and return it with its base."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, r=4, lora_alpha=8, lora_dropout=0.5)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model: Any = peft.get_peft_model(LlamaForCausalLM.from_pretrained(model_dir), config)
    model.save_pretrained(str(folder))
    return model


def in_cache(folder: Path, model_dir: Path) -> Any:
    """Save another model as the hub's client has it in its cache, as ``some/model``, and return it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(model_dir))
    repository = folder / "models--some--model"
    model.save_pretrained(repository / "snapshots" / "0123")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123")
    return model


def in_4_bits(model_dir: Path) -> Any:
    """Return the model with what 4 bits stand for as the weights of its decoder's linear layers.

    The layer of bitsandbytes is no reference: in evaluation it multiplies in bfloat16, whatever its compute type, on
    processors that have instructions for that (AVX512-BF16). This moves a log-probability by 1e-4 of itself.
    """
    model = LlamaForCausalLM.from_pretrained(model_dir)
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            packed, state = quantize_4bit(module.weight.data, blocksize=64, quant_type="nf4")
            module.weight.data = dequantize_4bit(packed, state)
    return model


OTHERS = ["checkpoint", "adapter of a run", "adapter of peft", "hub"]


@pytest.mark.numerical
@pytest.mark.parametrize("kind", [*OTHERS, "checkpoint to begin with", "adapter to begin with", "4 bits"])
def test_reference_values_are_those_of_that_model_by_full_logits(
    forked_runs: ForkedRuns,
    tmp_path: Path,
    model_dir: Path,
    packed: Path,
    straight: Path,
    adapted: Path,
    rounding: float,
    kind: str,
) -> None:
    options: dict[str, object] = {"reference": tmp_path / "reference"}
    policy: Any = LlamaForCausalLM.from_pretrained(model_dir)
    last = Path("checkpoints", "step-00000003")
    if kind == "checkpoint":
        options = {"reference": straight / "latest"}
        model = straight / last
        place = str(straight / last)
        reference: Any = LlamaForCausalLM.from_pretrained(model)
    elif kind == "adapter of a run":
        options = {"reference": adapted / last}
        place = str(adapted / last)
        reference = peft.PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(model_dir), adapted / last)
    elif kind == "adapter of peft":
        reference = of_peft(tmp_path / "reference", model_dir)
        place = str(tmp_path / "reference")
    elif kind == "checkpoint to begin with":
        policy = reference = LlamaForCausalLM.from_pretrained(straight / last)
        options = {"model_name": straight / "latest"}
        place = str(straight / last)
    elif kind == "adapter to begin with":
        policy = reference = of_peft(tmp_path / "reference", model_dir)
        options = {"init_adapter": tmp_path / "reference"}
        place = str(tmp_path / "reference")
    elif kind == "hub":
        reference = in_cache(tmp_path / "hub", model_dir)
        place = "some/model"
        options = {"reference": place}
    else:
        options = {"adapter": "lora", "base_weights": "nf4"}
        place = str(model_dir)
        policy = reference = in_4_bits(model_dir)
    tokens = Path(shutil.copytree(packed, tmp_path / "tokens"))
    others = [one.name for one in (tokens / "reference").iterdir()]
    options |= whole_windows(packed, 1, 2) | {"best_by": "accuracy", "max_step": 1}
    options |= {"label_smoothing": 0.1, "sft_weight": 0.2, "dpo_beta": 0.5}
    cache = f"from huggingface_hub import constants; constants.HF_HUB_CACHE = {str(tmp_path / 'hub')!r}"
    forked_runs.start(argv(model_dir, tokens, tmp_path / "run", **options), 1, before=cache).finish()
    rows = open_dataset(str(tokens)).train
    expected = plain_values(reference.eval(), rows)
    np.testing.assert_allclose(stored_values(tokens, others)["train"], expected, rtol=rounding)
    assert np.abs(expected).max() < LARGEST_LOG_PROBABILITY
    ratios = plain_values(policy.eval(), rows) - expected
    margin = 0.5 * (ratios[:, 0] - ratios[:, 1]).mean()
    assert bool(margin) == (kind in OTHERS)
    assert float(table(tmp_path / "run")[1]["train_margin"]) == pytest.approx(
        margin, rel=1e-4, abs=0.5 * rounding * LARGEST_LOG_PROBABILITY
    )
    saved = json.loads((tmp_path / "run" / "checkpoints" / "step-00000001" / "trainer.json").read_text())
    assert saved["reference"]["place"] == place
    assert saved["arguments"]["best_by"] == "accuracy"
    if kind == "checkpoint":
        resumes_with_its_reference(forked_runs, argv(model_dir, tokens, tmp_path / "run", **options), straight / last)


def resumes_with_its_reference(forked_runs: ForkedRuns, begun: list[str], reference: Path) -> None:
    """Resume a run without its ``--reference``, and with another path of the same checkpoint."""
    place = begun.index("--reference")
    without = [*begun[:place], *begun[place + 2 :]]
    other_path = str(reference.parent / ".." / reference.parent.name / reference.name)
    for step, given in ((2, without), (3, [*without, "--reference", other_path])):
        given[given.index("--max_step") + 1] = str(step)
        resumed = forked_runs.start([*given, "--resume", "true"], 1)
        resumed.finish()
        assert "reference" not in resumed.stdout().partition("changed since")[2].partition("\n")[0]


def test_eval_only_compares_with_the_reference_that_the_run_began_with(
    forked_runs: ForkedRuns, tmp_path: Path, model_dir: Path, packed: Path, straight: Path
) -> None:
    tokens = without_reference(packed, tmp_path / "tokens")
    run = tmp_path / "run"
    given = {"adapter": "dora", "lora_rank": 4, "max_step": 1, **whole_windows(packed, 1, 2)}
    forked_runs.start(argv(model_dir, tokens, run, reference=straight / "latest", **given), 1).finish()
    before = stored_values(tokens)["validation"]
    shutil.rmtree(tokens / "reference")
    options = {"eval_only": "true", "checkpoint": run / "latest", **given}
    forked_runs.start(argv(model_dir, tokens, tmp_path / "evaluated", **options), 1).finish()
    np.testing.assert_array_equal(stored_values(tokens)["validation"], before)


@pytest.mark.numerical
def test_an_adapter_that_was_trained_in_4_bits_is_a_reference_in_4_bits(
    forked_runs_in_4_bits: ForkedRuns, tmp_path: Path, model_dir: Path, packed: Path, rounding: float
) -> None:
    given = {"lora_rank": 4, "lr": 3e-2, "base_weights": "nf4", "objective": "orpo", **whole_windows(packed, 1, 2)}
    forked_runs_in_4_bits.start(argv(model_dir, packed, tmp_path / "first", max_step=2, **given), 1).finish()
    adapter = tmp_path / "first" / "checkpoints" / "step-00000002"
    tokens = without_reference(packed, tmp_path / "tokens")
    given = whole_windows(packed, 1, 2)
    forked_runs_in_4_bits.start(
        argv(model_dir, tokens, tmp_path / "run", reference=adapter, max_step=1, **given), 1
    ).finish()
    reference = peft.PeftModel.from_pretrained(in_4_bits(model_dir), adapter).eval()
    expected = plain_values(reference, open_dataset(str(tokens)).train)
    np.testing.assert_allclose(stored_values(tokens)["train"], expected, rtol=rounding)


def test_a_wrong_reference_is_refused_before_anything_is_computed(
    tmp_path: Path, model_dir: Path, packed: Path
) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    for name, changes in {
        "wide": {"vocab_size": config["vocab_size"] + 1},
        "short": {"max_position_embeddings": 64},
        "empty": {},
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config | changes))
    for name in ("wide", "short"):
        shutil.copy(model_dir / "model.safetensors", tmp_path / name)
    (tmp_path / "nothing").mkdir()
    of_peft(tmp_path / "peft", model_dir)
    shutil.copytree(tmp_path / "peft", tmp_path / "pickled")
    (tmp_path / "pickled" / "adapter_model.safetensors").rename(tmp_path / "pickled" / "adapter_model.bin")
    two = ("--parallelism", "fsdp2", "--tensor_parallel_size", "2", "--devices", "2")
    for reference, options, fault in (
        ("/nowhere", (), "--reference /nowhere: no such folder"),
        ("some/other", (), "--reference some/other: no such folder, and the hub does not provide it"),
        ("nothing", (), "nothing: the folder has no config.json"),
        ("empty", (), "empty: no weights in it"),
        ("wide", (), f"wide: it has {config['vocab_size'] + 1} tokens and {model_dir} has {config['vocab_size']}"),
        ("short", (), "short: it takes 64 tokens and the rows have"),
        ("pickled", (), "pickled: no adapter_model.safetensors in it"),
        ("peft", two, "--tensor_parallel_size does not work with the adapter --reference"),
    ):
        place = reference if "/" in reference else str(tmp_path / reference)
        words = argv(model_dir, packed, tmp_path / "run", reference=place, micro_batch_size=2, total_batch_size=2)
        with pytest.raises(InputError) as refused:
            prepare(parse(TrainArguments, [*words, *options]))
        assert fault in str(refused.value)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_the_self_check_and_the_evaluation_alone_take_pairs(
    forked_runs: ForkedRuns, tmp_path: Path, model_dir: Path, packed: Path, reward_rounding: float, precision: str
) -> None:
    given = {"precision": precision}
    forked_runs.start(argv(model_dir, packed, tmp_path / "check", self_check="true", **given)).finish()
    found = json.loads((tmp_path / "check" / "self_check.json").read_text())
    assert found["faults"] == []
    assert [figure["loss"] for figure in found["figures"]] == pytest.approx([math.log(2)] * 5, abs=1e-5)
    forked_runs.start(argv(model_dir, packed, tmp_path / "eval", eval_only="true", adapter="dora", **given)).finish()
    found = json.loads((tmp_path / "eval" / "evaluation.json").read_text())
    assert found["loss"] == pytest.approx(math.log(2), abs=reward_rounding)
    assert found["margin"] == pytest.approx(0, abs=reward_rounding)
    assert sum(one["num_pairs"] for one in found["sources"].values()) == found["num_pairs"]


def test_pairs_of_two_datasets_train_in_shares_with_best_by_accuracy(
    forked_runs: ForkedRuns, tmp_path: Path, model_dir: Path, sources: list[Path]
) -> None:
    folders = [tokenize(tmp_path / one.stem, model_dir, [one]) for one in sources]
    given = {"objective": "ipo", "token_shares": "0.5 0.5", "best_by": "accuracy", "early_stopping": "margin:9"}
    words = argv(model_dir, folders[0], tmp_path / "run", **given, total_batch_size=4, eval_step_interval=1)
    place = words.index(str(folders[0]))
    words[place + 1 : place + 1] = [str(folders[1])]
    shares = words.index("0.5 0.5")
    words[shares : shares + 1] = ["0.5", "0.5"]
    told = """
from fabric_train.training import reference
build = reference.set_up_model
reference.set_up_model = lambda *given, **options: print("the reference is built") or build(*given, **options)
"""
    started = forked_runs.start(words, before=told)
    started.finish()
    assert started.stdout().count("the reference is built") == 1  # for both token datasets
    rows = table(tmp_path / "run")
    counts = {one: len(list((one / "reference").iterdir())) for one in folders}
    assert set(counts.values()) == {1}
    assert all(float(rows[1][f"train_loss/{one}"]) > 0 for one in sources)  # the last window of an epoch has one row
    assert all(row[f"val_margin/{one}"] for one in sources for row in rows)
    trained = {int(row["step"]): float(row["val_accuracy"]) for row in rows[1:]}
    best = find_checkpoint(tmp_path / "run" / "best")
    assert trained[int(best.name.removeprefix("step-"))] == max(trained.values())


def test_a_fall_of_the_chosen_answers_is_warned_of() -> None:
    first, now = (
        Evaluation(TokenLoss(0.7, 1, further={"sft_loss": loss}, of_pairs=True), step=step)
        for step, loss in ((0, 1.0), (5, 1.2))
    )
    line = warn_of_displacement(TrainerState(step=5, evaluation=now, first_evaluation=first))
    assert line is not None
    assert "fell by 0.200 nats per token since step 0, more than 0.1" in line
    assert warn_of_displacement(TrainerState(step=5, evaluation=first, first_evaluation=now)) is None


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"objective": "sft"}, "preference pairs, which --objective sft does not train on"),
        ({"isolate_documents": "false"}, "leave --isolate_documents false out"),
        (
            {"objective": "simpo", "reference": "x"},
            "--reference is of --objective dpo, ipo, apo_zero, dpop, kto, apo_zero_unpaired, not simpo",
        ),
        ({"objective": "sft", "dpo_beta": 0.2}, "--dpo_beta is of --objective dpo, ipo, simpo, orpo, apo_zero, dpop"),
        ({"reference": "/nowhere"}, "--reference /nowhere: no such folder"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    forked_runs: ForkedRuns, tmp_path: Path, model_dir: Path, packed: Path, options: dict[str, object], fault: str
) -> None:
    run = forked_runs.start(argv(model_dir, packed, tmp_path / "run", **options), 1)
    assert run.wait() == [2]
    assert fault in run.stderr()
    assert len(run.stderr().strip().splitlines()) == 1
