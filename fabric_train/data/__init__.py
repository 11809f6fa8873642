"""Read the rows of token datasets and streams, and make the micro-batches of each optimizer step.

Open ``step_sampler.py`` first: it defines the order of the rows and how they are split among ranks. ``batch.py`` makes
the input of one forward pass. ``stream_batches.py`` does the same for ``--streaming_dataset``.
"""
