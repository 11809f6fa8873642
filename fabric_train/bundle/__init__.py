"""Everything that a run needs, in one folder for a machine without internet.

Open ``collect.py`` first: it writes the folder, whose ``install.sh`` is the one that lies here.
"""
