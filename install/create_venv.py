"""Create a virtual environment, even if the system's Python has no pip and no ensurepip (Debian, Ubuntu).

``make install`` runs this with the Python to use; it needs only the standard library. Usage: create_venv.py FOLDER
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request

PIP_WHEEL = "pip-25.3-py3-none-any.whl"
PIP_SHA256 = "9655943313a94722b7774661c21049070f6bbb0a1516bf02f7c8d5d9201514cd"


def create_with_ensurepip(folder: str) -> None:
    """Create the environment the usual way."""
    _run(sys.executable, "-m", "venv", "--clear", folder)


def create_with_system_pip(folder: str) -> None:
    """Create the environment without pip and install pip into it with the system's pip."""
    python = _create_without_pip(folder)
    site_packages = _run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    _run(sys.executable, "-m", "pip", "install", "-q", "--target", site_packages, "pip")


def create_with_downloaded_pip(folder: str) -> None:
    """Create the environment without pip, download pip's wheel from the package index and let it install itself.

    Raises:
        ValueError: the index has no such wheel, or its SHA-256 differs.
    """
    python = _create_without_pip(folder)
    project = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/") + "/pip/"
    with urllib.request.urlopen(project, timeout=60) as answer:
        link = re.search(rf'href="([^"]*/{re.escape(PIP_WHEEL)})[#"]', answer.read().decode())
    if link is None:
        raise ValueError(f"{project} has no {PIP_WHEEL}")
    address = urllib.parse.urljoin(project, link[1])
    with urllib.request.urlopen(address, timeout=60) as answer:
        content = answer.read()
    if hashlib.sha256(content).hexdigest() != PIP_SHA256:
        raise ValueError(f"the SHA-256 of {address} is not {PIP_SHA256}")
    with tempfile.TemporaryDirectory() as scratch:
        wheel = os.path.join(scratch, PIP_WHEEL)
        with open(wheel, "wb") as file:
            file.write(content)
        _run(python, os.path.join(wheel, "pip"), "install", "-q", "--no-index", wheel)


def _create_without_pip(folder: str) -> str:
    """Create an environment without pip and return its Python."""
    _run(sys.executable, "-m", "venv", "--clear", "--without-pip", folder)
    return os.path.join(folder, "bin", "python")


def _run(*command: str) -> str:
    """Run a command and return its output."""
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout


def main() -> None:
    """Try each way in turn until one gives an environment with pip."""
    folder = sys.argv[1]
    reasons = []
    for create in (create_with_ensurepip, create_with_system_pip, create_with_downloaded_pip):
        try:
            create(folder)
            _run(os.path.join(folder, "bin", "python"), "-m", "pip", "--version")
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            output = getattr(error, "stdout", None) or str(error)
            reasons.append((output.strip().splitlines() or [type(error).__name__])[-1])
        else:
            return
    sys.exit(
        f"error: {sys.executable} cannot create a virtual environment with pip ({reasons[-1]}); "
        "install the python3-venv package, or name another Python: make install PYTHON=..."
    )


if __name__ == "__main__":
    main()
