"""Read sources of documents (files, folders, URLs, datasets) and the rows in them.

Read ``sources.py`` first: it opens what ``--dataset`` names. ``listing.py`` lists and opens local files, ``files.py``
reads the rows of one file, and ``hf_datasets.py`` the rows of datasets. ``documents.py`` defines a document.
"""
