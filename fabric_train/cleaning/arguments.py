"""The arguments of cleaning, which are part of the arguments of ``tokenize_dataset.py``."""

import re
from dataclasses import dataclass
from typing import Literal

from fabric_train.cli.argument_types import PositiveInt64, PositiveShare

_LANGUAGES = r"[a-z]{2,3}(,[a-z]{2,3})*(:(0(\.[0-9]{1,6})?|1(\.0{1,6})?))?"
_QUALITY_RULES = ("gopher", "c4", "fineweb")
_PERSONAL_DATA = ("email", "phone", "iban", "dni", "ip")


@dataclass(frozen=True, kw_only=True)
class CleaningArguments:
    """Cleaning of documents, each drop and change counted"""

    language: str | None = None
    """Keep only documents in these languages, such as es,ca: ISO 639 codes, or va for Valencian. Add a number, as in
    es,ca:0.8, to set the minimum probability that the language identifier must reach; default: 0.65. In chats, only
    user and assistant messages count.
    """
    language_by: Literal["document", "paragraph"] = "document"
    """With --language: leave out entire documents in other languages, or first remove the paragraphs in other languages
    (texts only).
    """
    quality: str | None = None
    """Leave out text documents that published rules consider low quality: gopher, c4, fineweb, or several, such as
    gopher,fineweb. The c4 rules also remove lines.
    """
    near_duplicates: PositiveShare | None = None
    """Leave out texts and chats that nearly repeat an earlier one from any source. The number is the minimum share of
    word 5-grams that they have in common, such as 0.8 (estimated by MinHash). System messages are ignored.
    """
    boilerplate: PositiveInt64 | str | None = None
    """Remove lines of 15 or more letters that occur in at least this many documents over all sources, such as 10 for a
    small corpus or 1000 for millions of documents. Sources are read twice. With --shard, a number only counts lines.
    Merging the slices adds up the counts in a folder of repeated lines; then give that folder instead of the number.
    """
    redact: str | None = None
    """Personal data to replace with placeholders such as <EMAIL>: email,phone,iban,dni,ip, or some of these. All except
    email and ip need pip install 'fabric-train[cleaning]'.
    """
    decontaminate: list[str] | None = None
    """JSON lines files with the items of evaluation tasks, such as lm_eval's samples. Documents that share 13
    consecutive words with an item are left out (docs/cleaning.md).
    """
    contaminated: Literal["drop", "mark"] = "drop"
    """With --decontaminate: leave these documents out, or keep them and only list them in contamination.jsonl."""

    @property
    def cleans(self) -> bool:
        steps = (self.language, self.quality, self.near_duplicates, self.boilerplate, self.redact, self.decontaminate)
        return any(step is not None for step in steps)

    def faults(self) -> list[str]:
        """Return values of no known kind, and options without the one that they belong to."""
        faults = []
        if self.boilerplate == 1:
            faults.append("--boilerplate 1 removes every line; give 2 or more")
        elif isinstance(self.boilerplate, str) and re.fullmatch(r"-?[\d.,_]+", self.boilerplate):
            faults.append(f"--boilerplate {self.boilerplate}: expected a whole number of 2 or more")
        if self.language is not None and not re.fullmatch(_LANGUAGES, self.language):
            faults.append(f"--language: expected codes such as es,ca or es,ca:0.8, got {self.language!r}")
        if self.language is None and self.language_by != "document":
            faults.append(f"--language_by {self.language_by} needs --language; give the codes to keep, such as es,ca")
        if self.quality is not None and not set(self.quality.split(",")) <= set(_QUALITY_RULES):
            faults.append(
                f"--quality: expected {', '.join(_QUALITY_RULES)} or several separated by commas, got {self.quality!r}"
            )
        if self.redact is not None and not set(self.redact.split(",")) <= set(_PERSONAL_DATA):
            faults.append(
                f"--redact: expected {', '.join(_PERSONAL_DATA)} or several separated by commas, got {self.redact!r}"
            )
        if self.decontaminate == []:
            faults.append("--decontaminate is empty; give the files with the tasks' items")
        if self.decontaminate is None and self.contaminated != "drop":
            faults.append("--contaminated needs --decontaminate; give the files with the tasks' items")
        return faults
