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
from fabric_train.optim.stochastic_rounding import LocalElements, random_bits, round_stochastically, salt
from fabric_train.training.build_run import set_up_optimizer
from tests.support.forked_runs import ForkedRuns
from tests.support.unequal_rows import argv, metrics, write_model, write_rows

BF16 = torch.bfloat16

# --------------------------------------------------------------------------------------------------- rounding


def numbers(count: int, begin: int = 0) -> torch.Tensor:
    return LocalElements(begin, count, count).indices(0, count, torch.device("cpu"))


@pytest.mark.parametrize("value", [1.0, 1.001, -1.001, 3.14159, 1e-3, -7.7e-21, 1e-40, 0.0, 255.99])
def test_the_mean_of_many_roundings_is_the_value(value: float) -> None:
    count = 2**18
    values = torch.full((count,), value)
    rounded = values.clone()
    round_stochastically(rounded, random_bits(numbers(count), 1234) & 0xFFFF)
    assert torch.equal(rounded.to(BF16).float(), rounded)
    found = rounded.double().unique()
    nearest = values[0].to(BF16).double()
    assert len(found) <= 2
    assert nearest in found
    step = float(found.max() - found.min())  # of bfloat16 there
    # the mean of n coins, each 0 or 1, is off by less than 5 / sqrt(4 n) but once in two million
    assert abs(float(rounded.double().mean() - values[0].double())) <= 5 * step / (4 * count) ** 0.5
    if float(nearest) != float(values[0]):
        assert step > 0


def test_what_bfloat16_can_hold_stays_as_it_is() -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(BF16)
    every = every[every.isfinite()]
    for key in range(3):
        rounded = every.float()
        round_stochastically(rounded, random_bits(numbers(len(every)), key) & 0xFFFF)
        assert torch.equal(rounded.to(BF16).view(torch.int16), every.view(torch.int16))


@pytest.mark.parametrize("shift", [0, 16])
def test_both_halves_of_the_bits_are_uniform_and_independent(shift: int) -> None:
    count = 2**20
    cells = 256
    for key in (0, 1, salt(0, "a"), salt(0, "b")):
        bits = random_bits(numbers(count), key) >> shift & 0xFFFF
        next_key = random_bits(torch.ones((), dtype=torch.int32), key)
        later = random_bits(numbers(count), next_key) >> shift & 0xFFFF
        for other in (torch.zeros_like(bits), bits.roll(1), later):
            pairs = (bits >> 12) * 16 + (other >> 12)
            seen = torch.bincount(pairs, minlength=cells).double()
            seen = seen[seen > 0]  # 16 cells or 256, of 4096 or more each: a deviation of 1.6 % or less
            assert len(seen) in (16, 256)
            assert float((seen * len(seen) / count - 1).abs().max()) < 0.1
        assert len(random_bits(numbers(count), key).unique()) == count  # a permutation of all numbers


def test_seeds_names_steps_and_elements_have_bits_of_their_own() -> None:
    keys = {salt(seed, name) for seed in range(20) for name in ("a.weight", "b.weight", "a.bias")}
    assert len(keys) == 60
    of_steps = random_bits(torch.arange(1000, dtype=torch.int32), salt(0, "a.weight"))
    assert len(of_steps.unique()) == 1000
    assert random_bits(numbers(1), 7) != random_bits(numbers(1, begin=1), 7)


def test_shard_has_the_random_numbers_of_its_elements_in_the_whole() -> None:
    whole = torch.arange(7 * 6 * 5).reshape(7, 6, 5)
    cpu = torch.device("cpu")
    rows = whole[2:5].flatten()
    columns = whole[2:5, 1:4].flatten()
    assert torch.equal(LocalElements(60, 90, 90).indices(3, 80, cpu), rows[3:83].int())
    assert torch.equal(LocalElements(65, 15, 30).indices(4, 40, cpu), columns[4:44].int())
    beyond = LocalElements(2**31 - 2, 8, 8).indices(0, 8, cpu).tolist()
    assert beyond == [2**31 - 2, 2**31 - 1, *range(-(2**31), -(2**31) + 6)]


# ------------------------------------------------------------------------------------------------ the optimizer


def optimizer_of(parameters: dict[str, nn.Parameter], **given: Any) -> Any:
    return build_optimizer(parameters.items(), {"matrix"}, TrainingArguments(**given))


def train(weights: torch.Tensor, steps: int, gradient: float = 1.0, **given: Any) -> torch.Tensor:
    parameter = nn.Parameter(weights.clone())
    optimizer = optimizer_of({"matrix": parameter}, **given)
    for _ in range(steps):
        parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step()
    return parameter.detach()


def test_changes_too_small_for_bfloat16_add_up() -> None:
    start = torch.ones(64, 1000, dtype=BF16)
    steps = 100
    lr = 2e-5
    given: dict[str, Any] = {"lr": lr, "weight_decay": 0.0}
    assert torch.equal(train(start, steps, stochastic_rounding=False, **given), start)  # to the nearest: all is lost
    exact = train(start.float(), steps, **given)
    by_chance = train(start, steps, **given).float()
    change = float((exact - start.float()).mean())
    assert change == pytest.approx(-steps * lr, rel=1e-2)  # even fp32 rounds so near to 1
    # a step of bfloat16 below 1 is 2⁻⁸: the mean of 64,000 elements is off by less than 5 of its standard deviations
    deviation = (steps * lr * 2**-8) ** 0.5 / 64_000**0.5
    assert abs(float((by_chance - start.float()).mean()) - change) < 5 * deviation


@pytest.mark.numerical
@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_moments_in_bfloat16_follow_those_in_fp32(beta2: float) -> None:
    weights = nn.Parameter(torch.zeros(2**14))
    kept = {}
    for states in ("float32", "bfloat16"):
        optimizer = optimizer_of({"matrix": weights}, optimizer_states=states, beta2=beta2)
        random = torch.Generator().manual_seed(0)
        for step in range(400):
            size = 3.0 if step < 100 else 1.0  # the second moment has to come down
            weights.grad = size * torch.randn(weights.shape, generator=random)
            optimizer.step()
        kept[states] = optimizer.state[weights]
    assert kept["bfloat16"]["exp_avg"].dtype == kept["bfloat16"]["exp_avg_sq"].dtype == BF16
    exact, rounded = (kept[states]["exp_avg_sq"].double().mean() for states in ("float32", "bfloat16"))
    assert float(rounded) == pytest.approx(float(exact), rel=2e-3)


def test_in_fp32_throughout_it_is_torchs_own() -> None:
    random = torch.Generator().manual_seed(0)
    start = {"matrix": torch.randn(300, 500, generator=random), "vector": torch.randn(7, generator=random)}
    arguments = TrainingArguments(lr=1e-2, weight_decay=0.1)
    ours, theirs = ({name: nn.Parameter(tensor.clone()) for name, tensor in start.items()} for _ in range(2))
    reference = build_optimizer(theirs.items(), {"matrix"}, arguments)
    assert type(reference) is AdamW  # as everywhere in 32-true
    built = LowPrecisionAdamW(
        [{"params": [ours[name]], "weight_decay": decay} for name, decay in (("matrix", 0.1), ("vector", 0.0))],
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
        built.step()
        reference.step()
    for name in start:
        assert torch.equal(ours[name], theirs[name])
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(built.state[ours[name]][key], reference.state[theirs[name]][key])


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
    start = torch.randn(300, 1001, generator=torch.Generator().manual_seed(0)).to(BF16)
    kept = []
    arguments = TrainingArguments(lr=1e-2, weight_decay=0.1, optimizer_states=states)  # type: ignore[arg-type]
    from torch._inductor import config  # slow

    for compiles in (False, True):
        parameter = nn.Parameter(start.clone())
        random = torch.Generator().manual_seed(1)
        optimizer = build_optimizer([("matrix", parameter)], {"matrix"}, arguments, compiles=compiles)
        for _ in range(5):
            parameter.grad = torch.randn(start.shape, generator=random).to(BF16)
            with config.patch({"cpp.vec_isa_ok": False}):  # halves the time of the C++ compiler
                optimizer.step()
        kept.append([parameter.detach(), *(optimizer.state[parameter][key] for key in ("exp_avg", "exp_avg_sq"))])
    assert not torch.equal(kept[0][0], start)
    for one, other in zip(*kept, strict=True):
        assert one.dtype == other.dtype
        relative, absolute = (1e-6, 1e-7) if one.dtype == torch.float32 else (2**-7, 2**-10)  # of bfloat16 the next one
        torch.testing.assert_close(other, one, rtol=relative, atol=absolute)
        if one.dtype == BF16:
            assert float((one != other).double().mean()) < 1e-3


def test_stochastic_rounding_follows_the_seed_of_the_run() -> None:
    def trained(seed: int) -> torch.Tensor:
        words = ["--train_data_dir", "tokens", "--output_dir", "run", "--seed", str(seed), "--precision", "bf16-true"]
        start = SimpleNamespace(checkpoint=None, resumes=False)
        shape = SimpleNamespace(names={"weight": ("weight",)}, source="a model")
        given = {
            "arguments": parse(TrainArguments, words),
            "start": start,
            "model": shape,
            "trained_in_any_phase": {"weight"},
        }
        run: Any = SimpleNamespace(**given)
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


def differing(one: Path, other: Path) -> list[str]:
    """The tensors that are not the same, to the bit if they are kept in bfloat16.

    torch's kernel computes the few elements at the end of a part, which fill no register, in another way: their fp32
    moments may differ in the last bit.
    """
    tensors = saved(one)
    others = saved(other)
    assert tensors.keys() == others.keys()
    tolerances = {name: 0.0 if tensor.dtype == BF16 else 3e-7 for name, tensor in tensors.items()}
    return [name for name, at in tolerances.items() if not torch.allclose(tensors[name], others[name], at, 0.0)]


class Stepping:
    """Takes steps with given gradients under several strategies."""

    def __init__(self, folder: Path, runs: ForkedRuns, model: Path) -> None:
        self.folder = folder
        self.runs = runs
        self.model = model

    def __call__(self, name: str, parallelism: str, num_ranks: int, steps: int, **options: object) -> Path:
        given = {"parallelism": parallelism, "devices": num_ranks, "max_step": steps, "precision": "bf16-true"}
        line = argv(self.model, Path("unused"), self.folder / name, **given, **options)
        self.runs.start(line, num_ranks, program="tests.support.steps_with_given_gradients").finish()
        (checkpoint,) = (self.folder / name).glob("step-*")
        return checkpoint


@pytest.mark.numerical
@pytest.mark.slow
@pytest.mark.parametrize(
    ("states", "others", "resumed_by"),
    [
        ("bfloat16", ["ddp", "fsdp", "fsdp2", "tensor parallel"], ["single", "fsdp2"]),
        ("float32", ["fsdp2"], ["single"]),
    ],
    ids=["bfloat16", "float32"],
)
def test_same_gradients_give_same_weights_on_any_ranks_and_resumed(
    forked_runs: ForkedRuns, tmp_path: Path, model: Path, states: str, others: list[str], resumed_by: list[str]
) -> None:
    steps = Stepping(tmp_path, forked_runs, model)
    given = {"optimizer_states": states}
    whole = steps("whole", "single", 1, 4, **given)
    moments = {tensor.dtype for name, tensor in saved(whole).items() if "exp_avg" in name}
    assert moments == {getattr(torch, states)}
    for name in others:
        if name == "tensor parallel":
            found = steps(name, "fsdp2", 4, 4, **given, tensor_parallel_size=2)
        else:
            found = steps(name, name, 2 if name == "ddp" else 3, 4, **given)
        assert differing(found, whole) == [], name
    half = steps("half", "fsdp", 2, 2, **given, state_dict_type="sharded")
    for name in resumed_by:
        resumed = steps(f"resumed-{name}", name, 1 if name == "single" else 2, 2, **given, checkpoint=half)
        assert differing(resumed, whole) == [], name


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
    given = {"precision": "bf16-true", "parallelism": "ddp", "devices": 2, "max_step": 3, "micro_batch_size": 2}
    run = forked_runs.start(argv(model, tokens, tmp_path / "run", **given), 2, before=REPLICAS)
    run.finish()
    printed = [[line for line in run.stdout(rank).splitlines() if line.startswith("weights")] for rank in (0, 1)]
    assert len(printed[0]) == 1
    assert printed[0] == printed[1]


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
    given = {**options, "parallelism": parallelism, "devices": num_ranks, "lr_schedule": "constant", "seed": 3}
    given |= {"max_step": 2, "save_step_interval": 1, "micro_batch_size": 4 // num_ranks}
    forked_runs.start(argv(model, tokens, tmp_path / "whole", **given), num_ranks).finish()
    given["checkpoint"] = tmp_path / "whole" / "checkpoints" / "step-00000001"
    forked_runs.start(argv(model, tokens, tmp_path / "resumed", **given), num_ranks).finish()
    whole, resumed = (saved(tmp_path / run / "checkpoints" / "step-00000002") for run in ("whole", "resumed"))
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())
    losses = [[row["train_loss"] for row in metrics(tmp_path / run)] for run in ("whole", "resumed")]
    assert losses[0][1:] == losses[1]
