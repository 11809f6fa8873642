"""Collect Python's cyclic garbage on all ranks at the same steps.

The automatic collector would pause each rank at a different moment, and all other ranks would wait each time.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

INTERVAL = 50
"""Steps between collections."""


@contextmanager
def manual_collection() -> Iterator[None]:
    """Collect only in :func:`collect` while the block runs.

    Objects that exist at its start are never scanned again, so that a collection takes milliseconds.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def collect(step: int) -> None:
    """Collect if it is due at this step."""
    if step % INTERVAL == 0:
        gc.collect()
