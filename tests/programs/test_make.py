"""make sets a machine up, says what it can do, and says clearly what is missing."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import ROOT


def _make(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["make", *arguments], cwd=folder, text=True, capture_output=True, timeout=120, check=False)


def test_make_alone_lists_every_target() -> None:
    listed = {line.split()[1] for line in _make(ROOT).stdout.splitlines()}
    assert listed >= {"demo", "test", "install", "lint", "benchmark"}


def test_install_without_a_usable_python_says_so_in_one_line(tmp_path: Path) -> None:
    for name in ("Makefile", "requirements.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "install", tmp_path / "install")
    finished = _make(tmp_path, "install", "PYTHON=false")
    assert finished.returncode != 0
    assert "no Python 3.10, 3.11 or 3.12 among: false" in finished.stderr
    assert not (tmp_path / ".venv").exists()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["with_system_pip", "with_downloaded_pip"])
def test_without_ensurepip_the_environment_still_gets_a_working_pip(way: str, tmp_path: Path) -> None:
    code = f"import create_venv; create_venv.{way}({str(tmp_path / 'venv')!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT / "install", check=True, timeout=300)
    pip = subprocess.run(
        [tmp_path / "venv/bin/python", "-m", "pip", "--version"], text=True, capture_output=True, check=True
    )
    assert str(tmp_path / "venv") in pip.stdout


def test_the_package_depends_on_nothing_that_is_not_pinned() -> None:
    """The image takes requirements.txt as constraints: what is missing there would float."""
    from importlib.metadata import requires

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    pins = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line and not line.startswith("#")]
    pinned = {canonicalize_name(Requirement(pin).name) for pin in pins}
    assert all(str(Requirement(pin).specifier).startswith("==") for pin in pins)
    needed = [Requirement(line) for line in requires("fabric-train") or []]
    floating = [requirement for requirement in needed if not str(requirement.specifier).startswith("==")]
    assert {canonicalize_name(requirement.name) for requirement in floating} <= pinned
