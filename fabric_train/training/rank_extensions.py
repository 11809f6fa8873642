"""Give ranks in other processes the parts that this process has registered, by importing the same modules."""

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabric_train.cli.errors import InputError
from fabric_train.cli.tables import CHAT_FORMATS, LOGGERS, METRICS, OBJECTIVES, OPTIMIZERS, PROJECT, Table

if TYPE_CHECKING:
    from fabric_train.arguments import TrainArguments


def used_parts(arguments: "TrainArguments") -> Iterator[tuple[Table[Any], str]]:
    """Yield the table and the name of each registered part that a run uses."""
    selected: list[tuple[Table[Any], str]] = [
        (OBJECTIVES, arguments.preference.objective),
        (OPTIMIZERS, arguments.training.optimizer),
    ]
    selected += [(METRICS, name) for name in arguments.evaluation.computed_metrics]
    selected += [(LOGGERS, name) for name in arguments.logging.opened_loggers]
    if arguments.data.streaming_dataset:  # any of them may be that of a source
        selected += [(CHAT_FORMATS, name) for name in CHAT_FORMATS.registered]
    for table, name in selected:
        if table.module_of(name) != PROJECT:
            yield table, name


def note_on_unused_parts(arguments: "TrainArguments") -> str | None:
    """Return a note on registered parts that a run does not use although it could; None if there are none.

    A run has one objective and one optimizer, so if it uses a registered one it can use no other.
    """
    used = list(used_parts(arguments))
    used_kinds = {table.kind for table, _ in used}
    unused = []
    for table in (OBJECTIVES, OPTIMIZERS, METRICS, LOGGERS):
        has_one_part = table in (OBJECTIVES, OPTIMIZERS)
        if has_one_part and table.kind in used_kinds:
            continue
        unused += [f"--{table.kind} {name}" for name in table.registered if (table, name) not in used]
    if not unused:
        return None
    return f"registered but not used: {', '.join(unused)}; select them with their arguments to use them"


def arguments_for_ranks(arguments: "TrainArguments") -> "TrainArguments":
    """Return the arguments with which the ranks of a run have its registered parts.

    Raises:
        InputError: One of them was registered by the script itself, or by a module that cannot be imported again.
    """
    used = list(used_parts(arguments))
    missing = []
    for table, name in used:
        if not table.is_imported(name) or _find_import_folder(table.module_of(name)) is None:
            missing.append(f"{table.kind} {name}")
    if missing:
        raise InputError(
            f"--devices {arguments.device.devices}: the ranks are separate processes, which do not know what this "
            f"script registered ({', '.join(missing)}); register it in a module and give extensions=['MODULE'], "
            "start your script with torchrun or fabric run, or give --devices 1"
        )
    modules = dict.fromkeys(arguments.extensions.extensions or [])
    modules |= dict.fromkeys(table.module_of(name) for table, name in used)
    if not modules:
        return arguments
    # Metrics and loggers are named, so that a rank which lacks one refuses the run.
    evaluation = replace(arguments.evaluation, metrics=arguments.evaluation.computed_metrics or None)
    logging = arguments.logging
    if LOGGERS.registered:
        logging = replace(logging, loggers=logging.opened_loggers)
    extensions = replace(arguments.extensions, extensions=list(modules))
    return replace(arguments, evaluation=evaluation, logging=logging, extensions=extensions)


def folders_for_ranks(arguments: "TrainArguments") -> list[str]:
    """Return the folders in which Python finds the modules of ``arguments_for_ranks``."""
    folders: dict[str, None] = {}
    for module in arguments.extensions.extensions or []:
        folder = _find_import_folder(module)
        if folder is not None:
            folders[str(folder)] = None
    return list(folders)


def _find_import_folder(module: str) -> Path | None:
    """Return the folder on the import path that has a module; None if another process would not find it."""
    loaded = sys.modules.get(module)
    file_name = getattr(loaded, "__file__", None)
    if loaded is None or file_name is None or loaded.__spec__ is None:
        return None  # the script itself, for example
    file = Path(file_name).resolve()
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or Path(spec.origin).resolve() != file:
        return None
    depth = module.count(".")
    if file.name == "__init__.py":
        depth += 1
    return file.parents[depth]
