"""Command lines: arguments from argv, YAML and the launcher's variables; exit codes; output without secrets.

Read ``errors.py`` first: it says how every program ends. ``parser.py`` builds the dataclasses of ``arguments.py``.
"""
