"""KTO: its formula, and runs on unpaired answers that do not depend on packing, ranks or interruptions."""

import math
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, LlamaForCausalLM

from fabric_train.arguments import PreferenceArguments, TrainArguments, parse
from fabric_train.cli.errors import InputError
from fabric_train.data.batch import Batch
from fabric_train.data.token_dataset import open_dataset
from fabric_train.data.unpaired_batch import ANSWER, MISMATCHED, select_sequences
from fabric_train.model.lm_head_loss import compute_loss_in_head
from fabric_train.preflight.prepare import prepare
from fabric_train.training.kto import KTO, kto_losses
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
    write_unpaired_source,
)
from tests.support.rounding import num_sums_of_loss, rounding_tolerance

ARGUMENTS = PreferenceArguments(objective="kto", dpo_beta=0.3, kto_desirable_weight=1.5, kto_undesirable_weight=0.8)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("kl", [0.0, 0.7])
def test_the_loss_is_that_of_the_paper(kl: float) -> None:
    log_ratios = [1.2, -0.4, 3.0, -2.5]
    labels = [True, True, False, False]
    losses = kto_losses(
        torch.tensor(log_ratios, dtype=torch.float64),
        torch.tensor(labels),
        torch.tensor(kl, dtype=torch.float64),
        ARGUMENTS,
    )
    expected = []
    for log_ratio, label in zip(log_ratios, labels, strict=True):
        if label:
            expected.append(1.5 * (1 - sigmoid(0.3 * (log_ratio - kl))))
        else:
            expected.append(0.8 * (1 - sigmoid(0.3 * (kl - log_ratio))))
    assert losses.tolist() == pytest.approx(expected, rel=1e-12)


def test_metrics_are_means_over_one_kind_of_answers() -> None:
    objective = KTO(ARGUMENTS)
    # two desirable answers with rewards 1 and 3, one undesirable one with -3, as sums over all three
    sums = {"reward_desirable": 4.0, "reward_undesirable": -3.0, "margin": 0.0, "kl": 1.5}
    sums |= {"desirable": 2.0, "undesirable": 1.0, "logp_desirable": -8.0, "logp_undesirable": -9.0}
    means = [sums[name] / 3 for name in objective.metric_names]
    metrics = dict(zip(objective.metric_names, objective.finish_metrics(means, 3), strict=True))
    expected = {"reward_desirable": 2.0, "reward_undesirable": -3.0, "margin": 5.0, "kl": 0.5}
    expected |= {"desirable": 2, "undesirable": 1, "logp_desirable": -4.0, "logp_undesirable": -9.0}
    assert metrics == pytest.approx(expected)
    # a step without undesirable answers has no mean of them
    means = [0.0 if "undesirable" in name else mean for name, mean in zip(objective.metric_names, means, strict=True)]
    metrics = dict(zip(objective.metric_names, objective.finish_metrics(means, 3), strict=True))
    assert (metrics["reward_undesirable"], metrics["margin"], metrics["undesirable"]) == (None, None, 0)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("sources")
    a = write_unpaired_source(folder / "a.jsonl", range(12))
    b = write_unpaired_source(folder / "b.jsonl", range(40, 47))
    return [a, b]


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
    """How much a reward may differ with the default beta: it is beta times a difference of log-probabilities."""
    return PreferenceArguments().dpo_beta * rounding * LARGEST_LOG_PROBABILITY


def log_probabilities(model: Any, batch: Batch) -> torch.Tensor:
    """Return the log-probabilities of both answers of each document, [A, 2]: each sequence alone, by full logits."""
    assert batch.documents is not None
    ids = batch.input_ids.flatten()
    labels = batch.labels.flatten()
    sums = []
    for begin, end in pairwise(batch.documents.borders.tolist()):
        logits = model(input_ids=ids[None, begin:end]).logits[0, :-1]
        losses = F.cross_entropy(logits, labels[begin + 1 : end], reduction="none", ignore_index=-100)
        sums.append(-losses.double().sum())
    return torch.stack(sums).view(-1, 2)


@pytest.mark.numerical
@pytest.mark.parametrize("layout", ["packed", "one_a_row"])
def test_loss_and_gradient_are_those_of_each_answer_alone_by_full_logits(
    request: pytest.FixtureRequest, model_dir: Path, layout: str
) -> None:
    batch = open_dataset(str(request.getfixturevalue(layout))).train.__getitems__([0, 1, 2])
    model, plain = (LlamaForCausalLM.from_pretrained(model_dir).eval() for _ in range(2))
    assert compute_loss_in_head(model)
    logps = log_probabilities(plain, batch)
    noise = torch.randn(logps.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    reference = logps.detach() - noise
    batch = replace(batch, reference=reference)
    assert batch.is_desirable is not None

    # by hand: the mean log-ratio of the answers of other rows, which has no gradient, is not below 0
    kl = noise[:, 1].mean().clamp(min=0)
    losses = kto_losses(logps[:, 0] - reference[:, 0], batch.is_desirable, kl, ARGUMENTS)
    losses.sum().backward()

    objective = KTO(ARGUMENTS)
    answers = replace(select_sequences(batch, ANSWER), kl=kl)
    loss = objective.loss(model, answers)
    loss.total.backward()
    assert objective.count(answers) == len(losses) == len(logps)
    torch.testing.assert_close(loss.piece_losses, losses.detach(), rtol=1e-5, atol=1e-6)
    for weight, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert weight.grad is not None
        assert other.grad is not None
        assert (weight.grad - other.grad).norm() / other.grad.norm() < 1e-5
    mismatched = select_sequences(batch, MISMATCHED)
    assert mismatched.reference is not None
    torch.testing.assert_close(mismatched.reference, reference[:, 1])
    # each sequence is in one of both batches, and nothing else is
    num_supervised = [int((part.labels != -100).sum()) for part in (batch, answers, mismatched)]
    assert num_supervised[0] == num_supervised[1] + num_supervised[2]
    assert sorted((*answers.lengths, *mismatched.lengths)) == sorted(batch.lengths)


def test_a_rank_without_rows_takes_part_in_the_backward_pass(model_dir: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(model_dir)
    compute_loss_in_head(model)
    empty = Batch(torch.zeros(1, 2, dtype=torch.int64), torch.full((1, 2), -100))
    assert select_sequences(empty, MISMATCHED) is empty
    loss = KTO(ARGUMENTS).loss(model, empty)
    loss.total.backward()
    assert (loss.total.item(), loss.piece_losses) == (0, None)


def argv(model: Path, tokens: Path, run: Path, **options: object) -> list[str]:
    kto: dict[str, object] = {"objective": "kto", "kto_undesirable_weight": 1.5}
    return training_argv(model, tokens, run, **(kto | options))


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, forked_runs: ForkedRuns, model_dir: Path, packed: Path) -> Path:
    """A run on packed answers by one process."""
    run = tmp_path_factory.mktemp("straight") / "run"
    forked_runs.start(argv(model_dir, packed, run, **whole_windows(packed, 1, 2)), 1).finish()
    return run


@pytest.mark.numerical
def test_first_loss_is_half_the_mean_weight_and_the_divergence_grows(
    straight: Path, packed: Path, reward_rounding: float
) -> None:
    start, first, *_, last = read_table(straight)
    dataset = open_dataset(str(packed))
    assert dataset.manifest is not None
    for row, prefix, split in ((start, "val", "validation"), (first, "train", "train")):
        ledger = dataset.manifest.ledger.splits[split].unpaired
        assert ledger is not None
        num_answers = ledger.desirable + ledger.undesirable
        mean_weight = (ledger.desirable + 1.5 * ledger.undesirable) / num_answers
        assert float(row[f"{prefix}_loss"]) == pytest.approx(mean_weight / 2, abs=reward_rounding)
        assert float(row[f"{prefix}_kl"]) == pytest.approx(0, abs=10 * reward_rounding)
        assert (float(row[f"{prefix}_desirable"]), float(row[f"{prefix}_undesirable"])) == (
            ledger.desirable,
            ledger.undesirable,
        )
    assert float(last["train_loss"]) < float(first["train_loss"]) - 0.02
    assert float(last["train_kl"]) > 0.1
    assert float(last["train_margin"]) == pytest.approx(
        float(last["train_reward_desirable"]) - float(last["train_reward_undesirable"]), rel=1e-9
    )


@pytest.mark.numerical
@pytest.mark.parametrize(
    ("layout", "ranks", "parallelism", "rows", "options"),
    [
        ("packed", 3, "fsdp", 1, {}),
        ("packed", 2, "fsdp2", 2, {"tensor_parallel_size": 2}),
        ("one_a_row", 2, "fsdp2", 2, {}),
        ("one_a_row", 2, "ddp", 3, {}),
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
    tokens = request.getfixturevalue(layout)
    window = whole_windows(tokens, ranks // math.prod(options.values()), rows)
    words = argv(model_dir, tokens, tmp_path / "run", parallelism=parallelism, devices=ranks, **options, **window)
    forked_runs.start(words, ranks).finish()
    for row, other in zip(read_table(straight), read_table(tmp_path / "run"), strict=True):
        columns = [name for name in row if name.startswith(("train_", "val_")) or name == "grad_norm"]
        values = [float(other[name] or "nan") for name in columns]
        expected = [float(row[name] or "nan") for name in columns]
        # the divergence is a difference of log-probabilities as a reward is, without the factor of beta
        tolerated = pytest.approx(expected, rel=rounding, abs=10 * reward_rounding, nan_ok=True)
        assert values == tolerated, dict(zip(columns, values, strict=True))


def test_a_killed_run_whose_reference_is_deleted_goes_on_bit_for_bit(
    forked_runs: ForkedRuns, tmp_path: Path, model_dir: Path, packed: Path, straight: Path
) -> None:
    tokens = Path(shutil.copytree(packed, tmp_path / "tokens"))
    run = tmp_path / "run"
    words = argv(model_dir, tokens, run, **whole_windows(tokens, 1, 2))
    kill = short_runs.at_point("os.kill(os.getpid(), signal.SIGKILL)", 3, "OPTIMIZER", ranks=(0,))
    assert forked_runs.start(words, 1, before=kill).wait() == [-9]
    shutil.rmtree(tokens / "reference")
    forked_runs.start([*words, "--resume", "true"], 1).finish()
    assert short_runs.metrics(run) == short_runs.metrics(straight)
    weights_file = Path("checkpoints", "step-00000003", "model.safetensors")
    assert (run / weights_file).read_bytes() == (straight / weights_file).read_bytes()


def test_an_adapter_begins_at_its_base_and_apo_zero_has_no_divergence(
    forked_runs: ForkedRuns, tmp_path: Path, model_dir: Path, packed: Path, straight: Path, reward_rounding: float
) -> None:
    options = {**whole_windows(packed, 1, 2), "adapter": "lora", "lora_rank": 4, "objective": "apo_zero_unpaired"}
    forked_runs.start(argv(model_dir, packed, tmp_path / "run", **options), 1).finish()
    start, first, *_ = read_table(tmp_path / "run")
    assert float(start["val_loss"]) == float(read_table(straight)[0]["val_loss"])
    assert float(first["train_loss"]) == pytest.approx(
        float(read_table(straight)[1]["train_loss"]), abs=reward_rounding
    )
    assert {row["train_kl"] for row in read_table(tmp_path / "run")[1:]} == {"0.0"}


def test_a_self_check_agrees_with_itself(
    forked_runs: ForkedRuns, tmp_path: Path, model_dir: Path, packed: Path
) -> None:
    run = forked_runs.start(argv(model_dir, packed, tmp_path / "run", self_check="true"), 1)
    run.finish()
    assert "answers alone" in run.stdout()


def test_other_documents_and_objectives_are_refused_with_the_remedy(
    tmp_path: Path, model_dir: Path, packed: Path
) -> None:
    pairs = tokenize(tmp_path / "pairs", model_dir, [write_source(tmp_path / "pairs.jsonl", range(8))])
    cases: list[tuple[Path, dict[str, object], str]] = [
        (pairs, {}, "has preference pairs; give --objective dpo, or tokenize rows with an answer and a label"),
        (packed, {"objective": "dpo"}, "has unpaired answers; give --objective kto"),
        (packed, {"objective": "sft"}, "has unpaired answers, which --objective sft cannot train on; give --objecti"),
        (packed, {"isolate_documents": "false"}, "leave out --isolate_documents false"),
        (
            packed,
            {"label_smoothing": 0.1},
            "--label_smoothing only applies to --objective dpo, simpo, not kto; leave out --label_smoothing",
        ),
    ]
    for tokens, options, reason in cases:
        if "objective" in options:
            options["kto_undesirable_weight"] = None  # of kto alone
        with pytest.raises(InputError) as raised:
            prepare(parse(TrainArguments, argv(model_dir, tokens, tmp_path / "run", **options)))
        (fault,) = raised.value.faults
        assert reason in fault
