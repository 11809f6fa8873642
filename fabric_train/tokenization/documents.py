"""An encoded document, one that is left out, and the error for a row that cannot be used."""

from dataclasses import dataclass

import numpy as np

from fabric_train.cli.errors import InputError


@dataclass(frozen=True)
class EncodedDocument:
    """A document or a chat as tokens, BOS and EOS included.

    Args:
        input_ids: int32 [number of tokens].
        supervised: bool [number of tokens], whether the token is a target; None if all are.
        num_characters: code points of the encoded text; of a chat, of the content of its messages.
        num_bytes: UTF-8 bytes of the same.
        num_tokens_cut: tokens of the turns that were removed because they did not fit into a row.
        turn_ends: the ids of the control tokens with which supervised turns of a chat end.
    """

    input_ids: np.ndarray
    supervised: np.ndarray | None
    num_characters: int
    num_bytes: int
    num_tokens_cut: int = 0
    turn_ends: frozenset[int] = frozenset()


@dataclass(frozen=True)
class LeftOut:
    """A document that is left out: the ledger's reason, and its tokens if it did not fit into a row."""

    reason: str
    num_tokens_cut: int = 0


def utf8_length(text: str) -> int:
    """Return the number of bytes of ``text`` in UTF-8; half of a surrogate pair has three."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


class BadRowError(ValueError):
    """A row that cannot be used. The message names the fault and, once a reader has added it, the place."""

    def fault(self) -> InputError:
        """Return the error that ends the run with ``--on_bad_rows fail``."""
        return InputError(f"{self}; --on_bad_rows skip leaves such rows out")
