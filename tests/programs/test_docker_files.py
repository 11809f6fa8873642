"""The build context has what the Dockerfile copies, the image what the programs need, and the entry point no effect.

``tests/launchers/test_container.py`` and ``test_apptainer.py`` build and run them.
"""

import fnmatch
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from fabric_train.cli.commands import PROGRAMS
from tests.support.programs import ROOT


def copied() -> list[str]:
    """Return the sources of every COPY of the Dockerfile from the build context."""
    text = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    lines = re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE)
    return [word for line in lines for word in line.split()[:-1] if not word.startswith("--")]


def is_let_through(name: str) -> bool:
    """Whether .dockerignore keeps a file: its last pattern that matches decides."""
    kept = True
    for pattern in (ROOT / ".dockerignore").read_text(encoding="utf-8").split():
        if fnmatch.fnmatch(name, pattern.removeprefix("!")):
            kept = pattern.startswith("!")
    return kept


def test_every_file_that_is_copied_is_in_the_build_context() -> None:
    assert len(copied()) > 5
    assert [name for name in copied() if not is_let_through(name) or not (ROOT / name).exists()] == []


def test_nothing_else_is_in_the_build_context() -> None:
    """A model, a data set or a token in the project's folder does not get into an image."""
    others = {path.name for path in ROOT.iterdir()} - set(copied())
    assert [name for name in others if is_let_through(name)] == []


def test_the_image_can_compile_and_reach_other_machines() -> None:
    """Triton needs a compiler and Python.h; NCCL needs libibverbs for InfiniBand."""
    text = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    installed = re.search(r"apt-get install .*$", text, re.MULTILINE)
    assert installed is not None
    assert {"g++", "python3-dev", "libibverbs1", "ibverbs-providers"} <= set(installed.group().split())


def test_the_images_user_can_write_to_every_cache() -> None:
    text = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    caches = re.findall(r"(?:HF_HOME|[A-Z]+_CACHE_DIR)=(\S+)", text)
    owned = re.search(r"install -d -o 1000 -g 1000 (.*)$", text, re.MULTILINE)
    assert owned is not None
    assert len(caches) == 3
    assert [cache for cache in caches if not any(cache.startswith(folder) for folder in owned.group(1).split())] == []


def test_compose_and_apptainer_start_the_entry_point() -> None:
    docker = ROOT / "docker"
    entry = re.search(r'^ENTRYPOINT \["(.*)"\]$', (docker / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    assert entry is not None
    services = yaml.safe_load((docker / "compose.yaml").read_text(encoding="utf-8"))["services"]
    assert {service["entrypoint"][0] for service in services.values()} == {entry[1]}
    assert f'exec {entry[1]} "$@"' in (docker / "apptainer.def").read_text(encoding="utf-8")


def test_every_program_is_a_service_and_takes_the_arguments_that_follow() -> None:
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text(encoding="utf-8"))["services"]
    programs = set(PROGRAMS) - {"sample_data", "launch_files"}  # files for the machine outside
    assert set(services) == {"train-xla", *programs}
    started = {name: service["entrypoint"][1:] for name, service in services.items() if not name.startswith("train")}
    assert started == {name: ["fabric-train", name] for name in programs - {"train"}}
    assert {tuple(service["command"]) for service in services.values()} == {("--help",)}


def test_images_have_the_extras_that_recipes_need() -> None:
    """Without them a QLoRA recipe, --tasks and the check of an exported adapter end in a container."""
    needed = {"peft", "bitsandbytes", "liger", "eval"}
    docker, apptainer = ((ROOT / "docker" / name).read_text("utf-8") for name in ("Dockerfile", "apptainer.def"))
    in_docker = re.search(r'^ARG EXTRAS="(.*)"$', docker, re.MULTILINE)
    in_apptainer = re.search(r"--editable '\.\[(.*)\]'", apptainer)
    assert in_docker is not None
    assert in_apptainer is not None
    assert set(in_docker[1].split()) == set(in_apptainer[1].split(",")) == needed


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no tomllib, the image has 3.12")
def test_the_pins_of_an_image_are_those_of_the_project_and_its_extras(tmp_path: Path) -> None:
    text = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    command = re.search(r"python3 -c '(.*?)' \$EXTRAS", text, re.DOTALL)
    assert command is not None
    source = command[1].replace("\\\n", "").replace("/pins/", f"{ROOT}/")
    printed = subprocess.run(
        [sys.executable, "-c", source, "peft"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert "transformers>=5.17" in printed
    assert printed[-1].startswith("peft==")


def test_apptainer_has_the_base_packages_and_files_of_the_image() -> None:
    docker, apptainer = (
        (ROOT / "docker" / name).read_text(encoding="utf-8") for name in ("Dockerfile", "apptainer.def")
    )
    image = re.search(r"^ARG BASE=(\S+)$", docker, re.MULTILINE)
    packages = re.search(r"apt-get install (.*) \\$", docker, re.MULTILINE)
    assert image is not None
    assert packages is not None
    assert f"\nFrom: {image[1]}\n" in apptainer
    assert f"apt-get install {packages[1]}\n" in apptainer
    files = re.search(r"%files\n(.*?)\n\n", apptainer, re.DOTALL)
    assert files is not None
    expected = set(copied()) - {"install/xla-requirements.txt"}
    assert sorted(line.split()[0] for line in files[1].splitlines()) == sorted(expected)


def test_the_xla_image_has_other_torch_pins_and_a_base_with_the_same_user() -> None:
    """Of what differs by an argument, the files that it names are there, and PJRT_DEVICE comes from the environment."""
    text = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text(encoding="utf-8"))["services"]
    plain = services["train"]
    xla = services["train-xla"]
    arguments = xla["build"].pop("args")
    assert set(arguments) == set(re.findall(r"^ARG (\w+)", text, re.MULTILINE))
    assert f"install/{arguments['TORCH']}" in copied()
    base = re.search(r"^ARG BASE=nvidia/cuda:.*-base-ubuntu(.*)$", text, re.MULTILINE)
    assert base is not None
    assert arguments["BASE"] == f"ubuntu:{base[1]}"
    same = {"build", "command", "volumes", "network_mode", "init", "stop_grace_period", "ipc", "ulimits"}
    assert {key: xla[key] for key in same} == {key: plain[key] for key in same}
    assert xla["environment"] == {**plain["environment"], "PJRT_DEVICE": None}


def start_entry_point(folder: Path, *command: str) -> "subprocess.Popen[str]":
    """Start the entry point where 200 open files are allowed, which the doctor calls a fault."""
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    limited = ["bash", "-c", 'ulimit -n 200; exec "$@"', "-", str(ROOT / "docker" / "entrypoint"), *command]
    return subprocess.Popen(limited, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_the_entry_point_prints_what_is_wrong_and_keeps_the_exit_code(tmp_path: Path) -> None:
    process = start_entry_point(tmp_path, "bash", "-c", "echo started; exit 7")
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (7, "started\n")
    assert "fault    open files: limit of 200 for each process; " in errors
    assert not re.search("^ok ", errors, re.MULTILINE)


def test_a_signal_reaches_the_command_behind_the_entry_point(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    process = start_entry_point(
        tmp_path, "bash", "-c", f"trap 'exit 75' TERM; touch {ready}; while :; do sleep 0.1; done"
    )
    deadline = time.monotonic() + 60
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)  # to this process alone, as a container does
    process.communicate(timeout=60)
    assert process.returncode == 75
