"""End a process together with the one that started it, whatever ends that one."""

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1  # sys/prctl.h


def end_with_parent() -> None:
    """Make the system kill this process when the thread that started it ends; elsewhere than on Linux, do nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
