"""Sources of documents (files, folders, URLs, datasets) and the rows in them.

Read ``opening.py`` first: it opens what ``--dataset`` names. ``sources.py`` has what it returns, and ``files.py`` reads
the rows of one file.
"""
