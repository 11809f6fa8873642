"""Encode chats and instructions as token ids with labels.

Open ``chat_encoder.py`` first: it uses ``chat_template`` (text) and ``control_tokens`` (ids).
"""
