"""Make the virtual environment, also where the system's Python comes without pip and ensurepip (Debian, Ubuntu).

Run by ``make install`` with the Python to build on; needs its standard library alone. Usage: create_venv.py FOLDER
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


def with_ensurepip(folder: str) -> None:
    """Make it the usual way."""
    _run(sys.executable, "-m", "venv", "--clear", folder)


def with_system_pip(folder: str) -> None:
    """Let the system's pip put one into an environment made without."""
    python = _make_without_pip(folder)
    site_packages = _run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    _run(sys.executable, "-m", "pip", "install", "-q", "--target", site_packages, "pip")


def with_downloaded_pip(folder: str) -> None:
    """Fetch pip's own wheel, which runs as it is, from the package index and let it install itself."""
    python = _make_without_pip(folder)
    project = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/") + "/pip/"
    with urllib.request.urlopen(project, timeout=60) as answer:
        link = re.search(rf'href="([^"]*/{re.escape(PIP_WHEEL)})[#"]', answer.read().decode())
    if link is None:
        raise ValueError(f"{project} has no {PIP_WHEEL}")
    address = urllib.parse.urljoin(project, link[1])
    with urllib.request.urlopen(address, timeout=60) as answer:
        content = answer.read()
    if hashlib.sha256(content).hexdigest() != PIP_SHA256:
        raise ValueError(f"{address} is not the file it should be")
    with tempfile.TemporaryDirectory() as scratch:
        wheel = os.path.join(scratch, PIP_WHEEL)
        with open(wheel, "wb") as file:
            file.write(content)
        _run(python, os.path.join(wheel, "pip"), "install", "-q", "--no-index", wheel)


def _make_without_pip(folder: str) -> str:
    """Make an environment without pip and return its Python."""
    _run(sys.executable, "-m", "venv", "--clear", "--without-pip", folder)
    return os.path.join(folder, "bin", "python")


def _run(*command: str) -> str:
    """Run a command quietly and return what it printed."""
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout


def main() -> None:
    """Try each way in turn."""
    folder = sys.argv[1]
    reasons = []
    for way in (with_ensurepip, with_system_pip, with_downloaded_pip):
        try:
            way(folder)
            _run(os.path.join(folder, "bin", "python"), "-m", "pip", "--version")
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            said = getattr(error, "stdout", None) or str(error)
            reasons.append((said.strip().splitlines() or [type(error).__name__])[-1])
        else:
            return
    sys.exit(
        f"error: {sys.executable} can make no virtual environment with pip ({reasons[-1]}); "
        "install the python3-venv package, or name another Python: make install PYTHON=..."
    )


if __name__ == "__main__":
    main()
