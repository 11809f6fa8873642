"""Encoded documents to rows of equal length, and rows to the folder of a split and back.

Open ``rows.py`` first: it plans the rows. ``arrow_folder.py`` writes a split, ``token_folder.py`` reads one, and
``document_index.py`` says which documents are in a row.
"""
