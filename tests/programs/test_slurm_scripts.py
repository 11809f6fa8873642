"""``launch/slurm/submit.sh`` reports a fault in one line, and submits nothing then."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import ROOT

SCRIPTS = ROOT / "launch" / "slurm"
COMMAND = [str(Path(sys.executable).with_name("fabric-train"))]  # what the programs show after "next"
EXPORT = [sys.executable, str(ROOT / "convert_to_hf.py")]


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
    text = (SCRIPTS / "settings.sh").read_text(encoding="utf-8")
    file.write_text(f"{text}PYTHON={sys.executable}\n{settings}", encoding="utf-8")
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
        (["train", "--train_data_dir", "x", "--lrr", "1"], "", "--lrr: no such argument; did you mean --lr?"),
        (["train", "--train_data_dir", "x"], "PYTHON=pyton\n", "pyton: no such program here; "),
        (["train"], "CONTAINER=apptainer IMAGE=a.sif\n", "IMAGE=a.sif: no such file"),
        (["train"], "TASKS_PER_NODE=4\n", "TASKS_PER_NODE=4, but the job requests 8 GPUs per node"),
        (["train"], "JOB_OPTIONS=(--gpus-per-node=h100:2)\n", "TASKS_PER_NODE=8, but the job requests 2 GPUs"),
        (["train"], "JOB_OPTIONS=(--gpus-per-node 4)\n", "TASKS_PER_NODE=8, but the job requests 4 GPUs"),
        (["train"], "TRAIN_OPTIONS=(--gres=gpu:a100:4)\n", "TASKS_PER_NODE=8, but the job requests 4 GPUs"),
        (["train"], "MOUNTS=(/nowhere)\n", "MOUNTS contains /nowhere, which does not exist"),
        (["each", "a", "--", sys.executable, "nothing.py"], "", "nothing.py: no such file"),
        (["each", "a", "--", *EXPORT, "--chekpoint", "{}"], "", "--chekpoint: no such argument; "),
        (["each", "a", "--", *COMMAND, "convert", "--chekpoint", "{}"], "", "--chekpoint: no such argument; "),
        ([], "", "error: give train or each: "),
        (["--print", "trian"], "", "error: give train or each: "),
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


def test_a_job_is_checked_and_has_its_settings_in_it(
    tmp_path: Path, sbatch: Path, tiny_model_dir: Path, tiny_tokens_dir: Path
) -> None:
    """A later change of settings.sh does not reach it; the last of two options counts, so JOB_OPTIONS come last.

    The check starts in a folder with files with the names of the project's modules, and imports none of them.
    """
    for name in ("arguments", "evaluate", "tokenize_dataset"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the file of a user')")
    given = ["--model_name", str(tiny_model_dir), "--train_data_dir", str(tiny_tokens_dir), "--total_batch_size", "24"]
    settings = "NODES=3 JOB_OPTIONS=(--time=1:00:00)\n"
    done = submit(tmp_path, sbatch, "train", *given, settings=settings)
    assert not done.returncode, done.stderr
    assert "arguments, files and data are valid: " in done.stderr
    text = done.stdout
    assert "\n--nodes=3\n" in text
    assert text.index("--time=24:00:00") < text.index("--time=1:00:00")
    for part in (settings, (SCRIPTS / "job.sh").read_text(encoding="utf-8")):
        assert part in text
    ours = [sys.executable, "-m", "fabric_train", "--resume", "true", "--num_nodes", "3", "--devices", "8", *given]
    assert text.splitlines()[-len(ours) :] == ours


def test_a_job_is_shown_without_slurm(tmp_path: Path) -> None:
    done = submit(tmp_path, tmp_path, "--print", "each", "a b", "--", "echo", "{}")
    assert not done.returncode, done.stderr
    script, _, command = done.stdout.rstrip("\n").rpartition("\n")
    assert script.endswith((SCRIPTS / "job.sh").read_text(encoding="utf-8").rstrip("\n"))
    assert command.startswith("# sbatch --job-name=each ")
    assert command.endswith(f" SCRIPT {ROOT} 1 a\\ b echo \\{{\\}}")
    assert [path.name for path in tmp_path.iterdir()] == ["settings.sh"]


def test_items_are_jobs_of_one_array_with_the_same_command(tmp_path: Path, sbatch: Path) -> None:
    ours = [sys.executable, str(ROOT / "evaluate.py"), "--watch", "runs/1", "--tasks", "tasks.yaml", "--wait", "false"]
    done = submit(tmp_path, sbatch, "each", "1", "2", "3", "--", *ours)
    assert not done.returncode, done.stderr
    lines = done.stdout.splitlines()
    assert "--array=0-2%8" in lines
    assert lines[-len(ours) - 4 :] == ["3", "1", "2", "3", *ours]


def test_a_container_gets_the_variables_of_the_network(tmp_path: Path) -> None:
    program = tmp_path / "podman"
    program.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    network = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "NCCL_SOCKET_IFNAME": "ib0", "MASTER_PORT": "20001"}
    slurm = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}
    done = subprocess.run(
        [str(SCRIPTS / "container.sh"), "podman", "image", str(ROOT), "--", "true"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "FILES": "not a variable of ranks", **network, **slurm},
        text=True,
        capture_output=True,
        check=True,
    )
    given = {line.removeprefix("--env=") for line in done.stdout.splitlines() if line.startswith("--env=")}
    assert given == {*network, *slurm}


@pytest.mark.parametrize("name", ["settings.sh", "submit.sh", "job.sh", "container.sh"])
def test_bash_can_read_every_file(name: str) -> None:
    subprocess.run(["bash", "-n", str(SCRIPTS / name)], check=True)
