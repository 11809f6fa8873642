"""Runs of several real processes in about a second: their ranks are forks of a server that has imported everything.

A rank is a process in a session of its own with torchrun's environment variables. It runs the program as
``python -m fabric_train`` would: same arguments, same exit codes. There is no launcher, so nobody stops the other ranks
when one ends. A single rank has no launcher's variables, as under ``python -m``.

The server reads a JSON line per run from its standard input, answers with the process ids of the ranks, and writes the
exit code of each rank that ends into a file. It ends with the process that started it, and the ranks end with it.
"""

import ctypes
import functools
import gc
import importlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
_PORTS = range(12_000, 32_000)  # below those that Linux uses for outgoing connections, such as gloo's
_reserved: dict[int, socket.socket] = {}
_START_SECONDS = 200  # the first start waits for the imports
_POLL_SECONDS = 0.005
_SHOWN_CHARACTERS = 4000
_PR_SET_PDEATHSIG = 1
_OF_LAUNCHERS = ("LT_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "MASTER_")
_OF_RANKS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
OF_CONSOLES = ("CI", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES")
"""Environment variables that overrule what a program finds out about its terminal."""
# imported by the program when it needs them: each rank would import them in each run
_IMPORTED_LATER = (
    "fabric_train.distributed.watchdog",
    "fabric_train.preflight.memory_plan",
    "fabric_train.preflight.prepare",
    "fabric_train.training.trackers",
    "fabric_train.training.run",
    "torch._dynamo",
    "torch.distributed._shard.checkpoint",
    "torch.utils.tensorboard",
    "attrs",
    "rich._emoji_codes",
    "transformers.conversion_mapping",
    "transformers.models.llama.modeling_llama",
)

# what JSON of every checkpoint is read as
_READ_AS = (("fabric_train.checkpoint.files", "ChecksumsJson"), ("fabric_train.checkpoint.trainer_json", "_Parsed"))


class ForkedRun:
    """The ranks of one run."""

    def __init__(self, pids: tuple[int, ...], folder: Path) -> None:
        self.pids = pids
        self._folder = folder

    def codes(self) -> list[int | None]:
        """Return each rank's exit code, None while it runs; -9 means that SIGKILL ended it."""
        files = [self._folder / f"{rank}.code" for rank in range(len(self.pids))]
        return [int(file.read_text()) if file.exists() else None for file in files]

    def has_ended(self) -> bool:
        """Return whether some rank has ended."""
        return any(code is not None for code in self.codes())

    def wait(self, timeout: float = 120) -> list[int]:
        """Wait until all ranks have ended and return their exit codes.

        Raises:
            TimeoutError: some did not end in time; they were killed.
        """
        if not _wait_until(lambda: None not in self.codes(), timeout):
            there = self.codes()
            self.kill()
            _wait_until(lambda: None not in self.codes(), 30)
            raise TimeoutError(f"exit codes {there} after {timeout} s\n{self.report()}")
        return [code for code in self.codes() if code is not None]

    def finish(self, timeout: float = 120) -> None:
        """Wait until all ranks have ended and check that their exit codes are 0.

        Raises:
            AssertionError: a rank ended with another exit code.
        """
        codes = self.wait(timeout)
        assert not any(codes), f"exit codes {codes}\n{self.report()}"

    def wait_until(self, condition: Callable[[], bool], timeout: float = 120) -> bool:
        """Wait for a condition, or for the ranks to end; return whether the condition holds."""
        _wait_until(lambda: condition() or None not in self.codes(), timeout)
        return condition()

    def kill(self, number: int = signal.SIGKILL, ranks: Iterable[int] | None = None) -> None:
        """Send a signal to the ranks that run, or to some of them. SIGKILL takes their data workers too."""
        codes = self.codes()
        for rank in range(len(self.pids)) if ranks is None else ranks:
            if codes[rank] is None:
                with suppress(ProcessLookupError):  # it has ended meanwhile
                    os.kill(self.pids[rank], number)
                with suppress(ProcessLookupError):
                    if number == signal.SIGKILL:
                        os.killpg(self.pids[rank], number)

    def stdout(self, rank: int = 0) -> str:
        """Return what a rank has written to its standard output so far."""
        return (self._folder / f"{rank}.stdout").read_text(encoding="utf-8", errors="replace")

    def lines(self, rank: int = 0) -> list[str]:
        """Return the lines that a rank has written to its standard output so far, without their times."""
        return [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", "", line) for line in self.stdout(rank).splitlines()]

    def stderr(self, rank: int = 0) -> str:
        """Return what a rank has written to its standard error so far."""
        return (self._folder / f"{rank}.stderr").read_text(encoding="utf-8", errors="replace")

    def report(self) -> str:
        """Return the end of every rank's output."""
        parts = []
        for rank in range(len(self.pids)):
            parts += [
                f"--- rank {rank}",
                self.stdout(rank)[-_SHOWN_CHARACTERS:],
                self.stderr(rank)[-_SHOWN_CHARACTERS:],
            ]
        return "\n".join(parts)


class ForkedRuns:
    """Starts runs; ``close`` ends those that still run."""

    def __init__(
        self,
        folder: Path,
        env: Mapping[str, str] | None = None,
        *,
        draws: bool = True,
        imports: Sequence[str] = _IMPORTED_LATER,
        prepares: Sequence[str] = (),
    ) -> None:
        """Start the server; ``folder`` keeps the output of the ranks.

        Args:
            folder: for the output of the ranks.
            env: further environment variables of the server; a ``PYTHONPATH`` comes before what can be imported here.
            draws: whether runs draw ``loss_curves.png`` and write a report where ``start`` does not say it. That
                takes more time than a run of a few steps.
            imports: modules that the server imports besides the program.
            prepares: arguments of a run that the server prepares, so that the ranks find what it has kept in memory.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._num_runs = 0
        self._draws = draws
        further = dict(env or {})
        # what can be imported here can be there
        path = os.pathsep.join(filter(None, [further.pop("PYTHONPATH", ""), str(ROOT), *sys.path]))
        with (folder / "server.stderr").open("wb") as stderr:
            self._server = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), json.dumps(list(prepares)), *imports],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd=ROOT,
                # "false": threads that tokenize are not in a fork, which would wait for them for ever
                env=_environment() | further | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},
            )

    def start(
        self,
        argv: Sequence[object],
        num_ranks: int = 2,
        *,
        cwd: Path | None = None,
        before: str = "",
        env: Mapping[str, str] | None = None,
        program: str = "fabric_train.__main__",
        draws: bool | None = None,
        terminal: str | None = None,
    ) -> ForkedRun:
        """Start the ranks of a run and return at once.

        Args:
            argv: the program's arguments, its name left out.
            num_ranks: on one machine.
            cwd: where the ranks run; by default a folder of their own.
            before: Python source that each rank runs before the program's ``main``, with its number as ``rank``: it can
                make the rank fail at a certain moment.
            env: further environment variables.
            program: name of a module with a ``main``.
            draws: whether the run draws ``loss_curves.png`` and writes its report; by default as the server was told.
                With ``--report`` it writes a report, too.
            terminal: device that is the standard input and output of all ranks, instead of files.
        """
        self._num_runs += 1
        folder = self._folder / f"run-{self._num_runs:03d}"
        folder.mkdir()
        launcher = _launcher_variables(num_ranks, free_port())
        ours = _environment()
        if terminal:
            ours = {name: value for name, value in ours.items() if name not in OF_CONSOLES}
        request = {
            "program": program,
            "argv": [str(word) for word in argv],
            "cwd": str(cwd or folder),
            "before": before,
            "output": str(folder),
            "draws": self._draws if draws is None else draws,
            "terminal": terminal,
            "environments": [ours | variables | dict(env or {}) for variables in launcher],
        }
        self._send(request)
        return ForkedRun(tuple(self._answer()), folder)

    def close(self) -> None:
        """End the server, and with it every rank that still runs."""
        # closing standard input may not be enough: forks of this process hold it open, too
        self._server.communicate(b"\n", timeout=60)

    def with_imports(self, folder: Path, imports: Sequence[str]) -> "ForkedRuns":
        """Return a fork of the server that imports further modules; it ends with this server, or when it is closed.

        It starts in less time than a server of its own, which would import all that this one has imported.
        """
        return _OfFork(self, folder, imports)

    def _send(self, request: dict[str, Any] | None) -> None:
        """Send a request; None ends the server."""
        assert self._server.stdin is not None
        self._server.stdin.write((json.dumps(request).encode() if request else b"") + b"\n")
        self._server.stdin.flush()

    def _answers(self) -> IO[bytes]:
        assert self._server.stdout is not None
        return self._server.stdout

    def _answer(self) -> list[int]:
        stream = self._answers()
        answers = select.select([stream], [], [], _START_SECONDS)[0]
        line = stream.readline() if answers else b""
        if not line:
            output = (self._folder / "server.stderr").read_text(errors="replace")
            raise ChildProcessError(f"the server of forked runs does not answer: {output[-_SHOWN_CHARACTERS:]}")
        return json.loads(line)


class _OfFork(ForkedRuns):
    """Runs of a server that another one has forked. Two named pipes are its standard input and output."""

    def __init__(self, parent: ForkedRuns, folder: Path, imports: Sequence[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._num_runs = 0
        self._draws = parent._draws
        names = [folder / "requests", folder / "answers"]
        for name in names:
            os.mkfifo(name)
        # also for what it does not do with them: to open them then waits for nobody
        self._requests, self._replies = (name.open("r+b", buffering=0) for name in names)
        parent._send({"serves": str(folder), "imports": list(imports)})
        parent._answer()

    def close(self) -> None:
        self._send(None)
        _wait_until((self._folder / "server.code").exists, 60)
        for pipe in (self._requests, self._replies):
            pipe.close()

    def _send(self, request: dict[str, Any] | None) -> None:
        self._requests.write((json.dumps(request).encode() if request else b"") + b"\n")

    def _answers(self) -> IO[bytes]:
        return self._replies


def free_port() -> int:
    """Return a port that nobody listens on, and that this function returns to no other process while this one lives.

    Raises:
        OSError: all ports are taken.
    """
    for port in _PORTS:
        if port in _reserved:
            continue
        reservation = socket.socket(socket.AF_UNIX)
        try:
            reservation.bind(f"\0fabric-train-tests-port-{port}")  # an abstract name: it goes with the process
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            reservation.close()
            continue
        _reserved[port] = reservation
        return port
    raise OSError(f"no port is free in {_PORTS}")


def _wait_until(condition: Callable[[], bool], timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return holds


def _environment() -> dict[str, str]:
    """Return this process's environment without the variables of launchers."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
    for name in _OF_RANKS:
        ours.pop(name, None)
    return ours | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def _launcher_variables(num_ranks: int, port: int) -> list[dict[str, str]]:
    """Return the variables that torchrun on one machine sets for each rank."""
    if num_ranks == 1:
        return [{}]
    shared = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    elastic = {"RUN_ID": "none", "RESTART_COUNT": 0, "MAX_RESTARTS": 0, "USE_AGENT_STORE": False}
    shared |= {f"TORCHELASTIC_{name}": value for name, value in elastic.items()}
    ranks = [{"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, **shared} for rank in range(num_ranks)]
    return [{name: str(value) for name, value in variables.items()} for variables in ranks]


# -------------------------------------------------------------------------------------------------- in the server


def serve() -> None:
    """Import, then fork the requested ranks until an empty line or the end of standard input."""
    answers = os.dup(1)
    os.dup2(2, 1)  # standard output is for answers alone
    prepares, *imports = sys.argv[1:]
    for module in ("fabric_train.__main__", *imports):
        importlib.import_module(module)
    if "transformers.conversion_mapping" in sys.modules:
        # compiles the patterns of every family, which takes a third of a small run
        sys.modules["transformers.conversion_mapping"].get_checkpoint_conversion_mapping("llama")
    if argv := json.loads(prepares):
        _prepare(argv)
    _keep_from_collections()
    running: dict[int, Path] = {}
    unread = b""
    while True:
        if select.select([0], [], [], _POLL_SECONDS if running else None)[0]:
            received = os.read(0, 1 << 16)
            if not received:
                break
            *lines, unread = (unread + received).split(b"\n")
            for line in filter(None, lines):
                request = json.loads(line)
                if "serves" in request:
                    folder = Path(request["serves"])
                    if pid := os.fork():
                        running[pid] = folder / "server.code"
                        os.write(answers, b"[]\n")
                        continue
                    _become_server(folder, request["imports"], answers)
                    running = {}
                    unread = b""
                    lines = []
                    break
                started = [_fork(rank, request, answers) for rank in range(len(request["environments"]))]
                running |= {pid: Path(request["output"], f"{rank}.code") for rank, pid in enumerate(started)}
                os.write(answers, json.dumps(started).encode() + b"\n")
            if b"" in lines:
                break
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                file = running.pop(pid)
                _write_at_once(file, str(os.waitstatus_to_exitcode(status)))
    for pid in running:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _prepare(argv: list[str]) -> None:
    """Prepare a run, and ask what its ranks ask: Python and the libraries keep the answers, and forks have them."""
    from importlib import metadata

    import torch
    from lightning.fabric.utilities import registry
    from torchmetrics import Metric
    from transformers import AutoModelForCausalLM

    from fabric_train.arguments import TrainArguments, parse
    from fabric_train.files.regular_file import type_adapter
    from fabric_train.preflight.prepare import prepare

    run = prepare(parse(TrainArguments, argv))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(run.model.config)
    assert not any(isinstance(module, Metric) for module in model.modules())  # lightning asks, and Python keeps answers
    entry_points = functools.cache(metadata.entry_points)  # reads files of all packages
    entry_points(group="lightning.fabric.callbacks_factory")
    registry.__dict__["entry_points"] = entry_points
    for module, name in _READ_AS:
        type_adapter(getattr(importlib.import_module(module), name))


def _keep_from_collections() -> None:
    gc.collect()
    gc.freeze()  # the ranks' garbage collections do not touch the pages that they share


def _become_server(folder: Path, imports: Sequence[str], answers: int) -> None:
    """Take requests from the pipes in a folder, in a fork of a server whose end ends it."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    errors = os.open(folder / "server.stderr", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    pipes = os.open(folder / "requests", os.O_RDONLY), os.open(folder / "answers", os.O_WRONLY)
    for stream, number in zip((pipes[0], errors, errors, pipes[1]), (0, 1, 2, answers), strict=True):
        os.dup2(stream, number)
    for stream in (*pipes, errors):
        os.close(stream)
    for module in imports:
        importlib.import_module(module)
    _keep_from_collections()


def _fork(rank: int, request: dict[str, Any], answers: int) -> int:
    server = os.getpid()
    if request["terminal"]:  # without O_NOCTTY it would be the server's, whose end would then end the server
        streams = [os.open(request["terminal"], os.O_RDWR | os.O_NOCTTY) for _ in range(3)]
    else:
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
        streams = [os.open("/dev/null", os.O_RDONLY)]
        streams += [os.open(f"{request['output']}/{rank}.{name}", flags, 0o644) for name in ("stdout", "stderr")]
    pid = os.fork()
    if pid:
        for stream in streams:
            os.close(stream)
        return pid
    try:
        os.close(answers)
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:  # the server ended before this rank asked to end with it
            os._exit(1)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        _run(rank, request)
    except BaseException:  # noqa: BLE001  the child must not continue as a second server
        traceback.print_exc()
    finally:
        os._exit(1)


def _run(rank: int, request: dict[str, Any]) -> NoReturn:
    os.environ.clear()
    os.environ.update(request["environments"][rank])
    os.chdir(request["cwd"])
    sys.argv = [request["program"].removesuffix(".__main__"), *request["argv"]]

    import torch

    from fabric_train.cli.errors import run_program
    from fabric_train.training import loggers

    torch.set_num_threads(1)

    def main() -> None:
        if not request["draws"]:
            loggers.__dict__["open_loss_curves"] = lambda run: loggers.Logger()
            if "--report" not in request["argv"]:
                importlib.import_module("fabric_train.__main__").__dict__["write_run_report"] = lambda _: None
        exec(request["before"], {"rank": rank})
        importlib.import_module(request["program"]).main()

    run_program(main)


def _write_at_once(file: Path, text: str) -> None:
    file.with_suffix(".new").write_text(text)
    file.with_suffix(".new").replace(file)


if __name__ == "__main__":
    serve()
