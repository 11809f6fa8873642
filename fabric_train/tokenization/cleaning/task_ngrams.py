"""Index the word n-grams of evaluation tasks, and find those that a document has too."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fabric_train.tokenization.cleaning.contamination import TaskHit
from fabric_train.tokenization.cleaning.hashed_ngrams import LONGEST, Words, ngram_hashes, split_words
from fabric_train.tokenization.cleaning.task_items import TaskItem

SHORTEST = 8
"""Words of the shortest text that is compared as a whole."""
_COMMON_ITEMS, _COMMON_SHARE = 10, 0.05
_SHOWN_WORDS = 40
_TABLE_SIZE = 16  # places for each n-gram in the table of the first look-up

# an n-gram: its words, its hash, the numbers of its task, item and text, and its first character in the text
_NGRAM = np.dtype([("length", "u1"), ("hash", "u8"), ("task", "u4"), ("item", "u4"), ("text", "u4"), ("start", "u4")])


@dataclass(frozen=True)
class TaskText:
    """A text of an item, normalized as ``Words.text`` returns it."""

    item: TaskItem
    words: str


@dataclass(frozen=True)
class NgramTable:
    """The n-grams of one length.

    Args:
        hashes: uint64 [n-grams], in ascending order.
        texts: uint32 [n-grams], the number of the text that each is in.
        starts: uint32 [n-grams], its first character there.
        is_candidate: bool [a power of 2], whether a hash ends with these bits. Most look-ups end here.
    """

    hashes: np.ndarray
    texts: np.ndarray
    starts: np.ndarray
    is_candidate: np.ndarray

    def find(self, hashes: np.ndarray) -> Iterator[tuple[int, int, int]]:
        """Yield the place in ``hashes`` of each that the table has, with text and start of each n-gram of that hash."""
        places = np.flatnonzero(self.is_candidate[hashes & np.uint64(len(self.is_candidate) - 1)])
        if len(places):
            firsts = np.searchsorted(self.hashes, hashes[places])
            is_found = self.hashes[np.minimum(firsts, len(self.hashes) - 1)] == hashes[places]
            places, firsts = places[is_found], firsts[is_found]
            lasts = np.searchsorted(self.hashes, hashes[places], side="right")
            for place, first, last in zip(places.tolist(), firsts.tolist(), lasts.tolist(), strict=True):
                for ngram in range(first, last):
                    yield place, int(self.texts[ngram]), int(self.starts[ngram])


@dataclass(frozen=True)
class TaskIndex:
    """The n-grams of evaluation tasks.

    Args:
        texts: the texts of the items that are compared.
        tables: by the number of words of their n-grams, in ascending order.
        counts: of each task by name: ``items``, of them ``too_short``, ``ngrams``, and ignored ``common_ngrams``.
    """

    texts: list[TaskText]
    tables: dict[int, NgramTable]
    counts: dict[str, dict[str, int]]

    def find(self, text: str) -> tuple[TaskHit, ...]:
        """Return what ``text`` shares with the items, one hit for each item."""
        words = split_words(text)
        shared: dict[TaskItem, set[tuple[int, int]]] = defaultdict(set)  # first word and length of each n-gram
        for length, hashes in ngram_hashes(words, list(self.tables)).items():
            for place, number, start in self.tables[length].find(hashes):
                text_of_task = self.texts[number]
                if text_of_task.words.startswith(words.text(place, length), start):  # else only the hash is the same
                    shared[text_of_task.item].add((place, length))
        return tuple(_hit(item, sorted(ngrams), words) for item, ngrams in shared.items())


def index_tasks(items: Sequence[TaskItem]) -> TaskIndex:
    """Return the index of the items of all tasks; it has no tables if all are too short."""
    tasks = {name: number for number, name in enumerate(dict.fromkeys(item.task for item in items))}
    num_items, num_compared = np.zeros((2, len(tasks)), dtype=np.int64)
    texts: list[TaskText] = []
    found = [np.empty(0, dtype=_NGRAM)]
    for number, item in enumerate(items):
        compared = _compared(item)
        num_items[tasks[item.task]] += 1
        num_compared[tasks[item.task]] += bool(compared)
        for words, length in compared:
            (hashes,) = ngram_hashes(words, [length]).values()
            ngrams = np.empty(len(hashes), dtype=_NGRAM)
            ngrams["length"], ngrams["hash"], ngrams["start"] = length, hashes, words.starts[: len(hashes)]
            ngrams["task"], ngrams["item"], ngrams["text"] = tasks[item.task], number, len(texts)
            found.append(ngrams)
            texts.append(TaskText(item, words.text(0, len(words.starts))))
    ngrams, is_first, is_common = _by_frequency(np.concatenate(found), num_items)
    columns = {
        "items": num_items,
        "too_short": num_items - num_compared,
        "ngrams": np.bincount(ngrams["task"][is_first & ~is_common], minlength=len(tasks)),
        "common_ngrams": np.bincount(ngrams["task"][is_first & is_common], minlength=len(tasks)),
    }
    counts = {task: {name: int(column[number]) for name, column in columns.items()} for task, number in tasks.items()}
    ngrams = ngrams[~is_common]
    return TaskIndex(texts, {int(one): _table(ngrams, one) for one in np.unique(ngrams["length"])}, counts)


def _compared(item: TaskItem) -> list[tuple[Words, int]]:
    """Return the texts of an item that are compared, each with the words of its n-grams; none if all are too short."""
    texts = [split_words(text) for text in item.texts]
    long = [(words, LONGEST) for words in texts if len(words.starts) >= LONGEST]
    longest = max(texts, key=lambda words: len(words.starts))
    whole = [(longest, len(longest.starts))] if len(longest.starts) >= SHORTEST else []
    return long or whole


def _by_frequency(ngrams: np.ndarray, num_items: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return each item's n-grams once, in ascending order of length and hash, and two bool [n-grams].

    The first says whether it is the first of these n-grams in its task, the second whether it is in too many items of
    the task; ``num_items`` has the number of each task's items.
    """
    ngrams = ngrams[np.lexsort((ngrams["item"], ngrams["task"], ngrams["hash"], ngrams["length"]))]
    is_first = _differs(ngrams["length"]) | _differs(ngrams["hash"]) | _differs(ngrams["task"])
    is_new = is_first | _differs(ngrams["item"])
    ngrams, is_first = ngrams[is_new], is_first[is_new]
    numbers = np.cumsum(is_first) - 1
    in_items = np.bincount(numbers)[numbers]
    is_common = (in_items > _COMMON_ITEMS) & (in_items > _COMMON_SHARE * num_items[ngrams["task"]])
    return ngrams, is_first, is_common


def _differs(values: np.ndarray) -> np.ndarray:
    """Return whether each value differs from the one before, bool [n]; the first does."""
    return np.concatenate([[True], values[1:] != values[:-1]])[: len(values)]


def _table(ngrams: np.ndarray, length: int) -> NgramTable:
    ngrams = ngrams[ngrams["length"] == length]
    is_candidate = np.zeros(1 << (_TABLE_SIZE * len(ngrams)).bit_length(), dtype=bool)
    is_candidate[ngrams["hash"] & np.uint64(len(is_candidate) - 1)] = True
    hashes, texts, starts = (np.ascontiguousarray(ngrams[name]) for name in ("hash", "text", "start"))
    return NgramTable(hashes, texts, starts, is_candidate)


def _hit(item: TaskItem, ngrams: Sequence[tuple[int, int]], words: Words) -> TaskHit:
    """Return the hit for n-grams, first word and length of each, in ascending order."""
    longest = stretch = ngrams[0]
    for first, length in ngrams[1:]:
        begin, count = stretch
        stretch = (begin, max(count, first + length - begin)) if first <= begin + count else (first, length)
        longest = max(longest, stretch, key=lambda one: one[1])
    first, count = longest
    return TaskHit(item.task, item.name, len(ngrams), words.text(first, min(count, _SHOWN_WORDS)))
