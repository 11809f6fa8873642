"""Run a program of the project on pretended CUDA devices, and read what the devices have noted."""

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.support.forked_runs import ForkedRuns, start_forked_runs
from tests.support.pretended_cuda.build import BuildError, build
from tests.support.programs import ROOT

_START = Path(__file__).resolve().parent / "start"
_BEGIN = "from tests.support.pretended_cuda.install import begin; begin()\n"
_PROBE = "import sys, torch; assert (2 * torch.ones(2, device='cuda')).tolist() == [2, 2]; sys.exit(0)"
_SHOWN_CHARACTERS = 500


@dataclass(frozen=True)
class Notes:
    """What the devices have noted in one rank.

    ``waits`` counts the host's waits for the device by place, such as "item at fabric_train/training/loop.py:166
    take_step < train < main": what waits, the project's innermost line, and the functions that led there, innermost
    first. ``late_copies`` counts by such places the copies to the host that were delayed. ``contexts`` has the thread
    and place that made a context on a device, by its index, and ``collectives`` counts NCCL's by name. ``peak_bytes``
    is the largest memory of a device.
    """

    waits: dict[str, int]
    late_copies: dict[str, int]
    contexts: dict[str, str]
    collectives: dict[str, int]
    peak_bytes: int


@dataclass(frozen=True)
class PretendedRun:
    """A run that has ended.

    ``returncode`` and ``stderr`` are from the first rank that failed, else from rank 0; ``stdout`` is rank 0's;
    ``notes`` are by rank.
    """

    returncode: int
    stdout: str
    stderr: str
    notes: dict[int, Notes]


def run_pretended(
    argv: Sequence[object],
    devices: int = 2,
    copy_delay: float = 0.0,
    before: str = "",
    *,
    ranks: int | None = None,
    cwd: Path | None = None,
    timeout: float = 120,
) -> PretendedRun:
    """Run a program as ``python -m ARGV...`` with torchrun's variables would, in forked processes.

    Args:
        argv: a module with a ``main``, such as "fabric_train" or "generate", and its arguments.
        devices: on this machine.
        copy_delay: above 0, a copy between a device and pinned memory is made when something waits for it, and an event
            arrives this many seconds after the host began to wait: as late as CUDA may do it.
        before: Python source that each rank runs before the program, with its number as ``rank``.
        ranks: processes; default: one for each device in training, one in other programs.
        cwd: where the ranks run; by default a folder of their own.
        timeout: in seconds.

    Raises:
        BuildError: there can be no devices here.
        TimeoutError: the run did not end in time.
    """
    module, *words = argv
    program = str(module)
    default_ranks = 1
    if program == "fabric_train":
        program = "fabric_train.__main__"
        default_ranks = devices
    notes_dir = Path(tempfile.mkdtemp(dir=_folder()))
    run = _server().start(
        words,
        ranks or default_ranks,
        cwd=cwd,
        before=_BEGIN + before,
        env=environment(devices, notes_dir, copy_delay),
        program=program,
    )
    codes = run.wait(timeout)
    reported_rank = next((rank for rank, code in enumerate(codes) if code), 0)
    return PretendedRun(codes[reported_rank], run.stdout(), run.stderr(reported_rank), read_notes(notes_dir))


def environment(devices: int, notes: Path, copy_delay: float = 0.0, *, compiles: bool = False) -> dict[str, str]:
    """Return the variables with which any Python, and those that it starts, has pretended devices.

    Args:
        devices: on this machine.
        notes: folder for the notes of each rank, which ``read_notes`` reads.
        copy_delay: see ``run_pretended``.
        compiles: whether ``torch.compile`` works; it traces graphs, and writes no kernels.

    Raises:
        BuildError: there can be no devices here.
    """
    variables = {"PRETENDED_CUDA_NOTES": str(notes), "PRETENDED_CUDA_COPY_DELAY": str(copy_delay)}
    if compiles:
        variables["PRETENDED_CUDA_COMPILES"] = "1"
    return _variables(devices) | variables


def read_notes(folder: Path) -> dict[int, Notes]:
    """Return the notes in a folder by rank."""
    return {int(file.stem): Notes(**json.loads(file.read_text())) for file in sorted(folder.glob("*.json"))}


@cache
def why_not() -> str | None:
    """Return why there can be no pretended devices here; None if there can be."""
    try:
        probe = run_pretended(["fabric_train"], devices=1, before=_PROBE)
    except BuildError as error:
        return str(error)
    except ChildProcessError as error:  # the server of the runs could not start
        return f"torch's internals have moved: {str(error)[-_SHOWN_CHARACTERS:]}"
    if probe.returncode:
        return f"torch's internals have moved: {probe.stderr[-_SHOWN_CHARACTERS:]}"
    return None


def _variables(devices: int) -> dict[str, str]:
    path = os.pathsep.join([str(_START), str(ROOT)])
    return {"PRETENDED_CUDA_LIBRARY": str(build()), "PRETENDED_CUDA_DEVICES": str(devices), "PYTHONPATH": path}


@cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="pretended-cuda-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def _server() -> ForkedRuns:
    """Return the server of this process's runs: its imports take longer than a run."""
    runs = start_forked_runs(_folder() / "server", _variables(1), draws=False)
    atexit.register(runs.close)
    return runs
