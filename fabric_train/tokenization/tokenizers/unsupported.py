"""The reason why tiktoken cannot encode for a tokenizer."""


class UnsupportedTokenizerError(ValueError):
    """An error for a tokenizer whose ids tiktoken cannot reproduce; its message is a phrase with the reason."""
