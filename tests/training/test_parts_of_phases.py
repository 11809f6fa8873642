"""Phases train other parts: each border is exact, in one process, resumed after a kill and on other ranks."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fabric_train.arguments import TrainArguments, parse
from fabric_train.export.convert import convert
from fabric_train.export.model_card import CardFacts
from fabric_train.export.source import ExportSource
from fabric_train.preflight.memory_forecast import make_request
from fabric_train.preflight.prepare import prepare
from tests.support.checkpoint_examples import write_checksums
from tests.support.exports import verify_in_this_process
from tests.support.forked_runs import ForkedRun, ForkedRuns
from tests.support.short_runs import argv, at_point, metrics, saved_steps
from tests.support.token_datasets import TEXTS, tokenize, write_jsonl

pytestmark = pytest.mark.slow
PHASES = "[{from: 1, train_only: embed_tokens}, {from: 4, train_only: all, lr: 5e-4}, {from: 6, train_only: norm}]"
PRINT_PARAMETERS_LEFT = """
import weakref
from fabric_train.training import run as program

def set_up(fabric, run, original=program.set_up_checked_model):
    print("left", sum(parameter() is not None for parameter in earlier))
    model, decayed = original(fabric, run)
    earlier.extend(map(weakref.ref, model.parameters()))
    return model, decayed

earlier = []
program.set_up_checked_model = set_up
"""
"""Code for a rank: before it sets up a model, print how many parameters of earlier ones are in memory."""
EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"


class Phased:
    """Trains the embedding for three steps, then all for two, then the norm for one."""

    def __init__(self, folder: Path, model: Path, runs: ForkedRuns) -> None:
        self.folder = folder
        self.model = model
        self._runs = runs
        tokenize(folder / "tokens", model, write_jsonl(folder / "texts.jsonl", TEXTS * 2), validation_split=0.1)
        (folder / "phases.yaml").write_text(PHASES)

    def line(self, run: str, num_ranks: int, **options: Any) -> list[str]:
        arguments: dict[str, Any] = {
            "max_step": 6,
            "save_step_interval": 10,
            "grad_clip": 0,
            "total_batch_size": 2,
            "micro_batch_size": 1,
            "phases": self.folder / "phases.yaml",
            "devices": num_ranks,
            **options,
        }
        return argv(self.model, self.folder / "tokens", self.folder / run, **arguments)

    def start(self, run: str, num_ranks: int, before: str = "", **options: Any) -> ForkedRun:
        return self._runs.start(self.line(run, num_ranks, **options), num_ranks, before=before)

    def checkpoint(self, run: str, step: int) -> Path:
        return self.folder / run / "checkpoints" / f"step-{step:08d}"

    def weights(self, run: str, step: int) -> dict[str, torch.Tensor]:
        return load_file(self.checkpoint(run, step) / "model.safetensors")

    def states(self, run: str, step: int) -> dict[str, torch.Tensor]:
        """The optimizer's states by WEIGHT.STATE, such as model.norm.weight.exp_avg."""
        return load_file(self.checkpoint(run, step) / "optimizer" / "optimizer.safetensors")

    def state_steps(self, run: str, step: int) -> dict[str, int]:
        """The optimizer's own count of steps by WEIGHT.step."""
        return {name: int(state) for name, state in self.states(run, step).items() if name.endswith(".step")}

    def last_tensors(self, run: str) -> dict[str, torch.Tensor]:
        return self.weights(run, 6) | self.states(run, 6)


@pytest.fixture(scope="module")
def phased(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path, forked_runs: ForkedRuns) -> Phased:
    return Phased(tmp_path_factory.mktemp("phased"), tiny_model_dir, forked_runs)


@pytest.fixture(scope="module")
def whole(phased: Phased) -> ForkedRun:
    run = phased.start("whole", 2, parallelism="fsdp2")
    run.finish()
    return run


def differing(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    assert tensors.keys() == expected.keys()
    return [name for name in tensors if not torch.equal(tensors[name], expected[name])]


def test_each_phase_changes_its_parts_alone(phased: Phased, whole: ForkedRun) -> None:
    assert saved_steps(phased.folder / "whole") == [3, 5, 6]
    start = load_file(phased.model / "model.safetensors")
    after_embedding = phased.weights("whole", 3)
    after_all = phased.weights("whole", 5)
    after_norm = phased.weights("whole", 6)
    assert differing(start, after_embedding) == [EMBEDDING]
    assert set(differing(after_embedding, after_all)) == start.keys()
    assert differing(after_all, after_norm) == [NORM]
    lines = whole.stdout()
    assert f"note: the optimizer starts from zero for {len(start) - 1} weights, frozen until this step" in lines
    assert "from step 4 on: training all " in lines
    assert "from step 6 on: training model.norm 64" in lines


def test_states_are_of_what_trains_and_count_its_own_steps(phased: Phased, whole: ForkedRun) -> None:
    # three steps of the embedding, two of all weights, one of the norm
    expected_of_all = {f"{name}.step": 2 for name in phased.weights("whole", 6)}
    expected_of_all[f"{EMBEDDING}.step"] = 3 + 2
    assert phased.state_steps("whole", 3) == {f"{EMBEDDING}.step": 3}
    assert phased.state_steps("whole", 5) == expected_of_all
    assert phased.state_steps("whole", 6) == {f"{NORM}.step": 2 + 1}


@pytest.mark.parametrize(("parallelism", "num_ranks"), [("fsdp", 2), ("ddp", 2)])
def test_every_parallelism_ends_with_the_same_bits_and_frees_each_model(
    phased: Phased, whole: ForkedRun, parallelism: str, num_ranks: int
) -> None:
    run = phased.start(parallelism, num_ranks, PRINT_PARAMETERS_LEFT, parallelism=parallelism)
    run.finish()
    assert differing(phased.last_tensors(parallelism), phased.last_tensors("whole")) == []
    assert [line for line in run.lines() if line.startswith("left")] == 3 * ["left 0"]


def test_run_that_ends_at_the_border_and_resumes_is_the_same(phased: Phased, whole: ForkedRun) -> None:
    """A process for each phase: the first step of each is killed."""
    for step in (4, 6):
        kill = at_point("os.kill(os.getpid(), signal.SIGKILL)", step, "DATA")
        assert -9 in phased.start("killed", 2, kill, parallelism="fsdp2", resume="true").wait()
    phased.start("killed", 2, parallelism="fsdp2", resume="true").finish()
    assert differing(phased.last_tensors("killed"), phased.last_tensors("whole")) == []
    assert metrics(phased.folder / "killed") == metrics(phased.folder / "whole")


@pytest.mark.parametrize(("parallelism", "num_ranks"), [("fsdp2", 1), ("ddp", 2)])
def test_run_resumes_across_the_border_on_other_ranks(
    phased: Phased, whole: ForkedRun, parallelism: str, num_ranks: int
) -> None:
    """A window is two rows: their gradients have the same sum on two ranks as one after the other."""
    run = f"resumed on {num_ranks}"
    shutil.copytree(phased.folder / "whole", phased.folder / run)
    for step in (5, 6):
        shutil.rmtree(phased.checkpoint(run, step))
    phased.start(run, num_ranks, parallelism=parallelism, resume="true").finish()
    assert differing(phased.last_tensors(run), phased.last_tensors("whole")) == []


def test_branch_may_train_other_parts(phased: Phased, whole: ForkedRun) -> None:
    """Weights that the trunk has not trained start with states of zero, the embedding goes on with its own."""
    trunk = f"{phased.folder / 'whole'}@3"
    branch = phased.start("branch", 1, phases=None, branch=trunk, max_step=4, freeze="layers.0")
    branch.finish()
    state_steps = phased.state_steps("branch", 4)
    assert not any(".layers.0." in name for name in phased.states("branch", 4))
    assert state_steps[f"{EMBEDDING}.step"] == 3 + 1
    assert state_steps[f"{NORM}.step"] == 1
    assert "the optimizer starts from zero for " in branch.stdout()


def test_parts_of_a_begun_phase_may_not_change(phased: Phased, whole: ForkedRun) -> None:
    # step 3 ends the first phase, which has trained the embedding
    checkpoint = phased.checkpoint("whole", 3)
    (phased.folder / "other.yaml").write_text(PHASES.replace("embed_tokens", "layers.0"))
    run = phased.start("other", 1, phases=phased.folder / "other.yaml", checkpoint=checkpoint)
    assert run.wait() == [2]
    assert "--phases from step 1, train_only: embed_tokens -> layers.0 since " in run.stderr()

    # a phase to come may change
    (phased.folder / "later.yaml").write_text(PHASES.replace("all", "layers.0"))
    later = phased.start("later", 1, phases=phased.folder / "later.yaml", checkpoint=checkpoint, plan="check")
    later.finish()
    assert "train_only layers.0" in later.stdout()


def test_plan_is_of_the_phase_that_needs_most(phased: Phased) -> None:
    # given the forecast of a run that trains the parts of one phase throughout, for each phase
    forecasts = []
    for train_only in ("embed_tokens", "all", "norm"):
        line = phased.line("planned", 1, phases=None, train_only=train_only)
        forecasts.append(make_request(prepare(parse(TrainArguments, line))).forecast())
    # when a run with all phases is planned
    run = prepare(parse(TrainArguments, phased.line("planned", 1)))
    forecast = make_request(run).forecast()
    # then its phases have these parts, and it needs as much as the largest of them
    assert list(run.models.by_first_step) == [1, 4, 6]
    assert [model.num_trained for model in run.models.all] == [phase.units.trained for phase in forecasts]
    assert forecast.units.trained == run.model.num_parameters
    assert forecast.budget.most.total == max(phase.budget.most.total for phase in forecasts)


def test_export_has_the_frozen_weights_of_the_base(phased: Phased, whole: ForkedRun, tmp_path: Path) -> None:
    """It is verified like any other; the base is the one that the run began with."""
    source = ExportSource(phased.checkpoint("whole", 3))
    with verify_in_this_process():
        convert(source, tmp_path / "export", torch.float32, "5GB", CardFacts("owner/name"))
    exported = load_file(tmp_path / "export" / "model.safetensors")
    base = load_file(phased.model / "model.safetensors")
    assert differing(exported, base) == [EMBEDDING]
    card = (tmp_path / "export" / "README.md").read_text()
    trained = f"model.embed_tokens {base[EMBEDDING].numel():,}"
    assert f"- **Trained parts** of the last phase, with their numbers of parameters: {trained}." in card
    assert "trains `embed_tokens` |" in card


def test_missing_state_of_what_trained_is_no_zero(phased: Phased, whole: ForkedRun) -> None:
    """The checkpoint says that step 3 trained the embedding: layer 0 may start from zero, and the embedding not."""
    shutil.copytree(phased.folder / "whole", phased.folder / "altered")
    for step in (5, 6):
        shutil.rmtree(phased.checkpoint("altered", step))
    checkpoint = phased.checkpoint("altered", 3)
    saved = json.loads((checkpoint / "trainer.json").read_text())
    assert saved["phase_parts"] == [
        {"first_step": 1, "last_step": 3, "train_only": ["embed_tokens"]},
        {"first_step": 4, "last_step": 5, "train_only": ["all"]},
        {"first_step": 6, "last_step": 6, "train_only": ["norm"]},
    ]
    saved["phase_parts"][0]["train_only"] = ["embed_tokens", "layers.0"]
    (checkpoint / "trainer.json").write_text(json.dumps(saved))
    write_checksums(checkpoint)
    (phased.folder / "altered.yaml").write_text(PHASES.replace("embed_tokens", "[embed_tokens, layers.0]"))
    run = phased.start("altered", 1, phases=phased.folder / "altered.yaml", resume="true")
    assert run.wait() == [2]
    assert "step-00000003: the optimizer's model.layers.0." in run.stderr()
