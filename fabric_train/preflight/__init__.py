"""Check and plan a run before a process group exists. Read ``prepare.py`` first, which does the checks in order.

``memory_plan.py`` is ``--plan``: the memory, disk and traffic of a run that has not started. ``automatic.py`` decides
what ``auto`` becomes.
"""
