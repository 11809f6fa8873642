"""Compare models by their loss on texts; ``evaluate.py`` at the top runs it.

Open ``compare_models.py`` first. ``texts.py`` has the documents, ``encoded_text.py`` their tokens and windows,
``token_losses.py`` a model's losses.
"""
