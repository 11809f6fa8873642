"""The former name of ``tokenization``, kept for ``python -m fabric_train.corpus.inspect`` and ``….merge``."""

from fabric_train.tokenization import __path__

__all__ = ["__path__"]
