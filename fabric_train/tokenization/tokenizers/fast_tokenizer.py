"""Load a ``tokenizer.json`` with the ``tokenizers`` library."""

from pathlib import Path
from typing import TYPE_CHECKING

from fabric_train.cli.errors import InputError
from fabric_train.files.rust_panic import panics_as_errors

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def load_fast(tokenizer_file: Path, special_text_is_plain: bool) -> "Tokenizer":
    """Load the tokenizer without truncation and padding.

    Args:
        tokenizer_file: the ``tokenizer.json``.
        special_text_is_plain: whether the text of a special token is encoded as text, not as the token.

    Raises:
        InputError: the file is damaged.
    """
    from tokenizers import Tokenizer

    try:
        with panics_as_errors():
            tokenizer = Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:  # noqa: BLE001 - tokenizers raises no narrower type
        reason = str(error).splitlines()[0]
        raise InputError(f"{tokenizer_file} is not a tokenizer: {reason}; fetch the file again") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = special_text_is_plain
    return tokenizer
