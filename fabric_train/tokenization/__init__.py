"""From documents and chats to a token dataset on disk: read, encode, select, pack. ``tokenize_dataset.py`` drives it.

Read ``build.py`` first: it shows the whole way. ``reading/`` yields rows, ``tokenizers/`` and ``chats/`` turn them into
ids, ``packing/`` cuts rows, ``manifest.py`` records what was done; ``inspect/`` and ``merge.py`` are programs.
"""
