"""``--plan``: the memory, disk and traffic that a run needs, computed before it starts.

Read ``plan.py`` first. ``activations.py`` traces the model, ``forecast.py`` adds what the strategies hold,
``plan.py`` looks for arguments that fit.
"""
