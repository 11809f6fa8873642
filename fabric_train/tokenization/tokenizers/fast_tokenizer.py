"""The ``tokenizers`` library's own tokenizer of a ``tokenizer.json``, for whole documents."""

from pathlib import Path
from typing import TYPE_CHECKING

from fabric_train.cli.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def load_fast(tokenizer_file: Path, special_text_is_plain: bool) -> "Tokenizer":
    """Load the tokenizer, which is set to cut nothing off and to fill nothing up.

    Raises:
        InputError: the file is damaged.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:  # noqa: BLE001 - tokenizers raises nothing narrower
        reason = str(error).splitlines()[0]
        raise InputError(f"{tokenizer_file} is not a tokenizer: {reason}; fetch the file again") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = special_text_is_plain
    return tokenizer
