"""Load and compare tokenizers, and encode texts with them, by gigatoken where it gives the same ids.

Read ``tokenizer.py`` (loading) and ``text_encoder.py`` (encoding) first.
"""
