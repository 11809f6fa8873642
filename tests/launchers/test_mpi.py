"""``mpiexec`` with mpi4py: one run of all processes, the losses of torchrun, our exit codes, MPI finalized.

Open MPI and mpi4py are installed once into ``.cache/mpi``. They are not in this environment, since Fabric would start
MPI in every run.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.environments import environment_with
from tests.support.launched import Launched, launcher
from tests.support.programs import ROOT
from tests.support.short_runs import argv, metrics, saved_steps

pytestmark = [pytest.mark.slow, pytest.mark.launchers]

EXTRA = re.search(r"^mpi = (.*)$", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
PACKAGES = json.loads(EXTRA[1]) if EXTRA else []  # what `pip install -e '.[mpi]'` installs


LONG = {"max_step": 5000, "number_epochs": 999, "eval_step_interval": 5000, "save_step_interval": 5000}


@pytest.fixture(scope="module")
def mpi() -> Path:
    """An environment with ``mpiexec``."""
    return environment_with("mpi", *PACKAGES).parents[1]


def start(mpi: Path, folder: Path, *words: str, with_mpi4py: bool = True) -> "subprocess.Popen[str]":
    """Start two processes of ``python -m fabric_train`` by ``mpiexec``."""
    packages = mpi / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    command = [str(mpi / "bin" / "mpiexec"), "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    command += [sys.executable, "-m", "fabric_train", *words]
    paths = [str(ROOT), *([str(packages)] if with_mpi4py else [])]
    env = {**os.environ, "LD_LIBRARY_PATH": str(mpi / "lib"), "PYTHONPATH": os.pathsep.join(paths)}
    output = (folder / "output").open("w")
    return subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=subprocess.STDOUT, text=True)


def wait_for_steps(process: "subprocess.Popen[str]", folder: Path) -> None:
    """Wait until three steps are done."""
    deadline = time.monotonic() + 150
    while len(metrics(folder / "run")) < 3 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.1)
    assert process.poll() is None, (folder / "output").read_text()


def test_two_processes_train_one_run_with_the_losses_of_torchrun(
    mpi: Path, tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path, free_port: Callable[[], int]
) -> None:
    """The number of processes is mpiexec's: ``--devices`` is not given."""
    process = start(mpi, tmp_path, *argv(tiny_model_dir, tiny_tokens_dir, tmp_path / "run"))
    output = tmp_path / "output"
    assert process.wait(200) == 0, output.read_text()
    assert "2 × fsdp" in output.read_text()
    assert "finalize" not in output.read_text()  # mpiexec's complaint about a process that ends without it
    (tmp_path / "other").mkdir()
    given = argv(tiny_model_dir, tiny_tokens_dir, tmp_path / "torchrun")
    with Launched([*launcher("torchrun", free_port()), *given], tmp_path / "other") as other:
        assert other.process.wait(200) == 0, other.output()
    assert len(metrics(tmp_path / "run")) == 8
    assert metrics(tmp_path / "run") == metrics(tmp_path / "torchrun")


def test_another_world_than_asked_for_is_refused(
    mpi: Path, tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path
) -> None:
    process = start(mpi, tmp_path, *argv(tiny_model_dir, tiny_tokens_dir, tmp_path / "run", devices=4))
    output = tmp_path / "output"
    assert process.wait(100) == 2, output.read_text()
    (fault,) = [line for line in output.read_text().splitlines() if line.startswith("error: ")]
    assert fault.startswith("error: --devices 4 contradicts mpiexec (Open MPI) processes per machine 2:")


@pytest.mark.parametrize("kills_launcher", [True, False])
def test_no_rank_outlives_mpiexec_or_another_rank(
    mpi: Path, tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path, kills_launcher: bool
) -> None:
    process = start(mpi, tmp_path, *argv(tiny_model_dir, tiny_tokens_dir, tmp_path / "run", **LONG))
    wait_for_steps(process, tmp_path)
    ranks = [each for each in psutil.Process(process.pid).children(recursive=True) if "python" in each.name()]
    (process if kills_launcher else ranks[-1]).kill()
    assert not psutil.wait_procs(ranks, timeout=60)[1], (tmp_path / "output").read_text()
    assert process.wait(60) != 0


def test_a_signal_to_mpiexec_saves(mpi: Path, tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path) -> None:
    process = start(mpi, tmp_path, *argv(tiny_model_dir, tiny_tokens_dir, tmp_path / "run", **LONG))
    wait_for_steps(process, tmp_path)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 75, (tmp_path / "output").read_text()
    (step,) = saved_steps(tmp_path / "run")
    assert step >= 2


@pytest.mark.parametrize("with_mpi4py", [True, False])
def test_bad_input_is_one_line_of_ours(mpi: Path, tmp_path: Path, with_mpi4py: bool) -> None:
    """Without mpi4py, every process would train alone."""
    words = ["--train_data_dir", "nowhere", "--output_dir", "out"]
    process = start(mpi, tmp_path, *words, with_mpi4py=with_mpi4py)
    output = tmp_path / "output"
    assert process.wait(100) == 2, output.read_text()
    faults = [line for line in output.read_text().splitlines() if line.startswith("error: ")]
    assert len(faults) == 1
    assert ("nowhere: no such folder" if with_mpi4py else "pip install mpi4py") in faults[0]
