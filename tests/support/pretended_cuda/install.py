"""Make torch believe in CUDA devices, from its import on.

A torch that was built without CUDA has all of ``torch.cuda``, but not the functions of ``torch._C`` below it. They are
added when ``torch._C`` is imported, so torch, Fabric and the program run their own code for CUDA.
"""

import atexit
import importlib.abc
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from tests.support.pretended_cuda.library import Devices

_devices: Devices | None = None


def install() -> None:
    """Give this process the devices that the environment asks for; torch must not be imported yet.

    ``PRETENDED_CUDA_LIBRARY`` is what ``build`` returns, ``PRETENDED_CUDA_DEVICES`` the number of devices. The other
    variables are for :func:`begin`, which every process calls that runs a program.
    """
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already")
    sys.meta_path.insert(0, _Finder())


def begin() -> None:
    """Begin a program in this process, which may be a fork: apply the environment, and write notes when it ends.

    ``PRETENDED_CUDA_COPY_DELAY`` is in seconds, ``PRETENDED_CUDA_NOTES`` the folder for ``RANK.json``.
    """
    devices = _devices
    assert devices is not None
    devices.begin(_num_devices(), float(os.environ.get("PRETENDED_CUDA_COPY_DELAY", "0")))
    folder = os.environ.get("PRETENDED_CUDA_NOTES")
    process = os.getpid()
    leave = os._exit
    if folder is None:
        return

    def write() -> None:
        if os.getpid() == process:  # a data worker is a fork of this process
            rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or "0"
            devices.write_notes(Path(folder, f"{rank}.json"))

    def write_and_leave(status: int) -> NoReturn:
        write()
        leave(status)

    os._exit = write_and_leave
    atexit.register(write)


def _num_devices() -> int:
    """Return the number of devices; CUDA_VISIBLE_DEVICES may leave out some."""
    number = int(os.environ["PRETENDED_CUDA_DEVICES"])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return number if visible is None else min(number, len(visible.split(",")))


def _add_devices(c: Any) -> None:
    """Give ``torch._C`` the functions of a build with CUDA."""
    from tests.support.pretended_cuda import torch_c, torch_nccl

    assert _devices is not None
    torch_c.add_cuda(c, _devices)
    torch_nccl.add_nccl(c)
    begin()


def _load_library() -> None:
    global _devices
    _devices = Devices(os.environ["PRETENDED_CUDA_LIBRARY"], _num_devices())
    atexit.register(_devices["stop_notes"])


def _resize_storages(storage: Any) -> None:
    from tests.support.pretended_cuda import torch_c

    torch_c.resize_device_storages(storage.UntypedStorage)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of torch that get more than they have."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in ("torch._C", "torch.storage"):
            return None
        spec = PathFinder.find_spec(name, path, target)
        assert spec is not None
        assert spec.loader is not None
        spec.loader = (
            _Loader(spec.loader, _load_library, _add_devices)
            if name == "torch._C"
            else _Loader(spec.loader, lambda: None, _resize_storages)
        )
        return spec


class _Loader(importlib.abc.Loader):
    """Loads a module, and runs functions before and after."""

    def __init__(self, loader: Any, before: Callable[[], None], after: Callable[[Any], None]) -> None:
        self._loader = loader
        self._before = before
        self._after = after

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        self._before()
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._after(module)
