"""Files and folders: written atomically, locked, read safely.

Read ``atomic_folder.py`` first: token datasets, checkpoints and exports are all written through it.
"""
