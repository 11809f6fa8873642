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
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    match = re.search(r"^ARG BASE=(\S+)$", dockerfile, re.MULTILINE)
    assert match is not None
    return match[1]


def need_packages(**packages: str) -> None:
    """Install Debian packages for commands that are missing, or skip the test.

    Args:
        packages: the package that has a command, by the command.
    """
    if os.geteuid():
        pytest.skip("only root can install packages and build images")
    missing_packages = [package for command, package in packages.items() if shutil.which(command) is None]
    if not missing_packages:
        return
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    wait_for_lock = ["-o", "DPkg::Lock::Timeout=600"]  # another test process may be installing
    update = ["apt-get", "update", "-qq", *wait_for_lock]
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *wait_for_lock, *missing_packages]
    for command in (update, install):
        completed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if completed.returncode:
            pytest.skip(f"{' '.join(command)}: {completed.stderr.strip().splitlines()[-1:]}")


@cache
def base_folder() -> Path:
    """Return the root of a Debian with the user 1000 of Ubuntu's image, and mount points for pip's settings."""
    target = CACHE / "base"
    if not target.exists():
        with complete_folder(target) as folder:
            debootstrap(_SUITE, folder)
            _run_or_skip("useradd", "--root", str(folder), "--uid", "1000", "--create-home", "ubuntu")
            shutil.rmtree(folder / "dev")  # device files, which cannot be copied in a user namespace
            (folder / "dev").mkdir()
            for host_path, container_path in pip_mounts().items():
                _make_mount_point(folder / container_path.lstrip("/"), host_path)
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
    options = ["--variant=minbase"]
    if packages:
        options.append(f"--include={','.join(packages)}")
    _run_or_skip("debootstrap", *options, suite, str(folder))


def limits(open_files: int | None = None) -> list[str]:
    """Return podman's options that keep this machine's limits, which podman would raise."""
    open_files = open_files or resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return [f"--ulimit=nofile={open_files}:{open_files}", "--ulimit=nproc=4096:4096"]


def run_logged(log: Path, *command: str) -> str:
    """Run a command with its output in a file; return the output.

    Raises:
        AssertionError: it failed.
    """
    with log.open("w") as log_file:
        completed = subprocess.run(command, cwd=ROOT, stdout=log_file, stderr=subprocess.STDOUT, check=False)
    output = log.read_text(encoding="utf-8", errors="replace")
    assert completed.returncode == 0, output[-4000:]
    return output


@cache
def pip_mounts() -> dict[str, str]:
    """Return what pip needs of this machine during a build: settings, folders of packages, certificates.

    The image contains none of it.

    Returns:
        The path in the container of each path of this machine.
    """
    config_list = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], check=True, text=True, capture_output=True
    ).stdout
    settings = dict(re.findall(r"^(?:global|:env:)\.([\w-]+)='(.*)'$", config_list, re.MULTILINE))

    # folders of packages have the same path in the container
    mounts = {}
    for value in settings.values():
        for word in value.split():
            path = word.removeprefix("file://").removesuffix("/simple")
            if path.startswith("/"):
                mounts[path] = path

    # the image has a file of the certificates' name
    certificates = settings.get("cert")
    if certificates:
        mounts.pop(certificates)
        mounts[certificates] = _CERTIFICATES
        settings["cert"] = _CERTIFICATES

    pip_conf = CACHE / "pip.conf"
    pip_conf.parent.mkdir(parents=True, exist_ok=True)
    lines = ["[global]", *(f"{name} = {value}" for name, value in settings.items())]
    pip_conf.write_text("\n".join(lines) + "\n")
    mounts[str(pip_conf)] = "/etc/pip.conf"
    return mounts


def _make_mount_point(point: Path, host_path: str) -> None:
    """Make an empty folder or file, over which a folder or file of this machine can be mounted."""
    point.parent.mkdir(parents=True, exist_ok=True)
    if Path(host_path).is_dir():
        point.mkdir(exist_ok=True)
    else:
        point.touch()


def _run_or_skip(*command: str) -> None:
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode:
        output = completed.stderr or completed.stdout
        pytest.skip(f"{' '.join(command[:4])}: {output.strip()[-300:]}")
