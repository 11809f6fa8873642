"""Tokenizers: loaded, compared, and expressed so that tiktoken encodes by them."""
