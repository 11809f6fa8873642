"""Make torch believe in CUDA devices, from its import on.

A torch that was built without CUDA has all of ``torch.cuda``, but not the functions of ``torch._C`` below it. They are
added when ``torch._C`` is imported, so torch, Fabric and the program run their own code for CUDA.
"""

import atexit
import functools
import importlib.abc
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from tests.support.compiler_backend import NO_CODE
from tests.support.pretended_cuda.library import Devices

_devices: Devices | None = None
_BITSANDBYTES_KERNELS = "bitsandbytes.backends.cuda.ops"
"""The module that registers kernels for CUDA."""


def install() -> None:
    """Give this process the devices that the environment asks for; torch must not be imported yet.

    ``PRETENDED_CUDA_LIBRARY`` is what ``build`` returns, ``PRETENDED_CUDA_DEVICES`` the number of devices. With
    ``PRETENDED_CUDA_COMPILES``, ``torch.compile`` traces graphs without writing kernels for them. The other variables
    are for :func:`begin`, which every process calls that runs a program.
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
    notes_dir = os.environ.get("PRETENDED_CUDA_NOTES")
    if notes_dir is None:
        return
    program_pid = os.getpid()
    exit_at_once = os._exit

    def write_notes() -> None:
        if os.getpid() == program_pid:  # a data worker is a fork of this process, and inherits what is registered here
            rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or "0"
            devices.write_notes(Path(notes_dir, f"{rank}.json"))

    def write_notes_and_exit(status: int) -> NoReturn:
        write_notes()
        exit_at_once(status)

    # os._exit, with which a rank ends, calls nothing that is registered
    os._exit = write_notes_and_exit
    atexit.register(write_notes)


def _num_devices() -> int:
    """Return the number of devices; CUDA_VISIBLE_DEVICES may leave out some."""
    num_devices = int(os.environ["PRETENDED_CUDA_DEVICES"])
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible_devices is None:
        return num_devices
    return min(num_devices, len(visible_devices.split(",")))


def _add_devices(torch_c_module: ModuleType) -> None:
    """Give ``torch._C`` the functions of a build with CUDA."""
    from tests.support.pretended_cuda import torch_c, torch_nccl

    assert _devices is not None
    torch_c.add_cuda(torch_c_module, _devices)
    torch_nccl.add_nccl(torch_c_module)
    begin()


def _load_library() -> None:
    global _devices
    _devices = Devices(os.environ["PRETENDED_CUDA_LIBRARY"], _num_devices())
    atexit.register(_devices["stop_notes"])


def _resize_storages(torch_storage_module: ModuleType) -> None:
    from tests.support.pretended_cuda import torch_c

    torch_c.resize_device_storages(torch_storage_module.UntypedStorage)


def _compile_without_code(torch_module: Any) -> None:
    """Let ``torch.compile`` trace: Inductor would write kernels for CUDA, which these devices cannot run."""
    if os.environ.get("PRETENDED_CUDA_COMPILES"):
        torch_module.compile = functools.partial(torch_module.compile, backend=NO_CODE)


def _add_bitsandbytes_kernels() -> None:
    from tests.support.pretended_cuda.bitsandbytes_kernels import add_kernels

    add_kernels()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that get more than they have, or something else."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in ("torch", "torch._C", "torch.storage", _BITSANDBYTES_KERNELS):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None:  # bitsandbytes may not be installed
            return None
        assert spec.loader is not None
        if name == "torch":
            spec.loader = _Loader(spec.loader, lambda: None, _compile_without_code)
        elif name == "torch._C":
            spec.loader = _Loader(spec.loader, _load_library, _add_devices)
        elif name == "torch.storage":
            spec.loader = _Loader(spec.loader, lambda: None, _resize_storages)
        else:
            spec.loader = _Replacement(_add_bitsandbytes_kernels)
        return spec


class _Replacement(importlib.abc.Loader):
    """Loads a module with nothing of its source in it: a function takes its place."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        self._function()


class _Loader(importlib.abc.Loader):
    """Loads a module, and runs functions before and after."""

    def __init__(
        self,
        loader: importlib.abc.Loader,
        before_loading: Callable[[], None],
        after_loading: Callable[[ModuleType], None],
    ) -> None:
        self._loader = loader
        self._before_loading = before_loading
        self._after_loading = after_loading

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        self._before_loading()
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._after_loading(module)
