"""Atomic writes, locks, safe paths, JSON of others. Read ``atomic_folder.py`` first: all output goes through it."""
