"""Turn a panic of a library written in Rust, such as tokenizers, into an ordinary error."""

from collections.abc import Iterator
from contextlib import contextmanager

from fabric_train.cli.errors import first_line


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise ValueError instead of pyo3's PanicException, which is no Exception and whose class cannot be imported."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise ValueError(f"tokenizers fails: {first_line(error)}") from None
        raise
