"""``--compile``: each decoder layer is compiled in place, and all of them by the same compilation."""

import importlib
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fabric_train.cli.errors import InputError

MOST_SHAPES = 4
"""Rows of so few different lengths are compiled each for itself; of more, once for any length."""

_MOST_COMPILATIONS = 64
"""Of one layer: in training and in evaluation, with and without documents, for each shape. Beyond torch's default of 8
it would go on without compiling, and not say so.
"""


def refuse_without_compiler(argument: str, instead: str) -> None:
    """Refuse what is compiled when it first runs where there is no C++ compiler.

    Raises:
        InputError: naming the compiler, and what to do without.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise InputError(
            f"{argument} is compiled when it first runs and finds no compiler {compiler}; install g++, or {instead}"
        )


def compile_layers(layers: Iterable[nn.Module], any_length: bool, budget: float = 1.0) -> None:
    """Have each layer's ``forward`` compiled when it is first called; names in the state dict stay as they are.

    It is ``forward`` that is compiled and not the layer's call, so that the hooks by which FSDP gathers its weights run
    outside, without breaking the graph. Layers share the compilation as they share their code: it is kept by
    ``forward``'s code, and weights are arguments of what is compiled.

    Args:
        layers: of the model, before they are sharded.
        any_length: compile for rows of any length, else anew for each shape. A kernel for one shape is quicker, and
            is the same whatever came before, which exact resume rests on.
        budget: share of the activations that may be kept for the backward pass, the others being recomputed.
    """
    _remove_unfinished_builds()
    config: Any = importlib.import_module("torch._dynamo.config")
    config.recompile_limit = _MOST_COMPILATIONS
    config.optimize_ddp = False  # it would cut the graph at DDP's buckets, which hold several layers
    partitioner: Any = importlib.import_module("torch._functorch.config")
    partitioner.activation_memory_budget = budget
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=any_length)


def _remove_unfinished_builds() -> None:
    """Remove from torch's cache the libraries that a killed process was building: torch would take them for finished.

    The compiler writes into the library itself, beside a folder that goes when it is done; a lock is held meanwhile.
    """
    from torch._inductor.codecache import get_lock_dir
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    from torch.utils._filelock import FileLock

    for folder in Path(cache_dir()).glob("*/*_CxxBuild"):
        library, key = folder.name.removesuffix("_CxxBuild"), folder.name.partition(".")[0]
        with suppress(TimeoutError), FileLock(str(Path(get_lock_dir()) / f"{key}.lock"), timeout=0):
            folder.with_name(f"{library}.so").unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
