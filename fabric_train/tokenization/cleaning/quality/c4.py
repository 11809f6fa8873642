"""Apply the rules of C4 (Raffel et al. 2020, arXiv:1910.10683, section 2.2), with the phrases of its published code.

Left out: its list of bad words, its identification of English and its removal of repeated spans of sentences, for
which other switches are.
"""

import re
from collections import Counter
from collections.abc import Callable

from fabric_train.tokenization.cleaning.quality.measured_text import Fault

LIMITS = {"few_sentences": 5, "line_words": 3, "word_characters": 1000}
_END_MARKS = (".", "?", "!", '"', "'", "”", "»")
_POLICIES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
_CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
_SENTENCE_END = re.compile(r"[.?!…]+[\"'”’»)\]]*(?=\s|$)")


def clean_lines(text: str, edits: Counter[str]) -> str | Fault:
    """Return the lines that the rules keep, or the rule that the document breaks; count removed lines in ``edits``."""
    if "[" in text:
        text = _CITATION.sub("", text)
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    removed: dict[str, int] = {}

    def keep(rule: str, is_kept: Callable[[str], bool]) -> None:
        nonlocal lines
        kept = [line for line in lines if is_kept(line)]
        removed[rule] = len(lines) - len(kept)
        lines = kept

    keep("no_end_mark", lambda line: line.endswith(_END_MARKS) and not line.endswith("..."))
    keep("few_words", lambda line: len(line.split(None, LIMITS["line_words"])) >= LIMITS["line_words"])
    longest = LIMITS["word_characters"]
    keep("long_word", lambda line: len(line) <= longest or max(map(len, line.split())) <= longest)
    lowered = "\n".join(lines).lower()
    if "lorem ipsum" in lowered:
        return Fault("lorem_ipsum", "lorem ipsum")
    if "javascript" in lowered:
        keep("javascript", lambda line: "javascript" not in line.lower())
    if any("{" in line for line in lines):
        return Fault("curly_bracket", "{")
    if any(phrase in lowered for phrase in _POLICIES):
        keep("policy", lambda line: not any(phrase in line.lower() for phrase in _POLICIES))
    num_sentences = sum(map(count_sentences, lines[: LIMITS["few_sentences"]]))
    if num_sentences < LIMITS["few_sentences"]:
        return Fault("few_sentences", f"{num_sentences} sentences")
    for rule, count in removed.items():
        if count:
            edits[f"c4 removed line: {rule}"] += count
    return "\n".join(lines)


def count_sentences(line: str) -> int:
    """Return the number of sentences in a line that is not blank."""
    return max(1, len(_SENTENCE_END.findall(line)))
