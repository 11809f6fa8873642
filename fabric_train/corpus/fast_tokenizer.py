"""The ``tokenizers`` library's own tokenizer of a ``tokenizer.json``, for whole documents."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def load_fast(tokenizer_file: Path, special_text_is_plain: bool) -> "Tokenizer":
    """Load the tokenizer; what it may be set to cut off or fill up is left alone."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = special_text_is_plain
    return tokenizer
