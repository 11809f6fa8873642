"""Find documents that share words with items of evaluation tasks, to drop or to mark them.

A document and an item share words if they have 13 words in a row in common (Brown et al. 2020, arXiv:2005.14165,
appendix C). Of an item whose texts are all shorter, the longest is looked for as a whole if it has 8 words, the fewest
there too. That paper also ignores 13-grams of more than 10 training documents. Here each document is judged alone, and
ignored are n-grams in more than 10 items and more than 5 % of the items of their task: the instructions of prompts.
"""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fabric_train.cleaning.dropped import Dropped, Marked, TaskHit
from fabric_train.cli.errors import InputError
from fabric_train.reading.documents import BadRowError, Row
from fabric_train.reading.files import FileReader
from fabric_train.reading.listing import FilePart, file_suffix, list_file, sha256
from fabric_train.reading.sources import open_each

LONGEST = 13  # words of an n-gram
_OF_LM_EVAL = re.compile(r"samples_(.+)_[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9.-]+")
_SUFFIXES = (".jsonl", ".json")
_NAMES = ("task", "id", "doc_id")  # columns that are not part of an item's text
_NUM_CODES = 0x110000
_SEPARATOR, _WORD, _IGNORED = range(3)  # kinds of characters
_SPACE = ord(" ")
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # an odd number with well spread bits, of splitmix64
SHORTEST = 8  # words of the shortest text that is compared as a whole
_COMMON_ITEMS = 10
_COMMON_SHARE = 0.05
_SHOWN_WORDS = 40
_TABLE_SIZE = 16  # places for each n-gram in the table of the first look-up
# an n-gram: its words, its hash, the numbers of its task, item and text, and its first character in the text
_NGRAM = np.dtype([("length", "u1"), ("hash", "u8"), ("task", "u4"), ("item", "u4"), ("text", "u4"), ("start", "u4")])
CONTAMINATED = "contaminated"
_RULES = 1  # the version of the rules; shards that were finished with another are not reused


@dataclass(frozen=True)
class TaskItem:
    """An item of a task: its ``id`` or ``doc_id`` in the file or its line, and its texts."""

    task: str
    name: str
    texts: tuple[str, ...]


@dataclass(frozen=True)
class TaskFile:
    """A file of tasks: its name without folders, its SHA-256 in hexadecimal, and its items, each once."""

    name: str
    sha256: str
    items: tuple[TaskItem, ...]


def read_task_files(places: Sequence[str]) -> list[TaskFile]:
    """Return files of JSON lines, such as those that lm_eval writes with --log_samples, in the order given.

    A line is an object. Its texts are ``text`` if there is one, else ``doc`` and ``target`` of lm_eval, else all
    strings in it with more than one word, also in lists and objects. ``task`` names the task; by default it is the
    file's name. InputError with a line for each that is missing, of another kind, or has a bad line or no text.
    """
    try:
        return open_each(lambda place: _read_task_file(Path(place).expanduser()), places)
    except InputError as error:
        raise InputError(*(f"--decontaminate: {fault}" for fault in error.faults)) from None


def _read_task_file(path: Path) -> TaskFile:
    if not path.exists():
        raise InputError(f"{path}: no such file; give a file with an evaluation task's items as JSON lines")
    if file_suffix(path) not in _SUFFIXES:
        raise InputError(
            f"{path}: expected {' or '.join(_SUFFIXES)}, also with .gz or .zst; write the items as JSON lines"
        )
    listed = list_file(path)
    name = path.name[: path.name.lower().rindex(file_suffix(path))]  # without suffixes
    of_lm_eval = _OF_LM_EVAL.fullmatch(name)
    reader = FileReader(FilePart(listed, listed.size), ("text",))
    items = tuple(dict.fromkeys(_items(reader, of_lm_eval[1] if of_lm_eval else name)))
    if not items:
        raise InputError(f"{path}: no text in it; give a file with an evaluation task's items as JSON lines")
    return TaskFile(path.name, sha256(path), items)


def _items(reader: FileReader, default_task: str) -> Iterator[TaskItem]:
    for number, row in reader:
        if isinstance(row, BadRowError):
            raise InputError(f"{row}; fix the line, or remove it")
        given = [row[name] for name in ("id", "doc_id") if isinstance(row.get(name), str | int)]
        texts = tuple(dict.fromkeys(_texts(_content(row))))
        if texts:
            yield TaskItem(str(row.get("task") or default_task), str(given[0] if given else number), texts)


def _content(row: Row) -> Any:
    """Return the part of a row that holds the item; lm_eval's has the model's answers, too."""
    if isinstance(row.get("text"), str):
        return row["text"]
    if isinstance(row.get("doc"), dict | str):
        return [row["doc"], row.get("target")]
    return {name: value for name, value in row.items() if name not in _NAMES}


def _texts(content: Any) -> Iterator[str]:
    """Yield all strings with white space in them: names, addresses and single words are no text."""
    if isinstance(content, str) and len(content.split(maxsplit=1)) > 1:
        yield content
    elif isinstance(content, dict | list):
        for part in content.values() if isinstance(content, dict) else content:
            yield from _texts(part)


@dataclass(frozen=True)
class Words:
    """The words of a text, joined by single spaces."""

    codes: np.ndarray  # uint32 [characters], the code points, a space after each word but perhaps the last
    starts: np.ndarray  # int64 [words], where each word begins
    ends: np.ndarray  # int64 [words], the character after each word

    def text(self, first: int, count: int) -> str:
        """Return the words from number ``first`` on, joined by spaces."""
        codes = self.codes[self.starts[first] : self.ends[first + count - 1]]
        return codes.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")


def split_words(text: str) -> Words:
    """Return the words of ``text``, its runs of letters, digits and marks in Unicode's NFKC and lower case."""
    normal = unicodedata.normalize("NFKC", text).lower()
    codes = np.frombuffer(normal.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    kinds = _kinds()[codes]
    if (kinds == _IGNORED).any():  # soft hyphens and the like
        codes = codes[kinds != _IGNORED]
        kinds = kinds[kinds != _IGNORED]
    is_word = kinds == _WORD
    is_kept = is_word.copy()
    is_kept[1:] |= is_word[:-1]  # the first separator after each word
    codes = codes[is_kept]
    is_word = is_word[is_kept]
    codes = np.where(is_word, codes, np.uint32(_SPACE))
    ends = np.flatnonzero(~is_word)
    if len(is_word) and is_word[-1]:
        ends = np.append(ends, len(is_word))
    starts = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64) if len(ends) else ends
    return Words(codes, starts, ends)


def ngram_hashes(words: Words, lengths: Sequence[int]) -> dict[int, np.ndarray]:
    """Return 64-bit hashes by length, ascending, of the n-grams that fit in, uint64 [words - length + 1] each."""
    num_words = len(words.starts)
    lengths = [length for length in lengths if length <= num_words]
    if not lengths:
        return {}
    hashes = _word_hashes(words)
    multipliers = _random_odd(LONGEST)
    total = np.zeros(num_words, dtype=np.uint64)
    result = {}
    for before, length in pairwise([0, *lengths]):
        for word in range(before, length):
            total[: num_words - word] += hashes[word:] * multipliers[word]
        result[length] = _mixed(total[: num_words - length + 1])
    return result


def _word_hashes(words: Words) -> np.ndarray:
    lengths = np.diff(words.starts, append=len(words.codes))
    places = np.arange(len(words.codes)) - np.repeat(words.starts, lengths)
    products = words.codes * _random_odd(1024)[places & 1023]
    products[words.ends[words.ends < len(products)]] = 0  # the spaces: the last word may have none
    return _mixed(np.add.reduceat(products, words.starts))


def _mixed(hashes: np.ndarray) -> np.ndarray:
    """Return the hashes with each bit depending on all bits, as in splitmix64's finalizer, shortened."""
    mixed = (hashes ^ (hashes >> np.uint64(32))) * _GOLDEN
    return mixed ^ (mixed >> np.uint64(29))


@cache
def _random_odd(count: int) -> np.ndarray:
    return np.random.default_rng(13).integers(0, 1 << 64, count, dtype=np.uint64, endpoint=False) | np.uint64(1)


@cache
def _kinds() -> np.ndarray:
    """Return for each code point whether it is part of a word, a separator or ignored, uint8 [code points]."""
    kinds = {"L": _WORD, "N": _WORD, "M": _WORD, "Cf": _IGNORED}
    categories = (unicodedata.category(chr(code)) for code in range(_NUM_CODES))
    return np.fromiter((kinds.get(one, kinds.get(one[0], _SEPARATOR)) for one in categories), np.uint8, _NUM_CODES)


@dataclass(frozen=True)
class NgramTable:
    hashes: np.ndarray  # uint64 [n-grams], in ascending order
    texts: np.ndarray  # uint32 [n-grams], the number of the text that each is in
    starts: np.ndarray  # uint32 [n-grams], its first character there
    is_candidate: np.ndarray  # bool [a power of 2], whether a hash ends with these bits; most look-ups end here

    def find(self, hashes: np.ndarray) -> Iterator[tuple[int, int, int]]:
        """Yield the place in ``hashes`` of each that the table has, with text and start of each n-gram of that hash."""
        places = np.flatnonzero(self.is_candidate[hashes & np.uint64(len(self.is_candidate) - 1)])
        if len(places):
            firsts = np.searchsorted(self.hashes, hashes[places])
            is_found = self.hashes[np.minimum(firsts, len(self.hashes) - 1)] == hashes[places]
            places = places[is_found]
            firsts = firsts[is_found]
            lasts = np.searchsorted(self.hashes, hashes[places], side="right")
            for place, first, last in zip(places.tolist(), firsts.tolist(), lasts.tolist(), strict=True):
                for ngram in range(first, last):
                    yield place, int(self.texts[ngram]), int(self.starts[ngram])


@dataclass(frozen=True)
class TaskIndex:
    """The n-grams of evaluation tasks."""

    texts: list[tuple[TaskItem, str]]  # those compared, each with its item, as ``Words.text`` returns them
    tables: dict[int, NgramTable]  # by the number of words of their n-grams, in ascending order
    counts: dict[str, dict[str, int]]  # by task: items, of them too_short, ngrams, and ignored common_ngrams

    def find(self, text: str) -> tuple[TaskHit, ...]:
        """Return what ``text`` shares with the items, one hit for each item."""
        words = split_words(text)
        shared: dict[TaskItem, set[tuple[int, int]]] = defaultdict(set)  # first word and length of each n-gram
        for length, hashes in ngram_hashes(words, list(self.tables)).items():
            for place, number, start in self.tables[length].find(hashes):
                item, text_of_task = self.texts[number]
                if text_of_task.startswith(words.text(place, length), start):  # else only the hash is the same
                    shared[item].add((place, length))
        return tuple(_hit(item, sorted(ngrams), words) for item, ngrams in shared.items())


def index_tasks(items: Sequence[TaskItem]) -> TaskIndex:
    """Return the index of the items of all tasks; it has no tables if all are too short."""
    tasks = {name: number for number, name in enumerate(dict.fromkeys(item.task for item in items))}
    num_items, num_compared = np.zeros((2, len(tasks)), dtype=np.int64)
    texts: list[tuple[TaskItem, str]] = []
    found = [np.empty(0, dtype=_NGRAM)]
    for number, item in enumerate(items):
        compared = _compared(item)
        num_items[tasks[item.task]] += 1
        num_compared[tasks[item.task]] += bool(compared)
        for words, length in compared:
            (hashes,) = ngram_hashes(words, [length]).values()
            ngrams = np.empty(len(hashes), dtype=_NGRAM)
            ngrams["length"] = length
            ngrams["hash"] = hashes
            ngrams["start"] = words.starts[: len(hashes)]
            ngrams["task"] = tasks[item.task]
            ngrams["item"] = number
            ngrams["text"] = len(texts)
            found.append(ngrams)
            texts.append((item, words.text(0, len(words.starts))))
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
    ngrams = ngrams[is_new]
    is_first = is_first[is_new]
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


@dataclass(frozen=True)
class Decontamination:
    """The step that drops or marks documents with n-grams of evaluation tasks."""

    action: Literal["drop", "mark"]
    index: TaskIndex
    description: dict[str, Any]  # the rules, the files with their SHA-256, and the counts of each task

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
        return self.description


def open_decontamination(places: Sequence[str], action: Literal["drop", "mark"]) -> Decontamination:
    """Return the step for the tasks in files of JSON lines; InputError if a file is unusable or all items too short."""
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
