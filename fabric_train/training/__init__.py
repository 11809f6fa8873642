"""The training loop and what it calls: step, objective, evaluation, metrics, loggers, self-check, tables.

Read ``loop.py`` first, then ``step.py`` and ``objective.py``. ``build_run.py`` builds the parts that the loop uses.
"""
