"""``fabric run fabric_train`` says what a rank has said, ends with its exit code, and shows our help."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.launched import Launched, launcher
from tests.support.programs import ROOT

FAULT = "error: --train_data_dir nowhere: no such folder; make one with tokenize_dataset.py --output_dir nowhere"
ARGUMENTS = ["--train_data_dir", "nowhere", "--model_name", "m", "--output_dir", "out", "--accelerator", "cpu"]

pytestmark = pytest.mark.slow


def run(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run a command line in a folder, as a user does."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_bad_arguments_are_one_line_and_exit_code_2(tmp_path: Path, free_port: Callable[[], int]) -> None:
    ended = run(tmp_path, *launcher("fabric run", free_port()), *ARGUMENTS)
    assert (ended.returncode, ended.stderr) == (2, FAULT + "\n")
    assert all(" importing torch" in line for line in ended.stdout.splitlines())  # where that takes long
    assert not list(tmp_path.iterdir())


@pytest.mark.launchers
def test_bad_arguments_are_torchruns_first_and_last_line(tmp_path: Path, free_port: Callable[[], int]) -> None:
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    options = ["--nproc-per-node", "2", "--master-port", str(free_port()), "-m", "fabric_train"]
    ended = run(tmp_path, torchrun, *options, *ARGUMENTS)
    lines = [line.strip() for line in ended.stderr.splitlines() if line.strip(" =")]
    assert ended.returncode == 1
    assert lines[0] == FAULT
    assert lines[-1].endswith(FAULT)


def test_a_tpu_is_refused_in_one_line(tmp_path: Path, free_port: Callable[[], int]) -> None:
    command = launcher("fabric run", free_port())
    ended = run(tmp_path, *command[:-1], "--accelerator", "tpu", command[-1], "--lr", "1")
    assert ended.returncode == 2
    assert ended.stderr == (
        "error: fabric run --accelerator tpu: one process uses a TPU; start python -m fabric_train --tpu true\n"
    )


def test_help_is_that_of_the_program(tmp_path: Path, free_port: Callable[[], int]) -> None:
    ended = run(tmp_path, *launcher("fabric run", free_port()), "--lr", "1", "--help")
    assert ended.returncode == 0
    assert "--train_data_dir" in ended.stdout
    assert "--main-address" not in ended.stdout


@pytest.mark.launchers
def test_other_scripts_and_commands_are_lightnings(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys; print('script', sys.argv[1:]); sys.exit(3)")
    fabric = str(Path(sys.executable).with_name("fabric"))
    assert "--main-address" in run(tmp_path, fabric, "run", "--help").stdout
    ended = run(tmp_path, fabric, "run", "--accelerator=cpu", "script.py", "--one")
    assert "script ['--one']" in ended.stdout
    assert ended.returncode == 1
    assert "ChildFailedError" in ended.stderr


@pytest.mark.launchers
def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        ended = run(tmp_path, *launcher("fabric run", busy.getsockname()[1]), *ARGUMENTS)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: ")
    assert line.endswith("give a free port with --main-port")


def test_a_rank_killed_while_it_starts_is_named(tmp_path: Path, free_port: Callable[[], int]) -> None:
    with Launched([*launcher("fabric run", free_port()), *ARGUMENTS], tmp_path) as started:
        started.wait_until(lambda: len(started.ranks()) == 2)
        os.kill(started.ranks()[1].pid, signal.SIGKILL)
        assert started.process.wait(60) == 1, started.output()
    assert "error: rank 1 was killed by SIGKILL" in started.output()
    assert "Traceback" not in started.output()


IMPORTS_NOTHING = """
import os, signal, sys, lightning.fabric.cli
from fabric_train.cli import fabric_command

class Refuses:
    def find_spec(self, name, *_):
        raise ImportError(name)

def launch():
    sys.meta_path.insert(0, Refuses())
    os.kill(os.getpid(), signal.SIGTERM)

lightning.fabric.cli._main = launch
sys.argv = ["fabric", "run", "fabric_train"]
fabric_command.main()
"""


def test_the_handler_of_signals_imports_nothing() -> None:
    """A second signal would find the module half imported."""
    ended = subprocess.run([sys.executable, "-c", IMPORTS_NOTHING], cwd=ROOT, check=False, capture_output=True)
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr.decode()
