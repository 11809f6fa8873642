"""Read and write YAML 1.2 with PyYAML.

By default, PyYAML reads YAML 1.1, in which 010 is 8, 1:30 is 90, yes is true and 2024-01-01 is a date. Here, the core
schema decides the type of a plain scalar: https://yaml.org/spec/1.2.2/#103-core-schema.
"""

import os
import re
from collections.abc import Callable
from stat import S_ISDIR, S_ISREG
from typing import Any

import yaml

from fabric_train.cli.errors import InputError

_MAX_BYTES = 100_000  # a file of every argument has 4,000
_MAX_DEPTH = 20
_MAX_DIGITS = 100  # Python refuses to convert numbers of more than 4,300 digits

_TAG = "tag:yaml.org,2002:"
_CORE_SCHEMA = {
    "null": re.compile(r"(~|null|Null|NULL)?\Z"),
    "bool": re.compile(r"(true|True|TRUE|false|False|FALSE)\Z"),
    "int": re.compile(r"([-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z"),
    "float": re.compile(
        r"([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))\Z"
    ),
}
"""The pattern of each type's plain scalars. A scalar has the first type that matches, or else it is text."""


class YamlFault(ValueError):  # noqa: N818 - a fault of the user's, as in InputError
    """Raised for text that is not YAML, or a file that cannot be a YAML file of arguments; the message is one line."""


def read_text(path: str) -> str:
    """Return the text of a YAML file; a YamlFault if it cannot be one (reading a pipe would block)."""
    try:
        status = os.stat(path)
        if S_ISDIR(status.st_mode):
            raise YamlFault("a folder, not a YAML file")
        if not S_ISREG(status.st_mode):
            raise YamlFault("a pipe or a device, not a YAML file; write the arguments to a file")
        with open(path, "rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise YamlFault(f"it is larger than {_MAX_BYTES:,} bytes, so it is not a file of arguments")
        return content.decode("utf-8")
    except OSError as error:
        raise YamlFault(error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise YamlFault(f"byte {error.start} is not UTF-8 (0x{byte:02x}); save the file as UTF-8") from error


def load_file(path: str, option: str) -> Any:
    """Return the value of a YAML file; if it cannot be read, the InputError begins with ``option``."""
    try:
        return load(read_text(path))
    except YamlFault as fault:
        raise InputError(f"{option} {path}: {fault}") from fault


def load(text: str) -> Any:
    """Return the value of a YAML document: None, bool, int, float, str, lists and dicts of these.

    Raise a YamlFault if it is not YAML, nested too deeply, or has an alias, a tag or a key that is given twice.
    """
    try:
        return _construct(yaml.compose(text, Loader=_Loader))
    except YamlFault:
        raise
    except yaml.MarkedYAMLError as error:
        location = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        problem = ", ".join(text for text in (error.context, error.problem) if text)
        raise YamlFault(f"not a YAML file: {location}{problem}") from error
    # PyYAML lets ValueError and OverflowError through, for a code point or a YAML version that is out of range
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise YamlFault(f"not a YAML file: {' '.join(str(error).split())}") from error


def plain_scalar(text: str) -> Any:
    """Return the value of a plain scalar: None, bool, int, float, or the text.

    Raises:
        ValueError: it is an integer with too many digits.
    """
    text = text.strip()
    for kind, pattern in _CORE_SCHEMA.items():
        if pattern.match(text):
            return _CONVERT[kind](text)
    return text


def dump(values: dict[str, Any]) -> str:
    """Return YAML that :func:`load` reads back as equal; text that YAML 1.1 would not read as text is also quoted."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Loader(yaml.SafeLoader):
    """Compose nodes with the types of the core schema."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML reads this attribute
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Refuse aliases, which can form a circle or grow exponentially, and deep nesting, which ends the stack."""
        mark = self.peek_event().start_mark
        if self.check_event(yaml.AliasEvent):
            raise _fault_at(mark, "an alias (*name) is not supported; write the value again")
        if self._depth == _MAX_DEPTH and self.check_event(yaml.CollectionStartEvent):
            raise _fault_at(mark, f"nested more than {_MAX_DEPTH} levels deep")
        self._depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    """Quote text that either version of YAML reads as something else, and write no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True  # an object that occurs twice is written twice


_Dumper.add_representer(  # PyYAML changes some of Unicode's line ends in other styles than double quotes
    str, lambda dumper, text: dumper.represent_scalar(f"{_TAG}str", text, style=None if text.isprintable() else '"')
)
for _name, _pattern in _CORE_SCHEMA.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _name, _pattern, None)


def _construct(node: yaml.Node | None) -> Any:
    """Return the value of a node; None for an empty document."""
    if node is None:
        return None
    kind = node.tag.removeprefix(_TAG)
    if isinstance(node, yaml.SequenceNode) and kind == "seq":
        return [_construct(element) for element in node.value]
    if isinstance(node, yaml.MappingNode) and kind == "map":
        return _construct_mapping(node)
    if isinstance(node, yaml.ScalarNode) and _is_scalar_of(kind, node.value):
        try:
            return _CONVERT[kind](node.value)
        except ValueError as error:
            raise _fault_at(node.start_mark, str(error)) from error
    raise _fault_at(node.start_mark, f"the tag {node.tag!r} is not supported; leave it out")


def _construct_mapping(node: yaml.MappingNode) -> dict[Any, Any]:
    values: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = _construct(key_node)
        if isinstance(key, list | dict):
            raise _fault_at(key_node.start_mark, "a list or a mapping cannot be a name")
        if key in values:
            raise _fault_at(key_node.start_mark, f"{key} is given twice")
        values[key] = _construct(value_node)
    return values


def _is_scalar_of(kind: str, text: str) -> bool:
    """Return whether a text can have a type of the core schema; a tag that the user wrote may say something else."""
    if kind == "str":
        return True
    pattern = _CORE_SCHEMA.get(kind)
    return pattern is not None and pattern.match(text) is not None


def _fault_at(mark: yaml.Mark, problem: str) -> YamlFault:
    return YamlFault(f"line {mark.line + 1}: {problem}")


def _to_int(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(text):,} digits")
    base = {"0o": 8, "0x": 16}.get(text[:2], 10)
    return int(text, base)


_CONVERT: dict[str, Callable[[str], Any]] = {
    "null": lambda _: None,
    "bool": lambda text: text.lower() == "true",
    "int": _to_int,
    "float": lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
    "str": str,
}
