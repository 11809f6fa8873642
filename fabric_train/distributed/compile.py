"""Compile decoder layers in place (``--compile``); all layers share one compilation."""

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

MAX_STATIC_LENGTHS = 4
"""Up to so many row lengths, layers are compiled for each length separately; for more, once for any length."""

_RECOMPILE_LIMIT = 64
"""Compilations of a layer: in training and evaluation, with and without documents, for each shape. torch's default is
8; beyond the limit it runs the layer uncompiled.
"""

_DOCUMENT_BORDERS = r"L\['kwargs'\]\['(cu_seq_lens|max_length)_[qk]'\]"
"""torch's names of the arguments with which transformers passes document borders to a layer; see ``packed_forward``."""


def check_compiler(argument: str, alternative: str) -> None:
    """Check that there is a C++ compiler, which torch needs when compiled code first runs.

    Args:
        argument: the option that needs it, for the error message.
        alternative: what to do without a compiler.

    Raises:
        InputError: there is no compiler.
    """
    missing = missing_compiler()
    if missing:
        raise InputError(f"{argument} is compiled at run time and finds no {missing}; install g++, or {alternative}")


def missing_compiler() -> str | None:
    """Return the C++ compiler that torch would use, if it is not there, as "compiler NAME"; else None."""
    compiler = os.environ.get("CXX", "g++")
    return None if shutil.which(compiler) else f"compiler {compiler}"


def compile_layers(layers: Iterable[nn.Module], any_length: bool, budget: float = 1.0) -> None:
    """Compile each layer's ``forward`` when it is first called; names in the state dict stay the same.

    Compiling ``forward`` instead of the module keeps FSDP's hooks, which gather the weights, outside the graph. torch
    stores the compilation with ``forward``'s code and takes weights as arguments, so all layers share it.

    Args:
        layers: of the model, before they are sharded.
        any_length: compile once for rows of any length, else for each shape. A kernel for one shape is faster and does
            not depend on earlier shapes, which exact resume relies on.
        budget: share of the activations to keep for the backward pass; the others are recomputed.
    """
    _remove_unfinished_builds()
    config: Any = importlib.import_module("torch._dynamo.config")
    config.recompile_limit = _RECOMPILE_LIMIT
    _keep_document_borders_dynamic()
    config.optimize_ddp = False  # else the graph is split at DDP's buckets, which span several layers
    partitioner: Any = importlib.import_module("torch._functorch.config")
    partitioner.activation_memory_budget = budget
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=any_length)


def _keep_document_borders_dynamic() -> None:
    """Compile layers once for any number and length of documents; else each new number would be compiled for.

    Only attention's own kernel gets these arguments, so nothing that is compiled depends on them.
    """
    config: Any = importlib.import_module("torch.compiler.config")
    sources = [*filter(None, config.dynamic_sources.split(",")), _DOCUMENT_BORDERS]
    config.dynamic_sources = ",".join(dict.fromkeys(sources))


def _remove_unfinished_builds() -> None:
    """Remove libraries that a killed process left half-built in torch's cache: torch would take them for finished.

    The compiler writes to the library's final name. Until the build is done, a lock is held and a folder exists next to
    the library.
    """
    from torch._inductor.codecache import get_lock_dir
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    from torch.utils._filelock import FileLock

    for folder in Path(cache_dir()).glob("*/*_CxxBuild"):
        library, key = folder.name.removesuffix("_CxxBuild"), folder.name.partition(".")[0]
        with suppress(TimeoutError), FileLock(str(Path(get_lock_dir()) / f"{key}.lock"), timeout=0):
            folder.with_name(f"{library}.so").unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
