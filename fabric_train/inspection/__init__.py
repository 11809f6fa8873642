"""Show a token dataset: count its rows, compare them with the manifest, print rows; or compare it with another one.

Open ``report.py`` first, or ``comparison.py`` for two; ``rendering.py`` shows what they return.
"""
