"""Add up the bytes of tensors that are alive, by the lifetimes of their storages."""

import weakref
from collections import Counter
from collections.abc import Iterable

import torch


class LiveBytes:
    """The bytes of the storages that were added and are still alive, now and at the peak.

    Args:
        block: an allocation takes a multiple of so many bytes.
        ignored: tensors whose storages do not count.
    """

    def __init__(self, block: int = 1, ignored: Iterable[torch.Tensor] = ()) -> None:
        self.now = self.most = 0
        self.most_kinds: dict[str, int] = {}
        """The bytes at the peak by kind."""
        self._block = block
        self._kinds: Counter[str] = Counter()
        self._live = {tensor.untyped_storage()._cdata: (0, "") for tensor in ignored}

    def add(self, storage: torch.UntypedStorage, kind: str = "") -> None:
        """Add a storage, unless it was added before."""
        key = storage._cdata
        if key not in self._live:
            self._live[key] = (0, kind)
            weakref.finalize(storage, self._free, key)
            self._resize(key, storage.nbytes())

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage with its present size, if it was added."""
        if storage._cdata in self._live:
            self._resize(storage._cdata, storage.nbytes())

    def restart(self) -> None:
        """Restart the peak from here."""
        self.most, self.most_kinds = self.now, dict(self._kinds)

    def _resize(self, key: int, size: int) -> None:
        size = -(-size // self._block) * self._block
        before, kind = self._live[key]
        self._live[key] = (size, kind)
        self.now += size - before
        self._kinds[kind] += size - before
        if self.now > self.most:
            self.restart()

    def _free(self, key: int) -> None:
        size, kind = self._live.pop(key)
        self.now -= size
        self._kinds[kind] -= size
