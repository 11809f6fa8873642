"""Plan the rows of a token dataset, write them to disk with an index and a manifest, and read them.

Open ``rows.py`` first: it plans the rows. ``arrow_folder.py`` writes a split, ``token_folder.py`` reads one, and
``document_index.py`` says which documents are in a row. ``manifest.py`` records what a token dataset was made from.
"""
