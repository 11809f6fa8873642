"""From the rows of a token dataset, or a stream of texts, to the micro-batches of each optimizer step.

Read ``step_sampler.py`` first: the order of the rows and how a window is cut among ranks. ``batch.py`` is what one
forward pass gets.
"""
