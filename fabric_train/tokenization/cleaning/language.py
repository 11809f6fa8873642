"""Identify the language of a text with py3langid, whose model is part of its package.

It is naive Bayes on n-grams of bytes for 140 languages (Lui and Baldwin 2012, ACL P12-3005; py3langid has a model of
its own). ``docs/cleaning.md`` compares it with other identifiers.
"""

from functools import lru_cache
from importlib.metadata import version
from typing import Any

import numpy as np

from fabric_train.cli.errors import InputError

PIECES, PIECE_CHARACTERS = 3, 150
"""At most this number of pieces of a text are looked at, spaced evenly from its beginning to its end."""


@lru_cache(maxsize=1)  # several steps ask for the same document
def identify(text: str) -> tuple[str, float]:
    """Return the most likely language of a text, and its probability between 0 and 1.

    The language is an ISO 639-1 code, or one of ISO 639-3 where there is none; ``zxx`` is no language. Valencian is
    ``ca``. A text without letters has a probability near 0.
    """
    language, probability = _identifier().classify(_sample(text))
    return language, probability


def language_probabilities(text: str) -> dict[str, float]:
    """Return the probability of each language that the identifier knows."""
    return dict(_identifier().rank(_sample(text)))


def known_languages() -> list[str]:
    """Return the codes that ``identify`` can return."""
    return sorted(_identifier().labels)


def identifier_settings() -> dict[str, Any]:
    """Return what decides the result of ``identify``."""
    return {"identifier": f"py3langid {version('py3langid')}", "pieces": PIECES, "piece_characters": PIECE_CHARACTERS}


def load_identifier(option: str) -> None:
    """Load the model, so that processes that are forked later share it.

    Raises:
        InputError: py3langid is not installed.
    """
    try:
        _identifier()
    except ModuleNotFoundError:
        raise InputError(f"{option} needs py3langid; pip install 'fabric-train[cleaning]'") from None


@lru_cache(maxsize=1)
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    identifier.nb_ptc = identifier.nb_ptc.astype(np.float32)  # as float16, it would be converted for every text
    return identifier


def _sample(text: str) -> str:
    if len(text) <= PIECES * PIECE_CHARACTERS:
        return text
    step = (len(text) - PIECE_CHARACTERS) // (PIECES - 1)
    return "\n".join(text[start : start + PIECE_CHARACTERS] for start in range(0, PIECES * step, step))
