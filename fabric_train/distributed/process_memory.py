"""The resident memory of this process; a module of its own because the encoding processes need no torch."""

import os
from pathlib import Path


def process_memory() -> int:
    """Return the resident memory of this process in bytes; 0 if the system is not Linux."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.is_file() else 0
