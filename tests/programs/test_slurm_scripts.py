"""``launch/slurm/submit.sh`` says what is wrong in one line, and submits nothing then."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.programs import ROOT

SCRIPTS = ROOT / "launch" / "slurm"


@pytest.fixture
def sbatch(tmp_path: Path) -> Path:
    """A folder with a program ``sbatch`` that prints its arguments and the script."""
    program = tmp_path / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text(
        '#!/bin/bash\nfor word; do echo "$word"; [[ $word == /dev/fd/* ]] && cat "$word"; done; true\n', "utf-8"
    )
    program.chmod(0o755)
    return program.parent


def submit(folder: Path, sbatch: Path, *words: str, settings: str = "") -> "subprocess.CompletedProcess[str]":
    """Run ``submit.sh`` with the project's settings and some changes to them."""
    file = folder / "settings.sh"
    file.write_text((SCRIPTS / "settings.sh").read_text(encoding="utf-8") + settings, encoding="utf-8")
    return subprocess.run(
        [str(SCRIPTS / "submit.sh"), *words],
        cwd=folder,
        env={**os.environ, "PATH": f"{sbatch}:{os.environ['PATH']}", "FABRIC_TRAIN_SETTINGS": str(file)},
        text=True,
        capture_output=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("words", "settings", "fault"),
    [
        ([], "", "error: give train or each: "),
        (["trian"], "", "error: give train or each: "),
        (["each", "a", "b"], "", "error: each needs items, -- and a command: "),
        (["each", "--", "ls"], "", "error: each needs items, -- and a command: "),
        (["train"], "CONTAINER=dockr\n", "CONTAINER=dockr; give pyxis, apptainer, docker, podman or nothing"),
        (["train"], "CONTAINER=apptainer\n", "CONTAINER=apptainer needs an IMAGE"),
    ],
)
def test_each_fault_is_one_line(tmp_path: Path, sbatch: Path, words: list[str], settings: str, fault: str) -> None:
    done = submit(tmp_path, sbatch, *words, settings=settings)
    assert done.returncode == 2
    assert not done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert fault in line


def test_help_shows_both_kinds_of_jobs(tmp_path: Path, sbatch: Path) -> None:
    done = submit(tmp_path, sbatch, "--help")
    assert done.returncode == 0
    assert "\n  launch/slurm/submit.sh train " in done.stdout
    assert "\n  launch/slurm/submit.sh each " in done.stdout
    assert "set -" not in done.stdout


def test_a_job_has_its_settings_in_it(tmp_path: Path, sbatch: Path) -> None:
    """A later change of settings.sh does not reach it; the last of two options counts, so JOB_OPTIONS come last."""
    done = submit(tmp_path, sbatch, "train", "--lr", "1e-4", settings="NODES=3 JOB_OPTIONS=(--time=1:00:00)\n")
    assert not done.returncode, done.stderr
    text = done.stdout
    assert "\n--nodes=3\n" in text
    assert text.index("--time=24:00:00") < text.index("--time=1:00:00")
    for part in ("NODES=3 JOB_OPTIONS=(--time=1:00:00)\n", (SCRIPTS / "job.sh").read_text(encoding="utf-8")):
        assert part in text
    ours = ["python", "-m", "fabric_train", "--resume", "true", "--num_nodes", "3", "--devices", "8", "--lr", "1e-4"]
    assert text.splitlines()[-len(ours) :] == ours


def test_items_are_jobs_of_one_array_with_the_same_command(tmp_path: Path, sbatch: Path) -> None:
    ours = ["python", "evaluate.py", "--watch", "runs/1", "--tasks", "tasks.yaml", "--wait", "false"]
    done = submit(tmp_path, sbatch, "each", "1", "2", "3", "--", *ours)
    assert not done.returncode, done.stderr
    lines = done.stdout.splitlines()
    assert "--array=0-2%8" in lines
    assert lines[-len(ours) - 4 :] == ["3", "1", "2", "3", *ours]


@pytest.mark.parametrize("name", ["settings.sh", "submit.sh", "job.sh", "container.sh"])
def test_bash_can_read_every_file(name: str) -> None:
    subprocess.run(["bash", "-n", str(SCRIPTS / name)], check=True)
