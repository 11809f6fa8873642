"""Text from prompts: one, a chat, or a file of them. ``generate.py`` at the top runs it.

Open ``generate.py`` first. ``load_model.py`` loads any model, ``prompts.py`` makes token ids of prompts and writes the
texts for a file of them, ``chat.py`` is the conversation in a terminal.
"""
