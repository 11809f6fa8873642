"""Test the targets of the Makefile and the installation."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.programs import ROOT


def _make(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    # pytest may itself run under make, which hands its level, its options and FILE on
    own = {name: value for name, value in os.environ.items() if name not in ("MAKELEVEL", "MAKEFLAGS", "FILE")}
    return subprocess.run(
        ["make", *arguments], cwd=folder, env=own, text=True, capture_output=True, timeout=120, check=False
    )


def test_make_without_a_target_lists_every_target() -> None:
    listed = {line.split()[1] for line in _make(ROOT).stdout.splitlines()}
    (phony,) = re.findall(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert listed == set(phony.split())


def test_make_check_runs_one_file_in_one_process() -> None:
    printed = _make(ROOT, "--dry-run", "check", "FILE=tests/data/test_batch.py").stdout
    assert printed.splitlines()[-1].endswith("-m pytest -n 0 -q tests/data/test_batch.py")


def test_make_check_without_a_file_says_how_to_name_one() -> None:
    finished = _make(ROOT, "--dry-run", "check")
    assert finished.returncode != 0
    assert "no test file; name one: make check FILE=tests/data/test_batch.py" in finished.stderr


def test_install_without_a_usable_python_reports_it_in_one_line(tmp_path: Path) -> None:
    for name in ("Makefile", "requirements.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "install", tmp_path / "install")
    finished = _make(tmp_path, "install", "PYTHON=false")
    assert finished.returncode != 0
    assert "no Python 3.10 to 3.14 among: false" in finished.stderr
    assert not (tmp_path / ".venv").exists()


def supported_pythons() -> list[str]:
    """Return the versions that pyproject.toml names, the oldest first."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (limits,) = re.findall(r'^requires-python = ">=3\.(\d+),<3\.(\d+)"', text, re.MULTILINE)
    return [f"3.{minor}" for minor in range(*map(int, limits))]


def test_every_place_names_the_same_pythons() -> None:
    versions = supported_pythons()
    for name in ("README.md", "CONTRIBUTING.md"):
        assert f"with Python {versions[0]} to {versions[-1]}, git and make" in (ROOT / name).read_text(), name
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    for job in ("test", "package"):
        assert workflow["jobs"][job]["strategy"]["matrix"]["python-version"] == versions
    tried = _make(ROOT, "--dry-run", "install", "VENV=new").stdout.splitlines()[0]
    assert tried.startswith(" ".join(["for python in python3", *(f"python{version}" for version in versions[::-1])]))


@pytest.mark.parametrize("workflow", ["ci.yml", "nightly.yml"])
def test_the_keys_of_caches_depend_on_files_that_exist(workflow: str) -> None:
    """``hashFiles`` returns an empty text if a pattern matches no file: the cache would never be renewed."""
    text = (ROOT / ".github/workflows" / workflow).read_text()
    for hashed_files in re.findall(r"hashFiles\((.*?)\)", text):
        for pattern in re.findall(r"'(.*?)'", hashed_files):
            assert list(ROOT.glob(pattern)), pattern


def test_programs_compile_on_the_oldest_and_newest_python_here() -> None:
    """Find syntax that they refuse or warn about, on a machine where another version runs the tests."""
    places = [*os.environ["PATH"].split(os.pathsep), *map(str, Path.home().glob(".pyenv/versions/3.*/bin"))]
    found = [shutil.which(f"python{version}", path=place) for version in supported_pythons() for place in places]
    # pyenv has a python3.N of each version, which fails if that version is not activated
    usable = [one for one in found if one and not subprocess.run([one, "-c", ""], capture_output=True).returncode]
    files = [str(path) for path in (*ROOT.glob("*.py"), *(ROOT / "fabric_train").rglob("*.py"))]
    compiles = "import sys\nfor name in sys.argv[1:]:\n    compile(open(name, 'rb').read(), name, 'exec')"
    for python in {usable[0], usable[-1]}:
        done = subprocess.run(
            [python, "-W", "error", "-c", compiles, *files], text=True, capture_output=True, check=False
        )
        assert not done.returncode, f"{python}: {done.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize("function", ["create_with_system_pip", "create_with_downloaded_pip"])
def test_environment_without_ensurepip_gets_a_working_pip(function: str, tmp_path: Path) -> None:
    code = f"import create_venv; create_venv.{function}({str(tmp_path / 'venv')!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT / "install", check=True, timeout=300)
    pip = subprocess.run(
        [tmp_path / "venv/bin/python", "-m", "pip", "--version"], text=True, capture_output=True, check=True
    )
    assert str(tmp_path / "venv") in pip.stdout


def test_every_dependency_of_the_package_is_pinned() -> None:
    """The Docker image uses requirements.txt as constraints; a dependency missing there would not be pinned."""
    from importlib.metadata import requires

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    pins = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line and not line.startswith("#")]
    pinned = {canonicalize_name(Requirement(pin).name) for pin in pins}
    assert all(str(Requirement(pin).specifier).startswith("==") for pin in pins)
    needed = [Requirement(line) for line in requires("fabric-train") or []]
    unpinned = [requirement for requirement in needed if not str(requirement.specifier).startswith("==")]
    assert {canonicalize_name(requirement.name) for requirement in unpinned} <= pinned
