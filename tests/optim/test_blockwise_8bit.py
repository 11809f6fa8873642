"""Moments in 8 bits: near what they stand for, saved and restored without a change, and good enough to learn with."""

from pathlib import Path

import pytest
import torch
from torch import nn

from fabric_train.arguments import TrainingArguments
from fabric_train.optim.adamw import LowPrecisionAdamW
from fabric_train.optim.blockwise_8bit import BLOCK, Blockwise8Bit
from fabric_train.optim.optimizer import build_optimizer
from tests.support.forked_runs import ForkedRuns
from tests.support.unequal_rows import argv, metrics, write_model, write_rows

CPU = torch.device("cpu")


def numbers(count: int, signed: bool) -> torch.Tensor:
    """Of very different sizes from block to block, with a block of zeros, and one in which all but one is small."""
    random = torch.Generator().manual_seed(count)
    values = torch.randn(count, generator=random) * 10.0 ** torch.randint(-20, 3, (count,), generator=random)
    values[BLOCK : 2 * BLOCK] = 0
    values[:BLOCK] = torch.randn(BLOCK, generator=random)[:count]
    return values if signed else values.abs()


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("count", [1, BLOCK, 5 * BLOCK + 17])
def test_what_is_read_and_written_back_stays_as_it_is(signed: bool, count: int) -> None:
    kept = Blockwise8Bit(count, signed=signed, device=CPU)
    assert torch.equal(kept.read(0, count), torch.zeros(count))
    kept.write(0, numbers(count, signed))
    read = kept.read(0, count)
    again = Blockwise8Bit(count, signed=signed, device=CPU)
    again.write(0, read)
    assert torch.equal(again.read(0, count), read)
    if count > 2 * BLOCK:  # in pieces of whole blocks
        assert torch.equal(torch.cat([kept.read(0, 2 * BLOCK), kept.read(2 * BLOCK, count - 2 * BLOCK)]), read)
        again.write(2 * BLOCK, read[2 * BLOCK :])
        assert torch.equal(again.read(0, count), read)


@pytest.mark.parametrize(("signed", "largest"), [(True, 0.02), (False, 0.01)])
def test_numbers_are_kept_within_a_small_share_of_their_blocks_largest(signed: bool, largest: float) -> None:
    count = 300 * BLOCK
    values = numbers(count, signed)
    kept = Blockwise8Bit(count, signed=signed, device=CPU)
    kept.write(0, values)
    read = kept.read(0, count)
    blocks = values.view(-1, BLOCK)
    extremes = blocks.abs().amax(1)
    assert torch.equal(read.view(-1, BLOCK).abs().amax(1), extremes)
    assert bool(((read - values).view(-1, BLOCK).abs() <= largest * extremes[:, None]).all())
    first = values[:BLOCK]  # of one size: not only the largest is near
    ordinary = first.abs() > 0.1 * first.abs().max()
    assert float(((read[:BLOCK] - first).abs() / first.abs())[ordinary].max()) < 0.1


def test_matrices_are_kept_in_8_bits_and_vectors_in_fp32() -> None:
    parameters = {"matrix": nn.Parameter(torch.ones(40, 50)), "vector": nn.Parameter(torch.ones(50))}
    optimizer = build_optimizer(parameters.items(), {"matrix"}, TrainingArguments(optimizer_states="8bit"))
    assert isinstance(optimizer, LowPrecisionAdamW)
    for parameter in parameters.values():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    kept = {name: optimizer.state[parameter] for name, parameter in parameters.items()}
    assert all(isinstance(kept["matrix"][key], Blockwise8Bit) for key in ("exp_avg", "exp_avg_sq"))
    assert all(kept["vector"][key].dtype == torch.float32 for key in ("exp_avg", "exp_avg_sq"))
    for name, parameter in parameters.items():  # after the first step all is as it would be in fp32
        moments = optimizer.read_states(parameter)
        assert moments["exp_avg"].tolist() == pytest.approx([0.05] * parameter.numel()), name
        assert moments["exp_avg_sq"].tolist() == pytest.approx([0.0125] * parameter.numel()), name


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("eight") / "model")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("eight") / "tokens")


def losses(run: Path) -> list[float]:
    return [float(row["train_loss"]) for row in metrics(run)]


SHORT_RUN = {"lr_schedule": "constant", "max_step": 8, "micro_batch_size": 2}


@pytest.fixture(scope="module")
def exact_losses(
    tmp_path_factory: pytest.TempPathFactory, forked_runs: ForkedRuns, model: Path, tokens: Path
) -> list[float]:
    """The losses with states in fp32, which are the same under every strategy but for the last digits."""
    run = tmp_path_factory.mktemp("exact") / "run"
    forked_runs.start(argv(model, tokens, run, **SHORT_RUN, parallelism="single", devices=1), 1).finish()
    return losses(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallelism", "num_ranks", "kind"),
    [("single", 1, "full"), ("ddp", 2, "full"), ("fsdp", 2, "sharded"), ("fsdp2", 2, "full")],
)
def test_8bit_states_learn_as_fp32_does_and_resume_exactly(
    forked_runs: ForkedRuns,
    tmp_path: Path,
    model: Path,
    tokens: Path,
    exact_losses: list[float],
    parallelism: str,
    num_ranks: int,
    kind: str,
) -> None:
    quantized = {"parallelism": parallelism, "devices": num_ranks, "state_dict_type": kind, "optimizer_states": "8bit"}
    num_steps = 8 if num_ranks == 1 else 4
    quantized |= {**SHORT_RUN, "max_step": num_steps}
    exact = exact_losses[:num_steps]
    half = num_steps // 2
    line = argv(model, tokens, tmp_path / "whole", **quantized, save_step_interval=half)
    forked_runs.start(line, num_ranks).finish()
    checkpoint = tmp_path / "whole" / "checkpoints" / f"step-{half:08d}"
    line = argv(model, tokens, tmp_path / "resumed", **quantized, checkpoint=checkpoint)
    forked_runs.start(line, num_ranks).finish()
    assert losses(tmp_path / "resumed") == losses(tmp_path / "whole")[half:]
    assert losses(tmp_path / "whole") == pytest.approx(exact, rel=5e-3)
    assert losses(tmp_path / "whole") != pytest.approx(exact, rel=1e-6)
    if num_ranks == 1:
        return
    on_one_device = {**quantized, "parallelism": "single", "devices": 1, "checkpoint": checkpoint}
    forked_runs.start(argv(model, tokens, tmp_path / "other", **on_one_device), 1).finish()
    assert losses(tmp_path / "other") == pytest.approx(losses(tmp_path / "whole")[half:], rel=5e-3)
