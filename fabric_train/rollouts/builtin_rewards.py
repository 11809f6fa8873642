"""The built-in rewards of reinforcement learning: each is a few lines on a library, with values from 0 to 1.

A built-in reward is called like a user's reward. Its keyword parameters are columns of the prompts file; a value of
``--reward_settings`` replaces a column by the same value for all prompts. A ValueError is the error of a completion
or, for a setting, of the run before it starts.

The functions run in a process of their own with a time limit (``reward_worker.py``), because a regular expression or an
algebraic simplification can take forever. Libraries are imported when they are needed, so that this module is fast to
import.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fabric_train.cleaning.language import LanguageFilter

_ANSWER_MARK = "####"  # of GSM8K (arXiv:2110.14168)
_LATEX_MARKS = ("$", "\\(", "\\[", "\\boxed")
_MATH_SECONDS = 1  # of math-verify's own limit for parsing a text, and for comparing two expressions


def exact_answer(completions: list[str], prompts: list[Any], *, answer: list[Any]) -> list[float]:
    """Return 1 for each completion whose answer is the text in the column ``answer``, else 0.

    The answer of a completion is the rest of the line after its last ``####``, or the whole completion if it has no
    ``####``. The same holds for the column, so GSM8K's solutions can be used as they are. Runs of white space count as
    one space, and white space around the answer does not count; everything else does, such as case and full stops.
    """
    values = []
    for completion, expected in zip(completions, answer, strict=True):
        expected_answer = _normalized_answer(_answer_text(expected))
        if not expected_answer:
            raise ValueError(f"the column answer has nothing after its last {_ANSWER_MARK}")
        values.append(float(_normalized_answer(completion) == expected_answer))
    return values


def math(completions: list[str], prompts: list[Any], *, answer: list[Any]) -> list[float]:
    r"""Return 1 for each completion whose last expression equals the column ``answer``, else 0.

    math-verify reads and compares the expressions: ``\frac{1}{2}`` equals 0.5. In a completion, it takes the expression
    in ``\boxed{}``, else the last one in LaTeX, else the last number. Several ``\boxed{}`` are a set, so a completion
    cannot list many answers. The column may be a plain expression such as ``x^2 + 1``, LaTeX, or a solution with its
    answer after ``####``. A completion without an expression, or with one that takes longer than a second to read or
    to compare, gets 0.

    Raises:
        ValueError: An answer in the column is no expression.
    """
    from math_verify import parse, verify

    values = []
    for completion, expected in zip(completions, answer, strict=True):
        text = _answer_text(expected).rpartition(_ANSWER_MARK)[2].strip()
        is_latex = any(mark in text for mark in _LATEX_MARKS)
        expected_expressions = parse(text if is_latex else f"\\boxed{{{text}}}", parsing_timeout=_MATH_SECONDS)
        if not expected_expressions:
            raise ValueError(f"the answer {text!r} is no mathematical expression")
        expressions = parse(completion, parsing_timeout=_MATH_SECONDS)
        is_equal = verify(expected_expressions, expressions, timeout_seconds=_MATH_SECONDS)
        values.append(float(is_equal))
    return values


def regex(completions: list[str], prompts: list[Any], *, pattern: list[Any]) -> list[float]:
    r"""Return 1 for each completion in which the regular expression ``pattern`` matches somewhere, else 0.

    The syntax is that of Python's ``re``. A pattern for the whole completion starts with ``\A`` and ends with ``\Z``;
    ``(?s)`` at its start lets ``.`` match line breaks.
    """
    values = []
    for completion, expression in zip(completions, pattern, strict=True):
        match = _compile_pattern(expression).search(completion)
        values.append(float(match is not None))
    return values


def json_schema(completions: list[str], prompts: list[Any], *, schema: list[Any]) -> list[float]:
    """Return 1 for each completion that is JSON and satisfies the JSON schema ``schema``, else 0.

    The whole completion has to be one JSON value, without a Markdown fence; ``NaN`` and ``Infinity`` are not JSON. The
    schema is an object, or its JSON as a text. Without ``$schema``, it is of draft 2020-12. A ``$ref`` to another
    document is not downloaded, so it is an error.
    """
    values = []
    for completion, definition in zip(completions, schema, strict=True):
        validator = _schema_validator(json.dumps(_parse_schema(definition), sort_keys=True))
        try:
            value = json.loads(completion, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):  # no JSON, or nested too deeply
            values.append(0.0)
            continue
        values.append(float(validator.is_valid(value)))
    return values


def language(completions: list[str], prompts: list[Any], *, language: list[Any]) -> list[float]:
    """Return 1 for each completion in the language of the column ``language``, else 0.

    The language is a code of ISO 639 such as ``es``, or anything else that ``--language`` of cleaning accepts:
    ``es,ca`` for either language, ``va`` for Valencian, ``es:0.8`` for another threshold. py3langid's probability of
    the language has to reach the threshold, 0.65; it seldom does for less than a sentence.
    """
    values = []
    for completion, codes in zip(completions, language, strict=True):
        is_in_language = _open_language_filter(codes).clean(completion, Counter()) == completion
        values.append(float(is_in_language))
    return values


def length(
    completions: list[str],
    prompts: list[Any],
    *,
    max_characters: list[Any],
    min_characters: list[Any] | None = None,
) -> list[float]:
    """Return 1 for each completion of ``min_characters`` (0) to ``max_characters`` characters, else 0.

    Characters are Unicode code points; white space around the completion does not count. Both bounds are inclusive.
    """
    lower_bounds = min_characters or [0] * len(completions)
    values = []
    for completion, lower_bound, upper_bound in zip(completions, lower_bounds, max_characters, strict=True):
        num_characters = len(completion.strip())
        is_within = _check_count(lower_bound) <= num_characters <= _check_count(upper_bound)
        values.append(float(is_within))
    return values


def _answer_text(answer: Any) -> str:
    """Return a value of the column ``answer`` as text."""
    is_number = isinstance(answer, int | float) and not isinstance(answer, bool)
    text = str(answer) if is_number else answer
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"the column answer has {answer!r}, not a text or a number")
    return text


def _normalized_answer(text: str) -> str:
    """Return the rest of the line after the last mark, or the whole text, with single spaces."""
    if _ANSWER_MARK in text:
        text = text.rpartition(_ANSWER_MARK)[2].partition("\n")[0]
    return " ".join(text.split())


def _compile_pattern(pattern: Any) -> re.Pattern[str]:
    if not isinstance(pattern, str):
        raise ValueError(f"the pattern {pattern!r} is not a text")
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"the pattern {pattern!r} is no regular expression: {error}") from None


def _parse_schema(definition: Any) -> Any:
    """Return a schema that may be the text of its JSON."""
    if not isinstance(definition, str):
        return definition
    try:
        return json.loads(definition)
    except ValueError as error:
        raise ValueError(f"the schema is not JSON: {error}") from None


@lru_cache(maxsize=4096)
def _schema_validator(definition: str) -> Any:
    """Return the validator of a schema in JSON."""
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry

    schema = json.loads(definition)
    if not isinstance(schema, dict | bool):
        raise ValueError("the schema is not a JSON object")
    validator_class = validator_for(schema, default=Draft202012Validator)
    try:
        validator_class.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"the schema is no JSON schema: {error.message}") from None
    return validator_class(schema, registry=Registry())  # the default registry would download what $ref names


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _open_language_filter(codes: Any) -> "LanguageFilter":
    if not isinstance(codes, str):
        raise ValueError(f"the language {codes!r} is not a code such as es")
    return _open_cached_language_filter(codes)


@lru_cache(maxsize=1024)
def _open_cached_language_filter(codes: str) -> "LanguageFilter":
    from fabric_train.cleaning.language import open_language_filter
    from fabric_train.cli.errors import naming_option

    with naming_option("language", instead_of="--language"):
        return open_language_filter(codes, "document")


def _check_count(count: Any) -> int:
    if type(count) is not int or count < 0:
        raise ValueError(f"{count!r} is not a number of characters")
    return count


def _check_schema(definition: Any) -> None:
    _schema_validator(json.dumps(_parse_schema(definition), sort_keys=True))


Reward = Callable[..., Sequence[float]]
"""A reward: ``def reward(completions, prompts, **columns)`` returns a number for each completion."""


@dataclass(frozen=True)
class BuiltinReward:
    """A built-in reward."""

    compute: Reward
    packages: tuple[str, ...] = ()
    """The optional packages that it needs."""
    setting_checks: Mapping[str, Callable[[Any], object]] = field(default_factory=dict)
    """Functions that raise a ValueError if the value of a setting is wrong, by the name of the setting."""


BUILTIN_REWARDS: dict[str, BuiltinReward] = {
    "exact_answer": BuiltinReward(exact_answer),
    "math": BuiltinReward(math, packages=("math_verify",)),
    "regex": BuiltinReward(regex, setting_checks={"pattern": _compile_pattern}),
    "json_schema": BuiltinReward(json_schema, packages=("jsonschema",), setting_checks={"schema": _check_schema}),
    "language": BuiltinReward(language, packages=("py3langid",), setting_checks={"language": _open_language_filter}),
    "length": BuiltinReward(length, setting_checks={"min_characters": _check_count, "max_characters": _check_count}),
}
"""The built-in rewards by the names that ``--rewards`` accepts."""
