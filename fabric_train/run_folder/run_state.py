"""Tell from a run's lock file and the end of its log whether it is training, has ended or was killed."""

import fcntl
import re
import socket
import time
from pathlib import Path

import psutil

from fabric_train.run_folder.log_lines import read_last_message

_STATES_BY_LAST_MESSAGE = {"Done": "done", "early stopping": "done", "stopped by": "stopped", "error": "failed"}
"""The state of a run by the beginning of the last message in run.log."""
_RECENT_SECONDS = 600.0


def find_state(run_dir: Path, changed: float) -> str:
    """Return the state of a run.

    ``running?`` and ``stopped?`` mean that the run has a lock file which no process on this machine holds. Either the
    run was killed, or the folder is a copy, or a process on another machine holds the lock and the file system does not
    show it. The last case is ``running?``: another machine wrote the lock file, and the run changed recently. A run
    whose log ends with an error has failed also with a lock file: if another rank ends first, the launcher kills the
    rank that would have removed the file.

    Args:
        run_dir: The run's folder.
        changed: When one of its files was last changed, in seconds since 1970.

    Returns:
        "running", "running?", "done", "stopped" (by a signal, or before its first step), "stopped?" or "failed".
    """
    lock = run_dir / ".lock"
    if lock.is_file() and not lock.is_symlink():
        if _is_held(lock):
            return "running"
        _, _, host = lock.read_text(encoding="utf-8", errors="replace").strip().partition(" on ")
        is_elsewhere = host != socket.gethostname()
        is_recent = time.time() - changed < _RECENT_SECONDS
        if not is_elsewhere and read_last_message(run_dir).startswith("error"):
            return "failed"
        return "running?" if is_elsewhere and is_recent else "stopped?"

    last_message = read_last_message(run_dir)
    for beginning, state in _STATES_BY_LAST_MESSAGE.items():
        if last_message.startswith(beginning):
            return state
    return "stopped"


def _is_held(lock: Path) -> bool:
    """Return whether a process holds a lock file.

    Trying the lock could disturb a run that is starting, so it is not tried if the process in the file ran on this
    machine and has ended.
    """
    with lock.open(encoding="utf-8", errors="replace") as file:
        match = re.fullmatch(r"process ([0-9]{1,9}) on (.*)", file.readline().strip())
        if match and match[2] == socket.gethostname() and not psutil.pid_exists(int(match[1])):
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # a file system without locks
            return False
    return False
