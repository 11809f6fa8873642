"""Continue the training of a BPE from its existing merges: learn further merges from the words of texts.

New merges come after all old ones, and a tokenizer applies merges in their order. So a text is first cut as before, and
then new merges join some pieces: a text that gets no new token keeps its ids. One exception would break this: a pair
whose text is an old token that the old merges never make of it. It is no merge here.

A SentencePiece model is continued in the same way: it joins the pair whose piece has the best score, and the scores of
new pieces are below all old ones. Its own trainer starts from letters; of 2,000 pieces that it learned from 1.5 MB of
Catalan, 640 never came, because the old ones go first (docs/language.md).
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from fabric_train.cli.errors import InputError
from fabric_train.tokenization.workers import progress_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Pair = tuple[int, int]

_FEWEST = 2  # a pair that comes once saves nothing elsewhere


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
        number, before, after = self._numbers[word], Counter(pairwise(self.segments[word])), Counter(pairwise(ids))
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
