"""Find documents that share words with items of evaluation tasks, to drop or mark them.

A document and an item share words if they have 13 words in a row in common (Brown et al. 2020, arXiv:2005.14165,
appendix C). If all texts of an item are shorter, its longest text is looked for as a whole, if it has at least 8 words,
the minimum in that paper. The paper also ignores 13-grams in more than 10 training documents. Here each document is
judged alone; n-grams in more than 10 items and more than 5 % of a task's items are ignored: they are the prompts'
instructions.
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

from fabric_train.cleaning.results import Dropped, Marked, TaskHit
from fabric_train.cli.errors import InputError
from fabric_train.reading.documents import BadRowError, Row
from fabric_train.reading.files import FileReader
from fabric_train.reading.listing import FilePart, file_suffix, list_file, sha256
from fabric_train.reading.sources import open_each

LONGEST = 13  # words of an n-gram
_LM_EVAL_NAME = re.compile(r"samples_(.+)_[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9.-]+")
_SUFFIXES = (".jsonl", ".json")
_COLUMNS_WITHOUT_TEXT = ("task", "id", "doc_id")
_NUM_CODES = 0x110000
_SEPARATOR, _WORD, _IGNORED = range(3)  # kinds of characters
_SPACE = ord(" ")
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # an odd number with well spread bits, of splitmix64
SHORTEST = 8  # words of the shortest text that is compared as a whole
_COMMON_ITEMS = 10
_COMMON_SHARE = 0.05
_SHOWN_WORDS = 40
_CHARACTER_MULTIPLIERS = 1024  # a power of 2; longer words repeat them
_ENTRIES_PER_NGRAM = 16  # in the table of the first look-up: few other hashes end with the bits of an n-gram's
# an n-gram: its number of words, its hash, the indices of its task, item and text, and its first character in the text
_NGRAM = np.dtype([("length", "u1"), ("hash", "u8"), ("task", "u4"), ("item", "u4"), ("text", "u4"), ("start", "u4")])
CONTAMINATED = "contaminated"
_RULES = 1  # the version of the rules; shards that were finished with another are not reused
_SharedNgram = tuple[int, int]  # the index of its first word in the document, and its number of words


@dataclass(frozen=True)
class TaskItem:
    """An item of an evaluation task."""

    task: str
    name: str  # its ``id`` or ``doc_id`` in the file, or its line
    texts: tuple[str, ...]


@dataclass(frozen=True)
class TaskFile:
    """A file with the items of evaluation tasks."""

    name: str  # without folders
    sha256: str  # in hexadecimal
    items: tuple[TaskItem, ...]  # without repetitions


def read_task_files(paths: Sequence[str]) -> list[TaskFile]:
    """Read files of JSON lines, such as those that lm_eval writes with --log_samples.

    A line is an object. Its texts are ``text`` if there is one, or else lm_eval's ``doc`` and ``target``, or else all
    strings in it with more than one word, also in lists and objects. ``task`` names the task; by default it is the
    file's name.

    Raises:
        InputError: a file is missing, or has another suffix, a bad line or no text; the error has a line for each file.
    """
    try:
        return open_each(lambda path: _read_task_file(Path(path).expanduser()), paths)
    except InputError as error:
        raise InputError(*(f"--decontaminate: {fault}" for fault in error.faults)) from None


def _read_task_file(path: Path) -> TaskFile:
    if not path.exists():
        raise InputError(f"{path}: no such file; give a file with an evaluation task's items as JSON lines")
    suffix = file_suffix(path)
    if suffix not in _SUFFIXES:
        raise InputError(
            f"{path}: expected {' or '.join(_SUFFIXES)}, also with .gz or .zst; write the items as JSON lines"
        )
    listed_file = list_file(path)
    # a file of lm_eval is called samples_TASK_TIME.jsonl
    stem = path.name[: path.name.lower().rindex(suffix)]
    lm_eval_name = _LM_EVAL_NAME.fullmatch(stem)
    default_task = lm_eval_name[1] if lm_eval_name else stem
    reader = FileReader(FilePart(listed_file, listed_file.size), ("text",))
    items = tuple(dict.fromkeys(_read_items(reader, default_task)))
    if not items:
        raise InputError(f"{path}: it has no text; give a file with an evaluation task's items as JSON lines")
    return TaskFile(path.name, sha256(path), items)


def _read_items(reader: FileReader, default_task: str) -> Iterator[TaskItem]:
    """Yield the items of a file, except those without text."""
    for row_number, row in reader:
        if isinstance(row, BadRowError):
            raise InputError(f"{row}; fix or remove the line")
        texts = tuple(dict.fromkeys(_texts_in(_item_content(row))))
        if not texts:
            continue
        name: str | int = row_number
        for column in ("doc_id", "id"):  # ``id`` is preferred
            if isinstance(row.get(column), str | int):
                name = row[column]
        yield TaskItem(str(row.get("task") or default_task), str(name), texts)


def _item_content(row: Row) -> Any:
    """Return the values of a row that belong to the item, without the model's answers in a row of lm_eval."""
    if isinstance(row.get("text"), str):
        return row["text"]
    if isinstance(row.get("doc"), dict | str):
        return [row["doc"], row.get("target")]
    return {name: value for name, value in row.items() if name not in _COLUMNS_WITHOUT_TEXT}


def _texts_in(content: Any) -> Iterator[str]:
    """Yield all strings in a JSON value that have white space: names, addresses and single words are not texts."""
    if isinstance(content, str):
        if len(content.split(maxsplit=1)) > 1:
            yield content
    elif isinstance(content, dict):
        for value in content.values():
            yield from _texts_in(value)
    elif isinstance(content, list):
        for value in content:
            yield from _texts_in(value)


@dataclass(frozen=True)
class Words:
    """The words of a text, joined by single spaces."""

    codes: np.ndarray  # uint32 [characters], the code points, a space after each word but perhaps the last
    starts: np.ndarray  # int64 [words], where each word begins
    ends: np.ndarray  # int64 [words], the character after each word

    def text(self, first_word: int, count: int) -> str:
        """Return ``count`` words from ``first_word`` on, joined by spaces."""
        start = self.starts[first_word]
        end = self.ends[first_word + count - 1]
        return self.codes[start:end].astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")


def split_words(text: str) -> Words:
    """Split a text into words, which are runs of letters, digits and marks, in Unicode's NFKC and lower case."""
    normalized = unicodedata.normalize("NFKC", text).lower()
    codes = np.frombuffer(normalized.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    kinds = _kinds_of_characters()[codes]
    is_ignored = kinds == _IGNORED  # soft hyphens and the like: what is around them is one word
    if is_ignored.any():
        codes = codes[~is_ignored]
        kinds = kinds[~is_ignored]

    # keep the characters of words and one separator after each word, which becomes a space
    is_word = kinds == _WORD
    is_kept = is_word.copy()
    is_kept[1:] |= is_word[:-1]
    codes = codes[is_kept]
    is_word = is_word[is_kept]
    codes = np.where(is_word, codes, np.uint32(_SPACE))

    # words end at the spaces, and the last one may end with the text
    ends = np.flatnonzero(~is_word)
    if len(is_word) and is_word[-1]:
        ends = np.append(ends, len(is_word))
    if not len(ends):
        return Words(codes, starts=ends, ends=ends)
    starts = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64)
    return Words(codes, starts, ends)


def ngram_hashes(words: Words, lengths: Sequence[int]) -> dict[int, np.ndarray]:
    """Hash the n-grams of a text.

    Args:
        words: the words of the text.
        lengths: the numbers of words of the n-grams, in ascending order.

    Returns:
        64-bit hashes by length, uint64 [words - length + 1] each. Lengths that exceed the text are absent.
    """
    num_words = len(words.starts)
    lengths = [length for length in lengths if length <= num_words]
    if not lengths:
        return {}
    word_hashes = _hash_words(words)
    multipliers = _random_odd(LONGEST)
    # position i has the sum over the words of the n-gram that begins there; each length adds words to the previous one
    sums = np.zeros(num_words, dtype=np.uint64)
    hashes_by_length = {}
    for shorter_length, length in pairwise([0, *lengths]):
        for offset in range(shorter_length, length):
            sums[: num_words - offset] += word_hashes[offset:] * multipliers[offset]
        hashes_by_length[length] = _mix(sums[: num_words - length + 1])
    return hashes_by_length


def _hash_words(words: Words) -> np.ndarray:
    """Return a hash of each word, uint64 [words]: the sum of its characters times random multipliers, mixed."""
    lengths = np.diff(words.starts, append=len(words.codes))  # with the space after the word
    positions = np.arange(len(words.codes)) - np.repeat(words.starts, lengths)  # of each character in its word
    multipliers = _random_odd(_CHARACTER_MULTIPLIERS)
    products = words.codes * multipliers[positions & (_CHARACTER_MULTIPLIERS - 1)]
    products[words.ends[words.ends < len(products)]] = 0  # the spaces: the last word may have none
    return _mix(np.add.reduceat(products, words.starts))


def _mix(hashes: np.ndarray) -> np.ndarray:
    """Mix the hashes so that each bit depends on all bits, by a shortened form of splitmix64's finalizer."""
    mixed = (hashes ^ (hashes >> np.uint64(32))) * _GOLDEN
    return mixed ^ (mixed >> np.uint64(29))


@cache
def _random_odd(count: int) -> np.ndarray:
    """Return random odd numbers, uint64 [count], the same in every call and process."""
    numbers = np.random.default_rng(13).integers(0, 1 << 64, count, dtype=np.uint64, endpoint=False)
    return numbers | np.uint64(1)


@cache
def _kinds_of_characters() -> np.ndarray:
    """Return for each code point whether it is part of a word, a separator or ignored, uint8 [code points]."""
    kinds = np.full(_NUM_CODES, _SEPARATOR, dtype=np.uint8)
    for code in range(_NUM_CODES):
        category = unicodedata.category(chr(code))
        if category[0] in ("L", "N", "M"):  # letters, numbers, marks
            kinds[code] = _WORD
        elif category == "Cf":  # format
            kinds[code] = _IGNORED
    return kinds


@dataclass(frozen=True)
class NgramMatch:
    """An n-gram of a document with the same hash as an n-gram of a task."""

    index: int  # in the hashes that were looked up
    text: int  # the index of the task's text
    start: int  # the first character of the n-gram in that text


@dataclass(frozen=True)
class NgramTable:
    """The n-grams of one length from all tasks, for looking up hashes."""

    hashes: np.ndarray  # uint64 [n-grams], in ascending order
    texts: np.ndarray  # uint32 [n-grams], the index of the text with the n-gram
    starts: np.ndarray  # uint32 [n-grams], its first character in that text
    is_candidate: np.ndarray  # bool [a power of 2], whether a hash ends with these bits; most look-ups end here

    def find(self, hashes: np.ndarray) -> Iterator[NgramMatch]:
        """Yield the matches of ``hashes``, uint64 [n]; several n-grams of the tasks may have the same hash."""
        low_bits = hashes & np.uint64(len(self.is_candidate) - 1)
        indices = np.flatnonzero(self.is_candidate[low_bits])
        if not len(indices):
            return
        starts = np.searchsorted(self.hashes, hashes[indices])
        nearest = np.minimum(starts, len(self.hashes) - 1)  # a hash above all others has the position after them
        is_match = self.hashes[nearest] == hashes[indices]
        indices = indices[is_match]
        starts = starts[is_match]
        ends = np.searchsorted(self.hashes, hashes[indices], side="right")
        for index, start, end in zip(indices.tolist(), starts.tolist(), ends.tolist(), strict=True):
            for ngram in range(start, end):
                yield NgramMatch(index, int(self.texts[ngram]), int(self.starts[ngram]))


@dataclass(frozen=True)
class TaskIndex:
    """The n-grams of evaluation tasks."""

    texts: list[tuple[TaskItem, str]]  # the compared texts, each with its item, as ``Words.text`` returns them
    tables: dict[int, NgramTable]  # by the number of words of their n-grams, in ascending order
    counts: dict[str, dict[str, int]]  # by task: items, of them too_short, ngrams, and ignored common_ngrams

    def find(self, text: str) -> tuple[TaskHit, ...]:
        """Return a hit for each item that shares words with ``text``."""
        words = split_words(text)
        ngrams_by_item: dict[TaskItem, set[_SharedNgram]] = defaultdict(set)
        for length, hashes in ngram_hashes(words, list(self.tables)).items():
            for match in self.tables[length].find(hashes):
                item, task_text = self.texts[match.text]
                # compare the words: different n-grams may have the same hash
                if task_text.startswith(words.text(match.index, length), match.start):
                    ngrams_by_item[item].add((match.index, length))
        return tuple(_make_hit(item, sorted(ngrams), words) for item, ngrams in ngrams_by_item.items())


def index_tasks(items: Sequence[TaskItem]) -> TaskIndex:
    """Index the n-grams of the items of all tasks; there are no tables if all items are too short."""
    task_names = dict.fromkeys(item.task for item in items)
    task_indices = {name: index for index, name in enumerate(task_names)}

    # hash the n-grams of each text
    num_items = np.zeros(len(task_indices), dtype=np.int64)
    num_compared = np.zeros(len(task_indices), dtype=np.int64)
    texts: list[tuple[TaskItem, str]] = []
    ngrams_of_texts = [np.empty(0, dtype=_NGRAM)]
    for item_index, item in enumerate(items):
        task_index = task_indices[item.task]
        compared_texts = _choose_texts(item)
        num_items[task_index] += 1
        if compared_texts:
            num_compared[task_index] += 1
        for words, length in compared_texts:
            hashes = ngram_hashes(words, [length])[length]
            ngrams = np.empty(len(hashes), dtype=_NGRAM)
            ngrams["length"] = length
            ngrams["hash"] = hashes
            ngrams["start"] = words.starts[: len(hashes)]
            ngrams["task"] = task_index
            ngrams["item"] = item_index
            ngrams["text"] = len(texts)
            ngrams_of_texts.append(ngrams)
            texts.append((item, words.text(0, len(words.starts))))

    # leave out the n-grams of prompts, and count
    sorted_ngrams = _mark_common(np.concatenate(ngrams_of_texts), num_items)
    is_common = sorted_ngrams.is_common
    tasks_of_ngrams = sorted_ngrams.ngrams["task"]
    rare_groups = tasks_of_ngrams[sorted_ngrams.begins_group & ~is_common]
    common_groups = tasks_of_ngrams[sorted_ngrams.begins_group & is_common]
    num_ngrams = np.bincount(rare_groups, minlength=len(task_indices))
    num_common_ngrams = np.bincount(common_groups, minlength=len(task_indices))
    counts = {}
    for name, index in task_indices.items():
        counts[name] = {
            "items": int(num_items[index]),
            "too_short": int(num_items[index] - num_compared[index]),
            "ngrams": int(num_ngrams[index]),
            "common_ngrams": int(num_common_ngrams[index]),
        }
    ngrams = sorted_ngrams.ngrams[~is_common]
    tables = {int(length): _make_table(ngrams, length) for length in np.unique(ngrams["length"])}
    return TaskIndex(texts, tables, counts)


def _choose_texts(item: TaskItem) -> list[tuple[Words, int]]:
    """Return the texts of an item that are compared, each with the length of its n-grams in words.

    All texts of 13 words or more are compared. If an item has none, its longest text is compared as a whole, unless it
    has fewer than 8 words.
    """
    texts = [split_words(text) for text in item.texts]
    long_texts = [(words, LONGEST) for words in texts if len(words.starts) >= LONGEST]
    if long_texts:
        return long_texts
    longest_text = max(texts, key=lambda words: len(words.starts))
    num_words = len(longest_text.starts)
    if num_words < SHORTEST:
        return []
    return [(longest_text, num_words)]


@dataclass(frozen=True)
class _SortedNgrams:
    """Each item's n-grams, once per item, in groups of the same n-gram in one task."""

    ngrams: np.ndarray  # _NGRAM [n-grams], sorted by length, hash and task
    begins_group: np.ndarray  # bool [n-grams], whether an n-gram is the first of its group
    is_common: np.ndarray  # bool [n-grams], whether its group has too many items


def _mark_common(ngrams: np.ndarray, num_items: np.ndarray) -> _SortedNgrams:
    """Sort the n-grams, and mark those that are in too many items of their task.

    Args:
        ngrams: the n-grams of all texts, _NGRAM [all n-grams].
        num_items: the number of each task's items, int64 [tasks].
    """
    order = np.lexsort((ngrams["item"], ngrams["task"], ngrams["hash"], ngrams["length"]))
    ngrams = ngrams[order]
    begins_group = _is_change(ngrams["length"]) | _is_change(ngrams["hash"]) | _is_change(ngrams["task"])
    is_new_item = begins_group | _is_change(ngrams["item"])
    ngrams = ngrams[is_new_item]
    begins_group = begins_group[is_new_item]
    groups = np.cumsum(begins_group) - 1  # of each n-gram
    group_sizes = np.bincount(groups)[groups]  # the number of items that have the n-gram
    is_common = (group_sizes > _COMMON_ITEMS) & (group_sizes > _COMMON_SHARE * num_items[ngrams["task"]])
    return _SortedNgrams(ngrams, begins_group, is_common)


def _is_change(values: np.ndarray) -> np.ndarray:
    """Return whether each value differs from the one before it, bool [n]; the first value counts as different."""
    if not len(values):
        return np.empty(0, dtype=bool)
    return np.concatenate([[True], values[1:] != values[:-1]])


def _make_table(ngrams: np.ndarray, length: int) -> NgramTable:
    """Return the table of the n-grams with ``length`` words; ``ngrams`` is sorted by length and hash."""
    ngrams = ngrams[ngrams["length"] == length]
    table_size = 1 << (_ENTRIES_PER_NGRAM * len(ngrams)).bit_length()
    is_candidate = np.zeros(table_size, dtype=bool)
    is_candidate[ngrams["hash"] & np.uint64(table_size - 1)] = True
    return NgramTable(
        hashes=np.ascontiguousarray(ngrams["hash"]),
        texts=np.ascontiguousarray(ngrams["text"]),
        starts=np.ascontiguousarray(ngrams["start"]),
        is_candidate=is_candidate,
    )


def _make_hit(item: TaskItem, ngrams: Sequence[_SharedNgram], words: Words) -> TaskHit:
    """Return the hit for an item: how many n-grams it shares, and the longest sequence of words that they cover.

    Args:
        item: the item of a task.
        ngrams: the shared n-grams, at least one, in ascending order.
        words: the words of the document.
    """
    # join n-grams that overlap or touch
    start, length = ngrams[0]
    longest_start = start
    longest_length = length
    for ngram_start, ngram_length in ngrams[1:]:
        if ngram_start <= start + length:
            length = max(length, ngram_start + ngram_length - start)
        else:
            start = ngram_start
            length = ngram_length
        if length > longest_length:
            longest_start = start
            longest_length = length
    shown_words = words.text(longest_start, min(longest_length, _SHOWN_WORDS))
    return TaskHit(item.task, item.name, num_shared=len(ngrams), words=shown_words)


@dataclass(frozen=True)
class Decontamination:
    """The step that drops or marks documents with n-grams of evaluation tasks."""

    action: Literal["drop", "mark"]
    index: TaskIndex
    description: dict[str, Any]  # the rules, the files with their SHA-256, and the counts of each task

    def clean(self, text: str, edits: Counter[str]) -> str | Marked | Dropped:
        """Return the text if it has no n-gram of a task; otherwise mark or drop it, with the items that share n-grams.

        The text is not changed, so nothing is added to ``edits``.
        """
        hits = self.index.find(text)
        if not hits:
            return text
        if self.action == "mark":
            return Marked(text, hits)
        largest_hit = max(hits, key=lambda hit: hit.num_shared)
        detail = f"task {largest_hit.task}, item {largest_hit.item}: {largest_hit.words}"
        return Dropped(CONTAMINATED, detail, hits)

    def settings(self) -> dict[str, Any]:
        return self.description


def open_decontamination(paths: Sequence[str], action: Literal["drop", "mark"]) -> Decontamination:
    """Return the step for the tasks in files of JSON lines.

    Raises:
        InputError: a file is unusable, or all items are too short.
    """
    files = read_task_files(paths)
    # files may repeat each other's items
    items: dict[TaskItem, None] = {}
    for file in files:
        items |= dict.fromkeys(file.items)
    index = index_tasks(list(items))
    if not index.tables:
        raise InputError(f"--decontaminate: no item has a text of {SHORTEST} words; give the items with their texts")
    description = {
        "contaminated": action,
        "rules": _RULES,
        "ngram_words": LONGEST,
        "shortest_text": SHORTEST,
        "files": [{"name": file.name, "sha256": file.sha256} for file in files],
        "tasks": index.counts,
    }
    return Decontamination(action, index, description)
