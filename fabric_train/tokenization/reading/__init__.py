"""Sources of documents (files, folders, URLs, datasets) and the rows in them.

Read ``sources.py`` first: it opens what ``--dataset`` names. ``files.py`` then reads the rows of one file.
"""
