"""A Slurm cluster on this machine: ``slurmctld``, and a ``slurmd`` for each of its three nodes."""

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.support.programs import ROOT

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "sinfo", "scancel")
NODES = ("node1", "node2", "node3")
SLURMD_TIMEOUT = 15
_CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
SlurmctldPort={controller}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmdTimeout={timeout}
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
KillWait=60
MinJobAge=600
JobRequeue=1
MpiDefault=none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=node1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={node1} CPUs=4 RealMemory=8000 Gres=gpu:1
NodeName=node2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={node2} CPUs=4 RealMemory=8000 Gres=gpu:1
NodeName=node3 NodeHostname=localhost NodeAddr=127.0.0.1 Port={node3} CPUs=4 RealMemory=8000 Gres=gpu:1
PartitionName=low Nodes=node[1-3] Default=YES PriorityTier=1 PreemptMode=REQUEUE
PartitionName=high Nodes=node[1-3] PriorityTier=10 PreemptMode=OFF
"""


class SlurmCluster:
    """Three nodes with four CPUs and a "GPU" each, which is no device; a job in "high" preempts those in "low"."""

    def __init__(self, folder: Path, free_port: Callable[[], int]) -> None:
        self.folder = folder
        self._environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        ports = {name: free_port() for name in ("controller", *NODES)}
        text = _CONFIGURATION.format(folder=folder, timeout=SLURMD_TIMEOUT, **ports)
        (folder / "slurm.conf").write_text(text, encoding="utf-8")
        (folder / "gres.conf").write_text("Name=gpu File=/dev/null\n", encoding="utf-8")
        (folder / "state").mkdir()
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start all daemons."""
        self._daemons["slurmctld"] = self._start("slurmctld", "-D", "-c")
        for node in NODES:
            self.start_node(node)

    def start_node(self, node: str) -> None:
        """Start a node's daemon and wait until the node takes jobs."""
        (self.folder / f"spool-{node}").mkdir(exist_ok=True)
        self._daemons[node] = self._start("slurmd", "-D", "-N", node)
        self.wait_until(lambda: self.command("sinfo", "-h", "-n", node, "-p", "low", "-o", "%T").strip() == "idle")

    def kill_node(self, node: str, is_shut_down: bool = False) -> None:
        """Kill everything that runs on a node, as if its power had failed; or, shut down, its ranks first."""
        slurmd = self._daemons.pop(node)
        slurmd.kill()
        job_processes = [process for process in psutil.process_iter() if _node_of_job(process) == node]
        step_daemons = set()
        for process in job_processes:
            parent = process.parent()
            if parent is not None and parent.name().startswith("slurmstepd"):
                step_daemons.add(parent)
        # a step daemon that sees its processes end tells slurmctld how they ended; after a power failure nobody does
        killed_in_order = [*job_processes, *step_daemons] if is_shut_down else [*step_daemons, *job_processes]
        for process in killed_in_order:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        slurmd.wait()

    def close(self) -> None:
        """End all jobs and daemons."""
        with suppress(subprocess.CalledProcessError):
            self.command("scancel", "-u", "root", "--signal=KILL", "--full")
            self.command("scancel", "-u", "root")
            self.wait_until(lambda: not self.command("squeue", "-h").strip(), 30)
        for daemon in self._daemons.values():
            daemon.terminate()
        for daemon in self._daemons.values():
            daemon.wait(30)

    def submit(self, settings: Path, *words: object, environment: Mapping[str, str] = {}) -> int:
        """Run ``launch/slurm/submit.sh`` with these settings; return the job's id."""
        program = str(ROOT / "launch" / "slurm" / "submit.sh")
        with_settings = {"FABRIC_TRAIN_SETTINGS": str(settings), **environment}
        printed = self.command(program, *words, environment=with_settings)
        return int(printed.split()[-1])

    def command(self, *words: object, environment: Mapping[str, str] = {}) -> str:
        """Return what a command of Slurm prints."""
        return subprocess.run(
            [str(word) for word in words],
            env={**self._environment, **environment},
            cwd=self.folder,
            text=True,
            stdout=subprocess.PIPE,
            check=True,
            timeout=60,
        ).stdout

    def state(self, job: int | str) -> str:
        """Return a job's state, such as PENDING."""
        match = re.search(r"JobState=(\w+)", self.command("scontrol", "show", "job", job))
        assert match is not None
        return match[1]

    def wait_until(self, condition: Callable[[], bool], timeout: float = 600) -> None:
        """Wait until the condition holds; fail with the daemons' logs if the time is over."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, self.report()
            time.sleep(0.2)

    def report(self) -> str:
        """Return the queue and the end of every log."""
        report = self.command("squeue")
        for log in [*self.folder.glob("*.log"), *self.folder.rglob("logs/*.log")]:
            report += f"\n--- {log.name}\n{log.read_text()[-4000:]}"
        return report

    def _start(self, *words: str) -> "subprocess.Popen[bytes]":
        with (self.folder / "daemons").open("a") as output:
            return subprocess.Popen(words, env=self._environment, cwd=self.folder, stdout=output, stderr=output)


@contextmanager
def slurm_cluster(folder: Path, free_port: Callable[[], int]) -> Iterator[SlurmCluster]:
    """Start a cluster and end it."""
    cluster = SlurmCluster(folder, free_port)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


def _node_of_job(process: psutil.Process) -> str | None:
    """Return the node that a process of a job runs on; None if it belongs to no job."""
    try:
        return process.environ().get("SLURMD_NODENAME")
    except psutil.Error:
        return None
