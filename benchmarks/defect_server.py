"""Run tests in forks of a server that has imported everything except the project.

A fork imports the project as it is on disk at that moment, so a planted defect is tested without the seconds that torch
and transformers take to import. The server of the tests' forked runs is forked too. The server runs in a copy of the
project's tree. It reads a JSON line per request from its standard input, and writes an empty line when it is done:

    {"tests": [test or file, …], "seconds": limit, "report": file, "coverage": folder or null}

The report has a JSON line for each test: its name, outcome, seconds and, if it failed, the reason. With ``coverage``,
the lines of the project that each test runs are recorded in that folder, in all processes that the test starts.
"""

import ctypes
import gc
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

_IMPORTED = (
    "torch",
    "torch._dynamo",
    "torch.distributed._shard.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.utils.tensorboard",
    "lightning.fabric",
    "lightning.fabric.strategies",
    "datasets",
    "transformers",
    "transformers.conversion_mapping",
    "transformers.models.llama.modeling_llama",
    "wandb",
    "gigatoken",
    "sentencepiece",
    "pydantic",
    "hypothesis",
    "orjson",
    "xxhash",
    "rich._emoji_codes",
    "argcomplete",
    "coverage",
)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.01
_REASON_CHARACTERS = 300


@dataclass(frozen=True)
class Outcome:
    """A test that was run: passed, failed or skipped; ``reason`` is the end of what pytest says about a failure."""

    test: str
    outcome: str
    seconds: float
    reason: str


class DefectServer:
    """A server in a copy of the tree; ``close`` ends it."""

    def __init__(self, tree: Path, work: Path) -> None:
        """Start it; ``work`` is a folder for its report and output."""
        self.tree = tree
        self._report = work / "report.jsonl"
        environment = {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        environment |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "TOKENIZERS_PARALLELISM": "true"}
        environment |= {"TMPDIR": str(work)}
        with (work / "output").open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.defect_server"],
                cwd=tree,
                env=os.environ | environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,  # a Ctrl-C is for this process, which then ends the server
            )

    def run(self, tests: Sequence[str], seconds: float, coverage: Path | None = None) -> list[Outcome]:
        """Run tests one after the other until one fails or the time is over; return those that ended.

        With ``coverage``, run all of them and record the lines that they run in that folder.

        Raises:
            ChildProcessError: the server has ended.
        """
        self._report.unlink(missing_ok=True)
        request = {"tests": list(tests), "seconds": seconds, "report": str(self._report)}
        request["coverage"] = None if coverage is None else str(coverage)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        if not self._process.stdout.readline():
            raise ChildProcessError(f"the server of the tests ended: see {self._report.parent / 'output'}")
        lines = self._report.read_text(encoding="utf-8").splitlines() if self._report.is_file() else []
        return [Outcome(**json.loads(line)) for line in lines]

    def close(self) -> None:
        """End the server and what it runs."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


# -------------------------------------------------------------------------------------------------- in the server


def main() -> None:
    """Import, then run requests until the end of standard input."""
    answers = os.dup(1)
    os.dup2(2, 1)  # standard output is for answers alone
    sys.path.insert(0, os.getcwd())
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
    for module in _IMPORTED:
        importlib.import_module(module)
    assert "fabric_train" not in sys.modules
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what a test leaves behind becomes a child of this process
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        _serve(json.loads(line))
        os.write(answers, b"\n")


def _serve(request: dict[str, Any]) -> None:
    server = os.getpid()
    pid = os.fork()
    if not pid:
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == server:
                os.setsid()
                _run_tests(request)
        except BaseException:  # noqa: BLE001  the child must not continue as a second server
            traceback.print_exc()
        finally:
            os._exit(1)
    deadline = time.monotonic() + request["seconds"]
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            break
        time.sleep(_POLL_SECONDS)
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        with suppress(ChildProcessError):
            while os.waitpid(-1, 0):
                pass


def _run_tests(request: dict[str, Any]) -> None:
    coverage = Recorder(Path(request["coverage"])) if request["coverage"] else None
    _StandbyServer().install(coverage)
    names = request["tests"]
    pytest.main(
        ["-n", "0", "-q", "-x" if coverage is None else "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *names],
        plugins=[_Reports(Path(request["report"]), names, coverage)],
    )
    os._exit(0)


class Recorder:
    """Records the lines that each test runs, with coverage.py, also in forks and in other Python processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.test = ""
        self._exit = os._exit
        self._start()
        os.environ["COVERAGE_PROCESS_START"] = str(folder / "coveragerc")  # its context is PYTEST_CURRENT_TEST
        os.register_at_fork(after_in_child=self._restart)
        setattr(os, "_exit", self._save_and_exit)  # noqa: B010  mypy knows that it does not return

    def switch(self, test: str) -> None:
        """Attribute what follows to another test."""
        self.test = test
        self._coverage.switch_context(test)

    def _start(self) -> None:
        from coverage import Coverage

        rc = str(self._folder / "coveragerc")
        self._coverage = Coverage(config_file=rc, context="", data_suffix=f"{os.getpid()}-{time.monotonic_ns()}")
        self._coverage.start()
        if self.test:
            self._coverage.switch_context(self.test)

    def _restart(self) -> None:
        self._coverage.stop()
        self._coverage._auto_save = False  # the parent saves earlier lines
        self._start()

    def _save_and_exit(self, code: int) -> None:
        with suppress(Exception):
            self._coverage.stop()
            self._coverage.save()
        self._exit(code)


class _StandbyServer:
    """A fork that becomes the server of :class:`tests.support.forked_runs.ForkedRuns` when a test asks for one."""

    def install(self, coverage: Recorder | None) -> None:
        """Fork, and replace the start of that server's process."""
        from tests.support import forked_runs

        stdin = os.pipe()
        stdout = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(stdin[1])
            os.close(stdout[0])
            _become_server(stdin[0], stdout[1], coverage)
        os.close(stdin[0])
        os.close(stdout[1])
        self.stdin: IO[bytes] = os.fdopen(stdin[1], "wb")
        self.stdout: IO[bytes] = os.fdopen(stdout[0], "rb", buffering=0)
        self._used = False
        started = subprocess.Popen
        start_run = forked_runs.ForkedRuns.start

        def popen(words: Any, *args: Any, **options: Any) -> Any:
            is_server = isinstance(words, list) and words[1:] == [forked_runs.__file__]
            if not is_server or self._used or options["env"].keys() - os.environ.keys() - {"PYTHONPATH"}:
                return started(words, *args, **options)
            self._used = True
            self.stdin.write(json.dumps({"folder": os.path.dirname(options["stderr"].name)}).encode() + b"\n")
            self.stdin.flush()
            return self

        class Subprocess:
            def __getattr__(self, name: str) -> Any:
                return popen if name == "Popen" else getattr(subprocess, name)

        def start(runs: Any, argv: Any, num_ranks: int = 2, *, before: str = "", **options: Any) -> Any:
            if coverage is not None:
                before = f"import os; os._exit.__self__.switch({coverage.test!r})\n" + before
            return start_run(runs, argv, num_ranks, before=before, **options)

        setattr(forked_runs, "subprocess", Subprocess())  # noqa: B010
        setattr(forked_runs.ForkedRuns, "start", start)  # noqa: B010

    def communicate(self, data: bytes, timeout: float) -> None:
        """End the server."""
        with suppress(BrokenPipeError):
            self.stdin.write(data)
            self.stdin.close()


def _become_server(stdin: int, stdout: int, coverage: Recorder | None) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    first = b""
    while not first.endswith(b"\n"):  # unbuffered: what follows is read by the server itself
        if not (byte := os.read(0, 1)):
            os._exit(0)
        first += byte
    errors = os.open(f"{json.loads(first)['folder']}/server.stderr", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    os.dup2(errors, 2)
    os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", WANDB_MODE="offline", TOKENIZERS_PARALLELISM="true")
    from tests.support import forked_runs

    try:
        forked_runs.serve()
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    os._exit(0)


class _Reports:
    """A plugin of pytest: runs the tests in the order that was asked for, and writes a line for each."""

    def __init__(self, file: Path, names: list[str], coverage: Recorder | None) -> None:
        self._lines: io.TextIOWrapper = file.open("a", encoding="utf-8")
        self._order = {name: number for number, name in enumerate(names)}
        self._coverage = coverage
        self._seconds = 0.0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self._order.get(item.nodeid, -1))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if self._coverage is not None:
            self._coverage.switch(item.nodeid)
        self._seconds = 0.0
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds += report.duration
        if report.when == "call" or report.outcome != "passed":
            reason = str(report.longrepr)[-_REASON_CHARACTERS:] if report.failed else ""
            self._write(report.nodeid, report.outcome, reason)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report.nodeid, "failed", str(report.longrepr)[-_REASON_CHARACTERS:])

    def _write(self, test: str, outcome: str, reason: str) -> None:
        line = {"test": test, "outcome": outcome, "seconds": round(self._seconds, 2), "reason": reason}
        self._lines.write(json.dumps(line) + "\n")
        self._lines.flush()


if __name__ == "__main__":
    main()
