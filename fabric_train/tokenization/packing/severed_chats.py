"""Count the chats whose supervised turns lie in another row than the beginning of the chat."""

import numpy as np

from fabric_train.tokenization.packing.rows import RowPlan
from fabric_train.tokenization.packing.spooled import PiecesToCopy, SpooledDocuments, SpoolReader

_TOKENS_PER_BATCH = 1 << 22


def count_severed_chats(documents: SpooledDocuments, plan: RowPlan, is_chat: np.ndarray) -> int:
    """Return the number of chats with a supervised token in a row that does not hold the chat's beginning.

    The model learns these tokens without the turns before them. Only ``concat`` cuts chats.

    Args:
        documents: the documents of the plan.
        plan: the rows.
        is_chat: bool [documents].
    """
    new = plan.starts + plan.repeated  # the first token of each piece that is not repeated
    pieces = np.flatnonzero(is_chat[plan.order][plan.entries] & (new > 0))
    is_severed = np.zeros(len(is_chat), dtype=bool)
    reader = SpoolReader(documents)
    step = max(1, _TOKENS_PER_BATCH // plan.max_length)
    for begin in range(0, len(pieces), step):
        batch = pieces[begin : begin + step]
        lengths = (plan.lengths[batch] - plan.repeated[batch]).astype(np.int64)
        targets = np.cumsum(lengths) - lengths
        supervised = np.ones(int(lengths.sum()), dtype=np.uint8)
        tokens = np.empty(len(supervised), dtype=np.int32)
        reader.read(PiecesToCopy(plan.documents(batch), new[batch], lengths, targets), tokens, supervised)
        is_severed[plan.documents(batch)[np.maximum.reduceat(supervised, targets) > 0]] = True
    return int(is_severed.sum())
