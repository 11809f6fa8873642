"""Apply the quality rules of Gopher (Rae et al. 2021, arXiv:2112.11446, appendix A.1.1)."""

from fabric_train.tokenization.cleaning.language import identify
from fabric_train.tokenization.cleaning.quality.measured_text import Fault, MeasuredText
from fabric_train.tokenization.cleaning.quality.stop_words import STOP_WORDS

LIMITS = {
    "few_words": 50,
    "many_words": 100_000,
    "short_words": 3,  # characters, mean
    "long_words": 10,
    "hashes": 0.1,  # to each word
    "ellipses": 0.1,
    "bullet_lines": 0.9,  # of the lines
    "ellipsis_lines": 0.3,
    "few_alphabetic_words": 0.8,  # of the words
    "few_stop_words": 2,
}
_CERTAIN = 0.65


def find_fault(measured: MeasuredText) -> Fault | None:
    """Return the first rule that the document breaks; None if there is none."""
    return _fault_of_words(measured) or _fault_of_symbols(measured) or _fault_of_stop_words(measured)


def unchecked_language(text: str) -> str | None:
    """Return the language of a text if it has no list of stop words here, so that their rule is left out."""
    language, probability = identify(text)
    return language if probability >= _CERTAIN and language not in STOP_WORDS else None


def _fault_of_words(measured: MeasuredText) -> Fault | None:
    counts, num_words = measured.counts, len(measured.words)
    if num_words < LIMITS["few_words"]:
        return Fault("few_words", f"{num_words} words")
    if num_words > LIMITS["many_words"]:
        return Fault("many_words", f"{num_words} words")
    mean = sum(map(len, measured.words)) / num_words
    if mean < LIMITS["short_words"]:
        return Fault("short_words", f"{mean:.1f} characters a word")
    if mean > LIMITS["long_words"]:
        return Fault("long_words", f"{mean:.1f} characters a word")
    without = sum(count for word, count in counts.items() if not word.isalpha() and not any(map(str.isalpha, word)))
    share = 1 - without / num_words
    if share < LIMITS["few_alphabetic_words"]:
        return Fault("few_alphabetic_words", f"{share:.0%} of words have a letter")
    return None


def _fault_of_symbols(measured: MeasuredText) -> Fault | None:
    text, num_words, lines = measured.text, len(measured.words), measured.lines
    num_ellipses = text.count("...") + text.count("…")
    shares = {
        "hashes": text.count("#") / num_words,
        "ellipses": num_ellipses / num_words,
        "bullet_lines": sum(line.lstrip().startswith(("•", "-")) for line in lines) / len(lines),
        "ellipsis_lines": sum(line.endswith(("...", "…")) for line in lines) / len(lines) if num_ellipses else 0.0,
    }
    for rule, share in shares.items():
        if share > LIMITS[rule]:
            return Fault(rule, f"{share:.2f} to each {'line' if 'lines' in rule else 'word'}")
    return None


def _fault_of_stop_words(measured: MeasuredText) -> Fault | None:
    """Check the words of the document's language; of any language if the identifier is uncertain."""
    language, probability = identify(measured.text)
    languages = list(STOP_WORDS) if probability < _CERTAIN else [language]
    found = [sum(word in measured.counts for word in STOP_WORDS[one]) for one in languages if one in STOP_WORDS]
    if not found or max(found) >= LIMITS["few_stop_words"]:
        return None
    return Fault("few_stop_words", f"{max(found)} stop words, as {language} {probability:.2f}")
