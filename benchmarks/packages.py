"""Install the packages that only a peer needs, outside this environment, into one folder of the cache per peer."""

import hashlib
import subprocess
import sys
from pathlib import Path

from benchmarks.measure import ROOT
from fabric_train.files.atomic_folder import complete_folder
from fabric_train.sample_data import real_data

_REQUIREMENTS = ROOT / "benchmarks" / "peers" / "requirements"


def install_packages(peer: str, seconds: float | None = None) -> Path:
    """Install the packages of ``requirements/PEER.txt`` once; return their folder for ``PYTHONPATH``.

    Args:
        peer: name of the file with its requirements.
        seconds: how long pip may take; None for any time.

    Raises:
        ChildProcessError: pip cannot install them, or takes too long.
    """
    requirements = _REQUIREMENTS / f"{peer}.txt"
    pins = hashlib.sha256(requirements.read_bytes()).hexdigest()[:12]
    target = real_data.CACHE / "peers" / f"{peer}-{pins}-{sys.implementation.cache_tag}"
    if not target.exists():
        print(f"installing {peer} from PyPI", flush=True)
        with complete_folder(target) as folder:
            command = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps"]
            command += ["--target", str(folder), "-r", str(requirements)]
            try:
                pip = subprocess.run(
                    command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds, check=False
                )
            except subprocess.TimeoutExpired:
                raise ChildProcessError(f"{peer} cannot be installed within {seconds:.0f} s") from None
            if pip.returncode:
                reasons = [line for line in pip.stdout.splitlines() if line.startswith("ERROR")] or ["pip failed"]
                raise ChildProcessError(f"{peer} cannot be installed: {reasons[-1].removeprefix('ERROR: ')}")
    return target
