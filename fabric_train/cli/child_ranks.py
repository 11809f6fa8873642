"""The processes around a rank: the launcher that it must not outlive, and the ranks that it has started itself."""

import json
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabric_train.cli.launcher import BY_HAND, find_launcher

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"
_LAUNCHER = "FABRIC_TRAIN_LAUNCHER"  # the process id of ``fabric run``, or of the rank that has started the others
_GRACE_SECONDS = 3.0  # for the watchdog to report a rank that has failed, and for ranks to end
_children: list["subprocess.Popen[Any]"] = []


def launcher_process(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the id of the process that this rank must not outlive: the launcher's on this machine, or the rank that
    started it; None if the ranks were started by hand. Call it early: once the launcher has ended, it is not known.
    """
    if re.fullmatch("[0-9]+", environment.get(_LAUNCHER, "")):
        return int(environment[_LAUNCHER])
    return os.getppid() if find_launcher(environment) not in (None, BY_HAND) else None


@contextmanager
def as_launcher() -> Iterator[None]:
    """Make the ranks that this process starts in the block end with it; later processes are not affected."""
    os.environ[_LAUNCHER] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[_LAUNCHER]


def serve_on_loopback(port: int) -> "TCPStore":
    """Serve torch's store to this machine alone, not on all interfaces; an OSError if the port is in use.

    While it is kept, a store that this process opens on the port, as torch and torchrun do, has this server.
    """
    from torch.distributed import TCPStore

    opened = socket.create_server((LOOPBACK, port)).detach()
    return TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=opened)


def watch_children(children: Sequence["subprocess.Popen[Any]"], failed: Callable[[int, int], None]) -> None:
    """Call ``failed`` with rank and exit code when a rank that this process has started fails.

    The call comes some seconds later, and only if this process still runs: the watchdog has a better report.
    """
    _children.extend(children)

    def watch() -> None:
        while all(child.poll() == 0 or child.returncode is None for child in children):
            time.sleep(0.2)
        rank, code = next((rank, child.returncode) for rank, child in enumerate(children, 1) if child.returncode)
        time.sleep(_GRACE_SECONDS)
        failed(rank, code)

    threading.Thread(target=watch, daemon=True, name="children").start()


def report_to_torchrun(lines: Sequence[str]) -> None:
    """Let torchrun show these lines at the end of its own report, instead of "no error file" (torch's ``record``)."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file or not lines:
        return
    text = "\n".join(lines)
    message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
    with suppress(OSError), Path(file).open("x", encoding="utf-8") as report:  # the first fault is the cause
        json.dump({"message": message}, report)


def end_children() -> None:
    """End the ranks that this process has started and that still run."""
    for child in _children:
        child.terminate()
    deadline = time.monotonic() + _GRACE_SECONDS
    for child in _children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
