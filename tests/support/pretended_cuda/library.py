"""The compiled devices, and what they note: where the host waits, contexts, late copies, collectives, memory."""

import ctypes
import json
import os
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

_THIS_FOLDER = str(Path(__file__).resolve().parent)
_ROOT = str(Path(__file__).resolve().parents[3])
_NOTE = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
MAX_DEVICES = 16


class Devices:
    """The functions of the library, and the notes of this process.

    ``waits`` counts the host's waits for a device, ``late_copies`` the copies to the host that were delayed, both by
    place; ``contexts`` has the place where this process has made a context on a device, by index.
    """

    def __init__(self, path: str, num_devices: int) -> None:
        """Load the library, before torch asks for the first time whether there are devices."""
        self._library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        for name, result in {
            "get_stream": ctypes.c_int64,
            "allocated": ctypes.c_int64,
            "peak": ctypes.c_int64,
            "collectives": ctypes.c_char_p,
            "has_context": ctypes.c_bool,
        }.items():
            self[name].restype = result
        self["set_stream"].argtypes = [ctypes.c_int, ctypes.c_int64]
        self["set_copy_delay"].argtypes = [ctypes.c_int64]
        self.num_devices = num_devices
        self.waits: Counter[str] = Counter()
        self.late_copies: Counter[str] = Counter()
        self.contexts: dict[str, str] = {}
        self._lock = threading.Lock()
        self._callback = _NOTE(self._note)
        self["start"](num_devices, self._callback)

    def __getitem__(self, name: str) -> Any:
        """Return a function of the library."""
        return getattr(self._library, f"pretended_{name}")

    def begin(self, num_devices: int, copy_delay: float) -> None:
        """Begin a program: with so many devices, and copies that arrive this many seconds after something waits."""
        self.num_devices = num_devices
        self.waits = Counter()
        self.late_copies = Counter()
        self.contexts = {}
        self["set_device_count"](num_devices)
        self["set_copy_delay"](int(copy_delay * 1e6))

    def write_notes(self, file: Path) -> None:
        """Write the notes as JSON."""
        num_collectives = {}
        for line in self["collectives"]().decode().splitlines():
            name, count = line.split()
            num_collectives[name] = int(count)
        notes = {
            "waits": self.waits,
            "late_copies": self.late_copies,
            "contexts": self.contexts,
            "collectives": num_collectives,
            "peak_bytes": max(self["peak"](index) for index in range(MAX_DEVICES)),
        }
        file.write_text(json.dumps(notes), encoding="utf-8")

    def _note(self, event: bytes) -> None:
        kind, _, subject = event.decode().partition(" ")
        place = _describe_place(sys._getframe().f_back)  # none in a thread without Python
        with self._lock:
            if kind == "wait":
                operation = subject
                self.waits[f"{operation} at {place}"] += 1
            elif kind == "late":
                self.late_copies[place] += 1
            else:
                device_index = subject
                self.contexts[device_index] = f"{threading.current_thread().name} at {place}"


def _describe_place(frame: FrameType | None) -> str:
    """Return the project's innermost line, with the project's functions that led to it, innermost first.

    Without one, as in a thread of autograd, it is the innermost line of all.
    """
    functions = []
    project_line = ""
    innermost_line = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_THIS_FOLDER):
            innermost_line = innermost_line or f"{file}:{frame.f_lineno}"
            is_of_project = file.startswith(_ROOT) and "site-packages" not in file
            if is_of_project:
                file = os.path.relpath(file, _ROOT)
            if is_of_project or file == "<string>":  # of a test, which has changed the program
                project_line = project_line or f"{file}:{frame.f_lineno}"
                functions.append(frame.f_code.co_name)
        frame = frame.f_back
    if project_line:
        return f"{project_line} {' < '.join(functions)}"
    return innermost_line or "a thread without Python"
