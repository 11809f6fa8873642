"""The tables of what a run uses by name: its objective, optimizer, metrics and loggers.

A name stands for what builds the part. This project's own parts are imported when they are first used, so that
``--help`` lists them without torch. A script, or a module that ``--extensions`` names, registers others::

    OBJECTIVES["focal"] = Focal  # then --objective focal

The parameters of a factory that have defaults are its settings, which ``--objective_settings`` and
``--optimizer_settings`` set. Each checkpoint describes the parts of its run as :class:`Component`.
"""

import hashlib
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from fabric_train.cli.argument_types import nearest_name
from fabric_train.cli.errors import InputError, first_line

PROJECT = "fabric_train"
"""The module of this project's own parts in a :class:`Component`."""
_MAIN = "__main__"
_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
_MODULE = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
T = TypeVar("T")


@dataclass(frozen=True)
class _Origin:
    """The module that registered a part; ``at_import``: when it was imported."""

    module: str
    at_import: bool


def _find_origin(frame: FrameType | None) -> _Origin:
    """Return the module that registers a part in ``frame``: the one that is being imported, if there is one."""
    module = frame.f_globals.get("__name__", _MAIN) if frame else _MAIN
    while frame is not None:
        name = frame.f_globals.get("__name__")
        specification = getattr(sys.modules.get(name or ""), "__spec__", None)
        if getattr(specification, "_initializing", False):
            return _Origin(str(name), at_import=True)
        frame = frame.f_back
    return _Origin(module, at_import=False)


class Table(MutableMapping[str, T]):
    """Parts of one kind by name; ``own`` has this project's as MODULE:ATTRIBUTE."""

    def __init__(self, kind: str, own: Mapping[str, str]) -> None:
        """``kind`` is the argument that selects a part, such as objective."""
        self.kind = kind
        self._own = dict(own)
        self._registered: dict[str, T] = {}
        self._origins: dict[str, _Origin] = {}

    def __getitem__(self, name: str) -> T:
        if name in self._registered:
            return self._registered[name]
        module, _, attribute = self._own[name].partition(":")
        return getattr(importlib.import_module(module), attribute)

    def __contains__(self, name: object) -> bool:
        """Return whether there is such a part, without the import of its module, which may be slow."""
        return name in self._own or name in self._registered

    def __setitem__(self, name: str, part: T) -> None:
        """Register a part of a script or a module under a name that is free, or was registered before."""
        if name in self._own:
            raise InputError(f"{self.kind} {name}: this project has one of that name; register yours under another")
        if not isinstance(name, str) or not re.fullmatch(_NAME, name):
            raise InputError(f"{self.kind} {name!r}: expected a name of letters, digits, _, - and . to register it by")
        self._registered[name] = part
        self._origins[name] = _find_origin(sys._getframe(1))

    def __delitem__(self, name: str) -> None:
        del self._registered[name]
        del self._origins[name]

    def __iter__(self) -> Iterator[str]:
        return iter([*self._own, *self._registered])

    def __len__(self) -> int:
        return len(self._own) + len(self._registered)

    @property
    def registered(self) -> list[str]:
        """The names of parts that are not this project's."""
        return list(self._registered)

    def module_of(self, name: str) -> str:
        """Return the module that registered a part; ``PROJECT`` for this project's own."""
        return self._origins[name].module if name in self._origins else PROJECT

    def is_imported(self, name: str) -> bool:
        """Whether a process that imports the module of a part has the part."""
        return name not in self._origins or self._origins[name].at_import

    def describe(self, name: str, settings: Mapping[str, Any] | None = None) -> "Component":
        """Return what a checkpoint has of a part that a run uses with these settings."""
        module = self.module_of(name)
        if module == PROJECT:
            return Component(self.kind, name, PROJECT)
        file = getattr(sys.modules.get(module), "__file__", None)
        source = hashlib.sha256(Path(file).read_bytes()).hexdigest() if file and Path(file).is_file() else None
        if module == _MAIN and file:
            module = Path(file).stem  # the same module if --extensions names it
        return Component(self.kind, name, module, not self.is_imported(name), dict(settings or {}), source)


OBJECTIVES: Table[Any] = Table(
    "objective",
    {
        "sft": "fabric_train.training.objective:build_cross_entropy",
        **dict.fromkeys(
            ("dpo", "ipo", "simpo", "orpo", "apo_zero", "dpop"), "fabric_train.training.preference:build_preference"
        ),
    },
)
"""Factories of objectives (``training.objective.BuildObjective``)."""
OPTIMIZERS: Table[Any] = Table("optimizer", {"adamw": "fabric_train.optim.optimizer:build_adamw"})
"""Factories of optimizers (``optim.optimizer.BuildOptimizer``)."""
METRICS: Table[Any] = Table("metrics", {})
"""Metrics of an evaluation (``training.evaluation.Metric``)."""
LOGGERS: Table[Any] = Table(
    "loggers",
    {
        "csv": "fabric_train.training.loggers:open_csv",
        "tensorboard": "fabric_train.training.loggers:open_tensorboard",
        "jsonl": "fabric_train.training.loggers:open_json_lines",
        "wandb": "fabric_train.training.trackers:open_wandb",
        "trackio": "fabric_train.training.trackers:TrackioLogger",
        "mlflow": "fabric_train.training.trackers:MlflowLogger",
    },
)
"""Functions that open a logger (``training.loggers.OpenLogger``)."""
CHAT_FORMATS: Table[Any] = Table(
    "data_format",
    {
        name: f"fabric_train.tokenization.chats.formats:{attribute}"
        for name, attribute in (
            ("messages", "MESSAGES"),
            ("conversations", "CONVERSATIONS"),
            ("conversation", "CONVERSATION"),
            ("alpaca", "ALPACA"),
            ("prompt_completion", "PROMPT_COMPLETION"),
            ("query_calls", "QUERY_CALLS"),
            ("preference", "PREFERENCE_PAIRS"),
        )
    },
)
"""Formats of rows with chats (``tokenization.chats.formats.ChatFormat``)."""
TABLES = (OBJECTIVES, OPTIMIZERS, METRICS, LOGGERS, CHAT_FORMATS)


@dataclass(frozen=True)
class Component:
    """A part of a run as its checkpoints have it: what tells it from other parts, and where it was registered.

    ``module`` is ``PROJECT`` for this project's own parts, whose settings are arguments. ``by_script``: a script
    registered it, itself or by a call, so that importing the module does not. ``source`` is the SHA-256 of the module's
    file, None without one.
    """

    kind: str
    name: str
    module: str
    by_script: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    source: str | None = None

    @property
    def is_own(self) -> bool:
        """Whether it is one of this project's parts."""
        return self.module == PROJECT

    def computes_as(self, other: "Component") -> bool:
        """Whether another part is the same with the same settings, as far as names say that."""
        same_part = (self.kind, self.name, self.module) == (other.kind, other.name, other.module)
        return same_part and self.settings == other.settings

    def __str__(self) -> str:
        return f"{self.kind} {self.description}"

    @property
    def description(self) -> str:
        """The name, and of a registered part its module and settings."""
        if self.is_own:
            return self.name
        shown = ", ".join(f"{name} {_in_words(value)}" for name, value in self.settings.items())
        return f"{self.name} of {self.module}" + (f" ({shown})" if shown else "")

    @property
    def advice(self) -> str:
        """How to give a run this part."""
        if self.is_own:
            return f"give --{self.kind} {self.name}"
        words = f"--{self.kind} {self.name}"
        if self.settings:
            words += f" --{self.kind}_settings '{json.dumps(self.settings)}'"
        if self.module == _MAIN:
            return f"register it before the run, and give {words}"
        if self.by_script:
            return f"start the script in which {self.module} registers it, with {words}"
        return f"give --extensions {self.module} {words}"


def settings_of(factory: Any) -> dict[str, Any]:
    """Return the settings of a factory with their defaults: its parameters that have one."""
    parameters = inspect.signature(factory).parameters.values()
    return {one.name: one.default for one in parameters if one.default is not inspect.Parameter.empty}


def resolve_settings(table: Table[Any], name: str, changed: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return all settings of a part, with those that the user has changed.

    Raises:
        InputError: the part has no such setting, or a value is not of the type of its default.
    """
    option = f"--{table.kind}_settings"
    if table.module_of(name) == PROJECT:
        if changed:
            raise InputError(
                f"{option} is of an {table.kind} that was registered, not of --{table.kind} {name}; leave it out"
            )
        return {}
    settings = settings_of(table[name])
    faults = []
    for setting, value in (changed or {}).items():
        if setting not in settings:
            has = f"it has {', '.join(settings)}" if settings else "it has none"
            faults.append(f"{option}: {name} has no setting {setting}, {has}{nearest_name(setting, settings)}")
        elif not _is_like(value, settings[setting]):
            faults.append(f"{option}: {setting} is {settings[setting]!r} by default; got {value!r}, of another type")
    if faults:
        raise InputError(*faults)
    return settings | dict(changed or {})


def _is_like(value: Any, default: Any) -> bool:
    """Whether a value is of the type of a default; a whole number may stand for any number."""
    if default is None or value is None:
        return True
    if isinstance(default, float) and type(value) is int:
        return True
    return type(value) is type(default) or (isinstance(default, Sequence) and isinstance(value, list))


def _in_words(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def load_extensions(names: Sequence[str]) -> list[str]:
    """Import the modules of ``--extensions``, which register parts; return a fault for each that cannot be imported."""
    faults = []
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # programs that are commands have no current folder in it
    for name in names:
        option = f"--extensions {name}"
        if not re.fullmatch(_MODULE, name):
            faults.append(f"{option}: expected the name of a module, such as my_losses for my_losses.py")
            continue
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            where = "in the current folder, in PYTHONPATH and among installed packages"
            faults.append(f"{option}: there is no module {error.name} {where}")
        except Exception as error:  # noqa: BLE001 - the code of a user may raise anything
            faults.append(f"{option}: importing it failed: {type(error).__name__}: {first_line(error)}")
    return faults
