"""Fabric Train: continued pretraining and fine-tuning of Llama-3 on Lightning Fabric and FSDP.

``import fabric_train`` gives the programs as functions, which ``api.py`` defines and which are imported when they are
first used. ``__init__.pyi`` has their arguments for editors and type checkers. The tables of objectives, optimizers,
metrics and loggers are here too, for modules that register some.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
_TABLES = ("CHAT_FORMATS", "LOGGERS", "METRICS", "OBJECTIVES", "OPTIMIZERS")
__all__ = [
    "CHAT_FORMATS",
    "LOGGERS",
    "METRICS",
    "OBJECTIVES",
    "OPTIMIZERS",
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
    if name in _TABLES:
        return getattr(import_module("fabric_train.cli.tables"), name)
    if name in __all__:
        return getattr(import_module("fabric_train.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
