"""Generate text from a prompt, a chat, or a file of prompts, for the program ``generate.py``.

Open ``generate.py`` first. ``load_model.py`` loads any model, ``prompt_file.py`` reads prompts and ``prompts.py`` makes
token ids. ``conversation.py`` continues one prompt or a chat, and ``text_file.py`` writes the texts for a file.
"""
