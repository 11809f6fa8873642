"""Chats and instructions to tokens with labels."""
