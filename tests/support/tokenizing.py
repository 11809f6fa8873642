"""Run tokenize_dataset.py in a process group of its own, and act while it runs."""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fabric_train.programs import tokenize_dataset


def start(tmp_path: Path, tokenizer: Path, sources: Sequence[Path], *options: object) -> "subprocess.Popen[str]":
    """Start the program, which writes to ``tmp_path/new/out``."""
    argv = ["--dataset", *sources, "--tokenizer_name", tokenizer, "--output_dir", tmp_path / "new" / "out", *options]
    command = [sys.executable, tokenize_dataset.__file__, *(str(argument) for argument in argv)]
    # a session of its own, so that a test can send a signal to the program and its workers, and not to itself
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def wait_for_shards(process: "subprocess.Popen[str]", folder: Path, count: int) -> None:
    """Wait until ``count`` shards in ``folder`` are finished, or the program has ended."""
    while len(list(folder.glob(".out.unfinished/*.npz"))) < count and process.poll() is None:
        time.sleep(0.02)


def finish(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """Wait for the program's end; return its exit code and standard error."""
    _, stderr = process.communicate(timeout=120)
    return process.returncode, stderr
