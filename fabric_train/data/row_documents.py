"""Name the document that a piece of a row belongs to: source, file, place and first words."""

import numpy as np

from fabric_train.data.token_dataset import TokenDataset
from fabric_train.tokenization.inspect.row_view import visible
from fabric_train.tokenization.tokenizers.vocabulary import load_vocabulary

_DECODED_TOKENS = 32
_SHOWN_CHARACTERS = 60


def describe_piece(dataset: TokenDataset, row: int, piece: int) -> str | None:
    """Return where the document of a piece comes from, and the piece's first words; None without a document index.

    Args:
        dataset: the token dataset.
        row: of its train split.
        piece: its number in the row, from 0.

    Raises:
        InputError: the document index or the tokenizer is damaged.
    """
    index = dataset.train.index
    if index is None:
        return None
    pieces = index.pieces(np.array([row]))
    begin, length = int(pieces.positions[piece]), int(pieces.lengths[piece])
    ids = dataset.train.read([row])[0][0][begin : begin + min(length, _DECODED_TOKENS)].tolist()
    vocabulary = load_vocabulary(dataset.folder / "tokenizer")
    text = vocabulary.tokenizer.decode(ids, skip_special_tokens=True) if vocabulary else ""
    words = visible(" ".join(text.strip("\ufffd").split()))[:_SHOWN_CHARACTERS]
    return f"{index.origin(int(pieces.documents[piece]))} “{words}…”"
