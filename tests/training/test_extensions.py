"""Parts that a module registers reach every rank, and a run goes on only with the parts that it began with."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from fabric_train.checkpoint import read_trainer_json
from fabric_train.cli.tables import Component
from fabric_train.export.card_facts import read_record
from fabric_train.export.model_card import CardFacts, write_model_card
from fabric_train.report import __main__ as report_program
from fabric_train.training.metrics import read_metrics
from tests.support.forked_runs import ForkedRun, ForkedRuns
from tests.support.programs import ROOT
from tests.support.short_runs import SETTINGS, argv

MODULE = """
import torch
from fabric_train import LOGGERS, METRICS, OBJECTIVES, OPTIMIZERS
from fabric_train.optim.states import DeclaredStates, State
from fabric_train.training.evaluation import Metric
from fabric_train.training.logger import Logger
from fabric_train.training.objective import BatchLoss, CrossEntropy


class Weighted(CrossEntropy):
    def __init__(self, weight):
        self.weight = weight

    def loss(self, model, batch, scale=None):
        loss = super().loss(model, batch, None if scale is None else self.weight * scale)
        return BatchLoss(self.weight * loss.total, self.weight * loss.token_losses)


class Momentum(DeclaredStates, torch.optim.SGD):
    def declare_states(self, parameter):
        return (State("momentum_buffer", parameter.dtype),)


class Notes(Logger):
    def __init__(self, run):
        self.file = (run.folder / "notes.txt").open("a")

    def log(self, metrics):
        print(metrics.step, metrics.train_loss, file=self.file, flush=True)


def weighted(arguments, *, weight=2.0):
    return Weighted(weight)


def momentum(parameters, *, momentum=0.9):
    return Momentum(parameters.groups, lr=parameters.arguments.lr, momentum=momentum)


def register():
    OBJECTIVES["weighted"] = weighted
    OPTIMIZERS["momentum"] = momentum
    METRICS["doubled"] = Metric(lambda losses: 2 * losses)
    LOGGERS["notes"] = Notes
"""
SCRIPT = """
import fabric_train

{register}
given = {given!r} | {{"objective": "weighted", "optimizer": "momentum", "objective_settings": {{"weight": 3.0}}}}
try:
    print(fabric_train.train(**given).train_loss)
except fabric_train.InputError as error:
    print(*error.faults, sep="\\n")
"""
OPTIONS = {"max_step": 2, "save_step_interval": 1, "loggers": None, "eval_step_interval": 1}
PARTS: dict[str, object] = {
    "extensions": "parts",
    "objective": "weighted",
    "objective_settings": "{weight: 3}",
    "optimizer": "momentum",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with modules that register: one when it is imported, and one when its function is called."""
    folder = tmp_path_factory.mktemp("extensions")
    (folder / "late.py").write_text(MODULE)
    (folder / "parts.py").write_text(f"{MODULE}\n\nregister()\n")
    return folder


@pytest.fixture(scope="module")
def start(forked_runs: ForkedRuns, folder: Path, tiny_model_dir: Path, tiny_tokens_dir: Path):
    def started(run: str, num_ranks: int = 1, **options: object) -> ForkedRun:
        line = argv(tiny_model_dir, tiny_tokens_dir, folder / run, **{**OPTIONS, **options})
        return forked_runs.start(line, num_ranks, cwd=folder)

    return started


@pytest.fixture(scope="module")
def extended(start, folder: Path) -> Path:
    """A run of two steps with an objective and an optimizer of a module."""
    start("extended", **PARTS).finish()
    return folder / "extended"


@pytest.fixture(scope="module")
def plain(start, folder: Path) -> Path:
    start("plain").finish()
    return folder / "plain"


def python(folder: Path, model: Path, tokens: Path, register: str, **options: object) -> list[str]:
    """Run a script that trains on two devices, and return the lines that it prints."""
    given = {**SETTINGS, **OPTIONS, "model_name": str(model), "train_data_dir": str(tokens), **options}
    given |= {"devices": 2, "eval_at_start": False, "report": False, "parallelism": "fsdp2"}
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    (folder / "script.py").write_text(SCRIPT.format(register=register, given=given))
    command = [sys.executable, "script.py"]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_ranks_that_the_api_starts_have_what_a_module_registers(
    folder: Path, extended: Path, tiny_model_dir: Path, tiny_tokens_dir: Path
) -> None:
    lines = python(folder, tiny_model_dir, tiny_tokens_dir, "import parts", output_dir="by api")
    of_one = read_metrics(extended / "metrics.csv", 2)
    for row, expected in zip(read_metrics(folder / "by api" / "metrics.csv", 2), of_one, strict=True):
        assert row.train_loss == pytest.approx(expected.train_loss, rel=1e-5)
        assert row.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
        assert row.val_loss is not None
        assert row.extra["val_doubled"] == pytest.approx(2 * row.val_loss)
    assert float(lines[-1]) == pytest.approx(of_one[-1].train_loss, rel=1e-5)
    assert len((folder / "by api" / "notes.txt").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    "register", [f"{MODULE}\nregister()", "import late; late.register()"], ids=["in the script", "by a call"]
)
def test_what_the_ranks_cannot_have_is_refused(
    folder: Path, tiny_model_dir: Path, tiny_tokens_dir: Path, register: str
) -> None:
    (fault,) = python(folder, tiny_model_dir, tiny_tokens_dir, register, output_dir="refused")
    for part in ("objective weighted", "optimizer momentum", "metrics doubled", "loggers notes"):
        assert part in fault
    assert "extensions=['MODULE']" in fault
    assert not (folder / "refused").exists()


def test_a_checkpoint_has_the_identity_of_its_parts(extended: Path, plain: Path) -> None:
    found = read_trainer_json(extended / "checkpoints" / "step-00000002").components
    assert [(one.kind, one.name, one.module, one.settings) for one in found] == [
        ("objective", "weighted", "parts", {"weight": 3.0}),
        ("optimizer", "momentum", "parts", {"momentum": 0.9}),
        ("metrics", "doubled", "parts", {}),
        ("loggers", "notes", "parts", {}),
    ]
    assert read_trainer_json(plain / "checkpoints" / "step-00000002").components == (
        Component("objective", "sft", "fabric_train"),
        Component("optimizer", "adamw", "fabric_train"),
    )


def test_a_part_of_the_same_name_in_another_module_is_another_part() -> None:
    there = Component("objective", "weighted", "parts", settings={"weight": 3.0}, source="0123")
    assert there.computes_as(replace(there, source="4567", by_script=True))  # a changed file is noted
    for changed in (replace(there, module="others"), replace(there, name="other"), replace(there, settings={})):
        assert not there.computes_as(changed)


OTHERS: dict[str, dict[str, object]] = {
    "none": {},
    "another objective": PARTS | {"objective": "sft", "objective_settings": None},
    "another optimizer": PARTS | {"optimizer": "adamw"},
    "another setting": PARTS | {"objective_settings": "{weight: 2.5}"},
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("way", ["resume", "branch", "evaluation"])
def test_a_run_with_other_parts_than_its_checkpoint_is_refused(
    start, extended: Path, tmp_path: Path, way: str, other: str
) -> None:
    options = OTHERS[other]
    if way == "evaluation" and other == "another optimizer":
        pytest.skip("an evaluation has no optimizer")
    run = _go_on(start, extended, tmp_path, way, **options)
    assert run.wait() == [2]
    fault = run.stderr(0).splitlines()[0]
    there = "optimizer momentum of parts" if other == "another optimizer" else "objective weighted of parts"
    assert there in fault
    here = {"another optimizer": "optimizer adamw", "another setting": "(weight 2.5)"}.get(other, "objective sft")
    assert here in fault
    assert f"--extensions parts --{there.split()[0]}" in fault
    assert "--allow_changes true" in fault


def _go_on(start, run: Path, tmp_path: Path, way: str, **options: object) -> ForkedRun:
    """Resume a copy of a run, branch off it, or evaluate it."""
    checkpoint = run / "checkpoints" / "step-00000001"
    if way == "resume":
        copy = Path(shutil.copytree(run, tmp_path / "copy"))
        shutil.rmtree(copy / "checkpoints" / "step-00000002")
        return start(copy, resume="true", **options)
    if way == "branch":
        return start(tmp_path / "branch", branch=f"{run}@1", **options)
    return start(tmp_path / "evaluation", eval_only="true", checkpoint=checkpoint, **options)


@pytest.mark.parametrize("way", ["resume", "branch", "evaluation"])
def test_a_plain_run_does_not_go_on_with_a_registered_objective(start, plain: Path, tmp_path: Path, way: str) -> None:
    run = _go_on(start, plain, tmp_path, way, **PARTS)
    assert run.wait() == [2]
    (fault, *_) = run.stderr(0).splitlines()
    assert "objective sft" in fault
    assert "objective weighted of parts (weight 3" in fault
    assert "give --objective sft" in fault


@pytest.mark.parametrize("way", ["resume", "branch", "evaluation"])
def test_a_run_goes_on_with_its_own_parts(start, extended: Path, tmp_path: Path, way: str) -> None:
    run = _go_on(start, extended, tmp_path, way, **PARTS)
    run.finish()
    if way == "resume":
        assert read_metrics(tmp_path / "copy" / "metrics.csv", 2)[-1].train_loss == pytest.approx(
            read_metrics(extended / "metrics.csv", 2)[-1].train_loss, abs=0
        )
    if way == "evaluation":
        evaluated = json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())
        first = read_metrics(extended / "metrics.csv", 1)[-1]
        assert evaluated["loss"] == pytest.approx(first.val_loss, rel=1e-6)


def test_no_perplexity_is_computed_of_a_registered_loss(start, extended: Path, plain: Path, tmp_path: Path) -> None:
    (row,) = read_metrics(extended / "metrics.csv", 1)
    assert row.val_loss is not None
    assert (row.perplexity, row.val_bits_per_byte) == (None, None)
    _go_on(start, extended, tmp_path, "evaluation", **PARTS).finish()
    evaluated = json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())
    assert evaluated.keys() == {"model", "step", "loss", "doubled", "loss_sum", "num_tokens", "sources"}
    # the loss of the project's own objective is in nats
    assert read_metrics(plain / "metrics.csv", 1)[-1].perplexity is not None


def test_card_and_report_name_the_parts_and_the_unit_of_the_loss(extended: Path, tmp_path: Path) -> None:
    checkpoint = extended / "checkpoints" / "step-00000002"
    write_model_card(read_record(read_trainer_json(checkpoint)), tmp_path, CardFacts("model"))
    card = ModelCard.load(tmp_path / "README.md")
    assert "The loss is the loss of the objective weighted of parts (weight 3), in its unit" in card.text
    assert "in the unit of the objective weighted." in card.text
    assert "| `objective` | weighted of parts (weight 3) |" in card.text
    assert "| `optimizer` | momentum of parts (momentum 0.9) |" in card.text
    for words in ("nats", "erplexity", "its per byte", "a pair"):
        assert words not in card.text
    metrics = card.data.to_dict()["model-index"][0]["results"][0]["metrics"]
    assert [metric["type"] for metric in metrics] == ["loss", "doubled"]
    assert "nats" not in metrics[0]["name"]
    report_program.main([str(extended), "--output", str(tmp_path / "report.html")])
    report = (tmp_path / "report.md").read_text()
    assert "| objective | weighted of parts (weight 3) |" in report
    assert "| optimizer | momentum of parts (momentum 0.9) |" in report
    assert "Loss in the unit of the objective weighted." in report


def test_a_plan_says_which_loss_its_activations_are_of(start, tmp_path: Path) -> None:
    run = start(tmp_path / "planned", plan="true", **PARTS)
    run.finish()
    assert any(
        "the memory for activations is estimated for cross entropy; the objective weighted of parts" in line
        for line in run.lines()
    )


def test_an_accepted_change_of_the_optimizer_starts_its_states_from_zero(start, extended: Path, tmp_path: Path) -> None:
    run = _go_on(start, extended, tmp_path, "resume", **PARTS | {"optimizer": "adamw", "allow_changes": "true"})
    run.finish()
    notes = [line for line in run.lines() if "note: " in line]
    assert any("the optimizer adamw instead of the optimizer momentum of parts" in line for line in notes)
    assert any("starts from zero" in line for line in notes)


def test_a_changed_file_of_a_part_is_noted(start, extended: Path, folder: Path, tmp_path: Path) -> None:
    before = (folder / "parts.py").read_text()
    try:
        (folder / "parts.py").write_text(before.replace("2 * losses", "3 * losses"))
        run = _go_on(start, extended, tmp_path, "resume", **PARTS)
        run.finish()
    finally:
        (folder / "parts.py").write_text(before)
    assert any("the file of the objective weighted of parts" in line for line in run.lines())


def test_replay_imports_only_modules_that_its_command_names(
    forked_runs: ForkedRuns, extended: Path, folder: Path
) -> None:
    words = [str(extended), "--steps", "1:2", "--devices", "1"]
    refused = forked_runs.start(words, 1, cwd=folder, program="fabric_train.replay")
    assert refused.wait() == [2]
    assert "--extensions parts" in refused.stderr(0)
    replay = forked_runs.start([*words, "--extensions", "parts"], 1, cwd=folder, program="fabric_train.replay")
    replay.finish()
    assert "passed: every compared value is reproduced" in replay.stdout()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"extensions": "absent"}, "--extensions absent: no module absent"),
        ({"extensions": "broken"}, "--extensions broken: importing it failed: ZeroDivisionError"),
        ({"extensions": "../parts"}, "--extensions ../parts: expected the name of a module"),
        ({"objective": "weighted"}, "--objective: expected one of sft, distill, rl, dpo"),
        ({"optimizer": "sgd", "extensions": "parts"}, "--optimizer: expected one of adamw"),
        (PARTS | {"objective_settings": "{wait: 3}"}, "weighted has no setting wait; it has weight"),
        (PARTS | {"objective_settings": "{weight: high}"}, "weight has the wrong type: the default is 2.0, got 'high'"),
        ({"objective_settings": "{weight: 3}"}, "not to --objective sft; leave out --objective_settings"),
    ],
)
def test_wrong_names_and_settings_are_refused(start, folder: Path, options: dict[str, object], words: str) -> None:
    (folder / "broken.py").write_text("1 / 0\n")
    run = start("wrong", **options)
    assert run.wait() == [2]
    assert words in run.stderr(0)
    assert not (folder / "wrong").exists()
