"""Measure how well tokenizers work for a language, and extend a model's vocabulary with tokens for it.

Read ``report.py`` (the figures and the recommendation) and ``extend.py`` (the new model folder) first.
"""
