"""``docker/apptainer.def`` builds and trains with Debian's apptainer, on a base that Debian 12 stands in for.

Debian has apptainer only in its newest suite. So that suite is installed into ``.cache/containers/sid``, where podman
starts it.
"""

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.programs import ROOT
from tests.support.short_runs import argv, metrics
from tests.support.stand_in_base import (
    AS_ROOT_OF_A_NAMESPACE,
    CACHE,
    PODMAN,
    apptainer_folder,
    base_folder,
    limits,
    need_packages,
    pip_mounts,
    run_logged,
)

pytestmark = [pytest.mark.slow, pytest.mark.launchers]

IMAGE = CACHE / "apptainer-image"


def apptainer(*words: str, folders: tuple[Path, ...]) -> list[str]:
    """Return the command that runs ``apptainer`` where it is installed, which sees ``folders`` of this machine."""
    volumes = [f"--volume={folder}:{folder}" for folder in (ROOT, CACHE, *map(Path, pip_mounts()), *folders)]
    run = ["run", "--rm", "--privileged", "--network=host", *limits(), *volumes, f"--workdir={ROOT}"]
    return [*PODMAN, *run, "--rootfs", str(apptainer_folder()), *AS_ROOT_OF_A_NAMESPACE, "apptainer", *words]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the image: a .sif file would take minutes of compression."""
    need_packages(podman="podman", runc="runc")
    folder = tmp_path_factory.mktemp("apptainer")
    text = (ROOT / "docker" / "apptainer.def").read_text(encoding="utf-8")
    text = re.sub(r"^Bootstrap: .*\nFrom: .*\n", f"Bootstrap: localimage\nFrom: {base_folder()}\n", text)
    (folder / "stand-in.def").write_text(text)
    binds = [word for here, inside in pip_mounts().items() for word in ("--bind", f"{here}:{inside}:ro")]
    build = apptainer("build", "--force", "--sandbox", *binds, str(IMAGE), f"{folder}/stand-in.def", folders=(folder,))
    run_logged(folder / "build.log", *build)
    return IMAGE


def test_two_ranks_train_in_the_image(
    image: Path, tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path, free_port: Callable[[], int]
) -> None:
    scratch = tmp_path / "scratch"
    shutil.copytree(tiny_model_dir, scratch / "model")
    shutil.copytree(tiny_tokens_dir, scratch / "tokens")
    launch = ["fabric", "run", "--devices=2", f"--main-port={free_port()}", "/opt/fabric-train/fabric_train"]
    words = argv(Path("/scratch/model"), Path("/scratch/tokens"), Path("/scratch/run"))
    run = ["run", "--containall", "--bind", f"{scratch}:/scratch", str(image), *launch, *words]
    finished = subprocess.run(apptainer(*run, folders=(scratch,)), text=True, capture_output=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert "2 × fsdp" in finished.stdout
    assert [row[0] for row in metrics(scratch / "run")] == [str(step) for step in range(1, 9)]


def test_the_run_script_checks_the_machine_and_keeps_the_exit_code(image: Path) -> None:
    run = ["run", "--containall", str(image), "bash", "-c", "ulimit -n; exit 7"]
    finished = subprocess.run(apptainer(*run, folders=()), text=True, capture_output=True, check=False)
    assert finished.returncode == 7
    assert "HF_HOME: /root/.cache/huggingface" in finished.stderr
    assert not re.search("^ok ", finished.stderr, re.MULTILINE)
