"""What travels from the readers to the rows: a document's text, and its tokens."""

from dataclasses import dataclass

import numpy as np

from fabric_train.cli.errors import InputError


@dataclass(frozen=True)
class EncodedDocument:
    """A document or a chat as tokens, BOS and EOS included.

    Args:
        input_ids: int32 [number of tokens].
        supervised: bool [number of tokens], whether the token is a target; None where all are.
        num_characters: code points of the text that was encoded.
        num_tokens_cut: tokens of turns that were taken off because they did not fit into a row.
    """

    input_ids: np.ndarray
    supervised: np.ndarray | None
    num_characters: int
    num_tokens_cut: int = 0


class BadRowError(ValueError):
    """A row that cannot be used; the message says what is wrong with it and, once a reader has added that, where."""

    def fault(self) -> InputError:
        """Return what ends the run where such rows are not to be left out."""
        return InputError(f"{self}; --on_bad_rows skip leaves such rows out")
