"""Encode chats as token ids with labels. Open ``chat_encoder.py`` first, then ``chat_template``, ``control_tokens``."""
