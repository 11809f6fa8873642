"""Identify the language of a text with py3langid, whose model is part of its package.

It is naive Bayes on n-grams of bytes for 140 languages (Lui and Baldwin 2012, ACL P12-3005; py3langid has a model of
its own). ``docs/cleaning.md`` compares it with other identifiers.
"""

from functools import lru_cache
from importlib.metadata import version
from typing import Any

import numpy as np

from fabric_train.cli.errors import InputError

PIECES, PIECE_CHARACTERS, CERTAIN = 3, (150, 300), 0.95
"""At most this number of pieces of a text are looked at, spaced evenly from its beginning to its end.

They are longer if the identifier is not certain of the short ones. Each stretch of white space counts as one character:
the identifier divides by the length of the text, so that wide margins make it less certain.
"""
_PIECE_WITH_MARGINS = 6_000  # where a piece of a long text is taken from


@lru_cache(maxsize=1)  # several steps ask for the same document
def identify(text: str) -> tuple[str, float]:
    """Return the most likely language of a text, and its probability between 0 and 1.

    The language is an ISO 639-1 code, or one of ISO 639-3 where there is none; ``zxx`` is no language. Valencian is
    ``ca``. A text without letters has a probability near 0.
    """
    words = _words(text)
    for characters in PIECE_CHARACTERS:
        language, probability = _identifier().classify(_sample(words, characters))
        if probability >= CERTAIN:
            break
    return language, probability


def language_probabilities(text: str) -> dict[str, float]:
    """Return the probability of each language that the identifier knows."""
    return dict(_identifier().rank(_sample(_words(text), PIECE_CHARACTERS[-1])))


def known_languages() -> list[str]:
    """Return the codes that ``identify`` can return."""
    return sorted(_identifier().labels)


def identifier_settings() -> dict[str, Any]:
    """Return what decides the result of ``identify``."""
    pieces = {"pieces": PIECES, "piece_characters": list(PIECE_CHARACTERS), "certain": CERTAIN}
    return {"identifier": f"py3langid {version('py3langid')}", **pieces}


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


def _words(text: str) -> list[str]:
    """Return the whole of a text, or parts of a long one, with a space for each stretch of white space."""
    is_long = len(text) > PIECES * _PIECE_WITH_MARGINS
    return [" ".join(part.split()) for part in (_evenly_spaced(text, _PIECE_WITH_MARGINS) if is_long else [text])]


def _sample(words: list[str], num_characters: int) -> str:
    if len(words) == 1 and len(words[0]) > PIECES * num_characters:
        words = _evenly_spaced(words[0], num_characters)
    elif len(words) > 1:
        words = [part[:num_characters] for part in words]
    return "\n".join(words)


def _evenly_spaced(text: str, num_characters: int) -> list[str]:
    step = (len(text) - num_characters) // (PIECES - 1)
    return [text[start : start + num_characters] for start in range(0, PIECES * step, step)]
