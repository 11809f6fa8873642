"""A run that branches off another continues its steps, and goes its own way where the user wants it to."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file

from fabric_train.arguments import TrainingArguments
from fabric_train.checkpoint import read_trainer_json
from fabric_train.data.step_sampler import WindowOrder
from fabric_train.export.card_facts import read_record
from fabric_train.export.model_card import CardFacts, write_model_card
from fabric_train.optim.learning_rate import learning_rate
from tests.support.forked_runs import ForkedRun, ForkedRuns
from tests.support.run_comparison import counters, differences
from tests.support.short_runs import argv, at_point, metrics

pytestmark = pytest.mark.slow
DIE = at_point("os.kill(os.getpid(), signal.SIGKILL)", 13, "OPTIMIZER")


class Branching:
    """Trains runs in one folder: epochs of 4 windows, a checkpoint every third step and at each epoch's end."""

    def __init__(self, folder: Path, runs: ForkedRuns, model: Path, tokens: Path) -> None:
        self.folder = folder
        self.runs = runs
        self.model = model
        splits = datasets.load_from_disk(tokens)
        for name, rows in {"tokens": range(30), "others": range(40, 60)}.items():
            few = {"train": splits["train"].select(rows), "validation": splits["validation"].select(range(16))}
            datasets.DatasetDict(few).save_to_disk(folder / name)

    def start(self, name: str, num_ranks: int = 1, before: str = "", **options: Any) -> ForkedRun:
        given = {"number_epochs": 9, "lr_schedule": "constant", "warmup_steps": 2, "parallelism": "single", **options}
        given["micro_batch_size"] = 8 // num_ranks
        tokens = self.folder / given.pop("data", "tokens")
        return self.runs.start(argv(self.model, tokens, self.folder / name, **given), num_ranks, before=before)

    def train(self, name: str, num_ranks: int = 1, **options: Any) -> ForkedRun:
        run = self.start(name, num_ranks, **options)
        run.finish()
        return run

    def checkpoint(self, name: str, step: int) -> Path:
        return self.folder / name / "checkpoints" / f"step-{step:08d}"

    def trainer(self, name: str, step: int) -> dict[str, Any]:
        return json.loads((self.checkpoint(name, step) / "trainer.json").read_text())


@pytest.fixture(scope="module")
def branching(
    tmp_path_factory: pytest.TempPathFactory, forked_runs: ForkedRuns, tiny_model_dir: Path, tiny_tokens_dir: Path
) -> Branching:
    made = Branching(tmp_path_factory.mktemp("branches"), forked_runs, tiny_model_dir, tiny_tokens_dir)
    made.train("trunk", max_step=12)
    return made


@pytest.mark.parametrize(("num_ranks", "decay"), [(1, 3), (1, 5), (2, 3)])
def test_common_steps_are_the_trunks_bit_for_bit(branching: Branching, num_ranks: int, decay: int) -> None:
    trunk = "trunk"
    branch = f"decay-{num_ranks}-{decay}"
    parallelism = "single" if num_ranks == 1 else "fsdp"
    if num_ranks == 2:
        trunk = "trunk-fsdp"
        branching.train(trunk, 2, max_step=12, parallelism=parallelism)
    options: dict[str, Any] = {"lr_schedule": "wsd", "decay_steps": decay, "max_step": 12, "parallelism": parallelism}
    run = branching.train(branch, num_ranks, branch=f"{branching.folder / trunk}@3", **options)
    ours = metrics(branching.folder / branch)
    theirs = metrics(branching.folder / trunk)
    assert [int(row[0]) for row in ours] == list(range(4, 13))
    num_common = 9 - decay
    assert ours[:num_common] == theirs[3:-decay]
    assert ours[num_common] != theirs[-decay]
    training = TrainingArguments(lr=1e-3, warmup_steps=2, lr_schedule="wsd", decay_steps=decay)
    assert [float(row[5]) for row in ours] == [learning_rate(step, 12, training) for step in range(4, 13)]
    here = branching.checkpoint(branch, 6)
    there = branching.checkpoint(trunk, 6)
    assert counters(here) == counters(there)
    for file in ("model.safetensors", "optimizer/optimizer.safetensors"):
        tensors = load_file(here / file)
        wanted = load_file(there / file)
        assert tensors.keys() == wanted.keys()
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in tensors.items())
    changed = f"changed: lr_schedule: constant -> wsd, decay_steps: null -> {decay}\n"
    assert f"note: branch of {branching.folder / trunk} after step 3; {changed}" in run.stdout()


def test_a_killed_branch_with_other_data_resumes_bit_for_bit(branching: Branching) -> None:
    trunk = branching.folder / "trunk"
    options: dict[str, Any] = {"branch": f"{trunk}@8", "data": "others", "number_epochs": 2, "max_step": None}
    whole = branching.train("whole", **options)
    assert "note: the data restart from the first epoch: --train_data_dir is another token dataset (" in whole.stdout()
    rows = metrics(branching.folder / "whole")
    # 20 rows are 3 windows; steps and tokens go on, epochs count the other data
    assert [(int(row[0]), int(row[1])) for row in rows] == [(9, 0), (10, 0), (11, 0), (12, 1), (13, 1), (14, 1)]
    per_row = int(metrics(trunk)[7][7]) // 60  # 8 steps are two epochs of 30 rows
    assert int(rows[-1][7]) == (60 + 40) * per_row
    order = WindowOrder(num_rows=20, rows_per_window=8, micro_batch_size=2, world_size=1, rank=0, seed=0)
    assert branching.trainer("whole", 14)["rows_hash"] == order.rows_hash(6)
    killed = branching.start("killed", before=DIE, **options)
    assert killed.wait() == [-9]
    branching.train("killed", resume="true", **options)  # the same line, as after a requeue
    assert differences(branching.folder / "killed", branching.folder / "whole") == []
    sessions = branching.trainer("killed", 14)["sessions"]
    assert [session["after_step"] for session in sessions] == [0, 8, 11]


def test_the_lineage_is_in_checkpoints_and_the_model_card(branching: Branching, tmp_path: Path) -> None:
    trunk = branching.folder / "trunk"
    branching.train("first", branch=f"{trunk}@latest", max_step=14)
    branching.train("second", branch=f"{branching.folder / 'first'}@14", max_step=16, data="others", lr=2e-3)
    lineage = branching.trainer("second", 16)["lineage"]
    assert [(one["run"], one["step"], one["continues_data"]) for one in lineage] == [
        (str(trunk), 12, True),
        (str(branching.folder / "first"), 14, False),
    ]
    assert lineage[0]["changed"] == {"max_step": [12, 14]}
    assert lineage[1]["changed"] == {
        "max_step": [14, 16],
        "lr": [1e-3, 2e-3],
        "train_data_dir": [str(branching.folder / "tokens"), str(branching.folder / "others")],
    }
    sessions = [branching.trainer(run, step)["sessions"] for run, step in (("trunk", 12), ("second", 16))]
    assert [(one["after_step"], one["num_devices"], one["device"][:4]) for one in sessions[1]] == [
        (0, 1, "CPU,"),
        (12, 1, "CPU,"),
        (14, 1, "CPU,"),
    ]
    assert sessions[1][:1] == sessions[0]
    assert all(one["seconds"] > 0 for one in sessions[1])
    write_model_card(read_record(read_trainer_json(branching.checkpoint("second", 16))), tmp_path, CardFacts("model"))
    card = (tmp_path / "README.md").read_text()
    assert "| `trunk` | 12 | `max_step`: 12 → 14 |" in card
    arguments = "`train_data_dir`: tokens → others, `max_step`: 14 → 16, `lr`: 0.001 → 0.002"
    second = f"{arguments}, different data, read from the beginning"
    assert f"| `first` | 14 | {second} |" in card
    assert str(branching.folder) not in card
    assert "| fabric-train | " in card


@pytest.mark.parametrize(
    ("branch", "output", "fault"),
    [
        ("trunk@7", "new", "trunk/step-7: the run does not have this checkpoint; it has step-00000003, "),
        ("trunk", "new", "--branch: expected RUN@STEP such as runs/1@5000, RUN@latest or RUN/best; got "),
        ("nothing@6", "new", "nothing: no such folder; give the folder of a run"),
        ("trunk@6", "trunk", "trunk is the run to branch from; give another --output_dir"),
        ("trunk@12", "new", "is at step 12, and the branch would end at step 12; give a larger --max_step or "),
    ],
)
def test_a_branch_that_cannot_be_is_refused_in_one_line(
    branching: Branching, branch: str, output: str, fault: str
) -> None:
    before = sorted((branching.folder / "trunk").rglob("*"))
    refused = branching.start(output, branch=branching.folder / branch, max_step=12, resume="true")
    assert refused.wait() == [2], refused.report()
    (line,) = refused.stderr().splitlines()
    assert line.startswith("error: ")
    assert fault in line
    assert not (branching.folder / "new").exists()
    assert sorted((branching.folder / "trunk").rglob("*")) == before
