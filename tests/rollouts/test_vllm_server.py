"""The process around a vLLM server: its end with the run, its environment, and what its log says. No vLLM is needed."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from fabric_train.cli.errors import InputError, RunError
from fabric_train.rollouts import vllm_supervisor
from fabric_train.rollouts.vllm_server import (
    ServerSettings,
    VllmServer,
    check_environment,
    vllm_python_path,
)

GRANDCHILD = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {sleep!r}]); {sleep}"
SLEEP = "import time; time.sleep(600)"


def wait_until(is_true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not is_true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def start(server: VllmServer, model_dir: Path) -> None:
    server.start(model_dir)
    server.wait_until_it_answers()


def supervise(command: list[str], weights: Path, folders: list[Path], run_pid: int | str) -> list[str]:
    """Return the command of the supervisor of a server."""
    words = [sys.executable, "-I", vllm_supervisor.__file__, str(run_pid), str(weights), *map(str, folders), "--"]
    return words + command


@pytest.mark.parametrize("has_weights", [True, False])
def test_a_killed_run_leaves_no_process_of_the_server_and_no_folder(tmp_path: Path, has_weights: bool) -> None:
    """The run, the supervisor, and, if the weights were written, the server and the server's engine."""
    weights = tmp_path / "weights" / "step-0"
    folders = [tmp_path / "socket", tmp_path / "weights"]
    for folder in folders:
        folder.mkdir()
    if has_weights:
        weights.mkdir()
    server = [sys.executable, "-c", GRANDCHILD.format(sleep=SLEEP)]
    command = supervise(server, weights, folders, "RUN")
    run = (
        "import os, subprocess, sys\n"
        f"command = [word.replace('RUN', str(os.getpid())) for word in {command!r}]\n"
        "subprocess.Popen(command).wait()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", run])
    running = psutil.Process(process.pid)
    num_descendants = 3 if has_weights else 1
    assert wait_until(lambda: len(running.children(recursive=True)) == num_descendants)
    descendants = running.children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(descendants, timeout=20)
    assert not alive
    assert not any(folder.exists() for folder in folders)


def test_an_engine_ends_when_its_server_is_killed(tmp_path: Path) -> None:
    """The folders stay: the run starts another server with them."""
    server = [sys.executable, "-c", GRANDCHILD.format(sleep=SLEEP)]
    supervisor = subprocess.Popen(supervise(server, tmp_path, [tmp_path], os.getpid()))
    running = psutil.Process(supervisor.pid)
    assert wait_until(lambda: len(running.children(recursive=True)) == 2)
    server_process, engine = running.children(recursive=True)
    server_process.kill()
    assert supervisor.wait(20) == 128 + signal.SIGKILL
    _, alive = psutil.wait_procs([engine], timeout=20)
    assert not alive
    assert tmp_path.exists()


def test_a_server_starts_when_its_weights_are_there(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    server = [sys.executable, "-c", f"import os; print(os.listdir({str(weights)!r}))"]
    supervisor = subprocess.Popen(supervise(server, weights, [], os.getpid()), stdout=subprocess.PIPE, text=True)
    (tmp_path / "temporary").mkdir()
    (tmp_path / "temporary" / "model").touch()
    (tmp_path / "temporary").rename(weights)
    output, _ = supervisor.communicate(timeout=20)
    assert output == "['model']\n"
    assert supervisor.returncode == 0


INTERRUPTED_START = """
import os, pathlib, runpy, signal, subprocess

class InterruptedPopen(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        while not pathlib.Path({pid_file!r}).exists():
            pass
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)

subprocess.Popen = InterruptedPopen
runpy.run_path({supervisor!r}, run_name="__main__")
"""


def test_signals_while_the_server_starts_end_it_and_its_engine(tmp_path: Path) -> None:
    pid_file = tmp_path / "engine"
    source = INTERRUPTED_START.format(supervisor=vllm_supervisor.__file__, pid_file=str(pid_file))
    server = f"sleep 600 & echo $! > {pid_file}.part; mv {pid_file}.part {pid_file}; wait"
    arguments = [str(os.getpid()), str(tmp_path), str(tmp_path / "socket"), "--"]
    command = [sys.executable, "-c", source, *arguments, "/bin/sh", "-c", server]
    supervisor = subprocess.Popen(command)
    assert supervisor.wait(20) == 1
    engine_pid = int(pid_file.read_text())
    assert wait_until(lambda: not psutil.pid_exists(engine_pid))


def test_a_server_that_cannot_start_is_reported_with_its_last_error(tmp_path: Path) -> None:
    """This environment has no vLLM."""
    settings = ServerSettings(Path(sys.executable), tmp_path / "vllm.log", "float32", max_length=64)
    server = VllmServer(settings)
    with pytest.raises(RunError, match=r"vLLM ended while it was starting: .*No module named.*\(log: .*vllm\.log\)"):
        start(server, tmp_path)
    server.stop()
    assert not server.client.path.parent.exists()


def test_a_server_that_does_not_answer_in_time_is_ended(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'loading'; exec sleep 600\n")
    python.chmod(0o755)
    server = VllmServer(ServerSettings(python, tmp_path / "vllm.log", "float32", max_length=64, start_seconds=0.5))
    with pytest.raises(RunError, match=r"vLLM did not start within 0\.5 s: loading"):
        start(server, tmp_path)
    assert not server.is_running
    server.stop()


def test_a_relative_path_of_python_is_one_from_the_runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server starts in another folder. The link belongs to the environment, so it is not resolved."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real").write_text('#!/bin/sh\necho "error: started as $0"; exit 1\n')
    (tmp_path / "real").chmod(0o755)
    (tmp_path / "python").symlink_to("real")
    server = VllmServer(ServerSettings(vllm_python_path("python"), tmp_path / "vllm.log", "float32", max_length=64))
    with pytest.raises(RunError, match=rf"error: started as {tmp_path}/python \("):
        start(server, tmp_path)
    server.stop()


def test_an_environment_without_vllm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--vllm_python .*missing: there is no such program; make install-vllm"):
        check_environment(tmp_path / "missing")
    with pytest.raises(InputError, match="this environment has no vLLM"):
        check_environment(Path(sys.executable))
    (tmp_path / "other").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "other").chmod(0o755)
    with pytest.raises(InputError, match="is no Python"):
        check_environment(tmp_path / "other")
    (tmp_path / "old").write_text("#!/bin/sh\necho 0.19.1\n")
    (tmp_path / "old").chmod(0o755)
    with pytest.raises(InputError, match=r"has vLLM 0\.19\.1, which is too old; install 0\.32 or newer"):
        check_environment(tmp_path / "old")


def test_the_server_gets_no_variables_of_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_ADDR", "LT_DEVICES", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS", "PYTHONPATH"):
        monkeypatch.setenv(name, "1")
    server = VllmServer(ServerSettings(Path("/opt/v/bin/python"), tmp_path / "log", "float32", 64, devices=("4", "5")))
    environment = server._environment()
    server.stop()
    assert environment.keys().isdisjoint({"RANK", "MASTER_ADDR", "LT_DEVICES", "TORCHELASTIC_RUN_ID", "PYTHONPATH"})
    assert "OMP_NUM_THREADS" not in environment
    assert environment["PATH"].startswith("/opt/v/bin:")
    assert environment["CUDA_VISIBLE_DEVICES"] == "4,5"


def test_only_a_started_server_has_a_folder_for_its_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run may end before its first step."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    server = VllmServer(ServerSettings(Path("/bin/false"), tmp_path / "log", "float32", max_length=64))
    assert not list((tmp_path / "temporary").iterdir())
    with pytest.raises(RunError):
        start(server, tmp_path)
    assert server.client.path.parent.stat().st_mode & 0o777 == 0o700
    server.stop()
    assert not list((tmp_path / "temporary").iterdir())


def test_a_log_that_cannot_be_written_is_an_error_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    server = VllmServer(ServerSettings(Path(sys.executable), tmp_path / "file" / "log", "float32", max_length=64))
    with pytest.raises(RunError, match=r"vLLM could not be started: .*file"):
        server.start(tmp_path)
    server.stop()
