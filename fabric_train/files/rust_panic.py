"""Turn a panic of a library written in Rust, such as tokenizers, into an ordinary error."""

from collections.abc import Iterator
from contextlib import contextmanager

from fabric_train.cli.errors import InputError, first_line

_SHOWN_CHARACTERS = 60


class RustPanicError(ValueError):
    """A library written in Rust has ended what it was asked for."""


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise RustPanicError in place of pyo3's PanicException, which is no Exception and cannot be imported."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise RustPanicError(f"tokenizers fails: {first_line(error)}") from None
        raise


def refuse_text(panic: RustPanicError, text: str) -> InputError:
    """Return the error of a tokenizer that cannot encode a text, such as by a pattern that takes too many steps."""
    start = f"{text[:_SHOWN_CHARACTERS]!r}"
    return InputError(f"{panic}, in the text that begins with {start}; leave it out, or use another tokenizer")
