"""The server of forked runs: it has imported everything, and forks the ranks of each run that is requested.

Protocol: it reads one JSON line per request from its standard input, and answers each with one JSON line, the process
ids that it has forked. An empty line, or the end of standard input, ends the server, and its ranks end with it. The
exit code of a rank goes into a file, ``RANK.code``.

A ``RunRequest`` forks the ranks of a run. A ``ServerRequest`` forks the server itself, so that the fork can import more
modules; its standard input and output are two named pipes.
"""

import ctypes
import functools
import gc
import importlib
import json
import os
import select
import signal
import sys
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

POLL_SECONDS = 0.005
STDIN = 0
STDOUT = 1
STDERR = 2
_PR_SET_PDEATHSIG = 1  # prctl(2): the kernel sends this process a signal when its parent ends
_READ_BYTES = 1 << 16

# every checkpoint is read with these pydantic types, which take longer to build than a small file takes to read
_CHECKPOINT_TYPES = (
    ("fabric_train.checkpoint.files", "ChecksumsJson"),
    ("fabric_train.checkpoint.trainer_json", "_Parsed"),
)


@dataclass(frozen=True)
class RunRequest:
    """A request for the ranks of a run.

    Attributes:
        program: name of a module with a ``main``.
        argv: the arguments of the program, without its name.
        cwd: the folder that the ranks run in.
        before: Python source that each rank executes before ``main``, with its rank as ``rank``.
        output: the folder for standard output, standard error and exit code of each rank.
        draws: whether the run draws ``loss_curves.png`` and writes its report.
        terminal: the device that is standard input, output and error of all ranks; None: files in ``output``.
        environments: the environment variables of each rank.
    """

    program: str
    argv: list[str]
    cwd: str
    before: str
    output: str
    draws: bool
    terminal: str | None
    environments: list[dict[str, str]]

    def to_json(self) -> str:
        return json.dumps({"run": asdict(self)})


@dataclass(frozen=True)
class ServerRequest:
    """A request for a fork of the server.

    Attributes:
        folder: has the named pipes ``requests`` and ``answers``, and gets ``server.stderr`` and ``server.code``.
        imports: modules that the fork imports before it answers its first request.
    """

    folder: str
    imports: list[str]

    def to_json(self) -> str:
        return json.dumps({"server": asdict(self)})


class ForkServer:
    """Reads requests from standard input, forks, and writes down the exit codes of the forks.

    Args:
        answers: the file descriptor that answers are written to.
    """

    def __init__(self, answers: int) -> None:
        self._answers = answers
        self._lines: deque[bytes] = deque()
        """Lines that were received and not yet handled."""
        self._incomplete_line = b""
        self._code_files: dict[int, Path] = {}
        """The file for the exit code of each fork that runs, by its process id."""

    def serve(self) -> None:
        """Answer requests until an empty line or the end of standard input; then kill what still runs."""
        is_open = True
        while is_open:
            is_open = self._receive()
            while self._lines:
                line = self._lines.popleft()
                if line:
                    self._answer(line)
                else:
                    is_open = False
            self._write_exit_codes()
        for pid in self._code_files:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _receive(self) -> bool:
        """Receive lines; return False at the end of standard input."""
        # while forks run, the server also has to notice that they end; otherwise it can sleep until a request comes
        timeout = POLL_SECONDS if self._code_files else None
        readable, _, _ = select.select([STDIN], [], [], timeout)
        if not readable:
            return True
        received = os.read(STDIN, _READ_BYTES)
        *lines, self._incomplete_line = (self._incomplete_line + received).split(b"\n")
        self._lines.extend(lines)
        return bool(received)

    def _answer(self, line: bytes) -> None:
        request = json.loads(line)
        if "server" in request:
            self._fork_server(ServerRequest(**request["server"]))
            return
        run = RunRequest(**request["run"])
        pids = []
        for rank in range(len(run.environments)):
            pid = _fork_rank(rank, run, self._answers)
            self._code_files[pid] = Path(run.output, f"{rank}.code")
            pids.append(pid)
        os.write(self._answers, json.dumps(pids).encode() + b"\n")

    def _fork_server(self, request: ServerRequest) -> None:
        """Fork this server: the parent answers, and the child goes on as a server of its own with no forks yet."""
        folder = Path(request.folder)
        pid = os.fork()
        if pid:
            self._code_files[pid] = folder / "server.code"
            os.write(self._answers, b"[]\n")
            return
        _end_with_parent()
        _connect_to_pipes(folder, self._answers)
        self._lines.clear()
        self._incomplete_line = b""
        self._code_files = {}
        for module in request.imports:
            importlib.import_module(module)
        _exempt_imports_from_garbage_collection()

    def _write_exit_codes(self) -> None:
        for pid in list(self._code_files):
            ended_pid, status = os.waitpid(pid, os.WNOHANG)
            if ended_pid:
                file = self._code_files.pop(pid)
                # renamed when it is complete: the other process may read it at any moment
                unfinished = file.with_suffix(".new")
                unfinished.write_text(str(os.waitstatus_to_exitcode(status)))
                unfinished.replace(file)


def main() -> None:
    """Import the program and the modules of the command line, and serve: ``ARGV_OF_A_RUN_AS_JSON [MODULE ...]``."""
    # standard output is for answers alone: what an import prints goes to standard error
    answers = os.dup(STDOUT)
    os.dup2(STDERR, STDOUT)
    prepared_argv, *imports = sys.argv[1:]
    for module in ("fabric_train.__main__", *imports):
        importlib.import_module(module)
    conversion_mapping = sys.modules.get("transformers.conversion_mapping")
    if conversion_mapping is not None:
        # compiles the patterns of every model family, which takes a third of a small run; the forks inherit them
        conversion_mapping.get_checkpoint_conversion_mapping("llama")
    argv = json.loads(prepared_argv)
    if argv:
        _warm_caches(argv)
    _exempt_imports_from_garbage_collection()
    ForkServer(answers).serve()


def _warm_caches(argv: list[str]) -> None:
    """Prepare a run, and ask what its ranks will ask: the libraries cache the answers, and the forks inherit them."""
    from importlib import metadata

    import torch
    from lightning.fabric.utilities import registry
    from torchmetrics import Metric
    from transformers import AutoModelForCausalLM

    from fabric_train.arguments import TrainArguments, parse
    from fabric_train.files.typed_json import type_adapter
    from fabric_train.preflight.prepare import prepare

    run = prepare(parse(TrainArguments, argv))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(run.model.config)
    # Fabric asks this of each module of a model, and Python caches the answer for each class
    assert not any(isinstance(module, Metric) for module in model.modules())
    # Fabric looks for entry points of callbacks, for which importlib reads files of all installed packages
    entry_points = functools.cache(metadata.entry_points)
    entry_points(group="lightning.fabric.callbacks_factory")
    registry.__dict__["entry_points"] = entry_points
    for module_name, type_name in _CHECKPOINT_TYPES:
        type_adapter(getattr(importlib.import_module(module_name), type_name))


def _exempt_imports_from_garbage_collection() -> None:
    """Keep the ranks' garbage collections from touching, and so copying, the memory pages that they share.

    The garbage of the imports stays, too: it is little, and to find it takes half a second.
    """
    gc.freeze()


def _end_with_parent() -> None:
    """Make this fork the leader of a session, and let it end with the process that forked it."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _connect_to_pipes(folder: Path, answers: int) -> None:
    """Let a fork of a server read requests from, and write answers to, the named pipes in a folder."""
    requests_pipe = os.open(folder / "requests", os.O_RDONLY)
    answers_pipe = os.open(folder / "answers", os.O_WRONLY)
    errors_file = os.open(folder / "server.stderr", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    os.dup2(requests_pipe, STDIN)
    os.dup2(errors_file, STDOUT)
    os.dup2(errors_file, STDERR)
    os.dup2(answers_pipe, answers)
    for descriptor in (requests_pipe, answers_pipe, errors_file):
        os.close(descriptor)


def _fork_rank(rank: int, run: RunRequest, answers: int) -> int:
    """Fork a rank that runs the program, and return its process id."""
    server_pid = os.getpid()
    streams = _open_streams(rank, run)
    pid = os.fork()
    if pid:
        for stream in streams:
            os.close(stream)
        return pid
    # whatever happens below, the child must not return from here: it would go on as a second server
    try:
        os.close(answers)
        _end_with_parent()
        if os.getppid() != server_pid:  # the server ended before this rank had asked to end with it
            os._exit(1)
        for descriptor, stream in enumerate(streams):  # standard input, output and error
            os.dup2(stream, descriptor)
            os.close(stream)
        _run_program(rank, run)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        os._exit(1)


def _open_streams(rank: int, run: RunRequest) -> list[int]:
    """Return file descriptors for standard input, output and error of a rank."""
    if run.terminal:
        # with O_NOCTTY it does not become the server's terminal, whose end would send SIGHUP to the server
        return [os.open(run.terminal, os.O_RDWR | os.O_NOCTTY) for _ in range(3)]
    flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
    return [
        os.open("/dev/null", os.O_RDONLY),
        os.open(f"{run.output}/{rank}.stdout", flags, 0o644),
        os.open(f"{run.output}/{rank}.stderr", flags, 0o644),
    ]


def _run_program(rank: int, run: RunRequest) -> NoReturn:
    """Run the program as ``python -m`` would, and exit with its exit code."""
    os.environ.clear()
    os.environ.update(run.environments[rank])
    os.chdir(run.cwd)
    sys.argv = [run.program.removesuffix(".__main__"), *run.argv]

    import torch

    from fabric_train.cli.errors import run_program

    torch.set_num_threads(1)  # OMP_NUM_THREADS counts only when torch is imported, which the server has done

    def main() -> None:
        if not run.draws:
            _leave_out_drawing(run.argv)
        exec(run.before, {"rank": rank})
        importlib.import_module(run.program).main()

    run_program(main)


def _leave_out_drawing(argv: Sequence[str]) -> None:
    """Leave out ``loss_curves.png``, and the report where the arguments do not ask for one."""
    from fabric_train.training import loggers

    loggers.__dict__["open_loss_curves"] = lambda run: loggers.Logger()
    if "--report" not in argv:
        importlib.import_module("fabric_train.__main__").__dict__["write_run_report"] = lambda _: None


if __name__ == "__main__":
    main()
