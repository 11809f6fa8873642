"""The files of ``launch/slurm`` under a real Slurm: two nodes train, and the job survives what Slurm does to it.

Slurm (and shellcheck) is installed with apt-get where it is missing. Its daemons run for these tests only.
"""

import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.programs import ROOT
from tests.support.short_runs import argv, checkpoints, metrics
from tests.support.slurm_cluster import PROGRAMS, SlurmCluster, slurm_cluster

pytestmark = [pytest.mark.slow, pytest.mark.launchers]

SCRIPTS = ROOT / "launch" / "slurm"
PACKAGES = ["slurmctld", "slurmd", "slurm-client", "shellcheck"]
NUM_STEPS = 120
ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")


@pytest.fixture(scope="module", autouse=True)
def _slurm() -> None:
    """Install Slurm."""
    if all(shutil.which(name) for name in (*PROGRAMS, "shellcheck")):
        return
    for command in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
        done = subprocess.run(["apt-get", *command], text=True, capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"apt-get {command[0]} cannot install Slurm: {done.stderr.strip().splitlines()[-1]}")


@pytest.fixture
def cluster(tmp_path: Path, free_port: Callable[[], int]) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path, free_port) as started:
        yield started


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    """The settings of the project, changed for two nodes with a CPU rank each."""
    file = tmp_path / "settings.sh"
    changed = f"""
NODES=2
TASKS_PER_NODE=1
TRAIN_OPTIONS=(--time=30 --gpus-per-node=1 --cpus-per-task=2 --mem=2000)
EACH_OPTIONS=(--time=30 --cpus-per-task=1 --mem=500)
PYTHON={sys.executable}
export PYTHONPATH={ROOT} OMP_NUM_THREADS=1
"""
    file.write_text((SCRIPTS / "settings.sh").read_text(encoding="utf-8") + changed, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def arguments(tiny_model_dir: Path, tiny_tokens_dir: Path) -> Callable[..., list[str]]:
    fixed = {"number_epochs": 999, "eval_step_interval": 50, "save_step_interval": 50, "max_step": NUM_STEPS}
    return lambda run, **options: argv(tiny_model_dir, tiny_tokens_dir, run, **{**fixed, **options})


def has_steps(run: Path, number: int) -> Callable[[], bool]:
    return lambda: len(metrics(run)) >= number


def log_of(cluster: SlurmCluster, job: int) -> str:
    return (cluster.folder / "logs" / f"train-{job}.log").read_text(encoding="utf-8")


def test_a_preempted_job_ends_with_the_losses_of_one_left_alone(
    cluster: SlurmCluster, settings: Path, arguments: Callable[..., list[str]]
) -> None:
    whole, run = cluster.folder / "whole", cluster.folder / "run"
    alone = cluster.submit(settings, "train", *arguments(whole))
    cluster.wait_until(lambda: cluster.state(alone) in ENDED)
    assert cluster.state(alone) == "COMPLETED", cluster.report()
    assert "2 × fsdp" in log_of(cluster, alone)

    job = cluster.submit(settings, "train", *arguments(run))
    cluster.wait_until(has_steps(run, 10))
    states = [cluster.state(job)]
    with settings.open("a", encoding="utf-8") as file:
        file.write("EACH_OPTIONS=(--partition=high --nodes=3 --exclusive --time=30 --mem=500)\n")
    urgent = cluster.submit(settings, "each", "x", "--", "sleep", "1")

    def has_ended() -> bool:
        if cluster.state(job) != states[-1]:
            states.append(cluster.state(job))
        return states[-1] in ENDED

    cluster.wait_until(has_ended)
    assert [state for state in states if state != "COMPLETING"] == ["RUNNING", "PENDING", "RUNNING", "COMPLETED"]
    assert cluster.state(urgent) == "COMPLETED"
    log = log_of(cluster, job)
    assert "DUE TO PREEMPTION" in log
    assert "stopped by SIGTERM after step " in log
    assert log.index(f"job {job}, restart 0, on node[1-2]") < log.index(f"job {job}, restart 1, on node[1-2]")
    assert len(metrics(whole)) == NUM_STEPS
    assert metrics(run) == metrics(whole)


def test_a_cancelled_job_saves_and_is_not_started_again(
    cluster: SlurmCluster, settings: Path, arguments: Callable[..., list[str]]
) -> None:
    run = cluster.folder / "run"
    job = cluster.submit(settings, "train", *arguments(run, max_step=5000, save_step_interval=5000))
    cluster.wait_until(has_steps(run, 10))
    cluster.command("scancel", job)
    cluster.wait_until(lambda: not cluster.command("squeue", "-h").strip())
    assert cluster.state(job) == "CANCELLED"
    assert "Restarts=0" in cluster.command("scontrol", "show", "job", job)
    (step,) = checkpoints(run)
    assert step >= 9
    assert f"stopped by SIGTERM after step {step} of 5000" in log_of(cluster, job)


@pytest.mark.parametrize("failed", ["node1", "node2"])  # node1 has rank 0 and the script, and loses its power
def test_a_job_whose_node_fails_goes_on_without_it(
    cluster: SlurmCluster, settings: Path, arguments: Callable[..., list[str]], failed: str
) -> None:
    run = cluster.folder / "run"
    job = cluster.submit(settings, "train", *arguments(run, save_step_interval=10))
    cluster.wait_until(has_steps(run, 15))
    cluster.kill_node(failed, is_shut_down=failed == "node2")
    cluster.wait_until(lambda: cluster.state(job) in ENDED)
    assert cluster.state(job) == "COMPLETED", cluster.report()
    log = log_of(cluster, job)
    if failed == "node2":
        assert "error: rank 1 (node2, process " in log
        assert "slurm: error: node2: no answer. Slurm starts the job again without it" in log
    assert f"slurm: a node of the last start has failed: {failed} is down* (Not responding)" in log
    assert f"job {job}, restart 1, on node[{'2-3' if failed == 'node1' else '1,3'}]" in log
    assert len(metrics(run)) == NUM_STEPS


def test_a_job_whose_time_runs_out_saves_and_starts_again(
    cluster: SlurmCluster, settings: Path, arguments: Callable[..., list[str]]
) -> None:
    """Slurm looks at time limits twice a minute, so the run has to last for longer than that."""
    with settings.open("a", encoding="utf-8") as file:
        file.write("SAVE_SECONDS=120\n")
    run, long = cluster.folder / "run", 1000
    job = cluster.submit(settings, "train", *arguments(run, max_step=long, eval_step_interval=long))
    cluster.wait_until(has_steps(run, 5))
    minutes = int(cluster.command("squeue", "-h", "-j", job, "-o", "%M").split(":")[0])
    cluster.command("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes + 2}")
    cluster.wait_until(lambda: cluster.state(job) != "RUNNING")
    assert cluster.state(job) in ("COMPLETING", "PENDING"), cluster.report()
    cluster.wait_until(lambda: cluster.state(job) == "PENDING")
    cluster.command("scontrol", "update", f"JobId={job}", "TimeLimit=30")
    cluster.wait_until(lambda: cluster.state(job) in ENDED)
    assert cluster.state(job) == "COMPLETED", cluster.report()
    log = log_of(cluster, job)
    assert "stopped by SIGUSR1 after step " in log
    assert "slurm: stopped (exit code 75): queued again" in log
    assert len(metrics(run)) == long


def test_each_item_is_a_job_with_a_log(cluster: SlurmCluster, settings: Path) -> None:
    """``{}`` is the item and ``{/}`` its name; a program that cannot save is started again if USR1 ended it."""
    program = (
        'echo "$1 $2 $HF_HUB_OFFLINE"; if [[ $2 == b && $SLURM_RESTART_COUNT == "" ]]; then kill -USR1 $$; fi; '
        'exit "$([[ $2 == c ]] && echo 1 || echo 0)"'
    )
    job = cluster.submit(settings, "each", "x/a", "x/b", "x/c & d", "--", "bash", "-c", program, "program", "{}", "{/}")
    last = cluster.submit(settings, "each", "x/c", "--", "bash", "-c", program, "program", "{}", "{/}")
    cluster.wait_until(lambda: not cluster.command("squeue", "-h").strip())
    logs = [(cluster.folder / "logs" / f"each-{job}_{index}.log").read_text() for index in range(3)]
    assert "x/a a 1\n" in logs[0]
    assert "slurm: done" in logs[0]
    assert logs[1].count("x/b b 1\n") == 2
    assert "(exit code 138): queued again" in logs[1]
    assert "restart 1" in logs[1]
    assert "x/c & d c & d 1\n" in logs[2]
    assert "error: exit code 1 on node" in (cluster.folder / "logs" / f"each-{last}_0.log").read_text()


@pytest.fixture
def podman_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An image with nothing but links to /usr, in a storage of its own, and settings that a plain machine takes."""
    if not shutil.which("podman") or not shutil.which("runc"):
        pytest.skip("no podman and runc here: apt-get install podman runc")
    texts = {
        "CONTAINERS_CONF": '[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\nruntime = "runc"\n'
        '[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=1000:1000"]\n',
        "CONTAINERS_STORAGE_CONF": '[storage]\ndriver = "vfs"\n'
        f'graphroot = "{tmp_path}/storage"\nrunroot = "{tmp_path}/runroot"\n',
    }
    for variable, text in texts.items():
        (tmp_path / variable).write_text(text, encoding="utf-8")
        monkeypatch.setenv(variable, str(tmp_path / variable))
    with tarfile.open(tmp_path / "image.tar", "w") as image:
        for name in ("bin", "sbin", "lib", "lib64"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
            image.addfile(link)
    name = "fabric-train-stand-in:1"
    command = ["podman", "import", "--change", f"ENV PYTHONPATH={ROOT}", str(tmp_path / "image.tar"), name]
    subprocess.run(command, check=True, capture_output=True)
    return name


def test_ranks_in_podman_containers_are_told_to_stop_and_start_again(
    podman_image: str, cluster: SlurmCluster, settings: Path, arguments: Callable[..., list[str]]
) -> None:
    words = ["/usr", "/etc", "/opt", sys.base_prefix, sys.prefix, str(cluster.folder.parent)]
    mounts = " ".join(sorted({str(path) for word in words if (path := Path(word).resolve()).is_dir()}))
    with settings.open("a", encoding="utf-8") as file:
        file.write(f"CONTAINER=podman IMAGE={podman_image} MOUNTS=({mounts})\n")
        file.write("TRAIN_OPTIONS=(--time=30 --cpus-per-task=2 --mem=2000)\n")  # a container wants a real GPU
    run = cluster.folder / "run"
    job = cluster.submit(settings, "train", *arguments(run))
    cluster.wait_until(has_steps(run, 10))
    names = subprocess.run(["podman", "ps", "--format", "{{.Names}}"], text=True, capture_output=True, check=True)
    assert sorted(names.stdout.split()) == [f"fabric-train-{job}-0", f"fabric-train-{job}-1"]
    cluster.command("scancel", "--signal=USR1", job)
    cluster.wait_until(lambda: cluster.state(job) in ENDED)
    assert cluster.state(job) == "COMPLETED", cluster.report()
    assert "stopped by SIGUSR1 after step " in log_of(cluster, job)
    assert len(metrics(run)) == NUM_STEPS


def test_wrong_input_is_not_started_again(
    cluster: SlurmCluster, settings: Path, arguments: Callable[..., list[str]]
) -> None:
    job = cluster.submit(settings, "train", *arguments(cluster.folder / "run", train_data_dir="nowhere"))
    cluster.wait_until(lambda: cluster.state(job) in ENDED)
    assert cluster.state(job) == "FAILED"
    log = log_of(cluster, job)
    assert "error: --train_data_dir nowhere: no such folder" in log
    assert "slurm: error: wrong input, see above" in log
    assert "restart 1" not in log


def test_shellcheck_finds_nothing() -> None:
    whole = "#!/bin/bash\n" + "".join((SCRIPTS / name).read_text() for name in ("settings.sh", "job.sh"))
    texts = [whole, *((SCRIPTS / name).read_text() for name in ("submit.sh", "container.sh"))]
    for text in texts:
        command = ["shellcheck", "--exclude=SC1091", "-"]
        done = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
        assert not done.stdout
