"""Values in bfloat16 lose nothing on average, and their rounding knows nothing of ranks and restarts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning import Fabric
from safetensors.torch import load_file
from torch import nn

from fabric_train.arguments import TrainArguments, TrainingArguments, parse
from fabric_train.optim.adamw import AdamW, LowPrecisionAdamW
from fabric_train.optim.optimizer import build_optimizer
from fabric_train.optim.states import DeclaredStates
from fabric_train.optim.stochastic_rounding import LocalElements, random_bits, round_stochastically, salt
from fabric_train.training.build_run import set_up_optimizer
from tests.support.forked_runs import ForkedRuns
from tests.support.unequal_rows import argv, metrics, write_model, write_rows

BF16 = torch.bfloat16

# --------------------------------------------------------------------------------------------------- rounding


def element_indices(count: int, begin: int = 0) -> torch.Tensor:
    """Return the indices of ``count`` elements from ``begin`` on, which decide their random bits."""
    return LocalElements(begin, count, count).indices(0, count, torch.device("cpu"))


@pytest.mark.parametrize("value", [1.0, 1.001, -1.001, 3.14159, 1e-3, -7.7e-21, 1e-40, 0.0, 255.99])
def test_the_mean_of_many_roundings_is_the_value(value: float) -> None:
    # given many copies of a value
    count = 2**18
    exact = torch.tensor(value)  # in fp32
    rounded = exact.repeat(count)
    # when each is rounded with bits of its own
    round_stochastically(rounded, random_bits(element_indices(count), 1234) & 0xFFFF)
    # then each is one of the two numbers of bfloat16 next to it
    assert torch.equal(rounded.to(BF16).float(), rounded)
    neighbors = rounded.double().unique()
    nearest = exact.to(BF16).double()
    assert len(neighbors) <= 2
    assert nearest in neighbors
    spacing = float(neighbors.max() - neighbors.min())
    if float(nearest) != float(exact):
        assert spacing > 0
    # and the mean of n coins, each 0 or 1, is off by less than 5 / sqrt(4 n) but once in two million
    error = float(rounded.double().mean() - exact.double())
    assert abs(error) <= 5 * spacing / (4 * count) ** 0.5


def test_what_bfloat16_can_hold_stays_as_it_is() -> None:
    all_numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(BF16)
    finite_numbers = all_numbers[all_numbers.isfinite()]
    for key in range(3):
        rounded = finite_numbers.float()
        round_stochastically(rounded, random_bits(element_indices(len(rounded)), key) & 0xFFFF)
        # as bits, because 0.0 == -0.0
        assert torch.equal(rounded.to(BF16).view(torch.int16), finite_numbers.view(torch.int16))


@pytest.mark.parametrize("shift", [0, 16])
def test_both_halves_of_the_bits_are_uniform_and_independent(shift: int) -> None:
    count = 2**20
    indices = element_indices(count)
    for key in (0, 1, salt(0, "a"), salt(0, "b")):
        bits = random_bits(indices, key) >> shift & 0xFFFF
        next_key = random_bits(torch.ones((), dtype=torch.int32), key)
        bits_of_next_step = random_bits(indices, next_key) >> shift & 0xFFFF
        # alone, and in pairs with the element before and with the next step
        for paired_bits in (torch.zeros_like(bits), bits.roll(1), bits_of_next_step):
            # cells by the first four bits of both
            cells = (bits >> 12) * 16 + (paired_bits >> 12)
            cell_counts = torch.bincount(cells, minlength=256).double()
            cell_counts = cell_counts[cell_counts > 0]
            assert len(cell_counts) in (16, 256)
            # 16 cells or 256, of 4096 or more each: a standard deviation of 1.6 % or less
            share_of_mean = cell_counts * len(cell_counts) / count
            assert float((share_of_mean - 1).abs().max()) < 0.1
        assert len(random_bits(indices, key).unique()) == count  # a permutation of all numbers


def test_seeds_names_steps_and_elements_have_bits_of_their_own() -> None:
    salts = {salt(seed, name) for seed in range(20) for name in ("a.weight", "b.weight", "a.bias")}
    assert len(salts) == 20 * 3
    step_keys = random_bits(torch.arange(1000, dtype=torch.int32), salt(0, "a.weight"))
    assert len(step_keys.unique()) == 1000
    assert random_bits(element_indices(1), 7) != random_bits(element_indices(1, begin=1), 7)


def test_shard_has_the_random_numbers_of_its_elements_in_the_whole() -> None:
    cpu = torch.device("cpu")
    indices = torch.arange(7 * 6 * 5).reshape(7, 6, 5)
    # rows 2 to 4 are one run of 3 · 30 elements from 2 · 30 on
    rows = indices[2:5].flatten()
    assert torch.equal(LocalElements(60, 90, 90).indices(3, 80, cpu), rows[3:83].int())
    # columns 1 to 3 of them are runs of 3 · 5 elements, 30 apart, from 2 · 30 + 5 on
    columns = indices[2:5, 1:4].flatten()
    assert torch.equal(LocalElements(65, 15, 30).indices(4, 40, cpu), columns[4:44].int())
    # indices beyond the largest int32 go on from the smallest
    wrapped = LocalElements(2**31 - 2, 8, 8).indices(0, 8, cpu).tolist()
    assert wrapped == [2**31 - 2, 2**31 - 1, *range(-(2**31), -(2**31) + 6)]


# ------------------------------------------------------------------------------------------------ the optimizer


def optimizer_of(parameters: dict[str, nn.Parameter], **arguments: Any) -> DeclaredStates:
    """Return the optimizer of a run with these arguments; the parameter ``matrix`` decays."""
    return build_optimizer(parameters.items(), {"matrix"}, TrainingArguments(**arguments))


def train(weights: torch.Tensor, num_steps: int, **arguments: Any) -> torch.Tensor:
    """Return the weights after steps with a gradient of ones."""
    parameter = nn.Parameter(weights.clone())
    optimizer = optimizer_of({"matrix": parameter}, **arguments)
    for _ in range(num_steps):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return parameter.detach()


def test_changes_too_small_for_bfloat16_add_up() -> None:
    start = torch.ones(64, 1000, dtype=BF16)
    num_steps = 100
    lr = 2e-5
    # rounded to the nearest, all changes are lost
    assert torch.equal(train(start, num_steps, lr=lr, weight_decay=0.0, stochastic_rounding=False), start)
    # in fp32, AdamW changes each weight by lr in a step; even fp32 rounds so near to 1
    in_fp32 = train(start.float(), num_steps, lr=lr, weight_decay=0.0)
    exact_change = float((in_fp32 - start.float()).mean())
    assert exact_change == pytest.approx(-num_steps * lr, rel=1e-2)
    # rounded stochastically, a step of bfloat16 below 1 is 2⁻⁸: the mean of 64,000 elements is off by less than 5 of
    # its standard deviations
    in_bf16 = train(start, num_steps, lr=lr, weight_decay=0.0).float()
    change = float((in_bf16 - start.float()).mean())
    deviation = (num_steps * lr * 2**-8) ** 0.5 / 64_000**0.5
    assert abs(change - exact_change) < 5 * deviation


@pytest.mark.numerical
@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_moments_in_bfloat16_follow_those_in_fp32(beta2: float) -> None:
    def moments_after_steps(dtype: str) -> dict[str, torch.Tensor]:
        weights = nn.Parameter(torch.zeros(2**14))
        optimizer = optimizer_of({"matrix": weights}, optimizer_states=dtype, beta2=beta2)
        random = torch.Generator().manual_seed(0)
        for step in range(400):
            size = 3.0 if step < 100 else 1.0  # the second moment has to come down
            weights.grad = size * torch.randn(weights.shape, generator=random)
            optimizer.step()
        return optimizer.state[weights]

    exact = moments_after_steps("float32")
    rounded = moments_after_steps("bfloat16")
    assert rounded["exp_avg"].dtype == rounded["exp_avg_sq"].dtype == BF16
    exact_mean = float(exact["exp_avg_sq"].double().mean())
    assert float(rounded["exp_avg_sq"].double().mean()) == pytest.approx(exact_mean, rel=2e-3)


def test_in_fp32_throughout_it_is_torchs_own() -> None:
    random = torch.Generator().manual_seed(0)
    start = {"matrix": torch.randn(300, 500, generator=random), "vector": torch.randn(7, generator=random)}
    ours = {name: nn.Parameter(tensor.clone()) for name, tensor in start.items()}
    theirs = {name: nn.Parameter(tensor.clone()) for name, tensor in start.items()}
    reference = build_optimizer(theirs.items(), {"matrix"}, TrainingArguments(lr=1e-2, weight_decay=0.1))
    assert type(reference) is AdamW  # as everywhere in 32-true
    groups = [
        {"params": [ours["matrix"]], "weight_decay": 0.1},
        {"params": [ours["vector"]], "weight_decay": 0.0},
    ]
    optimizer = LowPrecisionAdamW(
        groups,
        lr=1e-2,
        betas=(0.9, 0.95),
        moments_dtype=torch.float32,
        stochastic_rounding=False,
        names={parameter: name for name, parameter in ours.items()},
        elements={parameter: LocalElements(0, parameter.numel(), parameter.numel()) for parameter in ours.values()},
        seed=0,
    )
    for _ in range(5):
        for name, tensor in start.items():
            gradient = torch.randn(tensor.shape, generator=random)
            ours[name].grad = gradient.clone()
            theirs[name].grad = gradient.clone()
        optimizer.step()
        reference.step()
    for name in start:
        assert torch.equal(ours[name], theirs[name])
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[ours[name]][key], reference.state[theirs[name]][key])


def test_bf16_true_without_stochastic_rounding_uses_torchs_adamw() -> None:
    parameters = {"matrix": nn.Parameter(torch.zeros(2, 2, dtype=BF16))}
    assert type(optimizer_of(parameters, stochastic_rounding=False)) is AdamW
    mixed = optimizer_of(parameters, stochastic_rounding=False, optimizer_states="float32")
    parameters["matrix"].grad = torch.ones_like(parameters["matrix"])
    mixed.step()
    assert mixed.state[parameters["matrix"]]["exp_avg"].dtype == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("states", ["float32", "bfloat16"])
def test_compiled_step_differs_in_a_last_bit_at_most(states: str) -> None:
    from torch._inductor import config  # slow

    start = torch.randn(300, 1001, generator=torch.Generator().manual_seed(0)).to(BF16)
    arguments = TrainingArguments(lr=1e-2, weight_decay=0.1, optimizer_states=states)  # type: ignore[arg-type]

    def tensors_after_steps(compiles: bool) -> list[torch.Tensor]:
        """Return the weights and both moments."""
        weights = nn.Parameter(start.clone())
        random = torch.Generator().manual_seed(1)
        optimizer = build_optimizer([("matrix", weights)], {"matrix"}, arguments, compiles=compiles)
        for _ in range(5):
            weights.grad = torch.randn(start.shape, generator=random).to(BF16)
            with config.patch({"cpp.vec_isa_ok": False}):  # halves the time of the C++ compiler
                optimizer.step()
        state = optimizer.state[weights]
        return [weights.detach(), state["exp_avg"], state["exp_avg_sq"]]

    uncompiled_tensors = tensors_after_steps(compiles=False)
    compiled_tensors = tensors_after_steps(compiles=True)
    assert not torch.equal(uncompiled_tensors[0], start)
    for compiled, uncompiled in zip(compiled_tensors, uncompiled_tensors, strict=True):
        assert compiled.dtype == uncompiled.dtype
        if uncompiled.dtype == torch.float32:
            torch.testing.assert_close(compiled, uncompiled, rtol=1e-6, atol=1e-7)
        else:
            # the next number of bfloat16, of few elements
            torch.testing.assert_close(compiled, uncompiled, rtol=2**-7, atol=2**-10)
            assert float((compiled != uncompiled).double().mean()) < 1e-3


def test_stochastic_rounding_follows_the_seed_of_the_run() -> None:
    def trained(seed: int) -> torch.Tensor:
        """Return weights after a step of a run with this seed."""
        words = ["--train_data_dir", "tokens", "--output_dir", "run", "--seed", str(seed), "--precision", "bf16-true"]
        run: Any = SimpleNamespace(
            arguments=parse(TrainArguments, words),
            start=SimpleNamespace(saved=None, resumes=False),
            model=SimpleNamespace(names={"weight": ("weight",)}, source="a model"),
            models=SimpleNamespace(trained_in_any_phase={"weight"}),
        )
        fabric = Fabric(accelerator="cpu", devices=1)
        model: Any = fabric.setup_module(nn.Embedding.from_pretrained(torch.ones(64, 64, dtype=BF16), freeze=False))
        optimizer = set_up_optimizer(fabric, model, {"weight"}, run)
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        return model.weight.detach()

    assert torch.equal(trained(3), trained(3))
    assert not torch.equal(trained(3), trained(4))


# ------------------------------------------------------------------------------------------------- on real ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("adamw") / "model")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("adamw") / "tokens")


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """The weights and the optimizer's state of a full checkpoint."""
    return load_file(folder / "model.safetensors") | load_file(folder / "optimizer" / "optimizer.safetensors")


def differing(checkpoint: Path, expected_checkpoint: Path) -> list[str]:
    """The tensors that are not the same, to the bit if they are kept in bfloat16.

    torch's kernel computes the few elements at the end of a part, which fill no register, in another way: their fp32
    moments may differ in the last bit.
    """
    tensors = saved(checkpoint)
    expected_tensors = saved(expected_checkpoint)
    assert tensors.keys() == expected_tensors.keys()
    names = []
    for name, tensor in tensors.items():
        tolerance = 0.0 if tensor.dtype == BF16 else 3e-7
        if not torch.allclose(tensor, expected_tensors[name], rtol=tolerance, atol=0.0):
            names.append(name)
    return names


class Stepping:
    """Takes steps with given gradients under several strategies."""

    def __init__(self, folder: Path, runs: ForkedRuns, model: Path) -> None:
        self.folder = folder
        self.runs = runs
        self.model = model

    def __call__(self, name: str, parallelism: str, num_ranks: int, num_steps: int, **options: object) -> Path:
        """Take steps and return the checkpoint after the last of them."""
        settings = {"parallelism": parallelism, "devices": num_ranks, "max_step": num_steps, "precision": "bf16-true"}
        line = argv(self.model, Path("unused"), self.folder / name, **settings, **options)
        self.runs.start(line, num_ranks, program="tests.support.steps_with_given_gradients").finish()
        (checkpoint,) = (self.folder / name).glob("step-*")
        return checkpoint


@pytest.mark.numerical
@pytest.mark.slow
@pytest.mark.parametrize(
    ("states", "strategies", "resumed_by"),
    [
        ("bfloat16", ["ddp", "fsdp", "fsdp2", "tensor parallel"], ["single", "fsdp2"]),
        ("float32", ["fsdp2"], ["single"]),
    ],
    ids=["bfloat16", "float32"],
)
def test_same_gradients_give_same_weights_on_any_ranks_and_resumed(
    forked_runs: ForkedRuns, tmp_path: Path, model: Path, states: str, strategies: list[str], resumed_by: list[str]
) -> None:
    take_steps = Stepping(tmp_path, forked_runs, model)
    # given four steps on one rank
    whole = take_steps("whole", "single", 1, 4, optimizer_states=states)
    moments_dtypes = {tensor.dtype for name, tensor in saved(whole).items() if "exp_avg" in name}
    assert moments_dtypes == {getattr(torch, states)}
    # then four steps on any ranks have the same tensors
    for strategy in strategies:
        if strategy == "tensor parallel":
            checkpoint = take_steps(strategy, "fsdp2", 4, 4, optimizer_states=states, tensor_parallel_size=2)
        else:
            num_ranks = 2 if strategy == "ddp" else 3
            checkpoint = take_steps(strategy, strategy, num_ranks, 4, optimizer_states=states)
        assert differing(checkpoint, whole) == [], strategy
    # and so have two steps, and two more on other ranks
    half = take_steps("half", "fsdp", 2, 2, optimizer_states=states, state_dict_type="sharded")
    for strategy in resumed_by:
        num_ranks = 1 if strategy == "single" else 2
        resumed = take_steps(f"resumed-{strategy}", strategy, num_ranks, 2, optimizer_states=states, checkpoint=half)
        assert differing(resumed, whole) == [], strategy


REPLICAS = """
import hashlib
from fabric_train.training.loop import Loop
train = Loop.train
def and_tell(loop):
    end = train(loop)
    state = [parameter.detach().float().numpy().tobytes() for parameter in loop.stepper.model.parameters()]
    print("weights", hashlib.sha256(b"".join(state)).hexdigest())
    return end
Loop.train = and_tell
"""


@pytest.mark.slow
def test_replicas_stay_equal_bit_for_bit(forked_runs: ForkedRuns, tmp_path: Path, model: Path, tokens: Path) -> None:
    options = {"precision": "bf16-true", "parallelism": "ddp", "devices": 2, "max_step": 3, "micro_batch_size": 2}
    run = forked_runs.start(argv(model, tokens, tmp_path / "run", **options), 2, before=REPLICAS)
    run.finish()
    (hash_on_rank_0,) = [line for line in run.lines(0) if line.startswith("weights")]
    (hash_on_rank_1,) = [line for line in run.lines(1) if line.startswith("weights")]
    assert hash_on_rank_0 == hash_on_rank_1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallelism", "num_ranks", "options"),
    [
        ("single", 1, {"precision": "bf16-true", "optimizer_states": "float32"}),
        ("ddp", 2, {"precision": "bf16-true"}),
        ("fsdp", 2, {"precision": "bf16-true"}),
        ("fsdp2", 2, {"precision": "32-true", "optimizer_states": "bfloat16"}),
    ],
)
def test_resumed_run_rounds_as_the_uninterrupted_one(
    forked_runs: ForkedRuns, tmp_path: Path, model: Path, tokens: Path, parallelism: str, num_ranks: int, options: dict
) -> None:
    settings = {
        **options,
        "parallelism": parallelism,
        "devices": num_ranks,
        "lr_schedule": "constant",
        "seed": 3,
        "max_step": 2,
        "save_step_interval": 1,
        "micro_batch_size": 4 // num_ranks,
    }
    # given a run of two steps, and one that begins with its checkpoint of step 1
    forked_runs.start(argv(model, tokens, tmp_path / "whole", **settings), num_ranks).finish()
    checkpoint = tmp_path / "whole" / "checkpoints" / "step-00000001"
    resumed_argv = argv(model, tokens, tmp_path / "resumed", **settings, checkpoint=checkpoint)
    forked_runs.start(resumed_argv, num_ranks).finish()
    # then both have the same tensors and the same loss of step 2
    resumed = saved(tmp_path / "resumed" / "checkpoints" / "step-00000002")
    for name, expected in saved(tmp_path / "whole" / "checkpoints" / "step-00000002").items():
        assert torch.equal(resumed[name], expected), name
    resumed_losses = [row["train_loss"] for row in metrics(tmp_path / "resumed")]
    whole_losses = [row["train_loss"] for row in metrics(tmp_path / "whole")]
    assert resumed_losses == whole_losses[1:]
