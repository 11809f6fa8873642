"""Each built-in reward accepts what it describes, and neither nonsense nor tricks."""

import json
from typing import Any

import pytest

from fabric_train.rollouts import builtin_rewards

SPANISH = "El perro corre por el parque todas las mañanas y después vuelve a casa con mucha hambre."
ENGLISH = "The dog runs through the park every morning and then comes home very hungry and tired."


def reward(name: str, completion: str, **columns: Any) -> float:
    """Return the built-in reward of one completion."""
    values = {column: [value] for column, value in columns.items()}
    (value,) = builtin_rewards.BUILTIN_REWARDS[name].compute([completion], ["prompt"], **values)
    return value


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("42", "42", 1),
        ("  42\n", "42", 1),
        ("First 41.\n#### 42", "42", 1),
        ("#### 41\n#### 42\nmore text", "42", 1),
        ("#### 42\n#### 41", "42", 0),
        ("48/2 = 24\n#### 72", "48/2 = <<48/2=24>>24 clips\n#### 72", 1),  # a solution of GSM8K
        ("València,  és gran", "València, és gran", 1),
        ("42.", "42", 0),
        ("the answer is 42", "42", 0),
        ("", "42", 0),
        ("####", "42", 0),
        ("42", 42, 1),
        ("\x1b[31m42", "42", 0),
    ],
)
def test_exact_answer_compares_what_follows_the_last_mark(completion: str, answer: Any, expected: int) -> None:
    assert reward("exact_answer", completion, answer=answer) == expected


@pytest.mark.parametrize("answer", ["", "  ", "text ####", None, True, ["42"]])
def test_exact_answer_refuses_an_answer_that_an_empty_completion_would_match(answer: Any) -> None:
    with pytest.raises(ValueError, match="the column answer has"):
        reward("exact_answer", "", answer=answer)


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        (r"So it is \boxed{\frac{1}{2}}.", "0.5", 1),
        (r"\boxed{1 + x^2}", "x^2 + 1", 1),
        (r"\boxed{1 + x^2}", r"$x^2 + 1$", 1),
        ("#### 1,000", "1000", 1),
        ("she has 72 clips", "48/2=24 more\n#### 72", 1),
        (r"\boxed{41}, or \boxed{42}", "42", 0),
        (" ".join(str(number) for number in range(100)), "42", 0),
        (r"\boxed{42", "41", 0),
        ("", "42", 0),
        ("{" * 3000, "42", 0),
        ("9" * 5000, "42", 0),
        (r"\boxed{\infty}", "42", 0),
        (r"$\boxed{$", "42", 0),
        ("🤷 ٤٢", "43", 0),
    ],
)
def test_math_compares_the_last_expression(completion: str, answer: str, expected: int) -> None:
    pytest.importorskip("math_verify")
    assert reward("math", completion, answer=answer) == expected


def test_math_gives_zero_to_an_expression_that_takes_too_long() -> None:
    pytest.importorskip("math_verify")
    assert reward("math", r"\boxed{10^{10^{10}}}", answer="42") == 0


def test_math_refuses_an_answer_without_an_expression() -> None:
    pytest.importorskip("math_verify")
    with pytest.raises(ValueError, match=r"'\$none at all' is no mathematical expression"):
        reward("math", "42", answer="$none at all")


@pytest.mark.parametrize(
    ("completion", "pattern", "expected"),
    [
        ("I say yes.", "yes|no", 1),
        ("I say yes.", r"\A(yes|no)\Z", 0),
        ("yes\n", r"\A(yes|no)\Z", 0),
        ("<think>a\nb</think>c", "(?s)<think>.*</think>", 1),
        ("<think>a\nb</think>c", "<think>.*</think>", 0),
        ("\ud800", ".", 1),
    ],
)
def test_regex_searches_its_pattern(completion: str, pattern: str, expected: int) -> None:
    assert reward("regex", completion, pattern=pattern) == expected


@pytest.mark.parametrize("pattern", ["(", 3, None, ["a"], "a{99999999999}"])
def test_regex_refuses_a_wrong_pattern(pattern: Any) -> None:
    with pytest.raises(ValueError, match=r"the pattern .* is"):
        reward("regex", "text", pattern=pattern)


SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ('{"age": 3}', 1),
        (' {"age": 3, "name": "\u00e9"}\n', 1),
        ('{"age": "3"}', 0),
        ("[3]", 0),
        ("", 0),
        ('```json\n{"age": 3}\n```', 0),
        ('{"age": 3} and more', 0),
        ('{"age": NaN}', 0),
        ('{"age": 1e999}', 0),
        ('{"age": ' + "9" * 5000 + "}", 0),  # Python refuses to read so many digits
        ("[" * 100_000, 0),
        ('{"age": 3, "x": ' + "[" * 900 + "]" * 900 + "}", 1),
    ],
)
def test_json_schema_accepts_only_json_of_the_schema(completion: str, expected: int) -> None:
    pytest.importorskip("jsonschema")
    assert reward("json_schema", completion, schema=SCHEMA) == expected
    assert reward("json_schema", completion, schema=json.dumps(SCHEMA)) == expected


@pytest.mark.parametrize("schema", ["{", '"text"', None, {"type": "no such type"}, 3])
def test_json_schema_refuses_what_is_no_schema(schema: Any) -> None:
    pytest.importorskip("jsonschema")
    with pytest.raises(ValueError, match="the schema is n"):
        reward("json_schema", "{}", schema=schema)


def test_json_schema_downloads_no_other_schema() -> None:
    pytest.importorskip("jsonschema")
    from referencing.exceptions import Unresolvable

    with pytest.raises(Unresolvable):
        reward("json_schema", "{}", schema={"$ref": "http://127.0.0.1:9/schema.json"})


@pytest.mark.parametrize(
    ("completion", "language", "expected"),
    [
        (SPANISH, "es", 1),
        (SPANISH, "en", 0),
        (SPANISH, "en,es", 1),
        (ENGLISH, "en", 1),
        ("", "es", 0),
        ("1234 5678 !!!", "es", 0),
        ("\x00\x1b[2J", "es", 0),
    ],
)
def test_language_identifies_the_language(completion: str, language: str, expected: int) -> None:
    pytest.importorskip("py3langid")
    assert reward("language", completion, language=language) == expected


def test_language_refuses_an_unknown_language() -> None:
    pytest.importorskip("py3langid")
    with pytest.raises(ValueError, match="language: py3langid does not support xx"):
        reward("language", SPANISH, language="xx")


def test_length_counts_characters_and_both_bounds_are_allowed() -> None:
    lengths = {0: 0, 2: 0, 3: 1, 5: 1, 6: 0}
    for num_characters, expected in lengths.items():
        completion = " \n" + "é" * num_characters + " "
        assert reward("length", completion, min_characters=3, max_characters=5) == expected
    assert reward("length", "", max_characters=0) == 1
    assert reward("length", "👩", max_characters=1) == 1


@pytest.mark.parametrize("bound", [-1, "3", 2.5, None, True])
def test_length_refuses_a_bound_that_is_no_count(bound: Any) -> None:
    with pytest.raises(ValueError, match="is not a number of characters"):
        reward("length", "text", max_characters=bound)
