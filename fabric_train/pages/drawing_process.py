"""Draw in a separate process: vl-convert has a JavaScript engine, whose crash would otherwise end a training.

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

_MAX_SECONDS = 120
_IDLE_SECONDS = 15.0  # after which the process ends: its engine takes 200 MB
_LOCK = threading.Lock()


class DrawError(RuntimeError):
    """The drawing process failed; the message says why in one line."""


class _EndedError(DrawError):
    """The drawing process has ended before it answered."""


def run(kind: str, text: str, output: Path) -> None:
    """Let the drawing process write a file.

    Args:
        kind: "png" for a picture of a specification in Vega-Lite, "javascript" for the libraries that draw in a page.
        text: The specification; not used for "javascript".
        output: The file.

    Raises:
        DrawError: the process failed, or took longer than two minutes.
        OSError: it could not be started.
    """
    request = json.dumps([kind, text, os.fspath(output.absolute())]) + "\n"
    owner_pid = os.getpid()
    with _LOCK:
        try:
            answer = _request(_drawing_process(owner_pid), request)
        except _EndedError:  # it may have ended because it was idle: start another one
            answer = _request(_drawing_process(owner_pid), request)
    if answer != "drawn\n":
        raise DrawError(f"drawing failed: {answer.strip()}")


@lru_cache(maxsize=1)
def _drawing_process(owner_pid: int) -> "subprocess.Popen[str]":
    """Return the drawing process of the process ``owner_pid``, which is this process; start it on the first call.

    The cache keeps it by the process id, because a fork inherits the cache but must not share its parent's drawing
    process, whose answers would get mixed up: a fork has another id, so it starts its own.
    """
    return subprocess.Popen(
        [sys.executable, __file__],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def _request(process: "subprocess.Popen[str]", request: str) -> str:
    """Send a request to the drawing process, and return the line that it answers.

    Raises:
        DrawError: it does not answer in time, or has ended; then it is cleaned up, and the next call starts another.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    is_late = False
    with suppress(BrokenPipeError):  # it has ended
        process.stdin.write(request)
        process.stdin.flush()
        readable, _, _ = select.select([process.stdout], [], [], _MAX_SECONDS)
        is_late = not readable
        answer = process.stdout.readline() if readable else ""
        if answer:
            return answer

    # clean up
    if is_late:
        process.kill()
    exit_code = process.wait()
    with suppress(BrokenPipeError):  # of a request that it has not read
        process.stdin.close()
    process.stdout.close()
    _drawing_process.cache_clear()

    if is_late:
        raise DrawError(f"drawing failed: no response within {_MAX_SECONDS} s")
    ending = f"by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"with exit code {exit_code}"
    raise _EndedError(f"drawing failed: its process was killed {ending}, perhaps because memory ran out")


def main() -> None:
    """Answer the requests on standard input, until they end or none has come for some seconds.

    A request is a line of JSON: the kind to write, "png" or "javascript", a specification, and the file to write.
    """
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], _IDLE_SECONDS)
        line = sys.stdin.readline() if readable else ""
        if not line:
            return
        kind, text, output = json.loads(line)
        try:
            import vl_convert  # only in this process

            if kind == "png":
                Path(output).write_bytes(vl_convert.vegalite_to_png(text, scale=2))
            else:
                script = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed")
                Path(output).write_text(script, encoding="utf-8")
            print("drawn", flush=True)
        except Exception as error:  # noqa: BLE001 - the caller reports it
            print(f"{type(error).__name__}: {error}".splitlines()[0], flush=True)


if __name__ == "__main__":
    main()
