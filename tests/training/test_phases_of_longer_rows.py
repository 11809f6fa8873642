"""A phase with token datasets of longer rows: its border is exact, and the record of the run stays true."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from fabric_train.checkpoint import read_trainer_json
from fabric_train.cli.errors import InputError
from fabric_train.trace.documents import list_documents
from fabric_train.trace.run_history import RunHistory
from tests.support.forked_runs import ForkedRun, ForkedRuns
from tests.support.rounding import assert_same_checkpoint, num_sums_of_gradient, rounding_tolerance
from tests.support.short_runs import argv, at_point, metrics, saved_steps
from tests.support.token_datasets import TEXTS, tokenize, write_jsonl

pytestmark = pytest.mark.slow
SHORT = 16
LONG = 320
POSITIONS = 256
LR = 1e-3
PHASES = """
- {from: 3, train_data_dir: long, max_length: 320, rope_scaling: "llama3:2", rope_theta: 500000, total_batch_size: 2,
   micro_batch_size: 1}
- {from: 5, lr: 1e-4}
"""
ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


class Growing:
    """Trains on rows of 16 tokens for two steps, then on rows of 320 for three, beyond the model's 256 positions."""

    def __init__(self, folder: Path, model: Path, runs: ForkedRuns) -> None:
        self.folder = folder
        self.model = model
        self._runs = runs
        tokenize(folder / "short", model, write_jsonl(folder / "short.jsonl"), validation_split=0.1, max_length=SHORT)
        documents = write_jsonl(folder / "long.jsonl", [f"long {text}" for text in TEXTS * 5])
        tokenize(folder / "long", model, documents, validation_split=0.2, max_length=LONG)
        (folder / "phases.yaml").write_text(PHASES)

    def start(self, run: str, num_ranks: int, before: str = "", **options: Any) -> ForkedRun:
        arguments: dict[str, Any] = {
            "phases": "phases.yaml",
            "max_step": 5,
            "total_batch_size": 8,
            "lr": LR,
            "eval_iters": None,
            "save_step_interval": 10,
            "parallelism": "fsdp2" if num_ranks > 1 else "auto",
            **options,
        }
        words = argv(self.model, Path("short"), Path(run), **arguments)
        return self._runs.start(words, num_ranks, cwd=self.folder, before=before)

    def checkpoint(self, run: str, step: int) -> Path:
        return self.folder / run / "checkpoints" / f"step-{step:08d}"

    def tensors(self, run: str, step: int = 5) -> dict[str, torch.Tensor]:
        folder = self.checkpoint(run, step)
        return load_file(folder / "model.safetensors") | load_file(folder / "optimizer" / "optimizer.safetensors")

    @property
    def rounding(self) -> float:
        """The tolerance of losses and gradients."""
        num_tokens = 2 * LONG
        return rounding_tolerance(num_sums_of_gradient(AutoConfig.from_pretrained(self.model), LONG, num_tokens))

    def assert_same_to_rounding(self, run: str, expected_run: str) -> None:
        assert_same_checkpoint(self.tensors(run), self.tensors(expected_run), LR, 5, self.rounding)


@pytest.fixture(scope="module")
def growing(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path, forked_runs: ForkedRuns) -> Growing:
    return Growing(tmp_path_factory.mktemp("growing"), tiny_model_dir, forked_runs)


@pytest.fixture(scope="module")
def whole(growing: Growing) -> ForkedRun:
    run = growing.start("whole", 2)
    run.finish()
    return run


def are_equal(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return tensors.keys() == expected.keys() and all(torch.equal(tensors[name], expected[name]) for name in tensors)


def test_the_rows_and_positions_of_a_phase_are_longer(growing: Growing, whole: ForkedRun) -> None:
    lines = whole.stdout()
    assert "256 positions, theta 10,000 -> 512 positions, llama3 factor 2 from 256 positions, theta 500,000" in lines
    assert "from step 3 on: long: " in lines
    assert saved_steps(growing.folder / "whole") == [2, 4, 5]  # each phase ends with one

    short_config = json.loads((growing.checkpoint("whole", 2) / "config.json").read_text())
    long_config = json.loads((growing.checkpoint("whole", 4) / "config.json").read_text())
    assert short_config["max_position_embeddings"] == 256
    assert long_config["max_position_embeddings"] == 512
    assert long_config["rope_parameters"] == ROPE | {"original_max_position_embeddings": POSITIONS}

    # two steps of 8 short rows, then three steps of 2 long ones
    num_tokens = [int(row[7]) for row in metrics(growing.folder / "whole")]
    assert num_tokens[1] == 2 * 8 * SHORT
    assert num_tokens[4] == 2 * 8 * SHORT + 3 * 2 * LONG
    before_border = read_trainer_json(growing.checkpoint("whole", 2))
    at_end = read_trainer_json(growing.checkpoint("whole", 5))
    assert before_border.state.num_samples == 2 * 8
    assert at_end.state.num_samples == 2 * 8 + 3 * 2

    assert before_border.lineage == ()
    (border,) = at_end.lineage
    assert (border.run, border.step, border.continues_data) == (str(growing.folder / "whole"), 2, False)
    assert border.changed["train_data_dir"] == ["short", "long"]
    assert border.changed["total_batch_size"] == [8, 2]
    assert json.loads((growing.checkpoint("whole", 5) / "trainer.json").read_text())["lineage"][0]["run"] == "."
    assert at_end.arguments["train_data_dir"] == "long"


@pytest.mark.parametrize("kills", [(3,), (2, 4)])
def test_a_run_killed_around_the_border_resumes_bit_for_bit(
    growing: Growing, whole: ForkedRun, kills: tuple[int, ...]
) -> None:
    """It is killed in the first step after the border, or in the step before it and the second after it."""
    name = f"killed at {kills[0]}"
    for step in kills:
        kill = at_point("os.kill(os.getpid(), signal.SIGKILL)", step, "COMPLETING")
        assert -9 in growing.start(name, 2, kill, resume="true").wait()
    growing.start(name, 2, resume="true").finish()
    assert are_equal(growing.tensors(name), growing.tensors("whole"))
    assert metrics(growing.folder / name) == metrics(growing.folder / "whole")
    resumed_state = read_trainer_json(growing.checkpoint(name, 5)).state
    whole_state = read_trainer_json(growing.checkpoint("whole", 5)).state
    assert resumed_state.rows_hash == whole_state.rows_hash


def test_one_rank_goes_on_from_either_part_in_a_moved_folder(growing: Growing, whole: ForkedRun) -> None:
    """It is bit-identical to an uninterrupted run, and two ranks have the same sums of gradients to rounding."""
    growing.start("single", 1).finish()
    for name, lost_steps in (("moved at the border", (4, 5)), ("moved later", (5,))):
        shutil.copytree(growing.folder / "single", growing.folder / name)
        for step in lost_steps:
            shutil.rmtree(growing.checkpoint(name, step))
        growing.start(name, 1, resume="true").finish()
        assert are_equal(growing.tensors(name), growing.tensors("single"))
        assert metrics(growing.folder / name) == metrics(growing.folder / "single")
        (border,) = read_trainer_json(growing.checkpoint(name, 5)).lineage
        assert border.run == str(growing.folder / name)
    growing.assert_same_to_rounding("single", "whole")


def test_ranks_that_share_the_rows_have_the_same_losses_and_weights(growing: Growing, whole: ForkedRun) -> None:
    growing.start("shared", 2, devices=2, context_parallel_size=2).finish()
    losses = [float(row[2] or 0) for row in metrics(growing.folder / "shared")]
    expected_losses = [float(row[2] or 0) for row in metrics(growing.folder / "whole")]
    assert losses == pytest.approx(expected_losses, rel=growing.rounding)
    growing.assert_same_to_rounding("shared", "whole")


def test_trace_reads_both_datasets(growing: Growing, whole: ForkedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(growing.folder)
    history = RunHistory(growing.folder / "whole")
    for step, num_rows, dataset in ((2, 8, "short"), (3, 2, "long"), (5, 2, "long")):
        step_documents = list_documents(history, step, None)
        assert step_documents.num_rows == num_rows
        assert {document.dataset for document in step_documents.documents} == {dataset}

    # without the checkpoint at the border, nobody knows what the steps before it have read
    shutil.copytree(growing.folder / "whole", growing.folder / "pruned")
    shutil.rmtree(growing.checkpoint("pruned", 2))
    with pytest.raises(InputError, match="the run that trained steps 1 to 2 no longer has a checkpoint"):
        list_documents(RunHistory(growing.folder / "pruned"), 2, None)


def test_replay_repeats_the_steps_of_either_side(growing: Growing, whole: ForkedRun, forked_runs: ForkedRuns) -> None:
    def replay(steps: str) -> ForkedRun:
        words = ["whole", "--steps", steps]
        return forked_runs.start(words, 2, program="fabric_train.replay", cwd=growing.folder)

    for steps in ("2:2", "3:4"):
        run = replay(steps)
        run.finish()
        assert "passed: " in run.stdout()
    refused = replay("2:3")
    assert refused.wait() == [2, 2]
    assert "after step 2, the run trains different parts of the model or reads different data" in refused.stderr()


def test_a_branch_and_a_plan_know_the_phase(growing: Growing, whole: ForkedRun) -> None:
    branch = growing.start("branch", 1, branch="whole@4", max_step=5)
    branch.finish()
    lineage = read_trainer_json(growing.checkpoint("branch", 5)).lineage
    assert [border.step for border in lineage] == [2, 4]
    plan = growing.start("planned", 1, plan="true")
    plan.finish()
    assert "it fits" in plan.stdout()
    assert "Plan, steps 1 to 2" in plan.stdout()
    assert "Plan, steps 3 to 5" in plan.stdout()


@pytest.mark.parametrize(
    ("phases", "fault"),
    [
        ("- {from: 3, max_length: 320}", "phase 1: max_length needs a phase with its own token datasets; add "),
        ("- {from: 1, train_data_dir: long}", "phase 1 begins with the run; give its train_data_dir on the "),
        ("- {from: 3, train_data_dir: long, max_length: 300}", "phase 1: max_length 300: the rows of long have 320"),
        ("- {from: 3, train_data_dir: long}", "tokenize with --max_length 256 or less, or extend the positions: "),
        ("- {from: 3, train_data_dir: long, rope_scaling: ntk}", "phase 1: rope_scaling: expected llama3:FACTOR, "),
        ("- {from: 3, train_data_dir: nowhere}", "nowhere: "),
    ],
)
def test_what_a_phase_cannot_have_is_one_line_before_the_run(growing: Growing, phases: str, fault: str) -> None:
    (growing.folder / "wrong.yaml").write_text(phases)
    run = growing.start("wrong", 1, phases="wrong.yaml")
    assert run.wait() == [2]
    assert fault in run.stderr()
    assert not (growing.folder / "wrong").exists()
