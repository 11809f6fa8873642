"""The pattern by which a byte-level tokenizer cuts a text into pieces, as one regular expression for tiktoken.

The ``tokenizers`` library reads patterns with Oniguruma, tiktoken with fancy-regex. Both look for the leftmost match
and try alternatives in order; Unicode classes agree, as ``tests/test_byte_bpe.py`` checks for every code point.
"""

import re
from typing import Any

from fabric_train.tokenization.tokenizers.unsupported import NotExpressibleError

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# as in Meta's llama-models, llama3/tokenizer.py
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace("{1,3}", "")
_MATCH_EVERYTHING = (GPT2_PATTERN, LLAMA3_PATTERN, QWEN2_PATTERN)  # so that nothing lies between matches

# The Digits step asks Rust's char::is_numeric, which is one Unicode version ahead of both regular expression engines.
_NUMERIC = r"\p{N}\x{11DE0}-\x{11DE9}\x{16FF4}-\x{16FF6}"
# GPT-2's pattern on what lies between digits: a digit ends the text there, so blanks before it stay together.
_DIGITS_THEN_GPT2 = (
    rf"[{_NUMERIC}]|'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?[^\s\p{{L}}{_NUMERIC}]+|\s+(?![^\s{_NUMERIC}])|\s+"
)

# What one engine reads otherwise than the other, or does not know: escapes other than these, possessive intervals,
# anchors (Oniguruma's are those of lines), and groups that are neither plain, nor case-insensitive, nor looking around.
_READ_OTHERWISE = re.compile(
    r"""\\(?!
            [pP]\{ | [sSrntdD] | [^A-Za-z0-9\s]
        ).
        | \{[0-9,]+\}\+ | (?<!\[)\^ | \$
        | \(\?(?! : | i: | = | ! | <= | <! )""",
    re.VERBOSE,
)


def split_pattern(pre_tokenizer: dict[str, Any] | None) -> str:
    """Return the pattern whose matches are the pieces that ``pre_tokenizer`` makes of a text.

    Raises:
        NotExpressibleError: it does anything else than cutting, or cuts in a way that is not known to be one pattern's.
    """
    steps = _flatten(pre_tokenizer)
    if not steps or steps[-1]["type"] != "ByteLevel":
        raise NotExpressibleError("its pre-tokenizer is not byte-level")
    byte_level = steps.pop()
    if byte_level.get("add_prefix_space"):
        raise NotExpressibleError("it puts a blank before the text")
    if byte_level.get("use_regex", True):
        if not steps:
            return GPT2_PATTERN
        if len(steps) == 1 and steps[0]["type"] == "Digits" and steps[0].get("individual_digits"):
            return _DIGITS_THEN_GPT2
    elif len(steps) == 1 and steps[0]["type"] == "Split":
        return _own_pattern(steps[0])
    names = ", ".join([*(step["type"] for step in steps), "ByteLevel"])
    raise NotExpressibleError(f"its pre-tokenizer ({names}) is not known as one pattern")


def ends_pieces_with_lines(pre_tokenizer: dict[str, Any] | None) -> bool:
    r"""Return whether a ``\n`` between two letters that are no blanks ends a piece, the same without the second.

    True for patterns that are known: the break is a piece of its own, or ends one of marks.
    """
    try:
        pattern = split_pattern(pre_tokenizer)
    except NotExpressibleError:
        return False
    return pattern in (*_MATCH_EVERYTHING, _DIGITS_THEN_GPT2)


def without_lookahead(pattern: str) -> str | None:
    r"""Return the pattern for texts in which no two blanks stand together but line breaks; None where none is known.

    ``\s+(?!\S)`` leaves the last of several blanks to what follows. It is tried where ``\s*[\r\n]+`` has failed, so on
    blanks without a line break, and does the same as ``\s+`` where these are not several.
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
        raise NotExpressibleError("it splits at a plain string")
    unlike = _READ_OTHERWISE.search(pattern)
    if unlike:
        raise NotExpressibleError(f"tiktoken would read {unlike[0]!r} in its split pattern otherwise")
    way = (split["behavior"], split["invert"])
    if way == ("Removed", True):
        return str(pattern)
    if way == ("Isolated", False):  # what lies between matches is a piece too; tiktoken drops it
        return str(pattern) if pattern in _MATCH_EVERYTHING else rf"{pattern}|(?:(?!{pattern})[\s\S])+"
    raise NotExpressibleError(f"it splits with behavior {split['behavior']}")
