"""A trained model in use: text from a prompt. ``generate.py`` drives it."""
