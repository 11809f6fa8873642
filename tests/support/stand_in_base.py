"""Build images without an image registry: Debian 12 stands in for the base image, and pip works as on this machine.

Images are kept in ``.cache/containers``. Only root can build there.
"""

import os
import re
import resource
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from fabric_train.files.atomic_folder import complete_folder
from fabric_train.sample_data import real_data
from tests.support.programs import ROOT

CACHE = (real_data.CACHE / "containers").resolve()  # podman's storage knows its own path
STORAGE = ["--root", str(CACHE / "storage"), "--runroot", str(CACHE / "run")]
PODMAN = ["podman", "--cgroup-manager=cgroupfs", "--events-backend=file", "--runtime=/usr/sbin/runc", *STORAGE]
AS_ROOT_OF_A_NAMESPACE = [
    "unshare", "--user", "--mount", "--map-users=0:0:65536", "--map-groups=0:0:65536", "--setuid=0", "--setgid=0"
]  # fmt: skip
"""A user namespace of its own has all capabilities that apptainer asks for."""
_CERTIFICATES = "/etc/pip-certificates.crt"
_SUITE = "bookworm"  # its Python 3.11 is one that the project supports


def base_image() -> str:
    """Return the name of the base image in the Dockerfile."""
    found = re.search(r"^ARG BASE=(\S+)$", (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return found[1]


def need_packages(**packages: str) -> None:
    """Install Debian packages for commands that are missing, or skip the test: command=package."""
    if os.geteuid():
        pytest.skip("only root can install packages and build images")
    missing = [package for command, package in packages.items() if shutil.which(command) is None]
    if not missing:
        return
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    lock = "DPkg::Lock::Timeout=600"
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "-o", lock, *missing]
    for command in (["apt-get", "update", "-qq", "-o", lock], install):
        finished = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if finished.returncode:
            pytest.skip(f"{' '.join(command)}: {finished.stderr.strip().splitlines()[-1:]}")


@cache
def base_folder() -> Path:
    """Return the root of a Debian with the user 1000 of Ubuntu's image, and mount points for pip's settings."""
    target = CACHE / "base"
    if not target.exists():
        with complete_folder(target) as folder:
            debootstrap(_SUITE, folder)
            _run("useradd", "--root", str(folder), "--uid", "1000", "--create-home", "ubuntu")
            shutil.rmtree(folder / "dev")  # device files, which cannot be copied in a user namespace
            (folder / "dev").mkdir()
            for inside in pip_mounts().values():
                _make_mount_point(folder, inside)
            folder.chmod(0o755)
    return target


def apptainer_folder() -> Path:
    """Return the root of a Debian with apptainer, which only the newest suite has."""
    target = CACHE / "sid"
    if not target.exists():
        with complete_folder(target) as folder:
            debootstrap("sid", folder, "apptainer")
            # Apptainer mounts the node's, and Debian's base system has none of its own.
            (folder / "etc" / "hosts").write_text("127.0.0.1 localhost\n", encoding="utf-8")
    return target


def debootstrap(suite: str, folder: Path, *packages: str) -> None:
    """Install a minimal Debian with some packages into a folder, or skip the test."""
    need_packages(debootstrap="debootstrap")
    include = [f"--include={','.join(packages)}"] if packages else []
    _run("debootstrap", "--variant=minbase", *include, suite, str(folder))


def limits(open_files: int | None = None) -> list[str]:
    """Return podman's options that keep this machine's limits, which podman would raise."""
    open_files = open_files or resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return [f"--ulimit=nofile={open_files}:{open_files}", "--ulimit=nproc=4096:4096"]


def run_logged(log: Path, *command: str) -> str:
    """Run a command with its output in a file; return the output.

    Raises:
        AssertionError: it failed.
    """
    with log.open("w") as output:
        finished = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False)
    text = log.read_text(encoding="utf-8", errors="replace")
    assert finished.returncode == 0, text[-4000:]
    return text


@cache
def pip_mounts() -> dict[str, str]:
    """Return what pip needs of this machine during a build, as paths here and inside: settings, folders, certificates.

    The image contains none of it.
    """
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], check=True, text=True, capture_output=True
    ).stdout
    settings = dict(re.findall(r"^(?:global|:env:)\.([\w-]+)='(.*)'$", listed, re.MULTILINE))
    words = [word.removeprefix("file://") for value in settings.values() for word in value.split()]
    mounts = {word.removesuffix("/simple"): word.removesuffix("/simple") for word in words if word.startswith("/")}
    if certificates := settings.get("cert"):
        del mounts[certificates]  # the image has a file of that name
        mounts[certificates] = settings["cert"] = _CERTIFICATES
    file = CACHE / "pip.conf"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(["[global]", *(f"{name} = {value}" for name, value in settings.items())]) + "\n")
    return {**mounts, str(file): "/etc/pip.conf"}


def _make_mount_point(root: Path, inside: str) -> None:
    point = root / inside.lstrip("/")
    point.parent.mkdir(parents=True, exist_ok=True)
    source = next(here for here, there in pip_mounts().items() if there == inside)
    if Path(source).is_dir():
        point.mkdir(exist_ok=True)
    else:
        point.touch()


def _run(*command: str) -> None:
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        pytest.skip(f"{' '.join(command[:4])}: {(finished.stderr or finished.stdout).strip()[-300:]}")
