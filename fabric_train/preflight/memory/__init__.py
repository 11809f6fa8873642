"""``--plan``: the memory, disk and traffic that a run needs, computed before it starts.

Read ``plan.py`` first. ``activations.py`` traces the model, ``device_memory.py`` adds what the strategies hold,
``fitting.py`` looks for arguments that fit.
"""
