"""Preference objectives: their formulas, and runs on pairs that do not depend on packing, ranks or interruptions."""

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from tests.support.pair_datasets import (
    LARGEST_LOG_PROBABILITY,
    ROW_LENGTH,
    read_table,
    tokenize,
    training_argv,
    whole_windows,
    write_model,
    write_source,
)
from tests.support.rounding import num_sums_of_loss, rounding_tolerance

ARGUMENTS = {
    "dpo": PreferenceArguments(objective="dpo", dpo_beta=0.3, label_smoothing=0.2, sft_weight=0.5),
    "dpo_norm": PreferenceArguments(objective="dpo", dpo_beta=5.0, length_normalised=True),
    "ipo": PreferenceArguments(objective="ipo", dpo_beta=0.4),
    "simpo": PreferenceArguments(objective="simpo", dpo_beta=2.0, simpo_gamma=1.1, label_smoothing=0.1),
    "orpo": PreferenceArguments(objective="orpo", dpo_beta=0.7),
    "apo_zero": PreferenceArguments(objective="apo_zero", dpo_beta=0.3, sft_weight=0.5),
    "dpop": PreferenceArguments(objective="dpop", dpo_beta=0.3, dpop_lambda=5.0),
}
COMPARED_COLUMNS = (
    "train_loss",
    "grad_norm",
    "train_margin",
    "train_logp_chosen",
    "train_accuracy",
    "train_length_rejected",
)


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


@dataclass(frozen=True)
class Answer:
    """An answer of a pair: its log-probabilities, and its number of tokens."""

    policy: float
    reference: float
    num_tokens: int

    @property
    def ratio(self) -> float:
        """The logarithm of the ratio of both probabilities."""
        return self.policy - self.reference

    @property
    def mean(self) -> float:
        return self.policy / self.num_tokens

    @property
    def mean_ratio(self) -> float:
        return self.ratio / self.num_tokens


def log_odds(log_probability: float) -> float:
    return math.log(math.exp(log_probability) / (1 - math.exp(log_probability)))


def by_hand(name: str, chosen: Answer, rejected: Answer) -> float:
    """Return the loss of a pair as TRL computes it, without the part of ``sft_weight``."""
    arguments = ARGUMENTS[name]
    beta = arguments.dpo_beta
    if name == "ipo":
        return (chosen.mean_ratio - rejected.mean_ratio - 1 / (2 * beta)) ** 2
    if name == "orpo":
        return -chosen.mean - beta * log_sigmoid(log_odds(chosen.mean) - log_odds(rejected.mean))
    if name == "apo_zero":
        return 1 - math.exp(log_sigmoid(beta * chosen.ratio)) + math.exp(log_sigmoid(beta * rejected.ratio))
    if name == "dpop":
        lost = max(0.0, -chosen.ratio)
        return -log_sigmoid(beta * (chosen.ratio - rejected.ratio - arguments.dpop_lambda * lost))
    if name == "simpo":
        margin = beta * (chosen.mean - rejected.mean) - arguments.simpo_gamma
    elif name == "dpo_norm":
        margin = beta * (chosen.mean_ratio - rejected.mean_ratio)
    else:
        margin = beta * (chosen.ratio - rejected.ratio)
    smoothing = arguments.label_smoothing
    return -(1 - smoothing) * log_sigmoid(margin) - smoothing * log_sigmoid(-margin)


def pairs_of(pairs: Sequence[tuple[Answer, Answer]]) -> Pairs:
    """Return pairs of a chosen and a rejected answer as the losses take them."""

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    return Pairs(
        chosen=column([chosen.policy for chosen, _ in pairs]),
        rejected=column([rejected.policy for _, rejected in pairs]),
        reference_chosen=column([chosen.reference for chosen, _ in pairs]),
        reference_rejected=column([rejected.reference for _, rejected in pairs]),
        chosen_tokens=column([chosen.num_tokens for chosen, _ in pairs]),
        rejected_tokens=column([rejected.num_tokens for _, rejected in pairs]),
    )


def metrics_of(name: str, chosen: Answer, rejected: Answer) -> dict[str, float]:
    """Return the metrics of one pair."""
    metrics = Preference(ARGUMENTS[name]).compute_metrics(pairs_of([(chosen, rejected)]))
    return {metric: value.item() for metric, value in metrics.items()}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_loss_is_that_of_its_paper(name: str) -> None:
    pairs = [
        (Answer(-9.0, -10.0, 5), Answer(-11.5, -10.2, 8)),
        (Answer(-2.0, -1.5, 4), Answer(-1.0, -2.5, 2)),
    ]
    arguments = ARGUMENTS[name]
    losses = LOSSES[arguments.objective](pairs_of(pairs), arguments)
    expected = [by_hand(name, chosen, rejected) for chosen, rejected in pairs]
    assert losses.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["dpo", "dpo_norm", "ipo", "apo_zero", "dpop"])
def test_rewards_and_kl_are_as_by_hand(name: str) -> None:
    chosen = Answer(policy=-9.0, reference=-10.0, num_tokens=5)
    rejected = Answer(policy=-12.0, reference=-10.0, num_tokens=8)
    metrics = metrics_of(name, chosen, rejected)
    # log-ratios, policy minus reference; these two losses divide them by the tokens
    chosen_ratio = 1.0
    rejected_ratio = -2.0
    if name in ("dpo_norm", "ipo"):
        chosen_ratio = 1.0 / 5
        rejected_ratio = -2.0 / 8
    beta = ARGUMENTS[name].dpo_beta
    assert metrics["reward_chosen"] == pytest.approx(beta * chosen_ratio)
    assert metrics["reward_rejected"] == pytest.approx(beta * rejected_ratio)
    assert metrics["margin"] == pytest.approx(beta * (chosen_ratio - rejected_ratio))
    # with every loss per token: the mean of reference minus policy over both answers
    reference_minus_policy = [-1.0 / 5, 2.0 / 8]
    assert metrics["kl"] == pytest.approx(sum(reference_minus_policy) / 2)
    assert metrics["sft_loss"] == pytest.approx(9 / 5)
    assert metrics["accuracy"] == 1.0
    assert metrics["ties"] == 0.0
    assert metrics["logp_chosen"] == -9.0
    assert metrics["logp_rejected"] == -12.0
    assert metrics["length_chosen"] == 5
    assert metrics["length_rejected"] == 8


def test_orpo_is_exact_for_nearly_certain_and_nearly_impossible_answers() -> None:
    logs = torch.tensor([-1e-12, -1e-3, -0.6, -0.8, -40.0], dtype=torch.float64)
    expected = [-27.631021115929, -6.9082552373155, -0.7958703683463, -0.596617679189, -4.2483542552916e-18]
    assert log1mexp(logs).tolist() == pytest.approx(expected, rel=1e-9, abs=0)


def test_an_answer_without_tokens_gives_finite_figures() -> None:
    for name in ARGUMENTS:
        metrics = metrics_of(name, Answer(0.0, 0.0, 0), Answer(-6.0, -7.0, 3))
        assert all(math.isfinite(value) for value in metrics.values()), name


def test_a_tie_is_half_an_accurate_pair() -> None:
    metrics = metrics_of("dpo", Answer(-4.0, -5.0, 3), Answer(-6.0, -7.0, 3))
    assert metrics["accuracy"] == 0.5
    assert metrics["ties"] == 1.0
    assert metrics["margin"] == 0.0


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
    sums_by_document: dict[int, torch.Tensor] = {}
    for row in range(len(rows)):
        documents = rows.index.pieces(np.array([row])).documents.tolist()
        sums_by_document |= zip(documents, sums_alone(model, rows.__getitems__([row])), strict=True)
    return torch.stack([sums_by_document[document] for document in sorted(sums_by_document)]).numpy()


def without_reference(tokens: Path, copy: Path) -> Path:
    """Copy a token dataset without the reference log-probabilities that other runs have written."""
    return Path(shutil.copytree(tokens, copy, ignore=shutil.ignore_patterns("reference")))


def stored_values(tokens: Path, ignored: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """Return the log-probabilities of the only reference besides ``ignored`` of a token dataset, by split."""
    (folder,) = (folder for folder in (tokens / "reference").iterdir() if folder.name not in ignored)
    return {file.stem: np.load(file) for file in folder.glob("*.npy")}


@pytest.mark.numerical
@pytest.mark.parametrize("name", ARGUMENTS)
def test_loss_and_gradient_are_those_of_each_answer_alone_by_full_logits(
    name: str, model_dir: Path, packed: Path
) -> None:
    arguments = ARGUMENTS[name]
    objective = Preference(arguments)
    batch = open_dataset(str(packed)).train.__getitems__([0, 1, 2])
    reference = torch.randn(batch.num_pairs, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) - 30
    batch = replace(batch, reference=reference)

    # the loss of packed pairs, computed in the head
    model = LlamaForCausalLM.from_pretrained(model_dir).eval()
    assert compute_loss_in_head(model)
    loss = objective.loss(model, batch)
    loss.total.backward()

    # a family whose head is left alone has the same
    plain = LlamaForCausalLM.from_pretrained(model_dir).eval()
    assert objective.loss(plain, batch).total.item() == pytest.approx(loss.total.item(), rel=1e-6)

    # so has the formula with the log-probabilities of each answer alone
    sums = sums_alone(plain, batch)
    num_tokens = answer_lengths(batch)
    if not arguments.needs_reference:
        reference = torch.zeros_like(reference)
    losses = LOSSES[arguments.objective](Pairs(*sums.T, *reference.T, *num_tokens.T), arguments)
    losses = losses - arguments.sft_weight * sums[:, 0] / num_tokens[:, 0]
    losses.sum().backward()
    assert batch.pieces is not None
    assert loss.piece_losses is not None
    torch.testing.assert_close(loss.piece_losses, losses.detach(), rtol=1e-5, atol=1e-6)
    losses_by_source = sum_by_source(loss.piece_losses, batch.pieces.sources, 2)
    assert losses_by_source.sum().item() == pytest.approx(float(loss.total.detach()), rel=1e-12)

    # and the same gradient
    for (weight_name, weight), plain_weight in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert weight.grad is not None
        assert plain_weight.grad is not None
        difference = (weight.grad - plain_weight.grad).norm() / plain_weight.grad.norm()
        assert difference < 1e-5, (weight_name, difference)


def answer_lengths(batch: Batch) -> torch.Tensor:
    """Return the number of supervised tokens of both answers of each pair, fp64 [P, 2]."""
    assert batch.documents is not None
    labels_by_answer = batch.labels.flatten().tensor_split(batch.documents.borders[1:-1].tolist())
    lengths = [int((labels != -100).sum()) for labels in labels_by_answer]
    return torch.tensor(lengths, dtype=torch.float64).view(-1, 2)


def test_a_rank_without_rows_takes_part_in_the_backward_pass(model_dir: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(model_dir)
    compute_loss_in_head(model)
    empty = Batch(torch.zeros(1, 2, dtype=torch.int64), torch.full((1, 2), -100))
    loss = Preference(ARGUMENTS["orpo"]).loss(model, empty)
    loss.total.backward()
    assert loss.total.item() == 0
    assert loss.piece_losses is None
    assert not any(weight.grad.any() for weight in model.parameters() if weight.grad is not None)


def argv(model: Path, tokens: Path, run: Path, **options: object) -> list[str]:
    return training_argv(model, tokens, run, **({"objective": "dpo"} | options))


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, forked_runs: ForkedRuns, model_dir: Path, packed: Path) -> Path:
    """A run on packed pairs by one process."""
    run = tmp_path_factory.mktemp("straight") / "run"
    forked_runs.start(argv(model_dir, packed, run, **whole_windows(packed, 1, 2)), 1).finish()
    return run


@pytest.mark.numerical
def test_the_first_loss_is_ln_2_and_the_reward_0(straight: Path, reward_rounding: float) -> None:
    start, first, *_ = read_table(straight)
    for row, split in ((start, "val"), (first, "train")):
        assert float(row[f"{split}_loss"]) == pytest.approx(math.log(2), abs=reward_rounding)
        assert float(row[f"{split}_margin"]) == pytest.approx(0, abs=reward_rounding)
    assert float(read_table(straight)[-1]["train_loss"]) < 0.65


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
    # given a run with another layout of the rows, other ranks or other micro-batches
    tokens = without_reference(request.getfixturevalue(layout), tmp_path / "tokens")
    num_data_ranks = ranks // math.prod(options.values())
    windows = whole_windows(tokens, num_data_ranks, rows)
    settings = {"parallelism": parallelism, "devices": ranks, **options, **windows}
    forked_runs.start(argv(model_dir, tokens, tmp_path / "run", **settings), ranks).finish()

    # then it has the same figures
    for row, expected_row in zip(read_table(tmp_path / "run"), read_table(straight), strict=True):
        for column, cell in expected_row.items():
            if column not in COMPARED_COLUMNS and not column.startswith(("train_loss/", "val_")):
                continue
            if int(row["step"]) <= 1 and ("ties" in column or "accuracy" in column):
                continue  # the policy still is the reference: rounding decides which of two rewards of 0 is larger
            expected = float(cell or "nan")
            tolerated = pytest.approx(expected, rel=rounding, abs=reward_rounding, nan_ok=True)
            assert float(row[column] or "nan") == tolerated, column

    # and has stored the log-probabilities of each answer alone
    dataset = open_dataset(str(tokens))
    assert dataset.validation is not None
    stored = stored_values(tokens)
    model = LlamaForCausalLM.from_pretrained(model_dir).eval()
    np.testing.assert_allclose(stored["train"], plain_values(model, dataset.train), rtol=rounding)
    np.testing.assert_allclose(stored["validation"], plain_values(model, dataset.validation), rtol=rounding)


def test_killed_run_whose_reference_is_deleted_resumes_bit_for_bit(
    forked_runs: ForkedRuns, tmp_path: Path, model_dir: Path, packed: Path, straight: Path
) -> None:
    # given a run that is killed at step 3, and whose reference is deleted
    tokens = without_reference(packed, tmp_path / "tokens")
    run = tmp_path / "run"
    words = argv(model_dir, tokens, run, **whole_windows(tokens, 1, 2))
    kill = short_runs.at_point("os.kill(os.getpid(), signal.SIGKILL)", 3, "OPTIMIZER", ranks=(0,))
    assert forked_runs.start(words, 1, before=kill).wait() == [-9]
    assert short_runs.saved_steps(run)[-1] in (1, 2)
    (reference,) = (tokens / "reference").iterdir()
    content = (reference / "train.npy").read_bytes()
    shutil.rmtree(tokens / "reference")
    # when it is resumed
    forked_runs.start([*words, "--resume", "true"], 1).finish()
    # then it writes the same reference, and ends as one that was not killed
    assert (reference / "train.npy").read_bytes() == content
    assert short_runs.metrics(run) == short_runs.metrics(straight)
    weights = Path("checkpoints", "step-00000003", "model.safetensors")
    assert (run / weights).read_bytes() == (straight / weights).read_bytes()


def test_a_reference_of_something_else_is_refused_by_name(
    forked_runs: ForkedRuns, tmp_path: Path, model_dir: Path, packed: Path, straight: Path
) -> None:
    del straight  # has written the reference
    tokens = Path(shutil.copytree(packed, tmp_path / "tokens"))
    (folder,) = (tokens / "reference").iterdir()
    content = json.loads((folder / "reference.json").read_text())
    assert content["made_of"]["dtype"] == "32-true"
    for ingredient in ("model", "dtype", "token dataset", "attention"):
        changed = content | {"made_of": content["made_of"] | {ingredient: "another"}}
        (folder / "reference.json").write_text(json.dumps(changed))
        run = forked_runs.start(argv(model_dir, tokens, tmp_path / "run"), 1)
        assert run.wait() == [2]
        assert f"reference.json: computed with a different {ingredient}" in run.stderr()
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
    start, first, *_ = read_table(tmp_path / "run")
    assert float(start["val_loss"]) == pytest.approx(math.log(2), abs=reward_rounding)
    assert abs(float(first["train_loss"]) - math.log(2)) > 2 * reward_rounding
    # other tests expect one reference
    for reference in (packed / "reference").iterdir():
        if str(model) in (reference / "reference.json").read_text():
            shutil.rmtree(reference)


@pytest.fixture(scope="module")
def adapted(
    tmp_path_factory: pytest.TempPathFactory, forked_runs: ForkedRuns, model_dir: Path, packed: Path, straight: Path
) -> Path:
    """A run with an adapter, after the run of all weights has written the reference."""
    del straight
    run = tmp_path_factory.mktemp("adapted") / "run"
    windows = whole_windows(packed, 1, 2)
    started = forked_runs.start(argv(model_dir, packed, run, **windows, adapter="lora", lora_rank=4, lr=3e-2), 1)
    started.finish()
    assert "reference log-probabilities of" not in started.stdout()
    return run


def test_the_reference_of_an_adapter_is_its_base(
    adapted: Path, straight: Path, packed: Path, reward_rounding: float
) -> None:
    assert len(list((packed / "reference").iterdir())) == 1  # the one of the run of all weights is read
    start, first, *_ = read_table(adapted)
    assert float(start["val_loss"]) == float(read_table(straight)[0]["val_loss"])
    assert float(first["train_loss"]) == pytest.approx(math.log(2), abs=reward_rounding)  # B of the adapter is 0


def save_peft_adapter(folder: Path, model_dir: Path) -> Any:
    """Save an adapter with peft whose matrices are not 0, and return it with its base."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, r=4, lora_alpha=8, lora_dropout=0.5)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model: Any = peft.get_peft_model(LlamaForCausalLM.from_pretrained(model_dir), config)
    model.save_pretrained(str(folder))
    return model


def save_in_hub_cache(folder: Path, model_dir: Path) -> Any:
    """Save another model as the hub's client has it in its cache, as ``some/model``, and return it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(model_dir))
    repository = folder / "models--some--model"
    model.save_pretrained(repository / "snapshots" / "0123")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123")
    return model


def load_in_4_bits(model_dir: Path) -> Any:
    """Return the model with what 4 bits stand for as the weights of its decoder's linear layers.

    The layer of bitsandbytes is no reference: in evaluation it multiplies in bfloat16, whatever its compute type, on
    processors that have instructions for that (AVX512-BF16). This moves a log-probability by 1e-4 of itself.
    """
    model = LlamaForCausalLM.from_pretrained(model_dir)
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            codes, state = quantize_4bit(module.weight.data, blocksize=64, quant_type="nf4")
            module.weight.data = dequantize_4bit(codes, state)
    return model


OTHER_MODELS = ["checkpoint", "adapter of a run", "adapter of peft", "hub"]
"""Kinds of a reference that is another model than the one that training begins with."""


@dataclass(frozen=True)
class ReferenceCase:
    """A run with a reference."""

    options: dict[str, object]
    """Arguments with which the run has the reference."""
    recorded_location: str
    """Where the reference is, as trainer.json says."""
    reference: Any
    policy: Any
    """The model that training begins with."""


def reference_case(kind: str, folder: Path, model_dir: Path, straight: Path, adapted: Path) -> ReferenceCase:
    """Return a case, for which files may be written into ``folder``."""
    base = LlamaForCausalLM.from_pretrained(model_dir)
    full_checkpoint = straight / "checkpoints" / "step-00000003"
    adapter_checkpoint = adapted / "checkpoints" / "step-00000003"
    adapter_dir = folder / "reference"
    if kind == "checkpoint":
        reference = LlamaForCausalLM.from_pretrained(full_checkpoint)
        return ReferenceCase({"reference": straight / "latest"}, str(full_checkpoint), reference, policy=base)
    if kind == "adapter of a run":
        own_base = LlamaForCausalLM.from_pretrained(model_dir)  # peft changes it
        with_adapter = peft.PeftModel.from_pretrained(own_base, adapter_checkpoint)
        return ReferenceCase({"reference": adapter_checkpoint}, str(adapter_checkpoint), with_adapter, policy=base)
    if kind == "adapter of peft":
        with_adapter = save_peft_adapter(adapter_dir, model_dir)
        return ReferenceCase({"reference": adapter_dir}, str(adapter_dir), with_adapter, policy=base)
    if kind == "hub":
        cached = save_in_hub_cache(folder / "hub", model_dir)
        return ReferenceCase({"reference": "some/model"}, "some/model", cached, policy=base)

    # without --reference, it is the model that training begins with
    if kind == "checkpoint to begin with":
        start = LlamaForCausalLM.from_pretrained(full_checkpoint)
        return ReferenceCase({"model_name": straight / "latest"}, str(full_checkpoint), start, policy=start)
    if kind == "adapter to begin with":
        with_adapter = save_peft_adapter(adapter_dir, model_dir)
        return ReferenceCase({"init_adapter": adapter_dir}, str(adapter_dir), with_adapter, policy=with_adapter)
    assert kind == "4 bits"
    in_4_bits = load_in_4_bits(model_dir)
    return ReferenceCase({"adapter": "lora", "base_weights": "nf4"}, str(model_dir), in_4_bits, policy=in_4_bits)


@pytest.mark.numerical
@pytest.mark.parametrize("kind", [*OTHER_MODELS, "checkpoint to begin with", "adapter to begin with", "4 bits"])
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
    # given a run of one step with the reference; the token dataset has those of other runs already
    case = reference_case(kind, tmp_path, model_dir, straight, adapted)
    tokens = Path(shutil.copytree(packed, tmp_path / "tokens"))
    earlier_references = [folder.name for folder in (tokens / "reference").iterdir()]
    beta = 0.5
    words = argv(
        model_dir,
        tokens,
        tmp_path / "run",
        **case.options,
        **whole_windows(packed, 1, 2),
        best_by="accuracy",
        max_step=1,
        label_smoothing=0.1,
        sft_weight=0.2,
        dpo_beta=beta,
    )
    use_cache = f"from huggingface_hub import constants; constants.HF_HUB_CACHE = {str(tmp_path / 'hub')!r}"
    forked_runs.start(words, 1, before=use_cache).finish()

    # then the log-probabilities of the reference are those of that model
    rows = open_dataset(str(tokens)).train
    expected = plain_values(case.reference.eval(), rows)
    np.testing.assert_allclose(stored_values(tokens, earlier_references)["train"], expected, rtol=rounding)
    assert np.abs(expected).max() < LARGEST_LOG_PROBABILITY

    # and the first margin is that of the policy beyond the reference, 0 if they are the same model
    ratios = plain_values(case.policy.eval(), rows) - expected
    margin = beta * (ratios[:, 0] - ratios[:, 1]).mean()
    assert bool(margin) == (kind in OTHER_MODELS)
    tolerated = pytest.approx(margin, rel=1e-4, abs=beta * rounding * LARGEST_LOG_PROBABILITY)
    assert float(read_table(tmp_path / "run")[1]["train_margin"]) == tolerated

    # and the checkpoint says which model it is
    saved = json.loads((tmp_path / "run" / "checkpoints" / "step-00000001" / "trainer.json").read_text())
    assert saved["reference"]["location"] == case.recorded_location
    assert saved["arguments"]["best_by"] == "accuracy"
    if kind == "checkpoint":
        check_resumes_with_its_reference(forked_runs, words, straight / "checkpoints" / "step-00000003")


def check_resumes_with_its_reference(forked_runs: ForkedRuns, words: list[str], reference: Path) -> None:
    """Resume a run without its ``--reference``, and with another path of the same checkpoint."""
    index = words.index("--reference")
    without_reference = [*words[:index], *words[index + 2 :]]
    other_path = str(reference.parent / ".." / reference.parent.name / reference.name)
    with_other_path = [*without_reference, "--reference", other_path]
    # of an argument that is given twice, the last value counts
    for resumed_words in ([*without_reference, "--max_step", "2"], [*with_other_path, "--max_step", "3"]):
        resumed = forked_runs.start([*resumed_words, "--resume", "true"], 1)
        resumed.finish()
        changes = resumed.stdout().partition("changed since")[2].partition("\n")[0]
        assert "reference" not in changes


def test_eval_only_compares_with_the_reference_that_the_run_began_with(
    forked_runs: ForkedRuns, tmp_path: Path, model_dir: Path, packed: Path, straight: Path
) -> None:
    tokens = without_reference(packed, tmp_path / "tokens")
    run = tmp_path / "run"
    settings = {"adapter": "dora", "lora_rank": 4, "max_step": 1, **whole_windows(packed, 1, 2)}
    forked_runs.start(argv(model_dir, tokens, run, reference=straight / "latest", **settings), 1).finish()
    values_of_run = stored_values(tokens)["validation"]
    shutil.rmtree(tokens / "reference")
    options = {"eval_only": "true", "checkpoint": run / "latest", **settings}
    forked_runs.start(argv(model_dir, tokens, tmp_path / "evaluated", **options), 1).finish()
    np.testing.assert_array_equal(stored_values(tokens)["validation"], values_of_run)


@pytest.mark.numerical
def test_an_adapter_that_was_trained_in_4_bits_is_a_reference_in_4_bits(
    forked_runs_in_4_bits: ForkedRuns, tmp_path: Path, model_dir: Path, packed: Path, rounding: float
) -> None:
    windows = whole_windows(packed, 1, 2)
    # given an adapter that was trained in 4 bits
    in_4_bits = {"lora_rank": 4, "lr": 3e-2, "base_weights": "nf4", "objective": "orpo", "max_step": 2}
    words = argv(model_dir, packed, tmp_path / "first", **in_4_bits, **windows)
    forked_runs_in_4_bits.start(words, 1).finish()
    adapter = tmp_path / "first" / "checkpoints" / "step-00000002"
    # when it is the reference of a run in full precision
    tokens = without_reference(packed, tmp_path / "tokens")
    words = argv(model_dir, tokens, tmp_path / "run", reference=adapter, max_step=1, **windows)
    forked_runs_in_4_bits.start(words, 1).finish()
    # then its log-probabilities are those of the adapter on 4 bits
    reference = peft.PeftModel.from_pretrained(load_in_4_bits(model_dir), adapter).eval()
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
    save_peft_adapter(tmp_path / "peft", model_dir)
    shutil.copytree(tmp_path / "peft", tmp_path / "pickled")
    (tmp_path / "pickled" / "adapter_model.safetensors").rename(tmp_path / "pickled" / "adapter_model.bin")
    two = ("--parallelism", "fsdp2", "--tensor_parallel_size", "2", "--devices", "2")
    for reference, options, fault in (
        ("/nowhere", (), "--reference /nowhere: no such folder"),
        ("some/other", (), "--reference some/other: no such folder, and the hub does not provide it"),
        ("nothing", (), "nothing: the folder has no config.json"),
        ("empty", (), "empty: it has no weights"),
        ("wide", (), f"wide: it has {config['vocab_size'] + 1} tokens, but {model_dir} has {config['vocab_size']}"),
        ("short", (), "short: it has 64 positions, but the rows have"),
        ("pickled", (), "pickled: it has no adapter_model.safetensors"),
        ("peft", two, "--tensor_parallel_size does not work with an adapter as --reference"),
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
    self_check_words = argv(model_dir, packed, tmp_path / "check", precision=precision, self_check="true")
    forked_runs.start(self_check_words).finish()
    self_check = json.loads((tmp_path / "check" / "self_check.json").read_text())
    assert self_check["faults"] == []
    assert [figure["loss"] for figure in self_check["figures"]] == pytest.approx([math.log(2)] * 5, abs=1e-5)

    eval_words = argv(model_dir, packed, tmp_path / "eval", precision=precision, eval_only="true", adapter="dora")
    forked_runs.start(eval_words).finish()
    evaluation = json.loads((tmp_path / "eval" / "evaluation.json").read_text())
    assert evaluation["loss"] == pytest.approx(math.log(2), abs=reward_rounding)
    assert evaluation["margin"] == pytest.approx(0, abs=reward_rounding)
    assert sum(source["num_pairs"] for source in evaluation["sources"].values()) == evaluation["num_pairs"]


def test_pairs_of_two_datasets_train_in_shares_with_best_by_accuracy(
    forked_runs: ForkedRuns, tmp_path: Path, model_dir: Path, sources: list[Path]
) -> None:
    folders = [tokenize(tmp_path / source.stem, model_dir, [source]) for source in sources]
    words = argv(
        model_dir,
        folders[0],
        tmp_path / "run",
        train_data_dir=folders,
        token_shares=[0.5, 0.5],
        objective="ipo",
        best_by="accuracy",
        early_stopping="margin:9",
        total_batch_size=4,
        eval_step_interval=1,
    )
    print_builds = """
from fabric_train.training import reference
build = reference.set_up_model
reference.set_up_model = lambda *words, **options: print("the reference is built") or build(*words, **options)
"""
    started = forked_runs.start(words, before=print_builds)
    started.finish()

    # one reference is built, for both token datasets
    assert started.stdout().count("the reference is built") == 1
    for folder in folders:
        assert len(list((folder / "reference").iterdir())) == 1

    # each source has its figures
    rows = read_table(tmp_path / "run")
    for source in sources:
        assert float(rows[1][f"train_loss/{source}"]) > 0  # the last window of an epoch has one row
        assert all(row[f"val_margin/{source}"] for row in rows)

    # and the best checkpoint is that with the highest accuracy
    accuracy_by_step = {int(row["step"]): float(row["val_accuracy"]) for row in rows[1:]}
    best = find_checkpoint(tmp_path / "run" / "best")
    best_step = int(best.name.removeprefix("step-"))
    assert accuracy_by_step[best_step] == max(accuracy_by_step.values())


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
        ({"objective": "sft"}, "preference pairs, which --objective sft cannot train on"),
        ({"isolate_documents": "false"}, "leave out --isolate_documents false"),
        (
            {"objective": "simpo", "reference": "x"},
            "--reference only applies to --objective rl, dpo, ipo, apo_zero, dpop, kto, apo_zero_unpaired, not simpo",
        ),
        (
            {"objective": "sft", "dpo_beta": 0.2},
            "--dpo_beta only applies to --objective dpo, ipo, simpo, orpo, apo_zero, dpop",
        ),
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
