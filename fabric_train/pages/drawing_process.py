"""Draw in a process of its own: vl-convert brings a JavaScript engine, whose failure would end a training.

The process runs this file as a program, so this module imports nothing of the project.
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

_SECONDS = 120
_IDLE_SECONDS = 15.0  # then the process that draws ends: its engine takes 200 MB
_LOCK = threading.Lock()


class DrawError(RuntimeError):
    """The process that draws failed; the message says why in one line."""


class _EndedError(DrawError):
    """The process that draws has ended before it answered."""


def run(what: str, text: str, output: Path) -> None:
    """Let the other process write a file.

    Args:
        what: "png" of a specification in Vega-Lite, or "javascript", the libraries that draw in a page.
        text: the specification.
        output: the file.

    Raises:
        DrawError: the process failed, or took longer than two minutes.
        OSError: it could not be started.
    """
    request = json.dumps([what, text, os.fspath(output.absolute())]) + "\n"
    with _LOCK:
        try:
            answer = _answer(_drawing_process(os.getpid()), request)
        except _EndedError:  # it may have ended while it had nothing to do
            answer = _answer(_drawing_process(os.getpid()), request)
    if answer != "drawn\n":
        raise DrawError(f"drawing failed: {answer.strip()}")


@lru_cache(maxsize=1)
def _drawing_process(_: int) -> "subprocess.Popen[str]":
    """Return this process's drawing process; a fork of this process has another id, and starts its own."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([sys.executable, __file__], text=True, **pipes)


def _answer(process: "subprocess.Popen[str]", request: str) -> str:
    """Return the line that the process answers to a request; a DrawError if there is none, after its end."""
    assert process.stdin is not None
    assert process.stdout is not None
    is_late = False
    with suppress(BrokenPipeError):
        process.stdin.write(request)
        process.stdin.flush()
        is_late = not select.select([process.stdout], [], [], _SECONDS)[0]
        if not is_late and (answer := process.stdout.readline()):
            return answer
    if is_late:
        process.kill()
    code = process.wait()
    with suppress(BrokenPipeError):  # what it did not read
        process.stdin.close()
    process.stdout.close()
    _drawing_process.cache_clear()
    if is_late:
        raise DrawError(f"drawing failed: no answer in {_SECONDS} s")
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    raise _EndedError(f"drawing failed: its process was ended {how}, perhaps for want of memory")


def main() -> None:
    """Draw what the lines on standard input ask for, until they end or none has come for some seconds.

    A line has the kind to write, "png" or "javascript", a specification, and the file to write.
    """
    while select.select([sys.stdin], [], [], _IDLE_SECONDS)[0] and (line := sys.stdin.readline()):
        what, text, output = json.loads(line)
        try:
            import vl_convert  # here alone

            if what == "png":
                Path(output).write_bytes(vl_convert.vegalite_to_png(text, scale=2))
            else:
                script = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed")
                Path(output).write_text(script, encoding="utf-8")
            print("drawn", flush=True)
        except Exception as error:  # noqa: BLE001 - the caller reports it
            print(f"{type(error).__name__}: {error}".splitlines()[0], flush=True)


if __name__ == "__main__":
    main()
