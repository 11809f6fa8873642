"""Translate the training file of another program into one of this project and the command that tokenizes its data."""
