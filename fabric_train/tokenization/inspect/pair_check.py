"""Find what is wrong with the preference pairs of some rows: halves of pairs, answers, prompts."""

from collections.abc import Iterator

import numpy as np

from fabric_train.tokenization.packing.rows import joined_ranges
from fabric_train.tokenization.packing.token_folder import RowBatch


def pair_faults(
    batch: RowBatch, supervised: np.ndarray, begins: np.ndarray, stops: np.ndarray, rows: np.ndarray, with_prompts: bool
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each kind of fault with the rows of the batch that have it, once for each pair.

    ``begins`` and ``stops``, int64 [S], are where the sequences of the batch begin and end, and ``rows`` are their
    rows. ``supervised`` is bool [tokens]. Both prompts must have the same tokens if ``with_prompts``: what is before
    the first supervised token, but for one token at its end, which a tokenizer may join with the answer.
    """
    counts = np.bincount(rows, minlength=len(batch.offsets) - 1)
    yield "rows with half a preference pair", np.flatnonzero(counts % 2)
    is_whole = counts[rows] % 2 == 0
    chosen, rejected = np.flatnonzero(is_whole)[::2], np.flatnonzero(is_whole)[1::2]
    targets = np.append(np.flatnonzero(supervised), len(supervised))
    answers = targets[np.searchsorted(targets, begins)]
    has_answers = (answers < stops)[chosen] & (answers < stops)[rejected]
    yield "preference pairs without two supervised answers", rows[chosen[~has_answers]]
    chosen, rejected = chosen[has_answers], rejected[has_answers]
    if not with_prompts or not len(chosen):
        return
    lengths = answers - begins
    shared = np.maximum(np.minimum(lengths[chosen], lengths[rejected]) - 1, 0)
    one, other = (batch.input_ids[joined_ranges(begins[half], shared)] for half in (chosen, rejected))
    different = np.bincount(np.repeat(np.arange(len(chosen)), shared)[one != other], minlength=len(chosen)) > 0
    different |= np.abs(lengths[chosen] - lengths[rejected]) > 1
    yield "preference pairs with two prompts", rows[chosen[different]]
