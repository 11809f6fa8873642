"""Encoded documents to rows of equal length, and rows to the folder of a split and back.

Read ``rows.py`` first: it plans the rows. ``arrow_folder.py`` writes a split and
``token_folder.py`` reads a token dataset.
"""
