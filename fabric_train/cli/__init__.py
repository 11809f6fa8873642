"""Handle command lines: arguments from argv, YAML and the launcher's variables; exit codes; output without secrets.

Read ``errors.py`` first: every program ends there. ``parser.py`` builds the dataclasses of arguments from values that
``argument_types.py`` converts and checks.
"""
