"""Documents and chats to a token dataset on disk: read, encode, select, pack. ``tokenize_dataset.py`` runs it.

Read ``build.py`` first: it shows every stage in order. ``reading/`` yields source rows, ``tokenizers/`` and ``chats/``
turn them into ids, ``packing/`` packs the ids into rows of equal length, and ``manifest.py`` records what was done.
``inspect/`` and ``merge.py`` are programs of their own.
"""
