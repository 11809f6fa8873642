"""Only some parts of a model train: the others keep their bits, and have no gradient and no optimizer state."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from arguments import TrainArguments, parse
from fabric_train.model import hf_model
from fabric_train.model.hf_model import read_shape, train_only
from fabric_train.preflight.memory_layout import bytes_of_states, read_units
from tests.support.forked_runs import ForkedRuns
from tests.support.unequal_rows import argv, metrics, write_model, write_rows


def trains(name: str) -> bool:
    """Whether a parameter is in the last decoder layer or the norm."""
    return name.startswith(("model.layers.1.", "model.norm."))


PLUG_IN = """
from fabric_train.model.hf_model import train_only
from tests.model.test_seam_trained_parts import trains
train_only(trains)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("parallelism", "num_ranks"), [("single", 1), ("fsdp", 2), ("fsdp2", 2), ("ddp", 2)])
def test_frozen_parts_stay_and_the_run_resumes_exactly(
    forked_runs: ForkedRuns, tmp_path: Path, parallelism: str, num_ranks: int
) -> None:
    model, tokens = write_model(tmp_path / "model"), write_rows(tmp_path / "tokens")
    given = {"parallelism": parallelism, "devices": num_ranks, "max_step": 2, "save_step_interval": 1}
    first = tmp_path / "whole" / "checkpoints" / "step-00000001"
    for run, more in (("whole", {}), ("resumed", {"checkpoint": first})):
        line = argv(model, tokens, tmp_path / run, **given, lr_schedule="constant", **more)
        forked_runs.start(line, num_ranks, before=PLUG_IN).finish()
    start = load_file(model / "model.safetensors")
    whole, resumed = (tmp_path / run / "checkpoints" / "step-00000002" for run in ("whole", "resumed"))
    weights, states = (load_file(whole / name) for name in ("model.safetensors", "optimizer/optimizer.safetensors"))
    assert weights.keys() == start.keys()
    assert {name for name in weights if not torch.equal(weights[name], start[name])} == set(filter(trains, start))
    assert {name.rpartition(".")[0] for name in states} == set(filter(trains, start))
    for name in ("model.safetensors", "optimizer/optimizer.safetensors"):
        one, other = load_file(whole / name), load_file(resumed / name)
        assert [key for key in one if not torch.equal(one[key], other[key])] == []
    losses = [[row["train_loss"] for row in metrics(tmp_path / run)] for run in ("whole", "resumed")]
    assert losses[0][1:] == losses[1]


def test_plan_and_flops_count_what_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_model, "_trains", None)  # and so again after the test
    folder = str(write_model(tmp_path / "model"))
    arguments = parse(TrainArguments, ["--train_data_dir", "tokens", "--output_dir", "run", "--precision", "32-true"])
    everything = read_shape(folder)
    train_only(trains)
    shape = read_shape(folder)
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32
    assert shape.num_trained == layer + 32
    assert bytes_of_states(shape, arguments) == (8 * (layer + 32), 8 * (layer + 32))
    units = read_units(shape, arguments)
    assert (units.total, units.trained, units.head) == (everything.num_parameters, layer + 32, 0)
    # forward and backward pass of the head, without a gradient of its own; only the forward pass of the first layer
    tokens, head = 10, 300 * 32
    assert everything.flops.of([tokens]) == tokens * (6 * (2 * layer + 32 + head) + 12 * 2 * 32 * tokens)
    expected = 6 * (layer + 32) + 4 * head + 2 * layer + (12 + 4) * 32 * tokens
    assert shape.flops.of([tokens]) == tokens * expected


@pytest.mark.slow
def test_a_choice_of_nothing_is_refused(forked_runs: ForkedRuns, tmp_path: Path) -> None:
    model, tokens = write_model(tmp_path / "model"), write_rows(tmp_path / "tokens")
    nothing = "from fabric_train.model.hf_model import train_only; train_only(lambda name: False)"
    run = forked_runs.start(argv(model, tokens, tmp_path / "run", max_step=1), 1, before=nothing)
    assert run.wait() == [2]
    assert "no parameter of the model would train" in run.stderr()
