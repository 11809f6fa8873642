"""Agree on the micro-batch before which every rank stops after a signal."""

import threading

Border = tuple[int, int]
"""The moment before a micro-batch: (optimizer step, index of the micro-batch). All ranks pass all borders in order."""


class RunStopped(Exception):  # noqa: N818 - not an error
    """All ranks stop here for a signal."""


class StopBorder:
    """The border at which this rank's main thread stops; the watchdogs of the ranks agree on it.

    A rank may be a few micro-batches ahead of another, and one that stops alone would leave the others waiting in a
    collective. So rank 0 asks every rank to :meth:`freeze`. Each answers with the border that it passed last, and waits
    at its next one. All ranks then stop at the first border after the last one that any rank has passed.
    """

    def __init__(self) -> None:
        self.signal = 0
        """Number of the signal to stop for, 0 as long as there is none."""
        self._changed = threading.Condition()
        self._passed: Border = (0, -1)
        self._last: Border | None = None
        self._is_frozen = False

    def enter(self, step: int, micro_batch: int) -> None:
        """Pass the border before a micro-batch; wait there while the ranks agree.

        Raises:
            RunStopped: the ranks stop before this micro-batch.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._is_frozen or self._last is not None)
            if self._last is not None and (step, micro_batch) > self._last:
                raise RunStopped
            self._passed = (step, micro_batch)

    def freeze(self) -> Border:
        """Let the main thread pass no further border until :meth:`stop_after`; return the last one it has passed."""
        with self._changed:
            self._is_frozen = True
            return self._passed

    def stop_after(self, last: Border, signal: int) -> None:
        """Let the main thread pass the borders up to ``last`` and stop at the next one."""
        with self._changed:
            self._last, self.signal = last, signal
            self._changed.notify()
