"""launch/skypilot.yaml: valid by SkyPilot's own schema and parser, and its ``run`` trains.

No cloud is rented. SkyPilot is installed once into ``.cache/skypilot`` (460 MB).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.environments import environment_with
from tests.support.programs import ROOT
from tests.support.short_runs import SETTINGS, saved_steps

pytestmark = [pytest.mark.slow, pytest.mark.launchers]

TASK = ROOT / "launch" / "skypilot.yaml"
READ_TASK = """
import sys, sky
task = sky.Task.from_yaml(sys.argv[1])
(resources,) = task.resources
print(task.num_nodes, resources.accelerators, resources.use_spot)
"""


@pytest.fixture(scope="module")
def skypilot() -> Path:
    """The Python of an environment with SkyPilot."""
    return environment_with("skypilot", "skypilot==0.14.1")


def read_task(skypilot: Path, task: Path, home: Path) -> "subprocess.CompletedProcess[str]":
    """Let SkyPilot check and parse a task file; it keeps its state in ``home``."""
    env = {**os.environ, "HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    command = [str(skypilot), "-c", READ_TASK, str(task)]
    return subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True, check=False)


def test_the_task_fits_skypilots_schema(skypilot: Path, tmp_path: Path) -> None:
    finished = read_task(skypilot, TASK, tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines()[-1] == "1 {'H100': 8} True"
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(TASK.read_text().replace("use_spot", "use_spotz"))
    assert "use_spotz" in read_task(skypilot, wrong, tmp_path).stderr


def test_the_command_of_the_task_trains(tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path) -> None:
    """As on one machine with two devices, which here are two CPU ranks."""
    project = tmp_path / "sky_workdir"
    project.mkdir()
    (project / ".venv").symlink_to(sys.prefix)
    (project / "fabric_train").symlink_to(ROOT / "fabric_train")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({**SETTINGS, "eval_iters": 1, "loggers": ["csv"]}))
    variables = {
        "SKYPILOT_NUM_NODES": "1",
        "SKYPILOT_NODE_RANK": "0",
        "SKYPILOT_NODE_IPS": "127.0.0.1",
        "SKYPILOT_NUM_GPUS_PER_NODE": "2",
        "RECIPE": str(recipe),
        "MODEL": str(tiny_model_dir),
        "TOKENS": str(tiny_tokens_dir),
        "OUTPUT": str(tmp_path / "run"),
    }
    task = yaml.safe_load(TASK.read_text())
    assert set(task["envs"]) == {"RECIPE", "MODEL", "TOKENS", "OUTPUT"}
    env = {**os.environ, **variables, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        ["bash", "-c", task["run"]], cwd=project, env=env, text=True, capture_output=True, timeout=300, check=False
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert saved_steps(tmp_path / "run")[-1] == 8
