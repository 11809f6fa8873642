"""Clean documents before they are encoded: drop some, change some, and count both.

Open ``cleaner.py`` first: it has the order of the steps. Each switch of ``tokenize_dataset.py`` is a module of its own;
``dropped.py`` has what they return, and the files that show it.
"""
