"""A wheel and a source distribution have all files; an installed wheel works from any folder, without the project."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest

from fabric_train import __version__
from tests.support.programs import ROOT

BUILD = "import sys; from setuptools import build_meta as b; to = sys.argv[1]; b.build_wheel(to); b.build_sdist(to)"


def run(folder: Path, *words: object, path: Path | None = None) -> str:
    """Run a command in a folder, and return its standard output; ``path`` is where Python looks first."""
    env = {**os.environ, "PYTHONPATH": str(path or ""), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    line = [str(word) for word in words]
    ended = subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel and a source distribution, made without the network from a copy of the project."""
    folder = tmp_path_factory.mktemp("package")
    project = folder / "project"
    leave_out = shutil.ignore_patterns("__pycache__")
    for name in ("fabric_train", "configs", "launch", "docker"):
        shutil.copytree(ROOT / name, project / name, ignore=leave_out)
    for file in (*ROOT.glob("*.py"), ROOT / "pyproject.toml", ROOT / "LICENSE", ROOT / "README.md"):
        shutil.copy(file, project)
    run(project, sys.executable, "-c", BUILD, folder)
    return folder


def test_both_have_every_file_of_the_programs(built: Path) -> None:
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    assert wheel.name == f"fabric_train-{__version__}-py3-none-any.whl"
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "fabric_train").rglob("*") if path.is_file()}
    files = {path for path in package if "__pycache__" not in path}
    configs = {path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").rglob("*.yaml")}
    with ZipFile(wheel) as content:
        names = set(content.namelist())
    assert files <= names
    assert {name.partition("share/fabric-train/")[2] for name in names} >= configs
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert files | configs | {"pyproject.toml", "LICENSE"} <= names


def test_an_installation_adds_one_name_to_the_modules_of_python(built: Path) -> None:
    """Packages of others have names such as ``evaluate`` and ``arguments``."""
    (wheel,) = built.glob("*.whl")
    with ZipFile(wheel) as content:
        names = {name.partition("/")[0] for name in content.namelist()}
    assert {name for name in names if not name.endswith((".dist-info", ".data"))} == {"fabric_train"}


def test_an_installed_wheel_runs_in_an_empty_folder(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-compile", "--no-index"]
    run(tmp_path, *pip, "--no-deps", "--target", built / "site", wheel)
    scripts = built / "site" / "bin"
    empty = tmp_path / "empty"
    empty.mkdir()
    train = (sys.executable, scripts / "fabric-train")
    assert run(empty, *train, "--version", path=built / "site") == f"fabric-train {__version__}\n"
    where = "from fabric_train import api, train; print(api.__file__)"
    assert run(empty, sys.executable, "-c", where, path=built / "site") == f"{built / 'site/fabric_train/api.py'}\n"
    for name in ("tokenize", "convert", "evaluate", "report"):
        assert "usage: " in run(empty, *train, name, "--help", path=built / "site")
    shown = run(empty, sys.executable, scripts / "fabric", "run", "fabric_train", "--help", path=built / "site")
    assert shown.startswith("usage: fabric run fabric_train")
    config = "configs/recipes/llama-3-8b-pretraining.yaml"  # found, else there were a second line
    ended = subprocess.run(
        [*map(str, train), "train", "--config", config, "--lr", "x"],
        cwd=empty,
        env={**os.environ, "PYTHONPATH": str(built / "site"), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stderr == "error: --lr: expected a number above 0, got 'x'\n"
    assert list(empty.iterdir()) == []
    run(empty, *train, "launch-files", "jobs", path=built / "site")
    for name in ("launch", "docker"):
        theirs, ours = ({path.relative_to(top) for path in (top / name).rglob("*")} for top in (empty / "jobs", ROOT))
        assert theirs == ours
    assert os.access(empty / "jobs" / "launch" / "slurm" / "submit.sh", os.X_OK)
