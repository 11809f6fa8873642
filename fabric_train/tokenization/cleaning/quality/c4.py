"""Apply the rules of C4 (Raffel et al. 2020, arXiv:1910.10683, section 2.2), with the phrases of its published code.

Left out: its list of bad words, its identification of English and its removal of repeated spans of sentences, for
which other switches are.
"""

import re
from collections import Counter

from fabric_train.tokenization.cleaning.quality.measured_text import Fault

LIMITS = {"few_sentences": 5, "line_words": 3, "word_characters": 1000}
_END_MARKS = (".", "?", "!", '"', "'", "”", "»")
_POLICIES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
_CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
_SENTENCE_END = re.compile(r"[.?!…]+[\"'”’»)\]]*(?=\s|$)")


def clean_lines(text: str, edits: Counter[str]) -> str | Fault:
    """Return the lines that the rules keep, or the rule that the document breaks; count removed lines in ``edits``."""
    kept: list[str] = []
    removed: Counter[str] = Counter()
    num_sentences = 0
    for original in text.splitlines():
        line = _CITATION.sub("", original.strip()) if "[" in original else original.strip()
        why = _why_removed(line)
        if why is not None:
            removed[why] += bool(line)
            continue
        lowered = line.lower()
        if "lorem ipsum" in lowered:
            return Fault("lorem_ipsum", "lorem ipsum")
        if "javascript" in lowered:
            removed["javascript"] += 1
        elif "{" in line:
            return Fault("curly_bracket", "{")
        elif any(phrase in lowered for phrase in _POLICIES):
            removed["policy"] += 1
        else:
            num_sentences += count_sentences(line)
            kept.append(line)
    if num_sentences < LIMITS["few_sentences"]:
        return Fault("few_sentences", f"{num_sentences} sentences")
    for why, count in removed.items():
        edits[f"c4 removed line: {why}"] += count
    return "\n".join(kept)


def count_sentences(line: str) -> int:
    """Return the number of sentences in a line that is not blank."""
    return max(1, len(_SENTENCE_END.findall(line)))


def _why_removed(line: str) -> str | None:
    if not line.endswith(_END_MARKS) or line.endswith("..."):
        return "no_end_mark"
    words = line.split()
    if len(words) < LIMITS["line_words"]:
        return "few_words"
    return "long_word" if max(map(len, words)) > LIMITS["word_characters"] else None
