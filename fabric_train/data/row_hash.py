"""Hash rows: a resumed run checks that it continues with the next ones, and losses of other rows are not compared."""

import numpy as np
import torch
import xxhash

from fabric_train.data.batch import IGNORED_LABEL

SUM_OF_HASHES = 1 << 40  # the sums of 8,192 ranks are exact in fp64


def hash_of(numbers: np.ndarray, before: str = "") -> str:
    """Return the XXH3-128 hash of ``numbers`` in hexadecimal.

    Args:
        numbers: integers of any dtype, hashed as int64.
        before: the hash of the numbers before these; the new hash then depends on all of them.
    """
    return xxhash.xxh3_128_hexdigest(bytes.fromhex(before) + numbers.astype("<i8").tobytes())


def hash_supervised(input_ids: torch.Tensor, labels: torch.Tensor) -> int:
    """Return a hash of rows that does not depend on their order: a sum, modulo ``SUM_OF_HASHES``, of the rows' XXH3-64.

    What follows a row's last supervised token does not count, since no loss depends on it.

    Args:
        input_ids: int64 [B, T], on the CPU.
        labels: int64 [B, T], on the CPU; -100 where no token is supervised.
    """
    total = 0
    for ids, of_row in zip(input_ids.numpy(), labels.numpy(), strict=True):
        supervised = np.flatnonzero(of_row != IGNORED_LABEL)
        if len(supervised):
            end = int(supervised[-1]) + 1
            total += xxhash.xxh3_64_intdigest(ids[:end].tobytes() + of_row[:end].tobytes())
    return total % SUM_OF_HASHES
