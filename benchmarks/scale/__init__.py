"""Measure how parts of the program grow with ranks, rows, dataset parts and weights, further than one machine goes."""
