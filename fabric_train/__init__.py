"""Fabric Train: continued pretraining and fine-tuning of Llama-3 on Lightning Fabric and FSDP.

``import fabric_train`` has the programs as functions, which ``api.py`` defines and which are imported when they are
first used. ``__init__.pyi`` has their arguments for editors and type checkers.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__all__ = [
    "ConvertResult",
    "Export",
    "InputError",
    "Run",
    "RunError",
    "TokenizeResult",
    "TrainResult",
    "__version__",
    "convert",
    "evaluate",
    "generate",
    "load_run",
    "tokenize",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("fabric_train.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
