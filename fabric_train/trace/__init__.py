"""Which documents a step read, and which steps and checkpoints read a document, from checkpoints and token datasets.

Open ``run_history.py`` first: it puts together which run took which steps, and the data that each of them read.
"""
