"""Checks and plans before a process group exists. Read ``prepare.py`` first: the checks in their order.

``memory_plan.py`` is ``--plan``: memory, disk and traffic of a run that has not started. ``automatic.py`` decides what
``auto`` becomes.
"""
