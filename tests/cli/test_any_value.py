"""Whatever is given to an argument, on the command line or in a file, the result is arguments or lines for the user."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric_train.arguments import TrainArguments, parse
from fabric_train.cli.argument_types import NumberRange, WrongValueError, convert, types_of
from fabric_train.cli.errors import InputError
from fabric_train.cli.parser import to_yaml
from fabric_train.cli.yaml_core import dump
from tests.support.program_arguments import PROGRAM_ARGUMENTS

PROGRAMS = list(PROGRAM_ARGUMENTS.values())
NAMES = [(program, name) for program in PROGRAMS for name in types_of(program)]
NUMBERS = st.one_of(
    st.integers(),
    st.integers(0, 100),
    st.floats(),
    st.sampled_from([2**31, 2**63, 2**64, 10**20, 1e300, 5e-324, 1.7e308, float("inf"), float("nan"), -1, -0.0]),
)
TEXTS = st.one_of(
    st.text(max_size=12),
    NUMBERS.map(str),
    st.integers(1, 6000).map("9".__mul__),
    st.sampled_from(["null", "None", "~", "true", "[1,2]", "{a:1}", "'", '"', "{", "!!int x", "-", "---", "*a", "&a"]),
    st.sampled_from(["0x10", "010", "1:30", "1e400", ".nan", "-1", "8k", "999999999k", "0,1", "1:2", "80GB", "9e9GB"]),
    st.sampled_from([f"{'9' * 400}TB", "0.0000001KB", "../..", "a/b", "/", "é", "\udce9", "a\nb", "\0", "x" * 5000]),
)
SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3))


def check_parsed(program: type, argv: list[str]) -> Any:
    """Parse, and check that faults are reported in lines; return the arguments if there are none."""
    parsed: Any = None
    faults = ["none"]
    try:
        parsed = parse(program, argv)
    except InputError as error:
        faults = list(error.faults)
    assert faults
    for fault in faults:
        assert fault.isprintable()
        assert len(fault) < 3000
    return parsed


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_word_of_the_command_line_is_accepted_or_refused(data: st.DataObject) -> None:
    program = data.draw(st.sampled_from(PROGRAMS))
    names = data.draw(st.lists(st.sampled_from(list(types_of(program))) | TEXTS, min_size=1, max_size=4))
    check_parsed(program, [word for name in names for word in (f"--{name}", data.draw(TEXTS))])


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_value_of_a_file_is_accepted_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    program = data.draw(st.sampled_from(PROGRAMS))
    values = data.draw(st.dictionaries(st.sampled_from(list(types_of(program))) | TEXTS, VALUES, max_size=4))
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_text(dump(values), encoding="utf-8", errors="replace")
    check_parsed(program, ["--config", str(file)])


@given(content=st.binary(max_size=40))
@settings(deadline=None)
def test_any_bytes_as_config_are_accepted_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_bytes(content)
    check_parsed(TrainArguments, ["--config", str(file)])


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_accepted_arguments_are_saved_and_read_back_equal(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(list(types_of(TrainArguments))))
    given_ = check_parsed(TrainArguments, ["--train_data_dir", "tokens", f"--{name}", data.draw(TEXTS)])
    if given_ is not None:
        file = Path(tmp_path_factory.getbasetemp() / "saved.yaml")
        file.write_text(to_yaml(given_), encoding="utf-8")
        assert parse(TrainArguments, ["--config", str(file)]) == given_


# --------------------------------------------------------------------------------------------------------------- limits


def numbers_in(kind: Any) -> list[Any]:
    """Return the number types within a type, those without a range as they are."""
    if get_origin(kind) is Annotated:
        return [kind] if isinstance(get_args(kind)[1], NumberRange) else []
    if kind in (int, float):
        return [kind]
    return [number for part in get_args(kind) for number in numbers_in(part)]


def test_every_number_argument_has_limits() -> None:
    without = {
        name for program, name in NAMES for number in numbers_in(types_of(program)[name]) if number in (int, float)
    }
    assert without == {"devices"}  # text with a pattern of its own


def test_every_number_argument_refuses_what_is_beyond_its_limits() -> None:
    checked = 0
    for program, name in NAMES:
        for number in numbers_in(types_of(program)[name]):
            if get_origin(number) is Annotated:
                base, range_ = get_args(number)
                assert isinstance(range_, NumberRange)
                assert convert(number, base(range_.highest)) == range_.highest
                below = range_.lowest - 1
                above = range_.highest * 2 + 1
                for beyond in (below, above, 10**90, float("inf"), "1e400", ".inf", str(10**90)):
                    with pytest.raises(WrongValueError):
                        convert(number, beyond)
                checked += 1
    assert checked > 40


def test_all_programs_are_tested() -> None:
    assert len(PROGRAMS) == 22
    assert all(dataclasses.is_dataclass(program) for program in PROGRAMS)
