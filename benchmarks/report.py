"""Write a benchmark's result into benchmarks/results: machine, commit, commands, and every raw number."""

import json
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measure import ROOT, Command
from fabric_train.tokenization.corpus import available_cores

RESULTS = ROOT / "benchmarks" / "results"
_VERSIONS_OF = (
    "torch",
    "lightning",
    "transformers",
    "datasets",
    "tokenizers",
    "tiktoken",
    "sentencepiece",
    "pyarrow",
    "numpy",
)


@dataclass(frozen=True)
class Machine:
    """The machine; ``load_average`` is over the minute before the benchmark and shows whether other processes ran."""

    kind: str
    gpu: str | None
    cores: int
    cpu: str
    memory_bytes: int
    system: str
    python: str
    load_average: float


@dataclass(frozen=True)
class Report:
    """The result of a benchmark; ``runs`` has a list of dataclasses for each system, ``summary`` is one dataclass."""

    name: str
    settings: Mapping[str, Any]
    commands: Mapping[str, Command | str]
    runs: Mapping[str, Sequence[Any]]
    summary: Any


def this_machine() -> Machine:
    """Return a description of this machine; call it before anything is measured."""
    import torch

    cores = available_cores()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return Machine(
        kind=gpu.lower().replace(" ", "-") if gpu else f"cpu{cores}",
        gpu=gpu,
        cores=cores,
        cpu=_cpu_model(),
        memory_bytes=psutil.virtual_memory().total,
        system=platform.platform(),
        python=platform.python_version(),
        load_average=psutil.getloadavg()[0],
    )


def write_report(report: Report, machine: Machine, commit: str | None, folder: Path = RESULTS) -> Path:
    """Write ``NAME-DATE-MACHINE.json`` into ``folder``, replacing one of the same day, and return its path."""
    now = datetime.now(timezone.utc)
    content = {
        "benchmark": report.name,
        "date": now.isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        "commit": commit,
        "machine": asdict(machine),
        "versions": {name: version(name) for name in _VERSIONS_OF},
        "settings": dict(report.settings),
        "commands": {system: str(command) for system, command in report.commands.items()},
        "summary": asdict(report.summary),
        "runs": {system: [asdict(run) for run in runs] for system, runs in report.runs.items()},
    }
    folder.mkdir(exist_ok=True)
    path = folder / f"{report.name}-{now:%Y-%m-%d}-{machine.kind}.json"
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path


def _cpu_model() -> str:
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
