"""Show a token dataset: count its rows, compare them with the manifest, print rows.

Read ``report.py`` first.
"""
