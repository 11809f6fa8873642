"""Hashes of windows' rows, by which a resumed run knows that it goes on with what would have come."""

import numpy as np
import xxhash


def hash_of(numbers: np.ndarray, before: str = "") -> str:
    """Return the XXH3-128 of integers in their order, in hexadecimal.

    Args:
        numbers: of any integer type; hashed as int64.
        before: hash of what came before them, so that the new one depends on all of it.
    """
    return xxhash.xxh3_128_hexdigest(bytes.fromhex(before) + numbers.astype("<i8").tobytes())
