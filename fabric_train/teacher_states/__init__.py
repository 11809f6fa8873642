"""A teacher's values for the rows of a token dataset, computed once: stored, read in training, and the program for it.

Open ``__main__.py`` first for the arguments, ``teach.py`` for the course of the program, and ``record.py`` for what a
folder has. ``data.teacher_states`` has the values in a batch.
"""
