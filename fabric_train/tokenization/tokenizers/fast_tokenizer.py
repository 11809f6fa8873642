"""Load a ``tokenizer.json`` with the ``tokenizers`` library; panics of its Rust code become errors."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fabric_train.cli.errors import InputError, first_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SHOWN_CHARACTERS = 60


class RustPanicError(ValueError):
    """A library written in Rust has panicked."""


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise RustPanicError in place of pyo3's PanicException.

    A PanicException is not an Exception, so callers would not catch it, and its class cannot be imported.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise RustPanicError(f"the tokenizers library failed: {first_line(error)}") from None
        raise


def refuse_text(panic: RustPanicError, text: str) -> InputError:
    """Return the error for a text that the tokenizer cannot encode: a split pattern may take too many steps."""
    beginning = f"{text[:_SHOWN_CHARACTERS]!r}"
    return InputError(
        f"{panic}, in the text that begins with {beginning}; leave the text out, or use another tokenizer"
    )


def load_fast(tokenizer_file: Path, special_text_is_plain: bool) -> "Tokenizer":
    """Load a ``tokenizer.json`` without truncation and padding; InputError if the file is damaged.

    With ``special_text_is_plain``, the text of a special token in a document is encoded as text, not as the token.
    """
    from tokenizers import Tokenizer

    try:
        with panics_as_errors():
            tokenizer = Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:  # noqa: BLE001 - tokenizers raises no narrower type
        reason = str(error).splitlines()[0]
        raise InputError(f"{tokenizer_file} is not a tokenizer: {reason}; download the file again") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = special_text_is_plain
    return tokenizer
