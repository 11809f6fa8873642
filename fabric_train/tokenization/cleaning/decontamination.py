"""Find documents that share words with items of evaluation tasks, to drop or to mark them.

A document and an item share words if they have 13 words in a row in common (Brown et al. 2020, arXiv:2005.14165,
appendix C). Of an item whose texts are all shorter, the longest is looked for as a whole if it has 8 words, the fewest
there too. That paper also ignores 13-grams of more than 10 training documents. Here each document is judged alone, and
ignored are n-grams in more than 10 items and more than 5 % of the items of their task: the instructions of prompts.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fabric_train.cli.errors import InputError
from fabric_train.tokenization.cleaning.cleaner import Dropped, Marked
from fabric_train.tokenization.cleaning.hashed_ngrams import LONGEST
from fabric_train.tokenization.cleaning.task_items import read_task_files
from fabric_train.tokenization.cleaning.task_ngrams import SHORTEST, TaskIndex, index_tasks

CONTAMINATED = "contaminated"
_RULES = 1  # the version of the rules; shards that were finished with another are not reused


@dataclass(frozen=True)
class Decontamination:
    """The step that drops or marks documents with n-grams of evaluation tasks; ``description`` has its settings."""

    action: Literal["drop", "mark"]
    index: TaskIndex
    description: dict[str, Any]

    def clean(self, text: str, edits: Counter[str]) -> str | Marked | Dropped:
        """Return the text if it has no n-gram of a task; else what it shares with which items."""
        hits = self.index.find(text)
        if not hits:
            return text
        if self.action == "mark":
            return Marked(text, hits)
        most = max(hits, key=lambda hit: hit.num_shared)
        return Dropped(CONTAMINATED, f"task {most.task}, item {most.item}: {most.words}", hits)

    def settings(self) -> dict[str, Any]:
        """Return the rules, the files with their SHA-256, and the number of items and n-grams of each task."""
        return self.description


def open_decontamination(places: Sequence[str], action: Literal["drop", "mark"]) -> Decontamination:
    """Return the step for the tasks in files of JSON lines.

    Raises:
        InputError: a file cannot be used, or all items are too short.
    """
    files = read_task_files(places)
    index = index_tasks(list(dict.fromkeys(item for file in files for item in file.items)))
    if not index.tables:
        raise InputError(f"--decontaminate: no text of an item has {SHORTEST} words; give the items with their texts")
    description = {
        "contaminated": action,
        "rules": _RULES,
        "ngram_words": LONGEST,
        "shortest_text": SHORTEST,
        "files": [{"name": file.name, "sha256": file.sha256} for file in files],
        "tasks": index.counts,
    }
    return Decontamination(action, index, description)
