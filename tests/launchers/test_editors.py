"""The debugger's configurations of ``.vscode/``, read from there and started as VS Code starts them.

The client below speaks the Debug Adapter Protocol to debugpy's adapter: over its standard streams to launch, over its
port to attach. debugpy is installed once into ``.cache/debugpy``. For the container, a mount namespace with the project
at the image's path stands in.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import psutil
import pytest

from fabric_train.files.atomic_folder import complete_folder
from fabric_train.sample_data import real_data
from tests.support.programs import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.launchers]

DEBUGPY = "debugpy==1.8.22"  # as in .vscode/tasks.json
STEP = ROOT / "fabric_train" / "training" / "step.py"
WITHIN = 400.0  # seconds; a slow machine imports torch for a minute
IMAGE_ROOT = "/opt/fabric-train"


@pytest.fixture(scope="module")
def debugpy() -> Path:
    """A folder with debugpy, for PYTHONPATH."""
    target = real_data.CACHE / "debugpy"
    if not target.exists():
        with complete_folder(target) as folder:
            pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", str(folder)]
            subprocess.run([*pip, DEBUGPY], check=True)
    return target


@pytest.fixture
def inputs(tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path) -> dict[str, str]:
    """What a user answers when VS Code asks."""
    given = {"tokens": str(tiny_tokens_dir), "model": str(tiny_model_dir), "run": str(tmp_path / "run")}
    return {**given, **{f"mounted_{name}": value for name, value in given.items()}}


def configured(file: str, kind: str, name: str, /, **values: str) -> Any:
    """Return the configuration or task whose name begins with ``name``, with VS Code's variables replaced."""
    content = json.loads((ROOT / ".vscode" / file).read_text(encoding="utf-8"))
    (found,) = [each for each in content[kind] if each.get("name", each.get("label")).startswith(name)]
    text = json.dumps(found)
    for variable, value in {"workspaceFolder": str(ROOT), **values}.items():
        text = text.replace(f"${{{variable}}}", value)
    assert "${" not in text
    return json.loads(text)


def answers(inputs: dict[str, str]) -> dict[str, str]:
    return {f"input:{name}": value for name, value in inputs.items()}


def environment(debugpy: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{debugpy}"}


@contextmanager
def started(command: list[str], log: Path, **options: Any) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a process; kill it and all that it has started when the block ends."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, **{"stdout": output, "stderr": output, **options})
    try:
        yield process
    finally:
        tree = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        for each in (process, *tree):
            each.kill()
        process.wait()


class Editor:
    """VS Code's side of a debugging session: requests, and the messages that come meanwhile."""

    def __init__(
        self, incoming: BinaryIO, outgoing: BinaryIO, run_in_terminal: Callable[[dict[str, Any]], None]
    ) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._run_in_terminal = run_in_terminal
        self._number = 0
        self._events: list[dict[str, Any]] = []
        self._responses: dict[int, dict[str, Any]] = {}

    def debug(self, configuration: dict[str, Any], breakpoints: dict[Path, list[int]]) -> dict[str, Any]:
        """Start a session with a configuration; return the top frame where it stops first, with its thread."""
        self.request("initialize", adapterID="debugpy", pathFormat="path", supportsRunInTerminalRequest=True)
        start = self.send(configuration["request"], configuration)
        self.event("initialized")
        for file, lines in breakpoints.items():
            set_ = self.request("setBreakpoints", source={"path": str(file)}, breakpoints=[{"line": n} for n in lines])
            assert len(set_["breakpoints"]) == len(lines)
        self.request("configurationDone")
        self.response(start)
        thread = self.event("stopped")["threadId"]
        frame = self.request("stackTrace", threadId=thread, startFrame=0, levels=1)["stackFrames"][0]
        return {**frame, "thread": thread}

    def evaluate(self, expression: str, frame: dict[str, Any]) -> str:
        """Return the value of an expression in a frame."""
        return str(self.request("evaluate", expression=expression, frameId=frame["id"], context="watch")["result"])

    def request(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a request and return the body of its response."""
        return self.response(self.send(command, arguments))

    def send(self, command: str, arguments: dict[str, Any]) -> int:
        """Send a request and return its number."""
        return self._write(type="request", command=command, arguments=arguments)

    def response(self, number: int) -> dict[str, Any]:
        """Return the body of the response to a request."""
        while number not in self._responses:
            self._read()
        response = self._responses.pop(number)
        assert response["success"], response
        return response.get("body") or {}

    def event(self, name: str) -> dict[str, Any]:
        """Return the body of the next event with this name."""
        while True:
            for event in self._events:
                if event["event"] == name:
                    self._events.remove(event)
                    return event.get("body") or {}
            self._read()

    def _write(self, **message: Any) -> int:
        self._number += 1
        content = json.dumps({"seq": self._number, **message}).encode()
        self._outgoing.write(b"Content-Length: %d\r\n\r\n" % len(content) + content)
        self._outgoing.flush()
        return self._number

    def _read(self) -> None:
        header = self._incoming.readline()
        assert header.startswith(b"Content-Length: "), f"the adapter has ended: {header!r}"
        assert self._incoming.readline() == b"\r\n"
        message = json.loads(self._incoming.read(int(header.split()[1])))
        if message["type"] == "event":
            assert message["event"] != "terminated", self._events
            self._events.append(message)
        elif message["type"] == "response":
            self._responses[message["request_seq"]] = message
        else:
            assert message["command"] == "runInTerminal"
            self._run_in_terminal(message["arguments"])
            self._write(type="response", request_seq=message["seq"], command="runInTerminal", success=True, body={})


@contextmanager
def launching(debugpy: Path, folder: Path) -> Iterator[Editor]:
    """An editor with an adapter of its own, as for a configuration that launches."""
    env = environment(debugpy)
    with ExitStack() as processes:

        def run_in_terminal(asked: dict[str, Any]) -> None:
            own = {**os.environ, "PYTHONPATH": str(ROOT), **(asked.get("env") or {})}
            log = folder / "terminal.log"
            processes.enter_context(started(asked["args"], log, cwd=asked["cwd"], env=own))

        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        command = [sys.executable, "-m", "debugpy.adapter"]
        adapter = processes.enter_context(started(command, folder / "adapter.log", env=env, **pipes))
        assert adapter.stdout is not None
        assert adapter.stdin is not None
        yield Editor(adapter.stdout, adapter.stdin, run_in_terminal)  # type: ignore[arg-type]


@contextmanager
def attaching(configuration: dict[str, Any], process: "subprocess.Popen[bytes]", log: Path) -> Iterator[Editor]:
    """An editor that is connected to the port that a configuration names."""
    place = (configuration["connect"]["host"], configuration["connect"]["port"])
    assert connect(place) is None, f"another program listens on {place}"
    deadline = time.monotonic() + WITHIN
    while (connection := connect(place)) is None:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
    with connection:
        connection.settimeout(WITHIN)
        stream = connection.makefile("rwb")
        editor = Editor(stream, stream, lambda asked: pytest.fail(f"unexpected: {asked}"))  # type: ignore[arg-type]
        yield editor
        editor.send("disconnect", {"terminateDebuggee": True})
    while (probe := connect(place)) is not None:  # the adapter is no child of the process
        probe.close()
        assert time.monotonic() < deadline
        time.sleep(0.2)


def connect(place: tuple[str, int]) -> socket.socket | None:
    """Return a connection, None if nobody listens there."""
    try:
        return socket.create_connection(place)
    except ConnectionRefusedError:
        return None


def line_of(text: str) -> int:
    """Return the number of the only line of step.py that has this text."""
    (number,) = [n for n, line in enumerate(STEP.read_text(encoding="utf-8").splitlines(), 1) if text in line]
    return number


def in_a_step() -> dict[Path, list[int]]:
    """Breakpoints in ``accumulate`` and in what it calls, which a step of a run calls directly."""
    return {
        STEP: [
            line_of("local_loss = backpropagate(fabric, model, window, objective)"),
            line_of("loss = objective.loss(model,"),
        ]
    }


def check_is_in_a_step(editor: Editor, frame: dict[str, Any], expected_rank: int, log: Path) -> None:
    """Check that a run has stopped in its first micro-batch."""
    assert (frame["name"], Path(frame["source"]["path"])) == ("backpropagate", STEP), log.read_text()
    assert editor.evaluate("(window.step, index, fabric.global_rank)", frame) == f"(1, 0, {expected_rank})"


def test_one_cpu_rank_is_launched_and_stops(debugpy: Path, tmp_path: Path, inputs: dict[str, str]) -> None:
    configuration = configured("launch.json", "configurations", "Train on one CPU rank", **answers(inputs))
    with launching(debugpy, tmp_path) as editor:
        frame = editor.debug(configuration, in_a_step())
        check_is_in_a_step(editor, frame, 0, tmp_path / "terminal.log")
        assert editor.evaluate("heartbeat.position.step", frame) == "1"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_two_is_attached_to_and_stops(
    debugpy: Path, tmp_path: Path, inputs: dict[str, str], rank: int
) -> None:
    task = configured("tasks.json", "tasks", "Start two CPU ranks", **answers({**inputs, "rank": str(rank)}))
    configuration = configured("launch.json", "configurations", "Attach to one of two CPU ranks")
    command = [task["command"], *task["args"]]
    log = tmp_path / "task.log"
    with (
        started(command, log, cwd=task["options"]["cwd"], env=environment(debugpy)) as process,
        attaching(configuration, process, log) as editor,
    ):
        frame = editor.debug(configuration, in_a_step())
        check_is_in_a_step(editor, frame, rank, log)


@pytest.mark.parametrize(
    ("label", "service", "environment", "device"),
    [
        ("Start the container", "train", ROOT / ".venv", ["--accelerator", "cpu"]),
        ("Start the XLA container", "train-xla", real_data.CACHE / "xla", []),
    ],
    ids=["cuda", "xla"],
)
def test_a_run_at_the_images_path_is_attached_to(
    debugpy: Path,
    tmp_path: Path,
    inputs: dict[str, str],
    label: str,
    service: str,
    environment: Path,
    device: list[str],
) -> None:
    """Its files have other paths than the editor's, as in the container; its GPU is left out, for XLA's CPU device."""
    if os.geteuid() or shutil.which("unshare") is None:
        pytest.skip("a mount namespace stands in for the container, which needs root and unshare")
    if not (environment / "bin" / "python").exists():
        pytest.skip(f"there is no {environment.relative_to(ROOT)}: make install-xla")
    task = configured("tasks.json", "tasks", label, **answers({**inputs, "pjrt_device": "CPU"}))
    configuration = configured("launch.json", "configurations", "Attach in the container")
    at = task["args"].index(service)
    before = task["args"][:at]
    after = task["args"][at + 1 :]
    assert before[-2:] == ["--entrypoint", "bash"]
    inside = ["bash", *after, *device, "--precision", "32-true"]
    variables = dict(word.split("=") for option, word in pairwise(before) if option == "--env")
    assert variables == ({"PJRT_DEVICE": "CPU"} if service == "train-xla" else {})
    mount = f"mount -t tmpfs none /opt && mkdir {IMAGE_ROOT} && mount --bind {ROOT} {IMAGE_ROOT} && cd {IMAGE_ROOT}"
    command = ["unshare", "--mount", "bash", "-c", f'{mount} && exec "$@"', "mounted", *inside]
    log = tmp_path / "log"
    paths = {"PATH": f"{environment / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": f"{IMAGE_ROOT}:{debugpy}"}
    with (
        started(command, log, env={**os.environ, **paths, **variables}) as process,
        attaching(configuration, process, log) as editor,
    ):
        frame = editor.debug(configuration, in_a_step())
        check_is_in_a_step(editor, frame, 0, log)
        assert IMAGE_ROOT in editor.evaluate("backpropagate.__code__.co_filename", frame)
        if service == "train-xla":
            assert editor.evaluate("fabric.device.type", frame) == "'xla'"


def test_one_test_of_the_open_file_stops_in_accumulate(debugpy: Path, tmp_path: Path) -> None:
    values = {"file": str(ROOT / "tests" / "training" / "test_loss.py"), "input:test": "worked_out_by_hand"}
    configuration = configured("launch.json", "configurations", "Run one test", **values)
    with launching(debugpy, tmp_path) as editor:
        frame = editor.debug(configuration, in_a_step())
        assert (frame["name"], Path(frame["source"]["path"])) == ("accumulate", STEP)


@pytest.mark.parametrize("kind", ["launch.json", "tasks.json"])
def test_a_debugger_is_never_too_slow_for_the_run(kind: str) -> None:
    """Whatever trains waits without limit, and installs the debugpy that the tests use."""
    content = json.loads((ROOT / ".vscode" / kind).read_text(encoding="utf-8"))
    lines = [each["args"] for each in content.get("configurations", content.get("tasks")) if "args" in each]
    training = [line for line in lines if "--train_data_dir" in line]
    assert training
    assert all(line[line.index("--rank_timeout") + 1] == "0" for line in training)
    assert all(DEBUGPY in word for line in lines for word in line if "debugpy==" in word)
