"""Documents and chats to a token dataset on disk: read, encode, select, pack. ``tokenize_dataset.py`` runs it.

Read ``build.py`` first: it shows every stage in order. ``reading/`` yields the rows of sources, ``encoding.py`` turns
them into ids with ``tokenizers/`` and ``chats/``, ``packing/`` packs the ids into rows of equal length, and
``manifest.py`` records the work. ``slices.py`` are the tasks of ``--shard I/N``; ``inspect/`` and ``merge.py`` are
programs of their own.
"""
