"""Find which documents a step read, and which steps and checkpoints read a document.

Open ``run_history.py`` first: it finds out from checkpoints which run took which steps, and which data they read.
"""
