"""RUN/best, RUN/latest and RUN/step-N mean the same checkpoint in every program that takes a model or a checkpoint."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fabric_train.arguments import TrainArguments, parse
from fabric_train.checkpoint import read_trainer_json
from fabric_train.export.plan import plan_targets
from fabric_train.inference.load_model import load_for_inference
from fabric_train.preflight.prepare import prepare
from fabric_train.trace.__main__ import main as trace
from tests.support.checkpoint_examples import write_checksums
from tests.support.forked_runs import ForkedRuns
from tests.support.short_runs import argv

pytestmark = pytest.mark.slow
NAMES = {"best": 2, "latest": 3, "step-1": 1}


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory, forked_runs: ForkedRuns, tiny_model_dir: Path, tiny_tokens_dir: Path
) -> Path:
    """A run of three steps, whose second checkpoint has the lowest validation loss."""
    folder = tmp_path_factory.mktemp("names") / "run"
    options = {"max_step": 3, "save_step_interval": 1, "eval_step_interval": 9}
    forked_runs.start(argv(tiny_model_dir, tiny_tokens_dir, folder, **options), 1).finish()
    for step, checkpoint in enumerate(sorted((folder / "checkpoints").iterdir()), 1):
        content = json.loads((checkpoint / "trainer.json").read_text()) | {"val_loss": 5.0 + (step != 2)}
        (checkpoint / "trainer.json").write_text(json.dumps(content))
        write_checksums(checkpoint)
    return folder


def checkpoint_of(run: Path, name: str) -> Path:
    return run / "checkpoints" / f"step-{NAMES[name]:08d}"


@pytest.mark.parametrize("name", NAMES)
def test_every_program_reads_a_name_as_the_same_checkpoint(
    run: Path,
    tiny_model_dir: Path,
    tiny_tokens_dir: Path,
    tmp_path: Path,
    name: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = str(run / name)
    wanted = checkpoint_of(run, name)
    begins: dict[str, dict[str, object]] = {
        "weights of --model_name": {"model_name": given},
        "weights of --checkpoint": {"checkpoint": given, "weights_only": "true"},
        "--checkpoint": {"checkpoint": given},
        "--branch": {"branch": given},
    }
    for option, words in begins.items():
        line = argv(tiny_model_dir, tiny_tokens_dir, tmp_path / "new", **{"max_step": 4, **words})
        start = prepare(parse(TrainArguments, line)).start
        assert start.checkpoint == wanted, option
        assert start.state.step == (0 if "weights" in option else NAMES[name]), option
    weights = load_file(wanted / "model.safetensors")
    model, _ = load_for_inference(given)
    assert torch.equal(model.state_dict()["model.norm.weight"], weights["model.norm.weight"])
    targets, _ = plan_targets([Path(given)], tmp_path / "out", torch.bfloat16)
    assert [source.checkpoint for source in targets.values()] == [wanted]
    capsys.readouterr()
    trace([given, "--step", "1", "--json"])
    assert json.loads(capsys.readouterr().out)["step"] == 1


def test_a_run_from_the_weights_of_a_checkpoint_can_be_resumed(
    run: Path, forked_runs: ForkedRuns, tiny_tokens_dir: Path, tmp_path: Path
) -> None:
    words = argv(run / "best", tiny_tokens_dir, tmp_path / "new", max_step=1)
    first = forked_runs.start(words, 1)
    first.finish()
    wanted = checkpoint_of(run, "best")
    assert f"{run / 'best'}: using the checkpoint with the lowest validation loss, {wanted.name}" in first.stdout()
    saved = tmp_path / "new" / "checkpoints" / "step-00000001"
    assert read_trainer_json(saved).base_model == read_trainer_json(wanted).base_model
    assert read_trainer_json(saved).arguments["checkpoint"] == str(run / "best")
    (tmp_path / "gone").mkdir()
    words = argv(tmp_path / "gone" / "best", tiny_tokens_dir, tmp_path / "new", max_step=2, resume="true")
    forked_runs.start(words, 1).finish()
    assert (saved.parent / "step-00000002").is_dir()


def test_a_replay_of_a_checkpoints_name_is_that_of_its_run(run: Path, forked_runs: ForkedRuns) -> None:
    replay = forked_runs.start([run / "best", "--steps", "2:3"], 1, program="fabric_train.replay")
    replay.finish()
    assert "passed: every compared value is reproduced" in replay.stdout()
