"""Write and read the recipe of a bundle, which names the places in it, and fetch the wheels that it needs."""

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import zipfile
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from fabric_train.cli import yaml_core
from fabric_train.cli.argument_types import GivenShares, Shares, split_name
from fabric_train.cli.errors import InputError

CONFIGURATION, MODEL, ADAPTER = "train.yaml", "model", "adapter"
"""The names in a bundle: the configuration, the model's folder, the adapter's folder."""
_OF_SHARES = ("shares", "token_shares")
_NOT_IN_A_BUNDLE = {
    "streaming_dataset": "tokenize its texts, and give --data",
    "checkpoint": "give the checkpoint as --model, which begins a new run with its weights",
    "branch": "give the checkpoint as --model, which begins a new run with its weights",
}

_CUDA_ON_PYPI = "13.0"
"""The CUDA version of the torch wheels on PyPI; wheels for others are on PyTorch's own index."""

_PYTORCH_INDEX = "https://download.pytorch.org/whl"
_NEWEST_GLIBC = 28  # of Debian 11, Ubuntu 20.04 and RHEL 8; torch needs it
_INSTALLERS = ("pip", "setuptools")  # pip installs pip too, so that ensurepip is not needed
_WITHOUT_WHEELS = {"eval": ("sqlitedict", "word2number")}  # lm_eval needs them; PyPI has their source
_PROGRESS = re.compile(r"\s*(?:Collecting|Downloading|Using cached) (\S+)")
# pip download --python-version chooses wheels for that Python, but evaluates "; python_version < ..." of dependencies
# for the Python that runs it
_PIP_AS_ON_TARGET = """
import json, runpy, sys
from pip._vendor.packaging import markers
target, here = json.loads(sys.argv.pop(1)), markers.default_environment
markers.default_environment = lambda: {**here(), **target}
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True)
class Recipe:
    """Arguments of a run as a YAML file has them: its values by their names. Without a file there are none."""

    path: str | None
    given: Mapping[str, Any]

    @property
    def data(self) -> list[str]:
        named = self.given.get("train_data_dir") or []
        return [named] if isinstance(named, str) else list(named)

    @property
    def mixes(self) -> bool:
        """Whether a run of it reads all token datasets, and not one."""
        return len(self.data) > 1 or any(self.given.get(name) is not None for name in (*_OF_SHARES, "phases"))

    def check(self, data: Sequence[str]) -> None:
        """Raise an InputError unless all it names can be in a bundle, with these token datasets in place of its own."""
        faults = [
            f"--recipe {self.path}: {name} {self.given[name]} is not in a bundle; {advice}"
            for name, advice in _NOT_IN_A_BUNDLE.items()
            if self.given.get(name)
        ]
        if len(self.data) > 1 and len(self.data) != len(data):
            faults.append(
                f"--recipe {self.path} mixes {len(self.data)} token datasets, and --data gives {len(data)}; give as "
                "many, in the recipe's order, or leave --data out"
            )
        if path := self.given.get("phases"):
            faults += [
                f"--phases {path}: phase {number} has a train_data_dir of its own, which is not in a bundle; leave the "
                "phase out, and go on with --branch and the folder of that token dataset there"
                for number, phase in enumerate(_load_phases(self._read("phases"), path), 1)
                if "train_data_dir" in phase
            ]
        if faults:
            raise InputError(*faults)

    def write(self, data: Sequence[str], folder: Path, added: Mapping[str, Any]) -> None:
        """Write ``train.yaml`` and the files that it names.

        ``data`` are the bundle's token datasets, in its order; ``added`` are arguments of
        its run; of those, the recipe may have its own, but for ``init_adapter``.
        """
        places = dict(zip(self.data or data, data, strict=False))
        given = {**added, **self.given, **{name: added[name] for name in ("init_adapter",) if name in added}}
        for name in _OF_SHARES:
            if given.get(name) is not None:
                given[name] = _with_places(Shares(f"--recipe {self.path}: {name}", given[name]), places)
        for name in ("phases", "sample_prompts"):
            if path := given.get(name):
                text = self._read(name) if name == "sample_prompts" else _phases(self._read(name), path, places)
                given[name] = f"recipe/{name}{Path(path).suffix}"
                (folder / "recipe").mkdir(exist_ok=True)
                (folder / given[name]).write_text(text, encoding="utf-8")
        trained = list(data) if self.mixes and len(data) > 1 else data[0]
        given |= {"model_name": MODEL, "train_data_dir": trained, "output_dir": "runs/1"}
        more = [] if self.mixes else data[1:]
        others = f"# Other token datasets: {', '.join(more)}\n" if more else ""
        text = f"# python -m fabric_train --config {CONFIGURATION}, in this folder\n{others}{yaml_core.dump(given)}"
        (folder / CONFIGURATION).write_text(text, encoding="utf-8")

    def _read(self, name: str) -> str:
        path = self.given[name]
        try:
            return Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise InputError(f"--recipe {self.path}: {name} {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise InputError(f"--recipe {self.path}: {name} {path}: it is not UTF-8; save it as UTF-8") from error


def read_recipe(path: str | None) -> Recipe:
    """Return the arguments in a YAML file, unchecked; raise an InputError if it cannot be read, or has none."""
    if path is None:
        return Recipe(None, {})
    loaded = yaml_core.load_file(path, "--recipe") or {}
    if not isinstance(loaded, dict):
        raise InputError(f"--recipe {path}: expected arguments such as 'lr: 1e-5', one on each line")
    return Recipe(path, {str(name).replace("-", "_"): value for name, value in loaded.items()})


def _phases(text: str, path: str, places: Mapping[str, str]) -> str:
    """Return a file of phases that names the bundle's token datasets."""
    content = _load_phases(text, path)
    for number, phase in enumerate(content, 1):
        for name in _OF_SHARES:
            if isinstance(phase.get(name), list):
                phase[name] = _with_places(Shares(f"{path}: phase {number}: {name}", phase[name]), places)
    return yaml_core.dump(content)


def _load_phases(text: str, path: str) -> Any:
    """Return a list of phases, each names with values."""
    try:
        content = yaml_core.load(text)
    except yaml_core.YamlFault as fault:
        raise InputError(f"--phases {path}: {fault}") from fault
    if not isinstance(content, list) or not all(isinstance(phase, dict) for phase in content):
        raise InputError(f"--phases {path}: expected a list of phases")
    return content


def _with_places(shares: Shares, places: Mapping[str, str]) -> GivenShares:
    """Return shares whose names are places in the bundle; numbers alone stay as they are."""
    named, renamed = shares.by_name(), []
    if named is None:
        assert shares.given is not None
        return shares.given
    for name, share in named.items():
        number, source = split_name(name, list(places), shares.option)
        place = list(places.values())[number]
        renamed.append({place if source is None else f"{place}:{source}": share})
    return renamed


@dataclass(frozen=True)
class Target:
    """The machine that a bundle is for: Linux, on a processor like this machine's."""

    python_version: str | None  # such as "3.11"; None is the one of this process
    cuda: str  # such as "13.0", or "none" for torch's CPU build

    @property
    def python(self) -> str:
        return self.python_version or f"{sys.version_info[0]}.{sys.version_info[1]}"

    @property
    def machine(self) -> str:  # as ``uname -m`` has it
        """The processor, as ``uname -m`` has it."""
        return {"arm64": "aarch64", "AMD64": "x86_64"}.get(platform.machine(), platform.machine())

    @property
    def markers(self) -> dict[str, str]:
        """What the target's Python would say of itself in the markers of requirements."""
        return {
            "python_version": self.python,
            "python_full_version": f"{self.python}.0",
            "implementation_version": f"{self.python}.0",
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
            "os_name": "posix",
            "sys_platform": "linux",
            "platform_system": "Linux",
            "platform_machine": self.machine,
        }

    def __str__(self) -> str:
        torch = "torch's CPU build" if self.cuda == "none" else f"CUDA {self.cuda}"
        return f"Python {self.python}, {torch}, Linux {self.machine}"


def download_wheels(
    target: Target, constraints: Path, folder: Path, show: Callable[[str], None], extras: Collection[str] = ()
) -> None:
    """Download a wheel of each package into the new folder ``folder``. pip's own settings (indexes, proxies) count.

    ``constraints`` is a requirements.txt with the pinned versions, ``extras`` are of this program. ``show`` is
    called with the name of each package when pip comes to it.
    """
    folder.mkdir()
    torch = re.search(r"^torch==([0-9.]+)\s*$", constraints.read_text(encoding="utf-8"), re.MULTILINE)
    if torch is None:
        raise InputError(f"{constraints}: it pins no version of torch for {target}; get the file of this project again")
    if target.cuda == _CUDA_ON_PYPI:
        exactly, indexes = f"torch==={torch[1]}", []  # === takes no torch+cpu, which a machine's own index may have
    else:
        build = "cpu" if target.cuda == "none" else f"cu{target.cuda.replace('.', '')}"
        exactly, indexes = f"torch==={torch[1]}+{build}", ["--extra-index-url", f"{_PYTORCH_INDEX}/{build}"]
    # alone: other packages must not come from that index
    pip_download(target, folder, ["--no-deps", *indexes, exactly], show)
    requirements = [exactly, *_INSTALLERS, *requirements_with(extras)]
    for name in (name for extra in extras for name in _WITHOUT_WHEELS.get(extra, ())):
        _build_wheel(name, folder)
    pip_download(target, folder, ["--find-links", str(folder), "-c", str(constraints), *requirements], show)


def _build_wheel(name: str, folder: Path) -> None:
    """Build the wheel of a package in Python alone, which has no wheel on PyPI."""
    command = [sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--no-deps", "--wheel-dir"]
    pip = subprocess.run([*command, str(folder), name], capture_output=True, text=True, check=False)
    if pip.returncode:
        reason = reason_in([line.strip() for line in (pip.stdout + pip.stderr).splitlines()])
        raise InputError(f"the wheel of {name} cannot be built: {reason}; check the network")


def reason_in(lines: list[str]) -> str:
    """Return the first error in pip's output that names a cause."""
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    causes = [error for error in errors if not error.startswith("Ignored the following")]
    return next(iter([*causes, *errors, *lines[-1:]]), "pip has failed")


def pip_download(target: Target, folder: Path, words: list[str], show: Callable[[str], None]) -> None:
    """Run ``pip download`` as the target would; ``words`` are requirements and further options of pip."""
    command = [sys.executable, "-c", _PIP_AS_ON_TARGET, json.dumps(target.markers), "download"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(folder), *words]
    command += ["--only-binary", ":all:", "--implementation", "cp", "--python-version", target.python]
    abis = (f"cp{target.python.replace('.', '')}", "abi3", "none")
    command += [word for abi in abis for word in ("--abi", abi)]
    platforms = [f"manylinux_2_{minor}" for minor in range(_NEWEST_GLIBC, 4, -1)]  # the newest first
    for name in (*platforms, "manylinux2014", "manylinux2010", "manylinux1", "linux"):
        command += ["--platform", f"{name}_{target.machine}"]
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    last = deque[str](maxlen=200)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            last.append(line.strip())
            if found := _PROGRESS.match(line):
                show(found[1])
    if pip.returncode:
        reason = reason_in([*last])
        raise InputError(f"the wheels for {target} cannot be downloaded: {reason}; check the versions and the network")


def installed_bytes(folder: Path) -> int:
    """Return the bytes that the wheels in a folder take once they are installed."""
    return sum(member.file_size for wheel in folder.glob("*.whl") for member in zipfile.ZipFile(wheel).infolist())


def estimated_bytes(target: Target) -> int:
    """Return about how many bytes the wheels will be, before they are known."""
    return 600_000_000 if target.cuda == "none" else 3_500_000_000


def requirements_with(extras: Collection[str]) -> list[str]:
    """Return what this program and some of its extras require, as pip takes it."""
    try:
        given = importlib.metadata.requires("fabric-train") or []
    except importlib.metadata.PackageNotFoundError:
        raise InputError("fabric-train is not installed, so what it needs is not known; run make install") from None
    requirements = list(map(Requirement, given))
    wanted = [f'extra == "{name}"' for name in extras]
    own = [str(one) for one in requirements if "extra" not in str(one.marker)]
    return own + [str(one).partition(";")[0].strip() for one in requirements if str(one.marker) in wanted]
