"""The training loop and what it calls once a step: loss, guard, metrics, loggers, evaluation.

Read ``loop.py`` first, then ``loss.py``. ``build_run.py`` builds what the loop drives.
"""
