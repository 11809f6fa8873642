"""Express how a byte-level tokenizer splits texts into pieces as one regular expression for tiktoken.

The ``tokenizers`` library uses Oniguruma, tiktoken uses fancy-regex. Both look for the leftmost match and try
alternatives in order. Their Unicode classes agree: ``tests/tokenization/test_byte_bpe.py`` checks every code point.
"""

import re
from typing import Any

from fabric_train.tokenization.tokenizers.unsupported import UnsupportedTokenizerError

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# as in Meta's llama-models, llama3/tokenizer.py
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace("{1,3}", "")
_MATCH_EVERYTHING = (GPT2_PATTERN, LLAMA3_PATTERN, QWEN2_PATTERN)  # there is no text between their matches

# The Digits step uses Rust's char::is_numeric, which is one Unicode version ahead of both regular expression engines.
_NUMERIC = r"\p{N}\x{11DE0}-\x{11DE9}\x{16FF4}-\x{16FF6}"
# GPT-2's pattern for the text between digits: a digit ends that text, so whitespace before it stays together.
_DIGITS_THEN_GPT2 = (
    rf"[{_NUMERIC}]|'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?[^\s\p{{L}}{_NUMERIC}]+|\s+(?![^\s{_NUMERIC}])|\s+"
)

# Syntax that only one engine has, or that has another meaning in the other: escapes except these, possessive intervals,
# anchors (Oniguruma's match at line breaks), and groups except plain, case-insensitive and lookaround ones.
_DIFFERENT_SYNTAX = re.compile(
    r"""\\(?!
            [pP]\{ | [sSrntdD] | [^A-Za-z0-9\s]
        ).
        | \{[0-9,]+\}\+ | (?<!\[)\^ | \$
        | \(\?(?! : | i: | = | ! | <= | <! )""",
    re.VERBOSE,
)


def split_pattern(pre_tokenizer: dict[str, Any] | None) -> str:
    """Return the pattern whose matches are the pieces into which ``pre_tokenizer`` splits a text.

    Raises:
        UnsupportedTokenizerError: it does more than splitting, or its steps are not known as one pattern.
    """
    steps = _flatten(pre_tokenizer)
    if not steps or steps[-1]["type"] != "ByteLevel":
        raise UnsupportedTokenizerError("its pre-tokenizer is not byte-level")
    byte_level = steps.pop()
    if byte_level.get("add_prefix_space"):
        raise UnsupportedTokenizerError("it puts a space before the text")
    if byte_level.get("use_regex", True):
        if not steps:
            return GPT2_PATTERN
        if len(steps) == 1 and steps[0]["type"] == "Digits" and steps[0].get("individual_digits"):
            return _DIGITS_THEN_GPT2
    elif len(steps) == 1 and steps[0]["type"] == "Split":
        return _own_pattern(steps[0])
    names = ", ".join([*(step["type"] for step in steps), "ByteLevel"])
    raise UnsupportedTokenizerError(f"its pre-tokenizer ({names}) is not known as one pattern")


def ends_pieces_with_lines(pre_tokenizer: dict[str, Any] | None) -> bool:
    r"""Return whether a ``\n`` between two non-whitespace characters ends a piece, with or without the second one.

    This is known for the patterns in this module: the line break is a piece, or the end of a piece of punctuation.
    """
    try:
        pattern = split_pattern(pre_tokenizer)
    except UnsupportedTokenizerError:
        return False
    return pattern in (*_MATCH_EVERYTHING, _DIGITS_THEN_GPT2)


def without_lookahead(pattern: str) -> str | None:
    r"""Return the pattern for texts without consecutive whitespace except line breaks, or None if none is known.

    ``\s+(?!\S)`` leaves the last of several whitespace characters to what follows. It is tried after ``\s*[\r\n]+`` has
    failed, so on whitespace without a line break. On a single whitespace character it does the same as ``\s+``.
    """
    return pattern.replace(r"|\s+(?!\S)", "") if pattern in (LLAMA3_PATTERN, QWEN2_PATTERN) else None


def _flatten(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    if step is None:
        return []
    if step["type"] == "Sequence":
        return [inner for part in step["pretokenizers"] for inner in _flatten(part)]
    return [step]


def _own_pattern(split: dict[str, Any]) -> str:
    pattern = split["pattern"].get("Regex")
    if pattern is None:
        raise UnsupportedTokenizerError("it splits at a plain string")
    different = _DIFFERENT_SYNTAX.search(pattern)
    if different:
        raise UnsupportedTokenizerError(f"{different[0]!r} in its split pattern has another meaning in tiktoken")
    behavior = (split["behavior"], split["invert"])
    if behavior == ("Removed", True):
        return str(pattern)
    if behavior == ("Isolated", False):  # text between matches is a piece too; tiktoken drops it
        return str(pattern) if pattern in _MATCH_EVERYTHING else rf"{pattern}|(?:(?!{pattern})[\s\S])+"
    raise UnsupportedTokenizerError(f"it splits with behavior {split['behavior']}")
