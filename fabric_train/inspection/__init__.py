"""Show a token dataset: count its rows, compare them with the manifest, print rows; compare two token datasets.

Open ``report.py`` first, or ``comparison.py`` for two; ``rendering.py`` shows what they return.
"""
