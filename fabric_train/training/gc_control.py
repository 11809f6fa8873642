"""Python's collection of cyclic garbage, at chosen steps: left to itself it halts each rank at another moment, and all
others wait.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

INTERVAL = 50
"""Steps between collections."""


@contextmanager
def collected_by_hand() -> Iterator[None]:
    """Let nothing be collected in the block but by ``collect``. What is there at its beginning is not looked at again,
    so that a collection takes milliseconds.
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
    """Collect where it is due: at the same steps on all ranks."""
    if step % INTERVAL == 0:
        gc.collect()
