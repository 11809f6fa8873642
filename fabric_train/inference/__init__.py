"""Text from prompts: one, a chat, or a file of them. ``generate.py`` at the top runs it.

Open ``generate.py`` first. ``load_model.py`` loads any model, ``prompts.py`` makes token ids of prompts, writes the
texts for a file of them, and has the conversation in a terminal.
"""
