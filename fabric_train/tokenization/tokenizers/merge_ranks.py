"""The vocabulary and merges of a byte-level BPE as tiktoken's ranks, where both provably join the same pairs.

The ``tokenizers`` library joins the first pair of a *list*; tiktoken joins any two neighbours whose bytes together are
a token, the token of lowest *rank* first, and takes a piece that is a token as a whole. Both do the same if

- every token's own bytes are joined to that token by the list, or
- the list holds all ways to cut its tokens in two, token by token, and pieces that are tokens are taken as a whole.

For then, when tiktoken joins two neighbours to a token t, nothing was joined across the borders of t before: the bytes
of t stand as they would alone, and alone the list joins them to t, by this very pair.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from fabric_train.tokenization.tokenizers.unsupported import NotExpressibleError

NOT_IN_VOCABULARY = -1
_NUM_BYTES = 256
_EVERY = 32


@dataclass(frozen=True)
class MergeRanks:
    """tiktoken's ``ranks`` of the tokens' bytes, and the tokens' own ids.

    ``ids`` [number of ranks], int32, holds the id of each rank: NOT_IN_VOCABULARY for a byte that the vocabulary lacks.
    """

    ranks: dict[bytes, int]
    ids: np.ndarray


def refuse_other_kinds(model: dict[str, Any]) -> None:
    """Raise NotExpressibleError unless ``model`` is a BPE of the plain kind."""
    if model.get("type", "BPE") != "BPE" or not model.get("merges"):
        raise NotExpressibleError(f"its model is {model.get('type')} and not BPE with merges")
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(option):
            raise NotExpressibleError(f"its model has {option}")
    if model.get("unk_token") is not None and not model["vocab"].keys() >= _BYTE_OF_LETTER.keys():
        raise NotExpressibleError("it has a token for unknown bytes")


def merge_ranks(model: dict[str, Any], found_in_text: frozenset[str]) -> MergeRanks:
    """Return the ranks of ``model``, a BPE; ``found_in_text`` are tokens that the model is never asked for.

    Raises:
        NotExpressibleError: tiktoken would join other pairs.
    """
    vocabulary: dict[str, int] = model["vocab"]
    joined = _joined(model["merges"])
    try:
        results = np.fromiter(map(vocabulary.__getitem__, joined), np.int64, len(joined))
    except KeyError as error:
        raise NotExpressibleError(f"its merges make {error}, which is not in its vocabulary") from None
    starts = np.flatnonzero(np.diff(results, prepend=-1))  # where the next token's merges begin
    order = results[starts]
    if np.bincount(order).max() > 1:
        raise NotExpressibleError("its merges are not in the order of the tokens they make")

    letters = sorted(_BYTE_OF_LETTER, key=lambda letter: vocabulary.get(letter, NOT_IN_VOCABULARY))
    names = letters + list(map(joined.__getitem__, starts.tolist()))
    ids = np.concatenate([[vocabulary.get(letter, NOT_IN_VOCABULARY) for letter in letters], order])
    tokens = _as_bytes(names)
    ranks = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(ranks) < len(tokens):
        raise NotExpressibleError("its merges make single bytes")
    if model.get("ignore_merges"):
        _refuse_unmade(vocabulary, ids, found_in_text)
    if len(order) == len(results):
        _refuse_unlike(model["merges"], dict(zip(names, range(len(names)), strict=True)))
    elif model.get("ignore_merges"):
        _refuse_incomplete(tokens, np.diff(starts, append=len(results)), ranks)
    else:
        raise NotExpressibleError("its merges make one token in several ways")
    return MergeRanks(ranks, ids.astype(np.int32))


def _joined(merges: list[Any]) -> list[str]:
    """Return what each merge makes; older files write a merge as one string with a blank in it."""
    if isinstance(merges[0], str):
        return [merge.replace(" ", "", 1) for merge in merges]
    return list(map("".join, merges))


def _letters() -> dict[str, int]:
    """Return GPT-2's letters for bytes: printable ones stand for themselves, the others for letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(_NUM_BYTES) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_LETTER = _letters()


def _as_bytes(names: list[str]) -> list[bytes]:
    """Return the bytes that the tokens ``names`` stand for, translated at once since there are 128,000 of them."""
    table = np.full(1 << 16, _NUM_BYTES, np.uint16)
    table[[ord(letter) for letter in _BYTE_OF_LETTER]] = list(_BYTE_OF_LETTER.values())
    units = table[np.frombuffer("".join(names).encode("utf-16-le", "surrogatepass"), np.uint16)]
    if (units == _NUM_BYTES).any():
        raise NotExpressibleError("its merges are not of GPT-2's letters for bytes")
    joined = units.astype(np.uint8).tobytes()
    ends = np.cumsum(list(map(len, names))).tolist()
    return [joined[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _refuse_unmade(vocabulary: dict[str, int], ids: np.ndarray, found_in_text: frozenset[str]) -> None:
    """Raise if a token that no merge makes could still be a whole piece of a text."""
    is_unmade = np.isin(np.fromiter(vocabulary.values(), np.int64, len(vocabulary)), ids, invert=True)
    tokens = list(vocabulary)
    for token in map(tokens.__getitem__, np.flatnonzero(is_unmade).tolist()):
        if token not in found_in_text and _BYTE_OF_LETTER.keys() >= set(token):
            raise NotExpressibleError(f"no merge makes its token {token!r}")


def _refuse_incomplete(tokens: list[bytes], num_listed: np.ndarray, ranks: dict[bytes, int]) -> None:
    """Raise unless the list holds all ways to cut a token in two; asked of some tokens only, as it takes its time.

    ``num_listed`` [number of tokens without the bytes] is the number of merges that make each.
    """
    for token, listed in zip(tokens[_NUM_BYTES::_EVERY], num_listed[::_EVERY].tolist(), strict=True):
        if sum(token[:cut] in ranks and token[cut:] in ranks for cut in range(1, len(token))) != listed:
            raise NotExpressibleError("its list of merges lacks some of the ways to make a token")


def _refuse_unlike(merges: list[Any], rank_of: dict[str, int]) -> None:
    """Raise unless the list, which makes each token in one way, joins every token's own bytes to that token.

    A token t = a + b is what its bytes become unless something is joined across the border between a and b while they
    are being joined themselves. So the border is followed back in time, for all tokens at once: the neighbours there
    are a and b; before a was joined, its right half and b; and so on down to bytes. A pair of neighbours is joined if
    it is in the list, before what came of them, or at the same time and further left.
    """
    halves = (merge.split(" ") if isinstance(merge, str) else merge for merge in merges)
    try:
        pairs = np.array([(rank_of[left], rank_of[right]) for left, right in halves], dtype=np.int64)
    except KeyError as error:
        raise NotExpressibleError(f"its merges join {error}, which they do not make") from None
    made = np.arange(len(pairs)) + _NUM_BYTES
    if (pairs >= made[:, None]).any():
        raise NotExpressibleError("its merges join tokens before they make them")
    num_ranks = _NUM_BYTES + len(pairs)
    keys = pairs[:, 0] * num_ranks + pairs[:, 1]
    by_key = np.argsort(keys)
    # halves by rank; bytes have none
    left_half, right_half = np.concatenate([np.full((_NUM_BYTES, 2), -1), pairs]).T

    left, right = pairs.T
    while len(left):
        undo_right = right >= left  # of two that were joined at the same time, the right one is the later
        until = np.where(undo_right, right, left)
        whole = until >= _NUM_BYTES
        left, right, undo_right, until = left[whole], right[whole], undo_right[whole], until[whole]
        left, right = np.where(undo_right, left, right_half[left]), np.where(undo_right, left_half[right], right)
        key = left * num_ranks + right
        place = by_key[np.minimum(np.searchsorted(keys, key, sorter=by_key), len(keys) - 1)]
        joined_at = np.where(keys[place] == key, made[place], num_ranks)
        across = np.where(undo_right, joined_at <= until, joined_at < until)
        if across.any():
            raise NotExpressibleError("its merges do not make every token of its own bytes")
