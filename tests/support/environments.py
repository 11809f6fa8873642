"""Environments with packages that only a test of a launcher needs, installed once into the cache."""

import subprocess
import sys
import venv
from pathlib import Path

from fabric_train.files.atomic_folder import complete_folder
from sample_data.real_data import CACHE


def environment_with(name: str, *packages: str) -> Path:
    """Return the Python of the environment ``.cache/NAME``; create it with these pinned packages if it is not there."""
    target = CACHE / name
    if not target.exists():
        with complete_folder(target) as folder:
            venv.create(folder)
            pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "-qq"]
            subprocess.run([*pip, *packages], check=True)
    return target / "bin" / "python"
