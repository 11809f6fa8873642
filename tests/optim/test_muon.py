"""Muon is torch's on one rank and on several, resumes bit for bit, and is refused where ranks have no whole rows."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from fabric_train.arguments import TrainArguments, TrainingArguments, parse
from fabric_train.cli.errors import InputError
from fabric_train.distributed.strategy import resolve_parallelism
from fabric_train.model.hf_model import read_shape
from fabric_train.optim.learning_rate import set_learning_rate
from fabric_train.optim.muon import is_layer_matrix
from fabric_train.optim.optimizer import build_optimizer, decayed_names
from fabric_train.optim.states import DeclaredStates
from fabric_train.preflight.memory_forecast import RunRequest
from fabric_train.preflight.memory_layout import bytes_of_states
from fabric_train.training.prepared_run import StepPlan
from tests.support.forked_runs import ForkedRuns
from tests.support.plain_training import GRAD_CLIP, LR, WEIGHT_DECAY, build_plain_adamw, train_plainly
from tests.support.short_runs import at_point, saved_steps
from tests.support.steps_with_given_gradients import gradient
from tests.support.two_nodes import on_nodes
from tests.support.unequal_rows import argv, metrics, write_model, write_rows

MUON_LR = 5e-3
STEPS = "tests.support.steps_with_given_gradients"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model in a folder. Of its 32 and 16 rows, three ranks have 11, 11 and 10, or 6, 6 and 4."""
    return write_model(tmp_path_factory.mktemp("muon") / "model")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("muon") / "tokens")


def layer_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the seven matrices of each of the two layers of a Llama."""
    matrices = [p for name, p in model.named_parameters() if ".layers." in name and name.endswith("proj.weight")]
    assert len(matrices) == 14
    return matrices


def other_parameters(model: nn.Module) -> list[nn.Parameter]:
    matrices = set(layer_matrices(model))
    return [parameter for parameter in model.parameters() if parameter not in matrices]


def build(model: nn.Module, **given: Any) -> DeclaredStates:
    arguments = TrainingArguments(optimizer="muon", **given)
    return build_optimizer(model.named_parameters(), decayed_names(model), arguments)


def set_gradients(model: nn.Module, step: int) -> None:
    for name, parameter in model.named_parameters():
        parameter.grad = gradient(name, step, parameter.shape).to(parameter.dtype)


def saved(folder: Path) -> Tensors:
    """Return the weights and the optimizer's states of a full checkpoint."""
    return load_file(folder / "model.safetensors") | load_file(folder / "optimizer" / "optimizer.safetensors")


# ---------------------------------------------------------------------------------------------------- on one device


@pytest.mark.parametrize("adjust_lr", ["match_rms_adamw", "original"])
def test_steps_are_bit_for_bit_those_of_torchs_muon_and_adamw(model: Path, adjust_lr: str) -> None:
    ours, theirs = (AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32) for _ in range(2))
    optimizer = build(ours, lr=LR, muon_lr=MUON_LR, muon_momentum=0.9, muon_adjust_lr=adjust_lr, weight_decay=0.1)
    matrices = layer_matrices(theirs)
    muon = torch.optim.Muon(matrices, MUON_LR, 0.1, 0.9, adjust_lr_fn=adjust_lr)
    others = other_parameters(theirs)
    groups = [
        {"params": [parameter for parameter in others if parameter.dim() > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in others if parameter.dim() == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), fused=True)
    for step in (1, 2, 3):
        for trained, optimizers in ((ours, (optimizer,)), (theirs, (muon, adamw))):
            set_gradients(trained, step)
            for stepping in optimizers:
                stepping.step()
    for (name, our_weight), their_weight in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(our_weight, their_weight), name
        if their_weight in muon.state:
            momentum = optimizer.read_states(our_weight)["momentum_buffer"]
            assert torch.equal(momentum.view_as(our_weight), muon.state[their_weight]["momentum_buffer"])


def test_muon_lr_is_of_matrices_and_the_schedule_scales_all_rates(model: Path) -> None:
    trained = AutoModelForCausalLM.from_pretrained(model)
    arguments = TrainingArguments(optimizer="muon", lr=1e-4, muon_lr=1e-3)
    # a rate of --lr_of counts also where it is the value of --lr
    by_pattern = {"model.layers.0.mlp.up_proj.weight": 1e-4, "model.norm.weight": 1e-2}
    optimizer = build_optimizer(trained.named_parameters(), decayed_names(trained), arguments, rates=by_pattern)
    set_learning_rate(optimizer, 0.5e-4)
    rates = {}
    for group in optimizer.param_groups:
        rates.update(dict.fromkeys(group["param_names"], group["lr"]))
    for name, parameter in trained.named_parameters():
        peak = by_pattern.get(name, 1e-3 if is_layer_matrix(name, parameter) else 1e-4)
        assert rates[name] == pytest.approx(peak / 2), name


def test_a_part_without_matrices_of_layers_trains_with_adamw_alone(model: Path) -> None:
    trained = AutoModelForCausalLM.from_pretrained(model)
    named = [("model.embed_tokens.weight", trained.model.embed_tokens.weight)]
    optimizer = build_optimizer(named, {"model.embed_tokens.weight"}, TrainingArguments(optimizer="muon"))
    assert [type(part).__name__ for part in optimizer.joined] == ["AdamW"]


def test_changes_too_small_for_bfloat16_add_up() -> None:
    """A step of bfloat16 below 1 is 2⁻⁸; the steps here are smaller by far."""
    num_steps = 100
    start = torch.ones(64, 1024, dtype=torch.bfloat16)
    random = torch.randn(start.shape, generator=torch.Generator().manual_seed(0))

    def train(weights: torch.Tensor, **given: Any) -> torch.Tensor:
        matrix = nn.Parameter(weights.clone())
        arguments = TrainingArguments(optimizer="muon", lr=2e-5, weight_decay=0.0, lr_schedule="constant", **given)
        optimizer = build_optimizer([("layers.0.matrix", matrix)], {"layers.0.matrix"}, arguments)
        for _ in range(num_steps):
            matrix.grad = random.to(matrix.dtype)
            optimizer.step()
        return matrix.detach().float()

    assert torch.equal(train(start, stochastic_rounding=False), start.float())  # to the nearest: all is lost
    change = train(start.float()) - 1
    rounded_change = train(start) - 1
    # Along the direction of the change, the mean of 65,536 roundings, each off by less than 2⁻⁸ after 100 steps, has
    # errors below five standard deviations: sqrt(100 steps · mean change · 2⁻⁸ / elements).
    deviation = (float(change.abs().mean()) * 2**-8 / change.numel()) ** 0.5
    along = float((rounded_change * change.sign()).mean())
    assert abs(along - float(change.abs().mean())) < 5 * deviation
    assert deviation < 0.05 * float(change.abs().mean())


def test_an_fp16_scaler_leaves_out_a_step_that_overflows(model: Path) -> None:
    trained = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = build(trained)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = trained.model.layers[0].mlp.up_proj.weight.detach().clone()
    for spoiled in (True, False):
        loss = scaler.scale(trained.model.layers[0].mlp.up_proj.weight.sum())
        loss.backward()
        if spoiled:
            trained.model.layers[0].mlp.up_proj.weight.grad[0, 0] = torch.inf
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(before, trained.model.layers[0].mlp.up_proj.weight) == spoiled


# -------------------------------------------------------------------------------------------------- on several ranks


class Stepping:
    """Takes steps of Muon with given gradients under several strategies."""

    def __init__(self, folder: Path, runs: ForkedRuns, model: Path) -> None:
        self.folder = folder
        self.runs = runs
        self.model = model

    def __call__(
        self, name: str, parallelism: str, num_ranks: int, num_steps: int, num_nodes: int = 1, **options: object
    ) -> Tensors:
        """Return the weights and the optimizer's states after the steps."""
        line = self.line(name, parallelism, num_ranks // num_nodes, num_steps, num_nodes=num_nodes, **options)
        before = on_nodes(num_ranks // num_nodes) if num_nodes > 1 else ""
        self.runs.start(line, num_ranks, program=STEPS, before=before).finish()
        return saved(self.checkpoint(name))

    def line(self, name: str, parallelism: str, devices: int, num_steps: int, **options: object) -> list[str]:
        given = {"parallelism": parallelism, "devices": devices, "max_step": num_steps, "optimizer": "muon"}
        given |= {"muon_lr": MUON_LR, "lr": LR}
        return argv(self.model, Path("unused"), self.folder / name, **given, **options)

    def checkpoint(self, name: str) -> Path:
        (checkpoint,) = (self.folder / name).glob("step-*")
        return checkpoint


def assert_equal(tensors: Tensors, others: Tensors, label: str) -> None:
    """Compare all tensors: to the bit, but for the last bit of what torch's fused AdamW has updated.

    Its kernel computes the few elements at the end of a shard, which fill no register, in another way.
    """
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        is_exact = "_proj.weight" in name or tensor.dtype == torch.bfloat16
        tolerance = 0.0 if is_exact else 3e-7
        torch.testing.assert_close(tensor, others[name], rtol=tolerance, atol=tolerance, msg=f"{label}: {name}")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_same_gradients_give_same_weights_on_any_ranks_and_resumed(
    forked_runs: ForkedRuns, tmp_path: Path, model: Path, precision: str
) -> None:
    steps = Stepping(tmp_path, forked_runs, model)
    whole = steps("whole", "single", 1, 4, precision=precision)
    assert_equal(steps("fsdp2", "fsdp2", 3, 4, precision=precision), whole, "fsdp2")
    if precision == "32-true":
        assert_equal(steps("ddp", "ddp", 2, 4), whole, "ddp")
        hybrid = steps("hybrid", "fsdp2", 4, 4, num_nodes=2, sharding_strategy="HYBRID_SHARD")
        assert_equal(hybrid, whole, "copies on two machines")
    # from a sharded checkpoint after half of the steps
    line = steps.line("half", "fsdp2", 2, 2, precision=precision, state_dict_type="sharded")
    forked_runs.start(line, 2, program=STEPS).finish()
    half = steps.checkpoint("half")
    for parallelism, num_ranks in (("single", 1), ("fsdp2", 3)):
        name = f"resumed-{parallelism}"
        resumed = steps(name, parallelism, num_ranks, 2, precision=precision, checkpoint=half)
        assert_equal(resumed, whole, name)


@pytest.mark.slow
def test_ranks_without_rows_take_part(forked_runs: ForkedRuns, tmp_path: Path) -> None:
    """Of four rows, three ranks have two, two and none."""
    model = write_model(tmp_path / "model", hidden_size=4, intermediate_size=4)
    steps = Stepping(tmp_path, forked_runs, model)
    assert_equal(steps("three", "fsdp2", 3, 2), steps("whole", "single", 1, 2), "three ranks")


@pytest.mark.numerical
@pytest.mark.slow
def test_runs_train_as_plain_pytorch_does(forked_runs: ForkedRuns, tmp_path: Path, model: Path, tokens: Path) -> None:
    """Losses and norms of gradients agree within 1e-5, relative.

    Gradients differ in their last bits, so that the norm by which Newton–Schulz divides a matrix, in bfloat16, may be
    the next number. Then all numbers are rounded in another way, by up to 2⁻⁹, and the five steps multiply what belongs
    to small singular values by up to 3.4445⁵. So the change of a matrix agrees roughly. With the same gradients it is
    the same to the bit, as the test above shows.
    """
    num_steps = 4
    rows_per_window = 6  # a multiple of one, two and three ranks
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    muon = torch.optim.Muon(layer_matrices(plain), 2 * LR, WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw")
    muon.param_groups[0]["lr_ratio"] = 2.0
    optimizers = [muon, build_plain_adamw(other_parameters(plain))]
    start = load_file(model / "model.safetensors")
    matrix_names = [name for name in start if is_layer_matrix(name, start[name])]
    losses, norms = train_plainly(plain, tokens, rows_per_window, num_steps, optimizers=optimizers)

    given = {"optimizer": "muon", "lr": LR, "muon_lr": 2 * LR, "max_step": num_steps, "grad_clip": GRAD_CLIP}
    given |= {"weight_decay": WEIGHT_DECAY, "total_batch_size": rows_per_window}
    for parallelism, num_ranks in (("single", 1), ("ddp", 2), ("fsdp2", 3)):
        run = tmp_path / f"{parallelism}-{num_ranks}"
        line = argv(model, tokens, run, **given, parallelism=parallelism, devices=num_ranks)
        forked_runs.start(line, num_ranks).finish()
        assert [float(row["train_loss"]) for row in metrics(run)] == pytest.approx(losses, rel=1e-5), run.name
        assert [float(row["grad_norm"]) for row in metrics(run)] == pytest.approx(norms, rel=1e-5), run.name
        weights = load_file(run / "checkpoints" / f"step-{num_steps:08d}" / "model.safetensors")
        for name in matrix_names:
            change = plain.get_parameter(name).detach() - start[name]
            difference = weights[name] - plain.get_parameter(name).detach()
            assert difference.norm() < 2**-4 * change.norm(), f"{run.name}: {name}"


@pytest.mark.slow
def test_killed_run_resumes_bit_for_bit_on_other_ranks(
    forked_runs: ForkedRuns, tmp_path: Path, model: Path, tokens: Path
) -> None:
    """A window is two rows: their gradients have the same sum on two ranks as one after the other.

    Gradients are not clipped, because the last digits of their norm depend on the ranks.
    """
    given = {"optimizer": "muon", "muon_lr": MUON_LR, "max_step": 6, "save_step_interval": 2}
    given |= {"total_batch_size": 2, "grad_clip": 0, "warmup_steps": 2, "seed": 3}

    def line(run: str, parallelism: str, num_ranks: int, **options: object) -> list[str]:
        ranks = {"parallelism": parallelism, "devices": num_ranks}
        return argv(model, tokens, tmp_path / run, **given, **ranks, **options)

    forked_runs.start(line("whole", "fsdp2", 2), 2).finish()
    # the save after step 4 has waited for that after step 2, which is written in the background
    killing = at_point("os.kill(os.getpid(), signal.SIGKILL)", step=5, phase="OPTIMIZER")
    killed = forked_runs.start(line("killed", "fsdp2", 2), 2, before=killing)
    assert -9 in killed.wait()  # the other rank may see that before it is killed itself
    assert 2 in saved_steps(tmp_path / "killed")
    whole = saved(tmp_path / "whole" / "checkpoints" / "step-00000006")
    for num_ranks in (1, 2):
        run = f"resumed-{num_ranks}"
        shutil.copytree(tmp_path / "killed", tmp_path / run)
        forked_runs.start(line(run, "fsdp2", num_ranks, resume="true"), num_ranks).finish()
        resumed = saved(tmp_path / run / "checkpoints" / "step-00000006")
        assert [name for name in whole if not torch.equal(resumed[name], whole[name])] == [], run

    # another optimizer, and another momentum
    for changed, expected in (
        (
            {"optimizer": "adamw", "muon_lr": None},
            "was saved with the optimizer muon, but this run has the optimizer adamw",
        ),
        ({"muon_momentum": 0.9}, "muon_momentum: 0.95 -> 0.9 since"),
    ):
        words = {name: value for name, value in (given | changed).items() if value is not None}
        refused = forked_runs.start(argv(model, tokens, tmp_path / "killed", **words, resume="true"), 1)
        assert refused.wait() == [2]
        assert expected in refused.stderr()


# ----------------------------------------------------------------------------------------- refusals and the plan


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"muon_lr": 1e-3}, "--muon_lr only applies to --optimizer muon, not adamw; leave out --muon_lr"),
        ({"optimizer": "muon", "muon_momentum": 1}, "--muon_momentum must be below 1"),
        (
            {"optimizer": "muon", "optimizer_states": "8bit"},
            "--optimizer_states 8bit only applies to --optimizer adamw, since Muon's momentum has the type of the "
            "weights; leave out --optimizer_states",
        ),
    ],
)
def test_arguments_that_muon_does_not_know_are_refused(options: Mapping[str, Any], expected: str) -> None:
    with pytest.raises(InputError) as refused:
        parse(TrainArguments, argv(Path("model"), Path("tokens"), Path("run"), **options))
    assert refused.value.faults == (expected,)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "--parallelism fsdp, which splits matrix rows; use fsdp2 or ddp"),
        ({"parallelism": "fsdp"}, "--parallelism fsdp, which splits matrix rows; use fsdp2 or ddp"),
        ({"parallelism": "fsdp2", "tensor_parallel_size": 2}, "--tensor_parallel_size 2; leave one of them out"),
        ({"parallelism": "fsdp2", "cpu_offload": "true"}, "--cpu_offload true; leave one of them out"),
        (
            {"parallelism": "fsdp2", "adapter": "lora"},
            "an adapter, since its matrices are low-rank factors; use --optimizer adamw",
        ),
    ],
)
def test_sharding_without_whole_rows_is_refused(options: Mapping[str, Any], expected: str) -> None:
    words = argv(Path("model"), Path("tokens"), Path("run"), optimizer="muon", **options)
    arguments = parse(TrainArguments, words)
    with pytest.raises(InputError) as refused:
        resolve_parallelism(arguments, 2, "cuda")
    assert refused.value.faults == (f"--optimizer muon does not work with {expected}",)


def test_a_refused_run_writes_nothing(forked_runs: ForkedRuns, tmp_path: Path, model: Path, tokens: Path) -> None:
    run = forked_runs.start(argv(model, tokens, tmp_path / "run", optimizer="muon", devices=2), 2)
    assert run.wait() == [2, 2]
    assert len(run.stderr().splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_the_plan_counts_the_bytes_of_the_states(model: Path, precision: str) -> None:
    arguments = parse(TrainArguments, argv(model, Path("tokens"), Path("run"), precision=precision, optimizer="muon"))
    dtype = torch.float32 if precision == "32-true" else torch.bfloat16
    trained = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    optimizer = build_optimizer(trained.named_parameters(), decayed_names(trained), arguments.training)
    set_gradients(trained, 1)
    optimizer.step()
    num_bytes = 0
    for parameter in trained.parameters():
        states = optimizer.read_states(parameter)
        num_bytes += sum(tensor.nbytes for name, tensor in states.items() if name != "step")
    matrices = sum(matrix.numel() for matrix in layer_matrices(trained))
    others = sum(parameter.numel() for parameter in other_parameters(trained))
    assert num_bytes == dtype.itemsize * (matrices + 2 * others)
    assert bytes_of_states(read_shape(str(model)), arguments) == (num_bytes, num_bytes)


def test_the_plan_counts_whole_matrices_and_their_exchange(model: Path) -> None:
    words = argv(model, Path("tokens"), Path("run"), optimizer="muon", parallelism="fsdp2", devices=2)
    plan = StepPlan(None, 2, 2, 1, 1, 2, None, 10, 24)
    shape = read_shape(str(model))
    request = RunRequest(parse(TrainArguments, words), (shape,), plan, "fsdp2", False, True, 10**9, is_elsewhere=True)
    forecast = request.forecast()
    *_, step = forecast.budget.phases
    # bf16: four tensors of 64 × 32 elements and two of 32 × 32, beside this rank's half of the states
    assert step.parts["optimizer"] - forecast.budget.phases[0].parts["optimizer"] == 2 * (4 * 64 * 32 + 2 * 32 * 32)
    # a rank sends the other one half of its half of all rows, of 2 bytes, and as much back
    trained = AutoModelForCausalLM.from_pretrained(model)
    matrices = sum(matrix.numel() for matrix in layer_matrices(trained))
    exchange = forecast.collectives[-1]
    assert (exchange.name, exchange.sent, exchange.leaving_machine) == ("all-to-all of updates", matrices, 0)
