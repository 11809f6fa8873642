"""Runs of several real processes in about a second: their ranks are forks of a server that has imported everything.

A rank is a process in a session of its own with torchrun's environment variables. It runs the program as
``python -m fabric_train`` would: same arguments, same exit codes. There is no launcher, so nobody stops the other ranks
when one ends. A single rank has no launcher's variables, as under ``python -m``.

``forked_run_server.py`` is the server. It ends with the process that started it, and the ranks end with the server.
"""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from tests.support.forked_run_server import POLL_SECONDS, RunRequest, ServerRequest
from tests.support.ports import free_port
from tests.support.programs import ROOT
from tests.support.rank_environment import CONSOLE_VARIABLES, environment_without_launcher, torchrun_variables

_START_SECONDS = 200  # the first start waits for the imports of the server
_END_SECONDS = 60
_SHOWN_CHARACTERS = 4000
# the program imports these modules when it needs them: without the server, each rank would import them in each run
_IMPORTED_WHEN_NEEDED = (
    "fabric_train.distributed.watchdog",
    "fabric_train.preflight.automatic",
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


class ForkedRun:
    """The ranks of one run."""

    def __init__(self, pids: Sequence[int], output: Path) -> None:
        self.pids = tuple(pids)
        self._output = output

    def codes(self) -> list[int | None]:
        """Return each rank's exit code, None while it runs; -9 means that SIGKILL ended it."""
        codes: list[int | None] = []
        for rank in range(len(self.pids)):
            file = self._output / f"{rank}.code"
            codes.append(int(file.read_text()) if file.exists() else None)
        return codes

    def has_ended(self) -> bool:
        """Return whether some rank has ended."""
        return any(code is not None for code in self.codes())

    def wait(self, timeout: float = 120) -> list[int]:
        """Wait until all ranks have ended and return their exit codes.

        Raises:
            TimeoutError: some did not end in time; they were killed.
        """
        if not _wait_until(self._all_have_ended, timeout):
            codes_at_timeout = self.codes()
            self.kill()
            _wait_until(self._all_have_ended, 30)
            raise TimeoutError(f"exit codes {codes_at_timeout} after {timeout} s\n{self.report()}")
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
        _wait_until(lambda: condition() or self._all_have_ended(), timeout)
        return condition()

    def kill(self, signal_number: int = signal.SIGKILL, ranks: Iterable[int] | None = None) -> None:
        """Send a signal to all ranks that still run, or to some of them.

        SIGKILL goes to the whole process group of a rank: its data workers could not notice that it died.
        """
        if ranks is None:
            ranks = range(len(self.pids))
        codes = self.codes()
        for rank in ranks:
            if codes[rank] is not None:
                continue
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(self.pids[rank], signal_number)
            if signal_number == signal.SIGKILL:
                with suppress(ProcessLookupError):
                    os.killpg(self.pids[rank], signal_number)

    def stdout(self, rank: int = 0) -> str:
        """Return what a rank has written to its standard output so far."""
        return (self._output / f"{rank}.stdout").read_text(encoding="utf-8", errors="replace")

    def lines(self, rank: int = 0) -> list[str]:
        """Return the lines that a rank has written to its standard output so far, without their times."""
        return [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", "", line) for line in self.stdout(rank).splitlines()]

    def stderr(self, rank: int = 0) -> str:
        """Return what a rank has written to its standard error so far."""
        return (self._output / f"{rank}.stderr").read_text(encoding="utf-8", errors="replace")

    def report(self) -> str:
        """Return the end of every rank's output."""
        paragraphs = []
        for rank in range(len(self.pids)):
            paragraphs.append(f"--- rank {rank}")
            paragraphs.append(self.stdout(rank)[-_SHOWN_CHARACTERS:])
            paragraphs.append(self.stderr(rank)[-_SHOWN_CHARACTERS:])
        return "\n".join(paragraphs)

    def _all_have_ended(self) -> bool:
        return None not in self.codes()


class ForkedRuns:
    """Starts runs; ``close`` ends those that still run."""

    def __init__(self, server: "_Server", folder: Path, *, draws: bool) -> None:
        self._server = server
        self._folder = folder
        self._draws = draws
        self._num_runs = 0

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
            argv: the program's arguments, without its name.
            num_ranks: on one machine.
            cwd: where the ranks run; by default a folder of their own.
            before: Python source that each rank executes before the program's ``main``, with its rank as ``rank``. It
                can make a rank fail at a certain moment.
            env: more environment variables of the ranks.
            program: name of a module with a ``main``.
            draws: whether the run draws ``loss_curves.png`` and writes its report; by default as the server was told.
                With ``--report`` it writes a report, too.
            terminal: device that is the standard input and output of all ranks, instead of files.
        """
        self._num_runs += 1
        folder = self._folder / f"run-{self._num_runs:03d}"
        folder.mkdir()

        inherited = environment_without_launcher()
        if terminal:
            for name in CONSOLE_VARIABLES:
                inherited.pop(name, None)
        environments = []
        for rank_variables in torchrun_variables(num_ranks, free_port()):
            environments.append({**inherited, **rank_variables, **(env or {})})

        request = RunRequest(
            program=program,
            argv=[str(argument) for argument in argv],
            cwd=str(cwd or folder),
            before=before,
            output=str(folder),
            draws=self._draws if draws is None else draws,
            terminal=terminal,
            environments=environments,
        )
        return ForkedRun(self._server.request(request), folder)

    def close(self) -> None:
        """End the server, and with it every rank that still runs."""
        self._server.close()

    def with_imports(self, folder: Path, imports: Sequence[str]) -> "ForkedRuns":
        """Return runs of a fork of the server that imports more modules; it ends with this server, or when closed.

        It starts in less time than a server of its own, which would import all that this one has imported.

        Args:
            folder: for the output of the ranks.
            imports: more modules.
        """
        folder.mkdir(parents=True, exist_ok=True)
        return ForkedRuns(_ServerFork(self._server, folder, imports), folder, draws=self._draws)


def start_forked_runs(
    folder: Path,
    env: Mapping[str, str] | None = None,
    *,
    draws: bool = True,
    imports: Sequence[str] = _IMPORTED_WHEN_NEEDED,
    prepares: Sequence[str] = (),
) -> ForkedRuns:
    """Start a server, and return what starts runs with it.

    Args:
        folder: for the output of the ranks.
        env: more environment variables of the server. A ``PYTHONPATH`` comes before what this process can import.
        draws: whether runs draw ``loss_curves.png`` and write a report where ``ForkedRuns.start`` does not say it. That
            takes more time than a run of a few steps.
        imports: modules that the server imports besides the program.
        prepares: arguments of a run that the server prepares, so that the ranks inherit what it has cached.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return ForkedRuns(_ServerProcess(folder, env or {}, imports, prepares), folder, draws=draws)


class _Server(ABC):
    """The connection to a server of forked runs; ``_folder`` has the server's standard error."""

    _folder: Path

    @abstractmethod
    def send(self, line: str) -> None:
        """Send a line; an empty one ends the server."""

    @abstractmethod
    def answers(self) -> IO[bytes]:
        """Return the stream of the server's answers."""

    @abstractmethod
    def close(self) -> None:
        """End the server and wait for its end."""

    def request(self, request: RunRequest | ServerRequest) -> list[int]:
        """Send a request and return the answer, the process ids of the ranks.

        Raises:
            ChildProcessError: the server has ended, or did not answer in time.
        """
        self.send(request.to_json())
        stream = self.answers()
        readable, _, _ = select.select([stream], [], [], _START_SECONDS)
        line = stream.readline() if readable else b""
        if not line:
            errors = (self._folder / "server.stderr").read_text(errors="replace")
            raise ChildProcessError(f"the server of forked runs does not answer: {errors[-_SHOWN_CHARACTERS:]}")
        pids: list[int] = json.loads(line)
        return pids


class _ServerProcess(_Server):
    """A server that this process has started."""

    def __init__(self, folder: Path, env: Mapping[str, str], imports: Sequence[str], prepares: Sequence[str]) -> None:
        self._folder = folder
        # the server, and so each rank, can import what this process can import
        import_path = [str(ROOT), *sys.path]
        if env.get("PYTHONPATH"):
            import_path.insert(0, env["PYTHONPATH"])
        environment = {
            **environment_without_launcher(),
            **env,
            "PYTHONPATH": os.pathsep.join(filter(None, import_path)),
            # a fork has none of the threads of its parent, and would wait for the tokenizing ones for ever
            "TOKENIZERS_PARALLELISM": "false",
        }
        with (folder / "server.stderr").open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.forked_run_server", json.dumps(list(prepares)), *imports],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd=ROOT,
                env=environment,
            )

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()

    def answers(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    def close(self) -> None:
        # an empty line, because to close standard input may not be enough: forks of this process hold it open, too
        self._process.communicate(b"\n", timeout=_END_SECONDS)


class _ServerFork(_Server):
    """A server that another one has forked. Two named pipes are its standard input and output."""

    def __init__(self, parent: _Server, folder: Path, imports: Sequence[str]) -> None:
        self._folder = folder
        os.mkfifo(folder / "requests")
        os.mkfifo(folder / "answers")
        # to open a named pipe waits until another process opens the other end, unless it is opened for both directions
        self._requests = (folder / "requests").open("r+b", buffering=0)
        self._answers = (folder / "answers").open("r+b", buffering=0)
        parent.request(ServerRequest(str(folder), list(imports)))

    def send(self, line: str) -> None:
        self._requests.write(f"{line}\n".encode())

    def answers(self) -> IO[bytes]:
        return self._answers

    def close(self) -> None:
        self.send("")
        _wait_until((self._folder / "server.code").exists, _END_SECONDS)
        self._requests.close()
        self._answers.close()


def _wait_until(condition: Callable[[], bool], timeout: float) -> bool:
    """Wait for a condition, but not longer than ``timeout`` seconds; return whether it holds."""
    deadline = time.monotonic() + timeout
    while True:
        holds = condition()
        if holds or time.monotonic() > deadline:
            return holds
        time.sleep(POLL_SECONDS)
