"""Text from prompts: one, a chat, or a file of them. ``generate.py`` at the top runs it.

Open ``generate.py`` first. ``load_model.py`` loads any model, ``prompt_file.py`` reads prompts and ``prompts.py`` makes
token ids of them. ``conversation.py`` continues one prompt or a chat, and ``text_file.py`` writes the texts for a file.
"""
