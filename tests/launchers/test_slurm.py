"""The files of ``launch/slurm`` under a real Slurm: two nodes train, and the job survives what Slurm does to it.

Slurm (and shellcheck) is installed with apt-get where it is missing. Its daemons run for these tests only.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.programs import ROOT
from tests.support.short_runs import argv, metrics, saved_steps
from tests.support.slurm_cluster import PROGRAMS, SlurmCluster, slurm_cluster
from tests.support.stand_in_base import AS_ROOT_OF_A_NAMESPACE, apptainer_folder, need_packages
from tests.support.token_datasets import manifest_of, write_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.launchers]

SCRIPTS = ROOT / "launch" / "slurm"
PACKAGES = ["slurmctld", "slurmd", "slurm-client", "shellcheck"]
NUM_STEPS = 120
OWN_MOUNTS = os.readlink("/proc/self/ns/mnt")
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
    whole = cluster.folder / "whole"
    run = cluster.folder / "run"
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
    (step,) = saved_steps(run)
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
        # which of the two depends on whether srun or Slurm notices first
        assert re.search("slurm: error: node2(: no answer. Slurm starts the job again without it| is down)", log)
    assert f"slurm: a node of the last start has failed: {failed} is down* (Not responding)" in log
    assert f"job {job}, restart 1, on node[{'2-3' if failed == 'node1' else '1,3'}]" in log
    assert len(metrics(run)) == NUM_STEPS


def test_a_spare_node_takes_over_in_the_same_job(
    cluster: SlurmCluster, tmp_path: Path, arguments: Callable[..., list[str]]
) -> None:
    """The script is the one in docs/launch.md, with fewer nodes."""
    run = cluster.folder / "run"
    section = (ROOT / "docs" / "launch.md").read_text(encoding="utf-8").partition("\n### Spare nodes\n")[2]
    script = section.split("```text\n")[1].split("```\n")[0]
    changes = {
        "--nodes 9 --ntasks-per-node 8 --gres gpu:8": "--nodes 3 --ntasks-per-node 1 --gres gpu:1 --mem 2000",
        "head -n 8": "head -n 2",
        "--nodes 8 --ntasks 64": "--nodes 2 --ntasks 2",
        "python -m fabric_train --devices 8 --num_nodes 8 --config run.yaml": (
            f"{sys.executable} -m fabric_train --devices 1 --num_nodes 2 {shlex.join(arguments(run))}"
        ),
    }
    for shown, here in changes.items():
        assert script.count(shown) == 1, shown
        script = script.replace(shown, here)
    file = tmp_path / "spare.sh"
    file.write_text(script, encoding="utf-8")
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    printed = cluster.command("sbatch", "--output", tmp_path / "spare.log", file, environment=environment)
    job = int(printed.split()[-1])
    cluster.wait_until(has_steps(run, 55))
    cluster.kill_node("node2", is_shut_down=True)
    cluster.wait_until(lambda: cluster.state(job) in ENDED)
    assert cluster.state(job) == "COMPLETED", cluster.report()
    assert "Restarts=0" in cluster.command("scontrol", "show", "job", job)
    log = (tmp_path / "spare.log").read_text(encoding="utf-8")
    assert "error: rank 1 (node2, process " in log
    assert "step-00000050" in log  # where the run went on, without node2
    assert len(metrics(run)) == NUM_STEPS


def test_a_job_whose_time_runs_out_saves_and_starts_again(
    cluster: SlurmCluster, settings: Path, arguments: Callable[..., list[str]]
) -> None:
    """Slurm looks at time limits twice a minute, so the run has to last for longer than that."""
    with settings.open("a", encoding="utf-8") as file:
        file.write("SAVE_SECONDS=120\n")
    run = cluster.folder / "run"
    long = 1000
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
    assert "slurm: stopped (exit code 75)\n" in log
    assert "slurm: queued again, to continue\n" in log
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
    assert "(exit code 138)" in logs[1]
    assert "restart 1" in logs[1]
    assert "x/c & d c & d 1\n" in logs[2]
    assert "error: exit code 1 on node" in (cluster.folder / "logs" / f"each-{last}_0.log").read_text()


def run_items(cluster: SlurmCluster, settings: Path, *words: object) -> list[str]:
    """Run ``submit.sh each`` to its end; return the log of each job, which must have succeeded."""
    job = cluster.submit(settings, "each", *words)
    cluster.wait_until(lambda: not cluster.command("squeue", "-h").strip())
    logs = [file.read_text(encoding="utf-8") for file in sorted(cluster.folder.glob(f"logs/each-{job}_*.log"))]
    assert all(log.endswith("slurm: done\n") for log in logs), "\n".join(logs)
    return logs


def test_a_job_on_one_node_saves_and_its_checkpoints_are_items(
    cluster: SlurmCluster,
    settings: Path,
    arguments: Callable[..., list[str]],
    tiny_model_dir: Path,
    tiny_tokens_dir: Path,
) -> None:
    """A job that may not be queued again ends when it has saved. Its checkpoints are exported and evaluated."""
    with settings.open("a", encoding="utf-8") as file:
        file.write("NODES=1 TASKS_PER_NODE=2\nTRAIN_OPTIONS=(--time=30 --cpus-per-task=2 --mem=2000)\n")
        file.write("EACH_OPTIONS=(--time=30 --cpus-per-task=1 --mem=3000)\n")
    run = cluster.folder / "run"
    long = arguments(run, max_step=5000, save_step_interval=30)
    job = cluster.submit(settings, "train", *long)
    cluster.wait_until(has_steps(run, 35))
    cluster.command("scontrol", "update", f"JobId={job}", "Requeue=0")
    cluster.command("scancel", "--signal=USR1", job)
    cluster.wait_until(lambda: cluster.state(job) in ENDED)
    assert cluster.state(job) == "FAILED"
    log = log_of(cluster, job)
    assert "2 × fsdp" in log
    assert "slurm: error: not queued again (Requeue=0?)" in log
    assert "queued again, to continue" not in log
    saved = sorted(run.glob("checkpoints/step-*"))[:2]
    assert len(saved) == 2

    program = [sys.executable, ROOT / "convert_to_hf.py"]
    run_items(cluster, settings, *saved, "--", *program, "--checkpoint", "{}", "--output_dir", "exports/{/}")
    for checkpoint in saved:
        assert (cluster.folder / "exports" / checkpoint.name / "model.safetensors").is_file()

    evaluate = [sys.executable, "-m", "fabric_train", "--eval_only", "true", "--devices", "1", "--accelerator", "cpu"]
    given = ["--train_data_dir", tiny_tokens_dir, "--model_name", tiny_model_dir, "--checkpoint", "{}"]
    logs = run_items(cluster, settings, *saved, "--", *evaluate, *given, "--output_dir", "evaluations/{/}")
    assert len(logs) == 2
    assert all("validation loss" in log for log in logs)

    corpora = cluster.folder / "corpora"
    corpora.mkdir()
    for name in ("a", "b"):
        write_jsonl(corpora / f"{name}.jsonl")
    tokenize = [sys.executable, ROOT / "tokenize_dataset.py", "--dataset", "{}", "--tokenizer_name", tiny_model_dir]
    output = ["--max_length", "64", "--validation_split", "0.1", "--output_dir", "tokens/{/}"]
    run_items(cluster, settings, *sorted(corpora.iterdir()), "--", *tokenize, *output)
    merge = [sys.executable, "-m", "fabric_train.tokenization.merge", *sorted(cluster.folder.glob("tokens/*"))]
    cluster.command(*merge, "--output_dir", "merged", environment={"PYTHONPATH": str(ROOT)})
    sources = manifest_of(cluster.folder / "merged").sources
    assert [Path(source.name).name for source in sources] == ["a.jsonl", "b.jsonl"]


def test_slices_of_an_array_are_merged_into_one_run(
    cluster: SlurmCluster, settings: Path, tiny_model_dir: Path
) -> None:
    for name in ("a", "b"):
        write_jsonl(cluster.folder / f"{name}.jsonl")
    tokenize = [sys.executable, ROOT / "tokenize_dataset.py", "--dataset", "a.jsonl", "b.jsonl"]
    tokenize += ["--tokenizer_name", tiny_model_dir, "--max_length", "64", "--deduplicate", "true"]
    run_items(cluster, settings, 1, 2, 3, "--", *tokenize, "--shard", "{}/3", "--output_dir", "slices/{}")
    merge = [sys.executable, "-m", "fabric_train.tokenization.merge", *(f"slices/{number}" for number in (1, 2, 3))]
    (log,) = run_items(cluster, settings, "tokens", "--", *merge, "--output_dir", "{}")
    assert "merged   3 slices" in log
    cluster.command(*tokenize, "--output_dir", "one", environment={"PYTHONPATH": str(ROOT)})
    assert manifest_of(cluster.folder / "tokens") == manifest_of(cluster.folder / "one")
    for file in cluster.folder.glob("one/**/*.*"):
        assert (cluster.folder / "tokens" / file.relative_to(cluster.folder / "one")).read_bytes() == file.read_bytes()


def test_the_documented_lines_count_in_an_array_before_one_encodes(
    cluster: SlurmCluster, settings: Path, tiny_model_dir: Path
) -> None:
    with settings.open("a", encoding="utf-8") as file:
        file.write("EACH_OPTIONS+=(${AFTER:+--dependency=afterok:$AFTER})\n")
    texts = [f"The header of all pages\nThis is page number {number}" for number in range(300)]
    (cluster.folder / "corpus").mkdir()
    write_jsonl(cluster.folder / "corpus" / "a.jsonl", texts)
    document = (ROOT / "docs" / "how-to" / "tokenize_on_many_machines.md").read_text(encoding="utf-8")
    (recipe,) = (block for block in re.findall(r"```bash\n(.*?)```", document, re.DOTALL) if "AFTER=$counts" in block)
    replacements = {
        "cpu-settings.sh": str(settings),
        "launch/slurm": str(SCRIPTS),
        "fabric-train ": f"{Path(sys.executable).parent / 'fabric-train'} ",
        "64": "3",
        "models/llama-3-8b": str(tiny_model_dir),
        "8k": "64",
    }
    for documented, replacement in replacements.items():
        recipe = recipe.replace(documented, replacement)
    last = int(cluster.command("bash", "-euc", recipe))
    cluster.wait_until(lambda: cluster.state(last) in ENDED)
    assert cluster.state(last) == "COMPLETED", cluster.report()
    ledger = manifest_of(cluster.folder / "data" / "tokens").ledger
    assert ledger.edits == {"boilerplate lines": 300}


@pytest.fixture
def podman_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An image with nothing but links to /usr, in a storage of its own, and settings that a plain machine takes."""
    need_packages(podman="podman", runc="runc")
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
            link.type = tarfile.SYMTYPE
            link.linkname = f"usr/{name}"
            image.addfile(link)
    name = "fabric-train-stand-in:1"
    command = ["podman", "import", "--change", f"ENV PYTHONPATH={ROOT}", str(tmp_path / "image.tar"), name]
    subprocess.run(command, check=True, capture_output=True)
    return name


def python_folders() -> list[Path]:
    """Return the folders of this Python, without what lies in the system's own folders."""
    folders = {Path(folder).resolve() for folder in (sys.prefix, sys.base_prefix)}
    return sorted(folder for folder in folders if folder.parts[1] != "usr")


@pytest.fixture
def apptainer_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An image that is this machine's own file system, and apptainer, which runs in another Debian.

    That Debian has the processes and the folders of this machine, as a node with apptainer would have them.
    """
    debian = apptainer_folder()
    program = tmp_path / "bin" / "apptainer"
    tops = {folder.parts[1] for folder in (ROOT, tmp_path, *python_folders())}
    script = f"""
cd {debian} && mount --bind / media && mount --rbind . . && cd {debian} || exit
for folder in proc sys dev {" ".join(sorted(tops))}; do
  mkdir -p $folder && mount --rbind /$folder $folder || exit
done
pivot_root . mnt && umount --lazy /mnt && exec {" ".join(AS_ROOT_OF_A_NAMESPACE)} /usr/bin/apptainer "$@"
"""
    program.parent.mkdir()
    program.write_text(f"#!/bin/bash\nexec unshare --mount bash -c '{script}' apptainer \"$@\"\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    return "/media"


@pytest.fixture(params=["podman", "apptainer"])
def container(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The settings of a kind of container with its image."""
    kind = str(request.param)
    image = request.getfixturevalue(f"{kind}_image")
    system = ["/usr", "/etc", "/opt"] if kind == "podman" else []
    folders = (*map(Path, system), *python_folders(), tmp_path.parent, tmp_path)  # the last is the current one, too
    mounts = [folder for folder in folders if folder.is_dir()]
    return f"CONTAINER={kind} IMAGE={image} MOUNTS=({' '.join(map(str, mounts))})\n"


def ranks_in_containers(job: int) -> set[str]:
    """Return the ranks of a job that see other mounts than this machine."""
    ranks = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            variables = process.environ()
            mounts = os.readlink(f"/proc/{process.pid}/ns/mnt")
            if variables.get("SLURM_JOB_ID") == str(job) and "python" in process.name() and mounts != OWN_MOUNTS:
                ranks.add(variables["SLURM_PROCID"])
    return ranks


def test_ranks_in_containers_are_told_to_stop_and_start_again(
    container: str, cluster: SlurmCluster, settings: Path, arguments: Callable[..., list[str]]
) -> None:
    with settings.open("a", encoding="utf-8") as file:
        file.write(container)
        file.write("TRAIN_OPTIONS=(--time=30 --cpus-per-task=2 --mem=2000)\n")  # a container wants a real GPU
    run = cluster.folder / "run"
    job = cluster.submit(settings, "train", *arguments(run))
    cluster.wait_until(has_steps(run, 10))
    assert ranks_in_containers(job) == {"0", "1"}
    cluster.command("scancel", "--signal=USR1", job)
    cluster.wait_until(lambda: cluster.state(job) in ENDED)
    assert cluster.state(job) == "COMPLETED", cluster.report()
    assert "stopped by SIGUSR1 after step " in log_of(cluster, job)
    assert len(metrics(run)) == NUM_STEPS
    assert not ranks_in_containers(job)


def test_wrong_input_is_not_started_again(
    cluster: SlurmCluster, settings: Path, arguments: Callable[..., list[str]]
) -> None:
    program = [sys.executable, "-m", "fabric_train", *arguments(cluster.folder / "run", train_data_dir="{}")]
    job = cluster.submit(settings, "each", "nowhere", "--", *program)  # submit.sh refuses it in a training job
    cluster.wait_until(lambda: cluster.state(job) in ENDED)
    assert cluster.state(job) == "FAILED"
    log = (cluster.folder / "logs" / f"each-{job}_0.log").read_text(encoding="utf-8")
    assert "error: --train_data_dir nowhere: no such folder" in log
    assert "slurm: error: invalid input, see above" in log
    assert "restart 1" not in log


def test_shellcheck_finds_nothing() -> None:
    whole = "#!/bin/bash\n" + "".join((SCRIPTS / name).read_text() for name in ("settings.sh", "job.sh"))
    texts = [whole, *((SCRIPTS / name).read_text() for name in ("submit.sh", "container.sh"))]
    for text in texts:
        command = ["shellcheck", "--exclude=SC1091", "-"]
        done = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
        assert not done.stdout
