"""Measure how well tokenizers serve a language, and extend the vocabulary of a model by tokens for it.

Read ``report.py`` (the figures and the recommendation) and ``extend.py`` (the new model folder) first.
"""
