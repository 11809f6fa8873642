"""Show a token dataset: count its rows, compare them with the manifest, print rows.

Read ``report.py`` first; ``terminal.py`` and ``page.py`` show what it returns.
"""
