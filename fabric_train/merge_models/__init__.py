"""Merge models into one: average, interpolate, or add what several of them have learned to their base.

Open ``merge.py`` first: it merges and verifies. ``tensors.py`` has the formulas.
"""
