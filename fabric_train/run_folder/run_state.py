"""Find out whether a run is training, has ended or was killed, from its lock file and the end of its log."""

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

    ``running?`` and ``stopped?``: the run has a lock file, but nobody on this machine holds it. Then the run was
    killed, the folder is a copy, or another machine holds it on a file system without locks; if it changed recently,
    that is more likely.

    Args:
        run_dir: The run's folder.
        changed: When one of its files was last changed, in seconds since 1970.

    Returns:
        running, running?, done, stopped (by a signal, or it has not begun), stopped? or failed.
    """
    lock = run_dir / ".lock"
    if lock.is_file() and not lock.is_symlink():
        if _is_held(lock):
            return "running"
        _, _, host = lock.read_text(encoding="utf-8", errors="replace").strip().partition(" on ")
        is_elsewhere = host != socket.gethostname()
        is_recent = time.time() - changed < _RECENT_SECONDS
        return "running?" if is_elsewhere and is_recent else "stopped?"

    last_message = read_last_message(run_dir)
    for beginning, state in _STATES_BY_LAST_MESSAGE.items():
        if last_message.startswith(beginning):
            return state
    return "stopped"


def _is_held(lock: Path) -> bool:
    """Return whether a process holds a lock file.

    To try the lock could disturb a run that starts, so it is not tried if the process has ended on this machine.
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
