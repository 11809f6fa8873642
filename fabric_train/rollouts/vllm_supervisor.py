"""Run a command in a session of its own, and end all of its processes when the process that started this one ends.

vLLM's engine is a process of its own. It stays, and keeps its memory, if the server that started it is killed.

``vllm_server`` starts this file by its path with ``python -I``: it uses the standard library alone, and starts in
milliseconds. Its arguments are the id of the process that starts it, a folder to remove if that process has ended, and
the command.
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
_END_SECONDS = 10  # for the server
_LEFT_SECONDS = 5  # for what the server has left: Python's resource tracker removes its shared memory


def main() -> NoReturn:
    """Run the command and exit with its code; SIGTERM ends it."""
    parent_pid = int(sys.argv[1])
    folder = sys.argv[2]
    command = sys.argv[3:]
    # Both signals are taken from ``sigwait`` alone: a handler could interrupt the start of the server, or its end.
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler, some systems drop it although it is blocked
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    _end_with_parent()
    if os.getppid() != parent_pid:  # it has ended before this process asked for the signal
        sys.exit(1)

    server = subprocess.Popen(command, start_new_session=True, preexec_fn=_prepare_server)
    received = signal.SIGCHLD
    while received == signal.SIGCHLD and server.poll() is None:  # it may have been stopped, and not have ended
        received = signal.Signals(signal.sigwait(_SIGNALS))
    code = server.poll()

    # end what is left
    server.terminate()
    with suppress(subprocess.TimeoutExpired):
        server.wait(_END_SECONDS)
    _end_session(server.pid)
    if os.getppid() != parent_pid:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(1 if code is None else code)


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
