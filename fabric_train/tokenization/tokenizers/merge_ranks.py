"""Convert the vocabulary and merges of a byte-level BPE to tiktoken's ranks, if both give the same tokens.

The ``tokenizers`` library applies the merges in the order of a *list*. tiktoken merges any two neighbours whose bytes
together are a token, the one with the lowest *rank* first, and takes a piece that is a token as a whole. Both give the
same tokens if one of these holds:

- The list merges the bytes of every token to that token.
- The list has every way to split a token in two, token by token, and pieces that are tokens are taken as a whole.

Proof: when tiktoken merges two neighbours to a token t, nothing was merged across the borders of t before. So the bytes
of t are merged as if they were alone, and alone the list merges them to t, with the same pair.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from fabric_train.tokenization.tokenizers.unsupported import UnsupportedTokenizerError

NOT_IN_VOCABULARY = -1
_NUM_BYTES = 256
_EVERY = 32


@dataclass(frozen=True)
class MergeRanks:
    """tiktoken's ranks, and the tokenizer's ids.

    Attributes:
        ranks: rank by the token's bytes.
        ids: the id of each rank, int32 [number of ranks]; NOT_IN_VOCABULARY for a byte that is not in the vocabulary.
    """

    ranks: dict[bytes, int]
    ids: np.ndarray


def check_model(model: dict[str, Any]) -> None:
    """Check that ``model`` is a BPE without options that tiktoken does not have.

    Raises:
        UnsupportedTokenizerError: it is not.
    """
    if model.get("type", "BPE") != "BPE" or not model.get("merges"):
        raise UnsupportedTokenizerError(f"its model is {model.get('type')} and not BPE with merges")
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(option):
            raise UnsupportedTokenizerError(f"its model has {option}")
    if model.get("unk_token") is not None and not model["vocab"].keys() >= _BYTE_OF_LETTER.keys():
        raise UnsupportedTokenizerError("it has a token for unknown bytes")


def merge_ranks(model: dict[str, Any], found_in_text: frozenset[str]) -> MergeRanks:
    """Return the ranks of ``model``.

    Args:
        model: a BPE that ``check_model`` accepts.
        found_in_text: added tokens, which are taken out of a text before the model gets it.

    Raises:
        UnsupportedTokenizerError: tiktoken would merge other pairs.
    """
    vocabulary: dict[str, int] = model["vocab"]
    merged = _merged(model["merges"])
    try:
        results = np.fromiter(map(vocabulary.__getitem__, merged), np.int64, len(merged))
    except KeyError as error:
        raise UnsupportedTokenizerError(f"its merges make {error}, which is not in its vocabulary") from None
    starts = np.flatnonzero(np.diff(results, prepend=-1))  # where the merges of each token begin
    order = results[starts]
    if np.bincount(order).max() > 1:
        raise UnsupportedTokenizerError("its merges are not in the order of the tokens they make")

    letters = sorted(_BYTE_OF_LETTER, key=lambda letter: vocabulary.get(letter, NOT_IN_VOCABULARY))
    names = letters + list(map(merged.__getitem__, starts.tolist()))
    ids = np.concatenate([[vocabulary.get(letter, NOT_IN_VOCABULARY) for letter in letters], order])
    tokens = _as_bytes(names)
    ranks = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(ranks) < len(tokens):
        raise UnsupportedTokenizerError("its merges make single bytes")
    if model.get("ignore_merges"):
        _check_every_token_is_made(vocabulary, ids, found_in_text)
    if len(order) == len(results):
        _check_merge_order(model["merges"], dict(zip(names, range(len(names)), strict=True)))
    elif model.get("ignore_merges"):
        _check_all_splits_listed(tokens, np.diff(starts, append=len(results)), ranks)
    else:
        raise UnsupportedTokenizerError("its merges make one token in several ways")
    return MergeRanks(ranks, ids.astype(np.int32))


def _merged(merges: list[Any]) -> list[str]:
    """Return the token that each merge makes. Older files write a merge as one string with a space in it."""
    if isinstance(merges[0], str):
        return [merge.replace(" ", "", 1) for merge in merges]
    return list(map("".join, merges))


def _letters() -> dict[str, int]:
    """Return the byte by GPT-2's letter: printable bytes are their own letter, the others start at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(_NUM_BYTES) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_LETTER = _letters()


def _as_bytes(names: list[str]) -> list[bytes]:
    """Return the bytes of the tokens ``names``, which are GPT-2's letters. One array operation handles all 128,000."""
    table = np.full(1 << 16, _NUM_BYTES, np.uint16)
    table[[ord(letter) for letter in _BYTE_OF_LETTER]] = list(_BYTE_OF_LETTER.values())
    units = table[np.frombuffer("".join(names).encode("utf-16-le", "surrogatepass"), np.uint16)]
    if (units == _NUM_BYTES).any():
        raise UnsupportedTokenizerError("its merges have characters that are not GPT-2's letters for bytes")
    content = units.astype(np.uint8).tobytes()
    ends = np.cumsum(list(map(len, names))).tolist()
    return [content[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _check_every_token_is_made(vocabulary: dict[str, int], ids: np.ndarray, found_in_text: frozenset[str]) -> None:
    """Raise if a token that no merge makes could be a whole piece of a text."""
    is_unmade = np.isin(np.fromiter(vocabulary.values(), np.int64, len(vocabulary)), ids, invert=True)
    tokens = list(vocabulary)
    for token in map(tokens.__getitem__, np.flatnonzero(is_unmade).tolist()):
        if token not in found_in_text and _BYTE_OF_LETTER.keys() >= set(token):
            raise UnsupportedTokenizerError(f"no merge makes its token {token!r}")


def _check_all_splits_listed(tokens: list[bytes], num_listed: np.ndarray, ranks: dict[bytes, int]) -> None:
    """Raise unless the list has every way to split a token in two.

    Only every 32nd token is checked, to save time.

    Args:
        tokens: the bytes of each token, by rank.
        num_listed: the number of merges that make each token, int64 [number of tokens except single bytes].
        ranks: rank by the token's bytes.
    """
    for token, listed in zip(tokens[_NUM_BYTES::_EVERY], num_listed[::_EVERY].tolist(), strict=True):
        if sum(token[:cut] in ranks and token[cut:] in ranks for cut in range(1, len(token))) != listed:
            raise UnsupportedTokenizerError("its list of merges lacks some ways to make a token")


def _check_merge_order(merges: list[Any], rank_of: dict[str, int]) -> None:
    """Raise unless the list, which makes each token in one way, merges the bytes of every token to that token.

    The bytes of a token t = a + b become t unless something is merged across the border between a and b while a and b
    are being made. So the neighbours at the border are followed back in time, for all tokens at once: first a and b;
    before a was made, the right half of a and b; and so on down to single bytes. Such a pair is merged if it is in the
    list earlier than the token that its members became part of, or at the same time and further left.
    """
    halves = (merge.split(" ") if isinstance(merge, str) else merge for merge in merges)
    try:
        pairs = np.array([(rank_of[left], rank_of[right]) for left, right in halves], dtype=np.int64)
    except KeyError as error:
        raise UnsupportedTokenizerError(f"its merges use {error}, which they do not make") from None
    made = np.arange(len(pairs)) + _NUM_BYTES
    if (pairs >= made[:, None]).any():
        raise UnsupportedTokenizerError("its merges use tokens before they make them")
    num_ranks = _NUM_BYTES + len(pairs)
    keys = pairs[:, 0] * num_ranks + pairs[:, 1]
    by_key = np.argsort(keys)
    # by rank; bytes have no halves
    left_half, right_half = np.concatenate([np.full((_NUM_BYTES, 2), -1), pairs]).T

    left, right = pairs.T
    while len(left):
        undo_right = right >= left  # of two tokens merged at the same time, the right one is later
        until = np.where(undo_right, right, left)
        whole = until >= _NUM_BYTES
        left, right, undo_right, until = left[whole], right[whole], undo_right[whole], until[whole]
        left, right = np.where(undo_right, left, right_half[left]), np.where(undo_right, left_half[right], right)
        key = left * num_ranks + right
        place = by_key[np.minimum(np.searchsorted(keys, key, sorter=by_key), len(keys) - 1)]
        merged_at = np.where(keys[place] == key, made[place], num_ranks)
        across = np.where(undo_right, merged_at <= until, merged_at < until)
        if across.any():
            raise UnsupportedTokenizerError("its merges do not make every token from its own bytes")
