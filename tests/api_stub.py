"""Write ``fabric_train/__init__.pyi``, the arguments of the Python API with their types: ``python -m tests.api_stub``.

The classes of arguments are its source. ``tests/programs/test_api.py`` says when the file is not up to date.
"""

import dataclasses
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import fabric_train
from fabric_train import api
from fabric_train.cli.argument_types import NameIn, default_of, groups_of, is_required, types_of

STUB = Path(fabric_train.__file__).with_suffix(".pyi")
_HEAD = '''"""Written by python -m tests.api_stub from the classes of arguments: do not edit."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

{results}

StrPath: TypeAlias = str | os.PathLike[str]
__version__: str
__all__: list[str]
'''
_ALSO = {
    ("tokenize", "dataset"): "Iterable[Mapping[str, Any]]",
    ("generate", "prompts"): "Iterable[str | Mapping[str, Any]]",
}
"""What an argument may be in Python alone."""
_RESULTS = {
    "tokenize": "TokenizeResult",
    "train": "TrainResult",
    "convert": "ConvertResult",
    "evaluate": "dict[str, Any]",
    "generate": "list[str]",
}


def written_stub() -> str:
    """Return the text that the file should have."""
    named = [name for name in fabric_train.__all__ if name[0].isupper()]
    results = "\n".join(sorted(f"from {getattr(fabric_train, one).__module__} import {one} as {one}" for one in named))
    functions = [_function(name, kind) for name, kind in api.ARGUMENTS.items()]
    load_run = f'def load_run(path: StrPath) -> Run:\n    """{inspect.getdoc(api.load_run)}"""\n'
    text = "\n".join([_HEAD.format(results=results), *functions, load_run])
    ruff = [str(Path(sys.executable).with_name("ruff")), "format", "--stdin-filename", str(STUB), "-"]
    return subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout


def _function(name: str, kind: type) -> str:
    parameters = ",\n".join([*_parameters(name, kind), "config: StrPath | None = None"])
    doc = inspect.getdoc(getattr(api, name))
    return f'def {name}(\n*,\n{parameters},\n) -> {_RESULTS[name]}:\n    """{doc}"""\n'


def _parameters(function: str, kind: type) -> Iterator[str]:
    types = types_of(kind)
    fields = [field for group in groups_of(kind).values() for field in dataclasses.fields(group)]
    for field in sorted(fields, key=is_required, reverse=True):
        parts = [*_types(types[field.name]), *filter(None, [_ALSO.get((function, field.name))])]
        parts = sorted(dict.fromkeys(parts), key=lambda part: part == "None")
        default = "" if is_required(field) else f" = {_shown(default_of(field))}"
        yield f"{field.name}: {' | '.join(parts)}{default}"


def _types(kind: Any) -> list[str]:
    """Return the types of Python that an argument of a type may have; numbers with units may be texts."""
    if get_origin(kind) in (Union, UnionType):
        return [one for part in get_args(kind) for one in _types(part)]
    if get_origin(kind) is Annotated:
        base, limits = get_args(kind)
        if isinstance(limits, NameIn):
            return ["str"]
        return [base.__name__, *(["str"] if limits.thousand else [])]
    if get_origin(kind) is Literal:
        return [f"Literal[{', '.join(map(_shown, get_args(kind)))}]"]
    if get_origin(kind) is list:
        one = _types(get_args(kind)[0])
        return [*one, f"Sequence[{' | '.join(one)}]"] if one == ["StrPath"] else [f"Sequence[{' | '.join(one)}]"]
    if get_origin(kind) is dict:
        return ["Mapping[str, Any]"]
    return ["None" if kind is type(None) else "StrPath" if kind is str else kind.__name__]


def _shown(value: Any) -> str:
    """Return a default as Python; a list is only said to be there."""
    return f'"{value}"' if isinstance(value, str) else "..." if isinstance(value, list) else repr(value)


if __name__ == "__main__":
    STUB.write_text(written_stub(), encoding="utf-8")
