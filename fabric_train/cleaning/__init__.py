"""Clean documents before they are encoded: drop some, change some, and count both.

Open ``cleaner.py`` first: it applies the steps in a fixed order. Each switch of ``tokenize_dataset.py`` has its
own module. ``results.py`` has the results of a step, and ``dropped.py`` the files that show dropped documents.
"""
