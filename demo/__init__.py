"""``make demo``: from text to an exported model, on GPUs or on a laptop's CPU. Start with ``__main__.py``."""
