"""Drop documents of low quality by published rules. Open ``quality_filter.py`` first.

The rules are those of datatrove 0.10, which is the reference, and decide the same if it gets the same words. Its own
words come from spaCy, with which it reads half a megabyte a second. Other differences: blank lines and white space at
the end of a line do not count, and C4's lines may end in the closing quotes of Spanish and Catalan.
"""
