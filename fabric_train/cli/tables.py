"""Tables of the components that a run uses by name: objectives, optimizers, metrics, loggers and chat formats.

Each name has a factory. This project's own factories are imported when they are first used, so that ``--help``
lists them without torch. A script, or a module in ``--extensions``, registers others::

    OBJECTIVES["focal"] = Focal  # then --objective focal

The parameters of a factory that have defaults are its settings, which ``--objective_settings`` and
``--optimizer_settings`` set. Each checkpoint describes the components of its run as :class:`Component`.
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
"""The module of this project's own components in a :class:`Component`."""
_MAIN = "__main__"
_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
_MODULE = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
T = TypeVar("T")


@dataclass(frozen=True)
class _Origin:
    """The module that registered a component."""

    module: str
    at_import: bool
    """Whether the component was registered while the module was imported, so that importing it registers it again."""


def _find_origin(frame: FrameType | None) -> _Origin:
    """Return the module that registers a component in ``frame``.

    This is the innermost module on the stack that is being imported, or if none is, the module of the frame.
    """
    caller_module = frame.f_globals.get("__name__", _MAIN) if frame else _MAIN
    while frame is not None:
        module = frame.f_globals.get("__name__")
        specification = getattr(sys.modules.get(module or ""), "__spec__", None)
        if getattr(specification, "_initializing", False):  # importlib sets it during the import
            return _Origin(str(module), at_import=True)
        frame = frame.f_back
    return _Origin(caller_module, at_import=False)


class Table(MutableMapping[str, T]):
    """Components of one kind by name."""

    def __init__(self, kind: str, project_components: Mapping[str, str]) -> None:
        """Create a table with this project's components.

        Args:
            kind: the argument that selects a component, such as objective.
            project_components: the MODULE:ATTRIBUTE of each component, by name.
        """
        self.kind = kind
        self._project_components = dict(project_components)
        self._imported: dict[str, T] = {}  # the components of the project that were used
        self._registered: dict[str, T] = {}
        self._origins: dict[str, _Origin] = {}

    def __getitem__(self, name: str) -> T:
        if name in self._registered:
            return self._registered[name]
        if name not in self._imported:  # each chat looks its format up, so this must be fast
            module, _, attribute = self._project_components[name].partition(":")
            self._imported[name] = getattr(importlib.import_module(module), attribute)
        return self._imported[name]

    def __contains__(self, name: object) -> bool:
        """Return whether there is a component with a name, without importing its module, which may be slow."""
        return name in self._project_components or name in self._registered

    def __setitem__(self, name: str, component: T) -> None:
        """Register a component from a script or a module; it may replace an earlier registration."""
        if name in self._project_components:
            raise InputError(
                f"{self.kind} {name}: this name is taken by a built-in one; register yours under another name"
            )
        if not isinstance(name, str) or not re.fullmatch(_NAME, name):
            raise InputError(f"{self.kind} {name!r}: expected a name of letters, digits, _, - and . to register it by")
        self._registered[name] = component
        self._origins[name] = _find_origin(sys._getframe(1))

    def __delitem__(self, name: str) -> None:
        del self._registered[name]
        del self._origins[name]

    def __iter__(self) -> Iterator[str]:
        return iter([*self._project_components, *self._registered])

    def __len__(self) -> int:
        return len(self._project_components) + len(self._registered)

    @property
    def registered(self) -> list[str]:
        """The names of components from outside this project."""
        return list(self._registered)

    def module_of(self, name: str) -> str:
        """Return the module that registered a component; ``PROJECT`` for this project's own."""
        return self._origins[name].module if name in self._origins else PROJECT

    def is_imported(self, name: str) -> bool:
        """Return whether importing a component's module is enough to have the component."""
        return name not in self._origins or self._origins[name].at_import

    def describe(self, name: str, settings: Mapping[str, Any] | None = None) -> "Component":
        """Return the description, for a checkpoint, of a component that a run uses with these settings."""
        module = self.module_of(name)
        if module == PROJECT:
            return Component(self.kind, name, PROJECT)
        file = getattr(sys.modules.get(module), "__file__", None)
        source_sha256 = None
        if file and Path(file).is_file():
            source_sha256 = hashlib.sha256(Path(file).read_bytes()).hexdigest()
        if module == _MAIN and file:
            module = Path(file).stem  # its name if --extensions imports it in another run
        return Component(
            kind=self.kind,
            name=name,
            module=module,
            by_script=not self.is_imported(name),
            settings=dict(settings or {}),
            source=source_sha256,
        )


OBJECTIVES: Table[Any] = Table(
    "objective",
    {
        "sft": "fabric_train.training.objective:build_cross_entropy",
        "distill": "fabric_train.training.distillation:build_distillation",
        "rl": "fabric_train.training.policy_gradient:build_policy_gradient",
        "dpo": "fabric_train.training.preference:build_preference",
        "ipo": "fabric_train.training.preference:build_preference",
        "simpo": "fabric_train.training.preference:build_preference",
        "orpo": "fabric_train.training.preference:build_preference",
        "apo_zero": "fabric_train.training.preference:build_preference",
        "dpop": "fabric_train.training.preference:build_preference",
        "kto": "fabric_train.training.kto:build_kto",
        "apo_zero_unpaired": "fabric_train.training.kto:build_kto",
    },
)
"""Factories of objectives (``training.objective.BuildObjective``)."""
OPTIMIZERS: Table[Any] = Table(
    "optimizer",
    {
        "adamw": "fabric_train.optim.optimizer:build_adamw",
        "muon": "fabric_train.optim.muon:build_muon",
    },
)
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
"""Functions that open a logger (``training.logger.OpenLogger``)."""
CHAT_FORMATS: Table[Any] = Table(
    "data_format",
    {
        "messages": "fabric_train.tokenization.chats.formats:MESSAGES",
        "conversations": "fabric_train.tokenization.chats.formats:CONVERSATIONS",
        "conversation": "fabric_train.tokenization.chats.formats:CONVERSATION",
        "alpaca": "fabric_train.tokenization.chats.formats:ALPACA",
        "prompt_completion": "fabric_train.tokenization.chats.formats:PROMPT_COMPLETION",
        "query_calls": "fabric_train.tokenization.chats.formats:QUERY_CALLS",
        "preference": "fabric_train.tokenization.chats.formats:PREFERENCE_PAIRS",
        "unpaired": "fabric_train.tokenization.chats.formats:UNPAIRED_ANSWERS",
    },
)
"""Formats of rows with chats (``tokenization.chats.formats.ChatFormat``)."""
TABLES = (OBJECTIVES, OPTIMIZERS, METRICS, LOGGERS, CHAT_FORMATS)


@dataclass(frozen=True)
class Component:
    """A component of a run in its checkpoints: what distinguishes it, and where it was registered."""

    kind: str
    """The argument that selects the component, such as objective."""
    name: str
    module: str
    """The module that registered it, or ``PROJECT`` for this project's own components, whose settings are arguments."""
    by_script: bool = False
    """Whether a script registered it, itself or by a call, so that importing the module does not."""
    settings: dict[str, Any] = field(default_factory=dict)
    source: str | None = None
    """The SHA-256 of the module's file; None if it has no file."""

    @property
    def is_own(self) -> bool:
        """Whether this is one of this project's components."""
        return self.module == PROJECT

    def computes_as(self, other: "Component") -> bool:
        """Return whether another component has the same kind, name, module and settings; sources are not compared."""
        has_same_name = (self.kind, self.name, self.module) == (other.kind, other.name, other.module)
        return has_same_name and self.settings == other.settings

    def __str__(self) -> str:
        return f"{self.kind} {self.description}"

    @property
    def description(self) -> str:
        """The name, and the module and settings of a registered component."""
        if self.is_own:
            return self.name
        description = f"{self.name} of {self.module}"
        settings = []
        for name, value in self.settings.items():
            text = str(value).lower() if isinstance(value, bool) else str(value)  # as on the command line
            settings.append(f"{name} {text}")
        return f"{description} ({', '.join(settings)})" if settings else description

    @property
    def advice(self) -> str:
        """How to select this component for a run."""
        options = f"--{self.kind} {self.name}"
        if self.is_own:
            return f"give {options}"
        if self.settings:
            options += f" --{self.kind}_settings '{json.dumps(self.settings)}'"
        if self.module == _MAIN:
            return f"register it before the run, and give {options}"
        if self.by_script:
            return f"start the script in which {self.module} registers it, with {options}"
        return f"give --extensions {self.module} {options}"


def settings_of(factory: Any) -> dict[str, Any]:
    """Return the settings of a factory with their defaults: its parameters that have a default."""
    settings = {}
    for parameter in inspect.signature(factory).parameters.values():
        if parameter.default is not inspect.Parameter.empty:
            settings[parameter.name] = parameter.default
    return settings


def resolve_settings(table: Table[Any], name: str, changes: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return all settings of a component: the user's ``changes``, and the defaults of the others.

    Raises:
        InputError: the component has no such setting, or a value has another type than the default.
    """
    option = f"--{table.kind}_settings"
    if table.module_of(name) == PROJECT:
        if changes:
            raise InputError(
                f"{option} only applies to a registered {table.kind}, not to --{table.kind} {name}; leave out {option}"
            )
        return {}
    defaults = settings_of(table[name])
    faults = []
    for setting, value in (changes or {}).items():
        if setting not in defaults:
            names = f"it has {', '.join(defaults)}" if defaults else "it has none"
            faults.append(f"{option}: {name} has no setting {setting}; {names}{nearest_name(setting, defaults)}")
        elif not _has_type_of(defaults[setting], value):
            faults.append(
                f"{option}: {setting} has the wrong type: the default is {defaults[setting]!r}, got {value!r}"
            )
    if faults:
        raise InputError(*faults)
    return defaults | dict(changes or {})


def _has_type_of(default: Any, value: Any) -> bool:
    """Return whether a value has the type of a default, as far as YAML can express the type."""
    if default is None or value is None:  # None stands for "not set" in either
        return True
    if isinstance(default, float) and type(value) is int:  # 1 for 1.0
        return True
    if isinstance(default, Sequence) and isinstance(value, list):  # a list for a tuple
        return True
    return type(value) is type(default)


def load_extensions(names: Sequence[str]) -> list[str]:
    """Import the modules of ``--extensions``, which register components; return a fault for each failed import."""
    faults = []
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # an installed command does not have the current folder in sys.path
    for name in names:
        option = f"--extensions {name}"
        if not re.fullmatch(_MODULE, name):
            faults.append(f"{option}: expected the name of a module, such as my_losses for my_losses.py")
            continue
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            where = "in the current folder, in PYTHONPATH and among installed packages"
            faults.append(f"{option}: no module {error.name} {where}")
        except Exception as error:  # noqa: BLE001 - the code of a user may raise anything
            faults.append(f"{option}: importing it failed: {type(error).__name__}: {first_line(error)}")
    return faults
