"""The functions and classes that ``torch._C`` has in a build with CUDA, for the pretended devices."""

import os
import time
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from tests.support.pretended_cuda.library import Devices

MEMORY = 80 << 30
"""Bytes of each device."""


@dataclass(frozen=True)
class DeviceProperties:
    """An H100's."""

    name: str = "NVIDIA H100 80GB HBM3"
    total_memory: int = MEMORY
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 132
    warp_size: int = 32
    max_threads_per_multi_processor: int = 2048
    regs_per_multiprocessor: int = 65536
    shared_memory_per_multiprocessor: int = 233472
    L2_cache_size: int = 50 << 20
    gcnArchName: str = ""  # noqa: N815  torch's name


def add_cuda(torch_c: Any, devices: Devices) -> None:
    """Add devices, streams, events and memory statistics to ``torch._C``."""

    def start() -> None:
        import torch

        # as with CUDA, a fork of a process that has used a device must not use one
        process = os.getpid()
        torch_c._cuda_isInBadFork = torch.cuda._is_in_bad_fork = lambda: os.getpid() != process
        # all devices draw from the CPU's generator, like their kernels
        generators: Any = (torch.default_generator,) * devices.num_devices
        torch.cuda.default_generators = generators
        torch.cuda._get_device_properties = lambda index: DeviceProperties()  # type: ignore[attr-defined]

    def exchange(index: int, switch: str) -> int:
        """Make another device the current one, with a function of the library; return the previous device."""
        previous_index: int = devices["get_device"]()
        if index >= 0 and index != previous_index:
            devices[switch](index)
        return previous_index

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        exchange(device_index, "set_device")  # as in torch: it may make a context
        devices["set_stream"](device_index, stream_id)

    def memory_stats(device: int) -> dict[str, dict[str, dict[str, int]]]:
        num_bytes = {"current": devices["allocated"](device), "peak": devices["peak"](device)}
        return {name: {"all": num_bytes} for name in ("allocated_bytes", "reserved_bytes", "active_bytes")}

    functions = {  # not ctypes' own functions, which have no hash
        "init": start,
        "isInBadFork": lambda: False,
        "getDeviceCount": lambda: devices.num_devices,
        "getDevice": lambda: devices["get_device"](),
        "setDevice": lambda index: exchange(index, "set_device"),
        "exchangeDevice": lambda index: exchange(index, "set_device"),
        "maybeExchangeDevice": lambda index: exchange(index, "restore_device"),
        "hasPrimaryContext": lambda index: devices["has_context"](index),
        "getCurrentStream": lambda index: (devices["get_stream"](index), index, _CUDA),
        "getCurrentRawStream": lambda index: devices["get_stream"](index),
        "getDefaultStream": lambda index: (0, index, _CUDA),
        "setStream": set_stream,
        "synchronize": lambda: devices["synchronize"](),
        "isCurrentStreamCapturing": lambda: False,
        "memoryStats": memory_stats,
        "resetPeakMemoryStats": lambda index: devices["reset_peak"](index),
        "resetAccumulatedMemoryStats": lambda index: None,
        "emptyCache": lambda: None,
        "ipc_collect": lambda: None,
        "getArchFlags": lambda: "sm_90",
        "getAllocatorBackend": lambda: "native",
        "memorySnapshot": lambda mempool=None, include_traces=True: {"segments": [], "device_traces": []},
        "record_memory_history": lambda *arguments, **options: None,
    }
    for name, function in functions.items():
        setattr(torch_c, f"_cuda_{name}", function)
    torch_c._cudart = ModuleType("torch._C._cudart")
    torch_c._cudart.cudaMemGetInfo = lambda index: (MEMORY - devices["allocated"](index), MEMORY)
    torch_c._nccl_version = lambda: 2 << 32 | 27 << 16
    torch_c._nccl_version_suffix = lambda: b""
    torch_c._has_cuda = True
    torch_c._CudaStreamBase, torch_c._CudaEventBase = _stream_classes(torch_c, devices)
    torch_c._CudaDeviceProperties = DeviceProperties
    for name in ("_CUDAGraph", "_graph_pool_handle"):  # imported, and never used here
        setattr(torch_c, name, type(name, (), {}))


def resize_device_storages(storage_class: Any) -> None:
    """Let ``UntypedStorage.resize_`` resize storages on the devices: torch can in a build with CUDA only."""
    resize = storage_class.resize_

    def resize_(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        import torch

        tensor = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)
        torch.ops.pretended_cuda.resize_storage(tensor, int(size))
        return self

    storage_class.resize_ = resize_


_CUDA = 1  # c10::DeviceType::CUDA


def _stream_classes(torch_c: Any, devices: Devices) -> tuple[type, type]:
    """Return the bases of ``torch.cuda.Stream`` and ``torch.cuda.Event``: the classes for all kinds of devices."""

    class CudaStream(torch_c.Stream):
        def __new__(
            cls,
            priority: int = 0,
            stream_id: int | None = None,
            device_index: int = 0,
            device_type: int = _CUDA,
            stream_ptr: int = 0,
        ) -> Any:
            if stream_id is None:
                device = torch_c.device("cuda", devices["get_device"]())
                return super().__new__(cls, device=device, priority=priority)
            return super().__new__(cls, stream_id=stream_id, device_index=device_index, device_type=_CUDA)

        @property
        def cuda_stream(self) -> int:
            return int(self.stream_id)

    class CudaEvent(torch_c.Event):
        def __new__(
            cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
        ) -> Any:
            return super().__new__(cls, device=torch_c.device("cuda"), enable_timing=enable_timing, blocking=blocking)

        @property
        def cuda_event(self) -> int:
            return id(self)

        def record(self, stream: Any) -> None:
            self._recorded_at = time.perf_counter()
            super().record(stream)

        def elapsed_time(self, end: Any) -> float:
            """Return the milliseconds between two events; as in CUDA, an error if the device has not passed them."""
            if not (self.query() and end.query()):
                raise RuntimeError("CUDA error: device not ready")
            return (end._recorded_at - self._recorded_at) * 1e3

    return CudaStream, CudaEvent
