"""Keep standard output and standard error writable: nobody has to read what a program prints."""

import errno
import io
import os
import select
import sys

_GONE = (errno.EPIPE, errno.EBADF, errno.EIO, errno.ECONNRESET)  # reader has ended, closed, terminal has gone


class _LastingFile(io.FileIO):
    """A file descriptor whose errors end no program: what cannot be written is dropped."""

    def write(self, data: bytes) -> int:  # type: ignore[override]
        """Write all of ``data``, or drop what cannot be written."""
        left = memoryview(data)
        while left:
            try:
                written = super().write(left)
            except OSError as error:
                if error.errno in _GONE:  # later writes go nowhere, also those of native libraries
                    _redirect_to_null(self.fileno())
                break
            if written is None:  # another program has made the terminal non-blocking
                select.select([], [self], [])
            left = left[written or 0 :]
        return len(data)


def keep_streams_writable() -> None:
    """Let no error of standard output or standard error reach the program, from now on.

    A reader such as ``tee`` or ``head`` may end, a terminal may go away, a disk may fill up, and a stream may be closed
    from the start (``>&-``). In all these cases the program goes on, prints to nowhere and keeps its exit code.
    Characters that the stream's encoding lacks are escaped. Every line is written at once, so nothing has to be flushed
    when the program ends.

    Call it before anything else opens a file: a file could get the number of a closed stream.
    """
    for descriptor in (0, 1, 2):
        if not _is_open(descriptor):
            _redirect_to_null(descriptor)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        replaced = getattr(sys, name)
        stream = io.TextIOWrapper(
            _LastingFile(descriptor, "w", closefd=False),
            encoding=replaced.encoding if replaced else "utf-8",
            errors="backslashreplace",
            line_buffering=True,
        )
        setattr(sys, name, stream)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _redirect_to_null(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)
