"""``ProcessGroupNCCL`` for the pretended devices, which a torch without CUDA does not have."""

from typing import Any


def add_nccl(torch_c: Any) -> None:
    """Let ``torch._C._c10d_init`` add ``ProcessGroupNCCL`` to the module that it makes."""
    init = torch_c._c10d_init

    def init_with_nccl() -> Any:
        result = init()
        c10d = torch_c._distributed_c10d
        c10d.ProcessGroupNCCL = _nccl_class(c10d)
        gloo = c10d.ProcessGroupGloo
        # what NCCL's backends have, and torch uses: it copies the options of a group that it splits
        c10d.Backend._set_default_timeout = lambda backend, timeout: backend.set_timeout(timeout)
        c10d.Backend.options = property(lambda backend: _new_options(gloo))
        gloo._Options.__deepcopy__ = lambda options, memo: _new_options(gloo)
        return result

    torch_c._c10d_init = init_with_nccl


def _new_options(gloo: Any) -> Any:
    """Return gloo's options for the groups that a group is split into; torch then sets their timeout."""
    options = gloo._Options()
    options._devices = [gloo.create_default_device()]
    return options


def _nccl_class(c10d: Any) -> type:
    class IsNccl(type):
        def __instancecheck__(cls, backend: Any) -> bool:
            return isinstance(backend, c10d.Backend) and backend.name() == "nccl"

    class ProcessGroupNCCL(metaclass=IsNccl):
        """Makes the backend of ``nccl.cpp``, over gloo."""

        class Options:
            """The fields that torch sets; only the timeout has an effect."""

            _timeout: Any = None
            is_high_priority_stream = False

            def __init__(self, is_high_priority_stream: bool = False) -> None:
                self.is_high_priority_stream = is_high_priority_stream

        def __new__(cls, store: Any, rank: int, size: int, options: Any) -> Any:
            import torch

            group = c10d.ProcessGroup(store, rank, size)
            gloo = c10d.ProcessGroupGloo(store, rank, size, timeout=options._timeout)
            group._register_backend(torch.device("cpu"), c10d.ProcessGroup.BackendType.GLOO, gloo)
            torch.ops.pretended_cuda.add_nccl(group.boxed())
            return group._get_backend(torch.device("cuda"))

    return ProcessGroupNCCL
