"""Text generation; ``generate.py`` at the top runs it."""
