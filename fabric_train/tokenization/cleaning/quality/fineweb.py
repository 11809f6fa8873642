"""Apply the rules that FineWeb adds to Gopher's (Penedo et al. 2024, arXiv:2406.17557, section 3.6)."""

from fabric_train.tokenization.cleaning.quality.measured_text import Fault, MeasuredText, duplicates

LIMITS = {
    "few_punctuated_lines": 0.12,  # of the lines
    "duplicate_line_characters": 0.1,  # of the characters in lines
    "short_lines": 0.67,  # of the lines
}
_SHORT_LINE = 30  # characters
_SENTENCE_END = tuple(".!?։؟۔।॥።፧፨။។៕‼‽⁇⁈⁉。﹒﹖﹗！．？｡")  # of Unicode's Sentence_Terminal, those in wide use


def find_fault(measured: MeasuredText) -> Fault | None:
    """Return the first rule that the document breaks; None if there is none."""
    lines = measured.lines
    punctuated = sum(line.endswith(_SENTENCE_END) for line in lines) / len(lines)
    if punctuated < LIMITS["few_punctuated_lines"]:
        return Fault("few_punctuated_lines", f"{punctuated:.0%}")
    short = sum(len(line) <= _SHORT_LINE for line in lines) / len(lines)
    if short > LIMITS["short_lines"]:
        return Fault("short_lines", f"{short:.0%}")
    repeated = duplicates(lines)[1] / sum(map(len, lines))
    if repeated > LIMITS["duplicate_line_characters"]:
        return Fault("duplicate_line_characters", f"{repeated:.0%}")
    return None
