"""Put BOS and EOS around the ids of a document."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Borders:
    """The ids of BOS and EOS; a tokenizer without BOS has None, and none is added."""

    bos_token_id: int | None
    eos_token_id: int


def add_borders(ids: np.ndarray, borders: Borders) -> np.ndarray:
    """Return ``ids`` with exactly one BOS at the start and one EOS at the end, also if they are there already.

    Args:
        ids: int32 [T].
        borders: their ids.
    """
    begin, end = 0, len(ids)
    while begin < end and ids[begin] == borders.bos_token_id:
        begin += 1
    while end > begin and ids[end - 1] == borders.eos_token_id:
        end -= 1
    num_bos = 0 if borders.bos_token_id is None else 1
    bordered = np.empty(num_bos + end - begin + 1, np.int32)
    if borders.bos_token_id is not None:
        bordered[0] = borders.bos_token_id
    bordered[num_bos:-1] = ids[begin:end]
    bordered[-1] = borders.eos_token_id
    return bordered


def join_documents(documents: list[np.ndarray], borders: Borders) -> tuple[np.ndarray, np.ndarray]:
    """Return the joined ids with BOS and EOS, int32 [T], and the documents' lengths, int64 [documents].

    Args:
        documents: int32 [number of tokens] each, at least one.
        borders: the ids of BOS and EOS.
    """
    bordered = [add_borders(ids, borders) for ids in documents]
    return np.concatenate(bordered), np.fromiter(map(len, bordered), np.int64, len(bordered))
