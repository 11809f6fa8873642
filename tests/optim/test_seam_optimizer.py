"""An optimizer from outside trains, is killed, and resumes bit for bit on another number of ranks."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fabric_train import OPTIMIZERS
from fabric_train.arguments import TrainArguments, parse
from fabric_train.model.hf_model import read_shape
from fabric_train.optim.states import DeclaredStates, State
from fabric_train.preflight.memory_layout import bytes_of_states
from tests.support.forked_runs import ForkedRuns
from tests.support.short_runs import at_point
from tests.support.unequal_rows import argv, write_model, write_rows


class MomentumSGD(DeclaredStates):
    """SGD with momentum 0.9 and decoupled weight decay, and a count of its steps."""

    def declare_states(self, parameter: nn.Parameter) -> tuple[State, ...]:
        return State("velocity", parameter.dtype), State("count", torch.int64, torch.Size([1]))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    start = {"velocity": torch.zeros_like(weight), "count": torch.zeros(1, dtype=torch.int64)}
                    state = self.state[weight] = self.state[weight] or start
                    state["count"] += 1
                    state["velocity"].mul_(0.9).add_(weight.grad)
                    weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(state["velocity"], alpha=group["lr"])


def register() -> None:
    """Let ``--optimizer momentum`` mean it."""
    OPTIMIZERS["momentum"] = lambda parameters: MomentumSGD(parameters.groups, {"lr": parameters.arguments.lr})


PLUG_IN = "from tests.optim.test_seam_optimizer import register; register()\n"
KILLED = PLUG_IN + at_point("os.kill(os.getpid(), signal.SIGKILL)", step=4, phase="OPTIMIZER")


def saved(run: Path, step: int) -> dict[str, torch.Tensor]:
    folder = run / "checkpoints" / f"step-{step:08d}"
    return load_file(folder / "model.safetensors") | load_file(folder / "optimizer" / "optimizer.safetensors")


@pytest.mark.slow
def test_killed_run_resumes_bit_for_bit_on_other_ranks(forked_runs: ForkedRuns, tmp_path: Path) -> None:
    """A window is two rows: their gradients have the same sum on two ranks as one after the other.

    Gradients are not clipped, because the last digits of their norm depend on the ranks.
    """
    model = write_model(tmp_path / "model")
    tokens = write_rows(tmp_path / "tokens")
    given = {
        "max_step": 6,
        "optimizer": "momentum",
        "save_step_interval": 2,
        "total_batch_size": 2,
        "lr": 0.1,
        "lr_schedule": "constant",
        "grad_clip": 0,
    }

    def line(run: str, parallelism: str, num_ranks: int, **options: object) -> list[str]:
        ranks = {"parallelism": parallelism, "devices": num_ranks}
        return argv(model, tokens, tmp_path / run, **given, **ranks, **options)

    forked_runs.start(line("whole", "fsdp", 2), 2, before=PLUG_IN).finish()
    killed = forked_runs.start(line("killed", "fsdp", 2), 2, before=KILLED)
    assert -9 in killed.wait()  # the other rank may see that before it is killed itself
    whole = saved(tmp_path / "whole", 6)
    for parallelism, num_ranks in (("fsdp", 1), ("fsdp2", 2)):
        run = f"resumed by {parallelism}"
        shutil.copytree(tmp_path / "killed", tmp_path / run)
        forked_runs.start(line(run, parallelism, num_ranks, resume="true"), num_ranks, before=PLUG_IN).finish()
        resumed = saved(tmp_path / run, 6)
        states = {name.rpartition(".")[2] for name in resumed} - {"weight"}
        assert states == {"velocity", "count"}
        assert {int(state) for name, state in resumed.items() if name.endswith(".count")} == {6}
        assert [name for name in whole if not torch.equal(resumed[name], whole[name])] == [], run


def test_the_plan_counts_the_states_that_it_declares(tmp_path: Path) -> None:
    shape = read_shape(str(write_model(tmp_path / "model")))
    line = ["--train_data_dir", "tokens", "--output_dir", "run", "--precision", "bf16-true"]
    arguments = parse(TrainArguments, line)
    assert bytes_of_states(shape, arguments) == (4 * shape.num_parameters, 4 * shape.num_parameters)  # two moments
    register()
    arguments = parse(TrainArguments, [*line, "--optimizer", "momentum"])
    assert bytes_of_states(shape, arguments) == (2 * shape.num_parameters, 2 * shape.num_parameters)
    del OPTIMIZERS["momentum"]
