"""Load and compare tokenizers, and encode texts with them, using gigatoken where it gives the same ids.

Read ``tokenizer.py`` (loading) and ``text_encoder.py`` (encoding) first.
"""
