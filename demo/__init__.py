"""``make demo``: the way from text to an exported model, on GPUs or on a laptop's CPU. Read ``__main__.py`` first."""
