"""Start a server when its weights are there, and end all of its processes when the run that started this one ends.

The process is there before the weights are written. If the run is killed at any moment, this process removes what the
run has left in memory. vLLM's engine is a process of its own. It stays, and keeps its memory, if the server that
started it is killed, so this process ends it as well.

``vllm_server`` starts this file by its path with ``python -I``: it uses the standard library alone, and starts in
milliseconds. Its arguments are the id of the run's process, the folder with the weights, folders to remove after
SIGTERM, ``--``, and the command.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import NoReturn

_PR_SET_PDEATHSIG = 1  # sys/prctl.h
_SIGNALS = (signal.SIGTERM, signal.SIGCHLD)
_POLL_SECONDS = 0.05
_END_SECONDS = 10  # for the server
_LEFT_SECONDS = 5  # for what the server has left: Python's resource tracker removes its shared memory


def main() -> NoReturn:
    """Run the command and exit with its code, or with 128 plus the number of the signal that ended it.

    SIGTERM, which also comes when the run ends, removes the folders and ends the command; the exit code is then 1.
    """
    run_pid = int(sys.argv[1])
    weights = sys.argv[2]
    separator = sys.argv.index("--")
    folders = sys.argv[3:separator]
    command = sys.argv[separator + 1 :]
    # Both signals are taken from ``sigwait`` alone: a handler could interrupt the start of the server, or its end.
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler, some systems drop it although it is blocked
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    _end_with_parent()

    server = None
    code = None
    # the run may have ended before this process asked for the signal
    if os.getppid() == run_pid and _wait_for_weights(weights):
        server = subprocess.Popen(command, start_new_session=True, preexec_fn=_prepare_server)
        code = _wait_for_end(server)

    # The parent's id does not tell whether the run has ended: the signal comes when its main thread ends, and while
    # other threads still end, the id stays the same. A run that itself ends the server needs the folders no more.
    if code is None or signal.SIGTERM in signal.sigpending():
        for folder in folders:  # before the server ends, which may take long: the folders are in memory
            shutil.rmtree(folder, ignore_errors=True)
    if server is not None:
        _end_server(server)
    sys.exit(1 if code is None else code)


def _wait_for_weights(weights: str) -> bool:
    """Wait until the folder is there; return False if SIGTERM comes first."""
    while signal.SIGTERM not in signal.sigpending():
        if os.path.isdir(weights):
            return True
        time.sleep(_POLL_SECONDS)
    return False


def _wait_for_end(server: subprocess.Popen[bytes]) -> int | None:
    """Return the exit code, or 128 plus the number of the signal that ended the server; None if SIGTERM comes first."""
    received = signal.SIGCHLD
    while received == signal.SIGCHLD and server.poll() is None:  # it may have been stopped, and not have ended
        received = signal.Signals(signal.sigwait(_SIGNALS))
    code = server.poll()
    if code is not None and code < 0:  # a signal
        return 128 - code
    return code


def _end_server(server: subprocess.Popen[bytes]) -> None:
    """End the server, if it runs, and what it has left."""
    server.terminate()
    with suppress(subprocess.TimeoutExpired):
        server.wait(_END_SECONDS)
    _end_session(server.pid)


def _end_session(group_id: int) -> None:
    """End the processes that a server has left: those that do not end on SIGTERM are killed."""
    deadline = time.monotonic() + _LEFT_SECONDS
    with suppress(ProcessLookupError):  # there is none (any more)
        os.killpg(group_id, signal.SIGTERM)
        while time.monotonic() < deadline:
            os.killpg(group_id, 0)
            time.sleep(0.05)
        os.killpg(group_id, signal.SIGKILL)


def _end_with_parent() -> None:
    """Make the system send SIGTERM to this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _prepare_server() -> None:
    """Let the server end with this process, and receive the signals that this process blocks."""
    _end_with_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


if __name__ == "__main__":
    main()
