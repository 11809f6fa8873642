"""The reason why gigatoken does not encode for a tokenizer."""


class UnsupportedTokenizerError(ValueError):
    """An error for a tokenizer that gigatoken does not take; its message is a phrase with the reason."""
