"""Read and write YAML 1.2 with PyYAML, for which 010 is 8, 1:30 is 90, yes is true and 2024-01-01 a date (YAML 1.1).

The core schema decides what a plain scalar means: https://yaml.org/spec/1.2.2/#103-core-schema.
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
"""The pattern of each type's plain scalars. A scalar has the first type that matches, otherwise it is text."""


class YamlFault(ValueError):  # noqa: N818 - a fault of the user's, as in InputError
    """Text that is not YAML, or a file that cannot be a YAML file of arguments; the message is one line."""


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
            raise YamlFault(f"larger than {_MAX_BYTES:,} bytes, so not a file of arguments")
        return content.decode("utf-8")
    except OSError as error:
        raise YamlFault(error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise YamlFault(f"byte {error.start} is not UTF-8 (0x{byte:02x}); save the file as UTF-8") from error


def load_file(path: str, option: str) -> Any:
    """Return the value of a YAML file; the InputError of one that cannot be read begins with ``option``."""
    try:
        return load(read_text(path))
    except YamlFault as fault:
        raise InputError(f"{option} {path}: {fault}") from fault


def load(text: str) -> Any:
    """Return the value of a YAML document: None, bool, int, float, str, lists and dicts of these.

    A YamlFault if it is not YAML, nested too deeply, or has an alias, a tag or a key that is given twice.
    """
    try:
        return _value(yaml.compose(text, Loader=_Loader))
    except YamlFault:
        raise
    except yaml.MarkedYAMLError as error:
        place = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise YamlFault(f"not a YAML file: {place}{', '.join(filter(None, (error.context, error.problem)))}") from error
    # PyYAML lets ValueError and OverflowError through, for a code point or a YAML version that is out of range
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise YamlFault(f"not a YAML file: {' '.join(str(error).split())}") from error


def plain_scalar(text: str) -> Any:
    """Return what a plain scalar means: None, bool, int, float, or the text; a ValueError if it has many digits."""
    text = text.strip()
    kind = next((name for name, pattern in _CORE_SCHEMA.items() if pattern.match(text)), "str")
    return _CONVERT[kind](text)


def dump(values: dict[str, Any]) -> str:
    """Return YAML that :func:`load` reads back equal; text that YAML 1.1 would not read as text is quoted too."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Loader(yaml.SafeLoader):
    """Compose nodes with the types of the core schema."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML reads this attribute
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Refuse what :func:`_value` and a printed value would follow for ever, or until the stack ends."""
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
    """Quote text that either version of YAML reads as something else, and write equal values twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(  # PyYAML changes some of Unicode's line ends in other styles than double quotes
    str, lambda dumper, text: dumper.represent_scalar(f"{_TAG}str", text, style=None if text.isprintable() else '"')
)
for _name, _pattern in _CORE_SCHEMA.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _name, _pattern, None)


def _value(node: yaml.Node | None) -> Any:
    if node is None:  # an empty document
        return None
    kind = node.tag.removeprefix(_TAG)
    if isinstance(node, yaml.SequenceNode) and kind == "seq":
        return [_value(item) for item in node.value]
    if isinstance(node, yaml.MappingNode) and kind == "map":
        values: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = _value(key_node)
            if isinstance(key, list | dict):
                raise _fault_at(key_node.start_mark, "a list or a mapping cannot be the name of a value")
            if key in values:
                raise _fault_at(key_node.start_mark, f"{key} is given twice")
            values[key] = _value(value_node)
        return values
    pattern = _CORE_SCHEMA.get(kind)
    if isinstance(node, yaml.ScalarNode) and (kind == "str" or (pattern and pattern.match(node.value))):
        try:
            return _CONVERT[kind](node.value)
        except ValueError as error:
            raise _fault_at(node.start_mark, str(error)) from error
    raise _fault_at(node.start_mark, f"the tag {node.tag!r} is not supported; leave it out")


def _fault_at(mark: yaml.Mark, problem: str) -> YamlFault:
    return YamlFault(f"line {mark.line + 1}: {problem}")


def _to_int(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(text):,} digits")
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


_CONVERT: dict[str, Callable[[str], Any]] = {
    "null": lambda _: None,
    "bool": lambda text: text.lower() == "true",
    "int": _to_int,
    "float": lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
    "str": str,
}
