"""``launch/pbs.sh`` on two nodes saves before the walltime is over, submits itself again, and loses no step.

PBS is in no package registry. So the nodes are network namespaces, and three programs stand in for PBS's: ``qstat``
prints the walltime, ``qsub`` notes the script, and ``pbsdsh`` starts a task on a node, without the job's folder and
variables and with exit code 0, as in OpenPBS 23.06.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.forked_runs import ForkedRuns
from tests.support.programs import ROOT
from tests.support.short_runs import argv, metrics, saved_steps
from tests.support.two_machines import ADDRESSES, two_machines

pytestmark = [pytest.mark.slow, pytest.mark.launchers]

OPTIONS = {"max_step": 200, "number_epochs": 999, "eval_step_interval": 100, "save_step_interval": 100}


class Job:
    """A job of ``launch/pbs.sh`` that a user has edited, on nodes with a process each."""

    def __init__(self, folder: Path, nodes: list[list[str]], arguments: list[str], walltime: str) -> None:
        self.folder = folder
        self.log = folder / "log"
        (folder / "bin").mkdir(parents=True)
        lines = {
            "devices": "1",
            "save_seconds": "60",
            "log": str(self.log),
            "arguments": f"({' '.join(arguments)})",
            "setup": f"'export PATH={Path(sys.executable).parent}:$PATH OMP_NUM_THREADS=1'",
        }
        text = (ROOT / "launch" / "pbs.sh").read_text(encoding="utf-8")
        for name, value in lines.items():
            text, found = re.subn(rf"^{name}=.*", f"{name}={value}", text, flags=re.MULTILINE)
            assert found == 1
        self._script = folder / "job.SC"
        self._script.write_text(text, encoding="utf-8")
        (folder / "nodes").write_text("".join(f"{address}\n" for address in ADDRESSES[: len(nodes)]))
        self._add_program("qstat", f'echo "Job Id: $2"; echo "    Resource_List.walltime = {walltime}"')
        self._add_program("qsub", f'echo "$@" >> {folder}/submitted; echo 124.pbs')
        inside = " ".join(nodes[-1])
        variables = f'PATH="$PATH" PYTHONPATH="$PYTHONPATH" HOME="$HOME" PBS_NODENUM={len(nodes) - 1}'
        checked = '[ "$1 $2 $3" = "-n 1 --" ] || exit 9\nshift 3; cd /'
        self._add_program("pbsdsh", f'{checked}\n{inside} env -i {variables} "$@"\nexit 0')
        environment = {
            **os.environ,
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "PBS_JOBID": "123.pbs",
            "PBS_O_WORKDIR": str(ROOT),
            "PBS_NODEFILE": str(folder / "nodes"),
        }
        command = [*nodes[0], "bash", str(self._script)]
        self.process = subprocess.Popen(command, env=environment, start_new_session=True)

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.processes():
            each.kill()
        self.process.kill()
        self.process.wait()

    def processes(self) -> list[psutil.Process]:
        """Return the processes that the job has started."""
        return psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []

    def wait_for_steps(self, run: Path, number: int) -> None:
        """Wait until the run has logged so many steps."""
        deadline = time.monotonic() + 200
        while len(metrics(run)) < number:
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.05)

    def _add_program(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    def resubmissions(self) -> list[str]:
        """Return the arguments of each ``qsub``."""
        file = self.folder / "submitted"
        return file.read_text().splitlines() if file.exists() else []

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8") if self.log.exists() else ""


@pytest.fixture
def nodes() -> Iterator[list[list[str]]]:
    with two_machines() as both:
        yield list(both)


def test_a_job_saves_ahead_of_its_walltime_and_the_next_goes_on(
    nodes: list[list[str]], forked_runs: ForkedRuns, tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path
) -> None:
    run = tmp_path / "run"
    whole = tmp_path / "whole"
    arguments = argv(tiny_model_dir, tiny_tokens_dir, run, **OPTIONS)
    with Job(tmp_path / "first", nodes, arguments, "01:01:05") as first:
        first.wait_for_steps(run, 3)
        (timer,) = [each for each in first.processes() if each.name() == "timeout"]
        assert timer.cmdline()[-4] == "3605"  # seconds, with save_seconds=60
        timer.send_signal(signal.SIGALRM)  # as if they had passed
        assert first.process.wait(100) == 75, first.output()
    assert "SIGUSR1: stopping and saving" in first.output()
    assert first.resubmissions() == [str(tmp_path / "first" / "job.SC")]
    with Job(tmp_path / "second", nodes, arguments, "01:01:05") as second:
        assert second.process.wait(300) == 0, second.output()
    assert "2 × fsdp" in second.output()
    assert second.resubmissions() == []
    forked_runs.start(argv(tiny_model_dir, tiny_tokens_dir, whole, **OPTIONS)).finish(300)
    assert len(metrics(run)) == 200
    assert metrics(run) == metrics(whole)


def test_a_deleted_job_saves_and_does_not_come_back(
    nodes: list[list[str]], tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path
) -> None:
    """qdel sends SIGTERM to all processes of the job. Here it has one node."""
    run = tmp_path / "run"
    arguments = argv(tiny_model_dir, tiny_tokens_dir, run, **{**OPTIONS, "max_step": 5000})
    with Job(tmp_path / "job", nodes[:1], arguments, "01:00:00") as job:
        job.wait_for_steps(run, 3)
        processes = job.processes()
        os.killpg(job.process.pid, signal.SIGTERM)
        assert job.process.wait(100) == 75, job.output()
        assert not psutil.wait_procs(processes, timeout=20)[1]
    assert max(saved_steps(run)) >= 2
    assert job.resubmissions() == []


def test_a_walltime_without_time_to_train_is_refused(tmp_path: Path) -> None:
    with Job(tmp_path, [[]], ["--help"], "00:01:00") as job:
        assert job.process.wait(20) == 2
    (line,) = [line for line in job.output().splitlines() if line.startswith("error: ")]
    assert line == "error: a walltime of 00:01:00 leaves no time to train: save_seconds is 60; ask for more"
