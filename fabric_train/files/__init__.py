"""Atomic writes, locks, safe paths, untrusted JSON. Read ``atomic_folder.py`` first: all output goes through it."""
