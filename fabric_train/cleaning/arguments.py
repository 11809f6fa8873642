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
    """Keep the documents in these languages, such as es,ca: ISO 639 codes, and va, which is Valencian. A number may
    follow, as in es,ca:0.8: the least probability at which the identifier is certain; default: 0.65. Of chats, what
    user and assistant say counts.
    """
    language_by: Literal["document", "paragraph"] = "document"
    """With --language: leave out documents in other languages, or, of texts, remove paragraphs in other languages
    first.
    """
    quality: str | None = None
    """Leave out documents of text that published rules find to be of low quality: gopher, c4, fineweb, or several, such
    as gopher,fineweb. The rules of c4 also remove lines.
    """
    near_duplicates: PositiveShare | None = None
    """Leave out texts and chats that nearly repeat an earlier one, of any source: the smallest share of 5-grams of
    words, such as 0.8, that they have in common (estimated by MinHash). System messages do not count.
    """
    boilerplate: PositiveInt64 | str | None = None
    """Remove lines of 15 letters or more that are in this number of documents or more, of all sources together: such as
    10 for a small corpus, 1000 for millions of documents. Sources are read twice. With --shard, a number only counts
    lines. A merge adds them up into a folder of repeated lines: then give this folder instead of the number.
    """
    redact: str | None = None
    """Personal data to replace by placeholders such as <EMAIL>: email,phone,iban,dni,ip or some of these kinds. All but
    email and ip need pip install 'fabric-train[cleaning]'.
    """
    decontaminate: list[str] | None = None
    """Files with the items of evaluation tasks, as JSON lines such as lm_eval's samples: documents with 13 words in a
    row that an item has too are left out (docs/cleaning.md).
    """
    contaminated: Literal["drop", "mark"] = "drop"
    """With --decontaminate: leave these documents out, or only list them in contamination.jsonl."""

    @property
    def cleans(self) -> bool:
        steps = (self.language, self.quality, self.near_duplicates, self.boilerplate, self.redact, self.decontaminate)
        return any(step is not None for step in steps)

    def faults(self) -> list[str]:
        """Return values of no known kind, and options without the one that they belong to."""
        faults = []
        if self.boilerplate == 1:
            faults.append("--boilerplate 1 removes every line: give 2 or more")
        elif isinstance(self.boilerplate, str) and re.fullmatch(r"-?[\d.,_]+", self.boilerplate):
            faults.append(f"--boilerplate {self.boilerplate}: give a whole number from 2 on, or leave it out")
        if self.language is not None and not re.fullmatch(_LANGUAGES, self.language):
            faults.append(f"--language: expected codes such as es,ca or es,ca:0.8, got {self.language!r}")
        if self.language is None and self.language_by != "document":
            faults.append(f"--language_by {self.language_by} needs --language: the codes to keep, such as es,ca")
        if self.quality is not None and not set(self.quality.split(",")) <= set(_QUALITY_RULES):
            faults.append(
                f"--quality: expected {', '.join(_QUALITY_RULES)} or several with commas, got {self.quality!r}"
            )
        if self.redact is not None and not set(self.redact.split(",")) <= set(_PERSONAL_DATA):
            faults.append(f"--redact: expected {', '.join(_PERSONAL_DATA)} or several with commas, got {self.redact!r}")
        if self.decontaminate == []:
            faults.append("--decontaminate names nothing: give the files of the tasks")
        if self.decontaminate is None and self.contaminated != "drop":
            faults.append("--contaminated needs --decontaminate: give the files of the tasks")
        return faults
