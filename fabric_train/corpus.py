"""The former name of ``tokenization``: ``python -m fabric_train.corpus.inspect`` and ``….merge`` keep working."""

from fabric_train.tokenization import __path__

__all__ = ["__path__"]
