"""A run folder is read strictly, with an error for a damaged file, or tolerantly, with a line for it."""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from fabric_train.cli.errors import InputError
from fabric_train.run_folder.run_folder import RunFolder
from fabric_train.run_folder.run_summary import summarize_run
from tests.support.checkpoint_examples import write_full


class Precision(BaseModel):
    precision: str


class WithPrecision(BaseModel):
    arguments: Precision


class WithSeed(BaseModel):
    seed: int


@pytest.fixture
def run(tmp_path: Path, tiny_model_dir: Path) -> Path:
    """A run with two checkpoints, of which the newer one has a damaged trainer.json."""
    folder = tmp_path / "run"
    write_full(folder / "checkpoints" / "step-00000001", tiny_model_dir, {}, step=1)
    damaged = write_full(folder / "checkpoints" / "step-00000002", tiny_model_dir, {}, step=2)
    (damaged / "trainer.json").write_text('{"step": 2')
    (folder / "config.yaml").write_text("- not\n- a configuration\n")
    (folder / "metrics.csv").write_text("step,epoch,train_loss\n1,0,2.5\n")
    return folder


def test_the_newest_readable_checkpoint_is_read_if_a_later_one_is_damaged(run: Path) -> None:
    folder = RunFolder(run)
    assert folder.newest.checkpoint == run / "checkpoints" / "step-00000001"
    assert list(folder.checkpoints) == [1, 2]
    assert list(folder.saved_by_step) == [1]
    assert not folder.has_ended


def test_a_damaged_file_is_an_error_for_the_strict_reader_alone(run: Path) -> None:
    folder = RunFolder(run)
    with pytest.raises(InputError, match=r"config\.yaml: not a configuration file"):
        print(folder.config)
    assert folder.metrics.steps.tolist() == [1]
    summary = summarize_run(run)
    assert summary.damage == ("config.yaml: damaged", "step-00000002/trainer.json: damaged")
    assert (summary.step, summary.arguments["lr"]) == (1, 0.001)


def test_further_fields_of_a_trainer_json_are_checked(run: Path) -> None:
    saved = RunFolder(run).newest
    assert saved.parse_content(WithPrecision).arguments.precision == "32-true"
    with pytest.raises(InputError, match=r"trainer\.json: damaged \(seed: Field required\); use another checkpoint"):
        saved.parse_content(WithSeed)


def test_neither_reader_imports_torch_and_the_tolerant_one_nothing_slow() -> None:
    code = (
        "import sys; from fabric_train.run_folder import run_summary; "
        "print(sorted({'torch', 'numpy', 'pydantic', 'pyarrow'} & set(sys.modules))); "
        "from fabric_train.run_folder import run_folder; print('torch' in sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert printed.stdout.splitlines() == ["[]", "False"]
