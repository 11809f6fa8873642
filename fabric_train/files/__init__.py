"""Files and folders: atomic writes, locks, safe paths, JSON of others.

Read ``atomic_folder.py`` first: token datasets, checkpoints and exports are all written through it.
"""
