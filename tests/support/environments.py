"""Environments with packages that only some tests need, installed once into the cache."""

import hashlib
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from fabric_train.files.atomic_folder import complete_folder
from sample_data.real_data import CACHE
from tests.support.programs import ROOT


def environment_with(name: str, *packages: str) -> Path:
    """Return the Python of the environment ``.cache/NAME``; create it with these pinned packages if it is not there."""
    target = CACHE / name
    if not target.exists():
        with complete_folder(target) as folder:
            venv.create(folder)
            _install(folder, *packages)
    return target / "bin" / "python"


def downstream_environment(name: str, *, on_top: bool) -> Path:
    """Return the Python of an environment with the packages of ``tests/downstream/requirements/NAME.txt``.

    It is created under ``.cache/downstream/`` if it is not there. A change of the pins creates another.

    Args:
        name: of the file, without ``.txt``.
        on_top: also see the packages of the environment that runs the tests. pip then installs only what that lacks,
            and keeps to the versions of the project's ``requirements.txt``.
    """
    requirements, versions = ROOT / "tests" / "downstream" / "requirements" / f"{name}.txt", ROOT / "requirements.txt"
    pins = requirements.read_bytes() + (versions.read_bytes() if on_top else b"")
    digest = hashlib.sha256(pins).hexdigest()[:12]
    target = CACHE / "downstream" / f"{name}-{digest}-{sys.implementation.cache_tag}"
    if not target.exists():
        with complete_folder(target) as folder:
            venv.create(folder)
            if on_top:
                # resolved: .venv may be a link that is removed before the cache is
                below = Path(sysconfig.get_path("purelib")).resolve()
                (site_packages,) = folder.glob("lib/python*/site-packages")
                (site_packages / "below.pth").write_text(f"{below}\n", encoding="utf-8")
            _install(folder, "-r", str(requirements), *(("-c", str(versions)) if on_top else ()))
    return target / "bin" / "python"


def _install(folder: Path, *words: str) -> None:
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "-qq"]
    subprocess.run([*pip, *words], check=True)
