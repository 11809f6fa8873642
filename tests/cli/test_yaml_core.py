"""YAML files follow YAML 1.2, written values are read back equal, and no text makes the reader hang or crash."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fabric_train.cli.yaml_core import YamlFault, dump, load, plain_scalar, read_text

# ------------------------------------------------------------------------------------------------------ plain scalars


@pytest.mark.parametrize(
    "text, value",
    [
        ("010", 10),
        ("0o10", 8),
        ("0x1F", 31),
        ("-7", -7),
        ("1e-4", 1e-4),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("-.inf", -math.inf),
        ("true", True),
        ("FALSE", False),
        ("~", None),
        ("Null", None),
        ("", None),
        *((text, text) for text in ("1:30", "190:20:30", "1_000", "0b11", "2024-01-01", "1e", "=", "<<", ".", "٣")),
        *((text, text) for text in ("yes", "No", "on", "OFF", "y", "n", "None", "nan", "inf", "1.2.3")),
    ],
)
def test_plain_scalars_are_those_of_the_core_schema(text: str, value: Any) -> None:
    for read in (plain_scalar(text), load(text), load(f"a: [{text}]")["a"][0] if text else None):
        assert read == value
        assert type(read) is type(value)


def test_nan_is_a_number() -> None:
    assert math.isnan(plain_scalar(".NaN"))


def test_quoted_scalars_are_text() -> None:
    assert load("a: '010'\nb: \"true\"\nc: !!str 5\nd: ''") == {"a": "010", "b": "true", "c": "5", "d": ""}


# ------------------------------------------------------------------------------------------------ written and read back

LIKE_OTHER_TYPES = st.sampled_from(
    ["010", "0o17", "1:30", "yes", "Off", "2024-01-01", "1e5", "1E5", "~", "null", "None", ".inf", "0x1", "1_000", "<<"]
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | LIKE_OTHER_TYPES
SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4))


def same(first: Any, second: Any) -> bool:
    """Whether values are equal and of one type, all the way down."""
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(same, first, second))
    return type(first) is type(second) and first == second


@settings(deadline=None)
@given(st.dictionaries(TEXTS, VALUES, max_size=6))
@example({"a": "x" * 200 + " y", "b": "line\nline\n", "c": " \t", "d": "\x85\u2028", "e": "\ufeff", "f": 1e16})
def test_written_values_are_read_back_equal(values: dict[str, Any]) -> None:
    assert same(load(dump(values)), values)


@settings(deadline=None)
@given(st.dictionaries(TEXTS, SCALARS, max_size=6))
def test_readers_of_yaml_1_1_read_the_same(values: dict[str, Any]) -> None:
    assert same(yaml.safe_load(dump(values)), values)


def test_equal_values_are_written_without_aliases() -> None:
    shared = ["a"]
    assert "&" not in dump({"first": shared, "second": shared})


# -------------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize(
    "text, fault",
    [
        ("a: 1\nb: 2\na: 3", "line 3: a is given twice"),
        ("a:\n  b: 1\n  b: 2", "line 3: b is given twice"),
        ("a: &x 1\nb: *x", "line 2: an alias (*name) is not supported; write the value again"),
        ("a: &x [*x]", "line 1: an alias (*name) is not supported; write the value again"),
        ("a: " + "[" * 3000 + "]" * 3000, "line 1: nested more than 20 levels deep"),
        ("a: " + "{b: " * 3000 + "1" + "}" * 3000, "line 1: nested more than 20 levels deep"),
        ("\n".join(" " * depth + "a:" for depth in range(3000)), "line 21: nested more than 20 levels deep"),
        ("a: " + "9" * 5000, "line 1: a number of 5,000 digits"),
        ("a: 0x" + "f" * 5000, "line 1: a number of 5,002 digits"),
        ("? [a]\n: 1", "line 1: a list or a mapping cannot be a name"),
        ("a: !!python/name:os.system x", "line 1: the tag 'tag:yaml.org,2002:python/name:os.system' is not …"),
        ("a: !!int x", "line 1: the tag 'tag:yaml.org,2002:int' is not supported; leave it out"),
        ("a: !!timestamp 2024-01-01", "line 1: the tag 'tag:yaml.org,2002:timestamp' is not supported; leave it out"),
        (
            "a: [1",
            "not a YAML file: line 1: while parsing a flow sequence, expected ',' or ']', but got '<stream end>'",
        ),
        (
            "a: 1\n---\nb: 2",
            "not a YAML file: line 2: expected a single document in the stream, …",
        ),
        ('a: "\\UFFFFFFFF"', "not a YAML file: …"),
        (f"%YAML {'9' * 5000}.1\n---\na", "not a YAML file: …"),
        ("\0", "not a YAML file: unacceptable character #x0000…"),
    ],
    ids=lambda text: text[:20],
)
def test_what_is_not_supported_is_refused_with_its_line(text: str, fault: str) -> None:
    with pytest.raises(YamlFault) as refusal:
        load(text)
    assert "\n" not in str(refusal.value)
    if fault.endswith("…"):
        assert str(refusal.value).startswith(fault[:-1])
    else:
        assert str(refusal.value) == fault


PIECES = st.sampled_from(
    [*"[]{}:,&*!|>%@`'\"?-#\n \t~\\a1x", "!!", "---", "...", "\\U", ": ", "- ", "0x", "e9", ".inf"]
)


@settings(deadline=None, max_examples=250)
@given(st.lists(PIECES, max_size=30).map("".join) | st.text(max_size=20))
def test_any_text_is_a_value_or_a_fault(text: str) -> None:
    fault = ""
    try:
        load(text)
    except YamlFault as error:
        fault = str(error)
    assert "\n" not in fault


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "huge.yaml").write_text("# nothing\n" * 20_000)
    for path, fault in (
        (tmp_path, "a folder, not a YAML file"),
        (tmp_path / "pipe", "a pipe or a device, not a YAML file; write the arguments to a file"),
        (Path("/dev/zero"), "a pipe or a device, not a YAML file; write the arguments to a file"),
        (tmp_path / "huge.yaml", "it is larger than 100,000 bytes, so it is not a file of arguments"),
        (tmp_path / "missing.yaml", "No such file or directory"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        with pytest.raises(YamlFault) as refusal:
            read_text(str(path))
        assert str(refusal.value) == fault
