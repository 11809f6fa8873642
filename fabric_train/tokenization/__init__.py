"""Turn documents and chats into a token dataset on disk, for the program ``tokenize_dataset.py``.

Read ``build.py`` first: it shows every stage in order. ``encoding.py`` reads the rows of sources, cleans them and
encodes them with ``tokenizers/`` and ``chats/``. ``selection.py`` chooses the documents of each split, which
``fabric_train/token_dataset/`` packs into rows and writes. ``slices.py`` runs the tasks of ``--shard I/N``, and
``merge.py`` is a separate program.
"""
