"""The words of a language: read and sample its texts, count their words, and learn further merges of a BPE from them.

New merges come after all old ones, and a tokenizer applies merges in their order. So a text is first cut as before, and
then new merges join some pieces: a text that gets no new token keeps its ids. One exception would break this: a pair
whose text is an old token that the old merges never make of it. It is no merge here.

A SentencePiece model is continued in the same way: it joins the pair whose piece has the best score, and the scores of
new pieces are below all old ones. Its own trainer starts from letters; of 2,000 pieces that it learned from 1.5 MB of
Catalan, 640 never came, because the old ones go first (docs/language.md).
"""

import hashlib
import heapq
import random
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from fabric_train.cli.argument_types import parse_size, show_size
from fabric_train.cli.errors import InputError
from fabric_train.cli.progress import progress_of
from fabric_train.reading.documents import text_of
from fabric_train.reading.sources import Source, open_sources, split_names
from fabric_train.tokenization.corpus import find_kind

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Pair = tuple[int, int]

_SAMPLED_PARTS = 64
_SMALLEST_PART = 1 << 14
_FEWEST_TO_HOLD_OUT = 10
# Scripts that are written without spaces: Thai, Lao, Tibetan, Myanmar, Khmer, kana, Chinese characters
_ALONE = (
    "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3041-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
_WORD = re.compile(rf"[{_ALONE}]|[^\s{_ALONE}]+")
_FEWEST = 2  # a pair that comes once saves nothing elsewhere


@dataclass(frozen=True)
class LanguageTexts:
    """The documents of a language; ``note`` says how much of a large text was read, "" if all."""

    name: str
    documents: tuple[str, ...]
    note: str = ""

    @property
    def num_bytes(self) -> int:
        return sum(len(document.encode()) for document in self.documents)


def words_of(text: str) -> list[str]:
    """Return the words of a text: what stands between spaces; each character of a script without spaces is one."""
    return _WORD.findall(text)


def read_texts(given: Sequence[str], text_column: str, max_bytes: str, seed: int) -> list[LanguageTexts]:
    """Read what ``--texts`` gives as NAME=PLACE; places of one name are one text.

    Of a place with more than ``max_bytes``, read parts all over it, in an order that ``seed`` decides. InputError with
    a line for each place that cannot be read or has no text.
    """
    most = parse_size(max_bytes)
    assert most is not None, "the arguments are checked"
    read: dict[str, LanguageTexts] = {}
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as downloads:
        for name, place in split_names(given, "--texts"):
            try:
                found = _read(name, place, text_column, most, seed, Path(downloads))
            except InputError as error:
                faults += error.faults
                continue
            before = read.get(name, LanguageTexts(name, ()))
            notes = "; ".join(filter(None, (before.note, found.note)))
            read[name] = LanguageTexts(name, before.documents + found.documents, notes)
    if faults:
        raise InputError(*faults)
    return list(read.values())


def _read(name: str, place: str, text_column: str, most: int, seed: int, downloads: Path) -> LanguageTexts:
    (source,) = open_sources([place], "--texts", False, downloads)
    kind = find_kind(source, text_column, skips_bad_rows=True, prefers_text=True)
    if kind != "text":
        raise InputError(f"--texts {place}: its rows are chats or instructions; give documents with plain text")
    documents: list[str] = []
    num_bytes = 0
    with progress_of(f"reading {name}") as show:
        for text in _documents(source, text_column, max(_SMALLEST_PART, most // _SAMPLED_PARTS), seed):
            size = len(text.encode())
            if num_bytes + size > most and documents:
                total = f" of {show_size(source.num_bytes)}" if source.num_bytes else ""
                note = f"{name}: {show_size(num_bytes)}{total} were read, in parts from all over {place}"
                return LanguageTexts(name, tuple(documents), note)
            documents.append(text)
            num_bytes += size
            show(min(1.0, num_bytes / min(most, source.num_bytes or most)))
    if not documents:
        raise InputError(f"--texts {place}: no document has text; give another place")
    return LanguageTexts(name, tuple(documents))


def _documents(source: Source, text_column: str, part_bytes: int, seed: int) -> Iterator[str]:
    """Yield the documents of a source, the parts of a large one in random order; InputError for a bad row."""
    parts = list(source.parts(part_bytes))
    random.Random(seed).shuffle(parts)
    for part in parts:
        reader = source.reader(part, (text_column,))
        for number, row in reader:
            try:
                text, _ = text_of(row, text_column, partial(reader.place, number))
            except ValueError as error:
                raise InputError(str(error)) from None
            if text.strip():
                yield text


def hold_out(texts: LanguageTexts) -> tuple[list[str], list[str]]:
    """Return the documents to learn from, and the tenth that is held out: the same whatever else is read.

    Of fewer than ten documents, lines are held out instead.
    """
    units: Sequence[str] = texts.documents
    if len(units) < _FEWEST_TO_HOLD_OUT:
        units = [line for document in units for line in document.splitlines(keepends=True)]
    is_out = [hashlib.sha256(unit.encode()).digest()[0] * 10 < 256 for unit in units]
    kept = [unit for unit, out in zip(units, is_out, strict=True) if not out]
    return kept, [unit for unit, out in zip(units, is_out, strict=True) if out]


@dataclass(frozen=True)
class Learned:
    """New tokens in the order of their ids, and the merges that make them of two tokens, in their order.

    ``pieces`` has the old ids that each new token replaces. ``segments`` has the ids of each word of the texts after
    all merges, for a comparison with the tokenizer that has them.
    """

    tokens: list[str] = field(default_factory=list)
    merges: list[tuple[str, str]] = field(default_factory=list)
    pieces: list[tuple[int, ...]] = field(default_factory=list)
    segments: dict[str, tuple[int, ...]] = field(default_factory=dict)


def learn_merges(
    tokenizer: "Tokenizer",
    words: Mapping[str, int],
    num_tokens: int,
    first_id: int,
    *,
    kept: Iterable[str] = (),
    takes_whole_words: bool = False,
    fits: Callable[[str], bool] = bool,
) -> Learned:
    """Return ``num_tokens`` new tokens with ids from ``first_id`` on, the pair that comes most first.

    Args:
        tokenizer: the old tokenizer, whose model is a BPE.
        words: the words of the texts with their numbers, as the model gets them.
        kept: words that keep their ids in any case.
        takes_whole_words: whether it takes a word that is a token as it is, without merges (``ignore_merges``).
        fits: whether a text may become a token.

    Raises:
        InputError: the texts have too few pairs that come twice.
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    text_of = {index: token for token, index in vocabulary.items()}
    pairs = _Pairs(cut(tokenizer, words), words)
    kept = set(kept)
    forbidden = {pair for ids in cut(tokenizer, kept).values() for pair in pairwise(ids)}
    new_ids: dict[str, int] = {}
    learned = Learned()
    with progress_of("learning tokens") as show:
        while len(learned.tokens) < num_tokens:
            pair = pairs.most_frequent()
            if pair is None:
                raise InputError(
                    f"--num_tokens {num_tokens}: the texts have only {len(learned.tokens):,} new tokens that come "
                    f"{_FEWEST} times; give a lower number, or more text"
                )
            token = text_of[pair[0]] + text_of[pair[1]]
            is_kept = pair in forbidden or (takes_whole_words and token in kept)
            if is_kept or token in vocabulary or not fits(token):
                pairs.forbid(pair)
                continue
            index = new_ids.setdefault(token, first_id + len(new_ids))
            if index not in text_of:
                text_of[index] = token
                learned.tokens.append(token)
                sides = (learned.pieces[side - first_id] if side >= first_id else (side,) for side in pair)
                learned.pieces.append(tuple(piece for side in sides for piece in side))
                show(len(learned.tokens) / num_tokens)
            learned.merges.append((text_of[pair[0]], text_of[pair[1]]))
            pairs.merge(pair, index)
            if takes_whole_words and token in pairs.segments:
                pairs.replace(token, (index,))
    learned.segments.update(pairs.segments)
    return learned


def cut(tokenizer: "Tokenizer", words: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Return the ids of each word; without words that have a letter or byte for which there is no token."""
    segments = {}
    for word in words:
        tokens = tokenizer.model.tokenize(word)
        if "".join(token.value for token in tokens) == word:
            segments[word] = tuple(token.id for token in tokens)
    return segments


class _Pairs:
    """The pairs of neighbours in the words of texts, with how often each comes; a heap finds the most frequent one."""

    def __init__(self, segments: dict[str, tuple[int, ...]], numbers: Mapping[str, int]) -> None:
        self.segments = segments
        self._numbers = numbers
        self._counts: dict[Pair, int] = defaultdict(int)
        self._words: dict[Pair, set[str]] = defaultdict(set)
        for word, ids in segments.items():
            for pair in pairwise(ids):
                self._counts[pair] += numbers[word]
                self._words[pair].add(word)
        # in the heap: the count when a pair was pushed, which may have become less since
        self._heap = [(-count, pair) for pair, count in self._counts.items()]
        heapq.heapify(self._heap)

    def most_frequent(self) -> Pair | None:
        """Return the pair that comes most, of equal ones the one with the lowest ids; None if none comes twice."""
        while self._heap:
            count, pair = self._heap[0]
            now = self._counts.get(pair, 0)
            if now == -count and now >= _FEWEST:
                return pair
            heapq.heappop(self._heap)
            if now >= _FEWEST:
                heapq.heappush(self._heap, (-now, pair))
        return None

    def forbid(self, pair: Pair) -> None:
        """Never return a pair again that was the most frequent one."""
        heapq.heappop(self._heap)
        self._counts.pop(pair)

    def merge(self, pair: Pair, index: int) -> None:
        """Join a pair to the token ``index`` in all words, from the left to the right."""
        grown: set[Pair] = set()
        for word in self._words.pop(pair):
            ids = self.segments[word]
            joined: list[int] = []
            place = 0
            while place < len(ids):
                is_pair = ids[place : place + 2] == pair
                joined.append(index if is_pair else ids[place])
                place += 2 if is_pair else 1
            grown |= self._recount(word, tuple(joined))
        self._push(grown)

    def replace(self, word: str, ids: tuple[int, ...]) -> None:
        """Give a word other ids."""
        self._push(self._recount(word, ids))

    def _recount(self, word: str, ids: tuple[int, ...]) -> set[Pair]:
        """Give a word other ids; return the pairs that come more often now, for the heap."""
        number = self._numbers[word]
        before = Counter(pairwise(self.segments[word]))
        after = Counter(pairwise(ids))
        self.segments[word] = ids
        for pair, times in (before - after).items():
            if pair in self._counts:
                self._counts[pair] -= times * number
        grown = after - before
        for pair, times in grown.items():
            self._counts[pair] += times * number
            self._words[pair].add(word)
        return set(grown)

    def _push(self, pairs: Iterable[Pair]) -> None:
        for pair in pairs:
            heapq.heappush(self._heap, (-self._counts[pair], pair))
