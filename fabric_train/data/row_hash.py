"""Hash rows, so that a resumed run can check that it continues with the rows that come next."""

import numpy as np
import xxhash


def hash_of(numbers: np.ndarray, before: str = "") -> str:
    """Return the XXH3-128 hash of ``numbers`` in hexadecimal.

    Args:
        numbers: integers of any dtype, hashed as int64.
        before: the hash of the numbers before these; the new hash then depends on all of them.
    """
    return xxhash.xxh3_128_hexdigest(bytes.fromhex(before) + numbers.astype("<i8").tobytes())
