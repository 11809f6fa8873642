"""Environments with packages that only some tests need, installed once into the cache."""

import hashlib
import json
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fabric_train.files.atomic_folder import complete_folder
from fabric_train.sample_data.real_data import CACHE
from tests.support.programs import ROOT


def environment_with(name: str, *packages: str) -> Path:
    """Return the Python of the environment ``.cache/NAME``; if it is missing, create it with these pinned packages."""
    target = CACHE / name
    if not target.exists():
        with complete_folder(target) as folder:
            venv.create(folder)
            _install(folder, *packages)
    return target / "bin" / "python"


def downstream_environment(name: str, *, without: Sequence[str] = ()) -> Path:
    """Return the Python of an environment with the packages of ``tests/downstream/requirements/NAME.txt``.

    It is created under ``.cache/downstream/`` if it is not there, on top of the environment that runs the tests: pip
    installs only what that lacks, or has in another version. A change of the pins creates another environment. Packages
    ``without`` which the software runs are uninstalled again.
    """
    requirements = ROOT / "tests" / "downstream" / "requirements" / f"{name}.txt"
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()[:12]
    target = CACHE / "downstream" / f"{name}-{digest}-{sys.implementation.cache_tag}"
    if not target.exists():
        with complete_folder(target) as folder:
            venv.create(folder)
            # a .pth file adds the packages of this environment; .venv may be a link that is removed before the cache is
            base_packages = Path(sysconfig.get_path("purelib")).resolve()
            (site_packages,) = folder.glob("lib/python*/site-packages")
            (site_packages / "below.pth").write_text(f"{base_packages}\n", encoding="utf-8")
            _install(folder, "-r", str(requirements))
            if without:
                pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
                subprocess.run([*pip, "uninstall", "-qq", "-y", *without], check=True)
    return target / "bin" / "python"


def run_inside(python: Path | str, program: str, *words: object) -> Any:
    """Run ``tests/downstream/inside/PROGRAM`` with an environment's Python; return the JSON of its last line."""
    script = ROOT / "tests" / "downstream" / "inside" / program
    command = [str(python), str(script), *(str(word) for word in words)]
    ended = subprocess.run(command, text=True, capture_output=True, timeout=1200, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout.splitlines()[-1])


def _install(folder: Path, *words: str) -> None:
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "-qq"]
    subprocess.run([*pip, *words], check=True)
