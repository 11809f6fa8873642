"""Why a tokenizer is not encoded by tiktoken."""


class NotExpressibleError(ValueError):
    """tiktoken could not be made to give this tokenizer's ids; the message is one phrase that says why."""
