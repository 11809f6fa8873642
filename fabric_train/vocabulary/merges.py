"""Learn more merges for a BPE tokenizer from the words of texts.

New merges come after all old ones, and a tokenizer applies merges in order. So a text is first cut as before, and
then new merges join some pieces: a text that gets no new token keeps its ids. One exception would break this: a pair
whose text is an old token that the old merges never make from it. It is not a merge here.

A SentencePiece model is continued in the same way: it joins the pair whose piece has the best score, and the scores of
new pieces are below all old ones. Its own trainer starts from letters; of 2,000 pieces that it learned from 1.5 MB of
Catalan, 640 never came, because the old ones go first (docs/contributing/language.md).
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from fabric_train.cli.errors import InputError
from fabric_train.cli.progress import progress_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Pair = tuple[int, int]
"""The ids of two adjacent tokens in a word."""
_MIN_COUNT = 2  # a pair that comes once saves nothing elsewhere


@dataclass(frozen=True)
class Learned:
    """The new tokens in the order of their ids, and the merges that make them."""

    tokens: list[str] = field(default_factory=list)
    merges: list[tuple[str, str]] = field(default_factory=list)
    """The two tokens of each merge, in the order in which a tokenizer applies them."""
    pieces: list[tuple[int, ...]] = field(default_factory=list)
    """The old ids that each new token replaces."""
    segments: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The ids of each word of the texts after all merges, for a comparison with the tokenizer that has them."""


def learn_merges(
    tokenizer: "Tokenizer",
    words: Mapping[str, int],
    num_tokens: int,
    first_id: int,
    *,
    kept_words: Iterable[str] = (),
    takes_whole_words: bool = False,
    fits: Callable[[str], bool] = bool,
) -> Learned:
    """Learn ``num_tokens`` new tokens with ids from ``first_id`` on, beginning with the most frequent pair.

    Args:
        tokenizer: the old tokenizer, whose model is a BPE.
        words: the words of the texts with their counts, as the model gets them.
        num_tokens: the number of tokens to learn.
        first_id: the id of the first new token.
        kept_words: words that keep their ids in any case.
        takes_whole_words: whether the tokenizer uses a word that is a token without merges (``ignore_merges``).
        fits: whether a text may become a token.

    Raises:
        InputError: the texts have too few pairs that occur twice.
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    text_by_id = {token_id: token for token, token_id in vocabulary.items()}
    pairs = _PairCounts(cut(tokenizer, words), words)

    # Joining a pair within a kept word would change its ids.
    kept_words = set(kept_words)
    forbidden: set[Pair] = set()
    for token_ids in cut(tokenizer, kept_words).values():
        forbidden.update(pairwise(token_ids))

    new_ids: dict[str, int] = {}
    learned = Learned()
    with progress_of("learning tokens") as show:
        while len(learned.tokens) < num_tokens:
            pair = pairs.most_frequent()
            if pair is None:
                raise InputError(
                    f"--num_tokens {num_tokens}: the texts have only {len(learned.tokens):,} new tokens that occur "
                    f"{_MIN_COUNT} times; give a lower number, or more text"
                )
            # A pair that cannot become a token is never looked at again.
            left, right = pair
            token = text_by_id[left] + text_by_id[right]
            changes_kept_word = pair in forbidden or (takes_whole_words and token in kept_words)
            if changes_kept_word or token in vocabulary or not fits(token):
                pairs.forbid(pair)
                continue

            # Several merges may make the same token; it is new with the first of them.
            token_id = new_ids.setdefault(token, first_id + len(new_ids))
            if token_id not in text_by_id:
                text_by_id[token_id] = token
                learned.tokens.append(token)
                learned.pieces.append((*_old_ids(left, learned, first_id), *_old_ids(right, learned, first_id)))
                show(len(learned.tokens) / num_tokens)
            learned.merges.append((text_by_id[left], text_by_id[right]))
            pairs.merge(pair, token_id)
            # such a tokenizer does not merge a word that is a token, so its pairs need not be learned any more
            if takes_whole_words and token in pairs.segments:
                pairs.replace(token, (token_id,))
    learned.segments.update(pairs.segments)
    return learned


def _old_ids(token_id: int, learned: Learned, first_id: int) -> tuple[int, ...]:
    """Return the old ids that a token replaces; an old token is its own piece."""
    if token_id < first_id:
        return (token_id,)
    return learned.pieces[token_id - first_id]


def cut(tokenizer: "Tokenizer", words: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Return the ids of each word, except words with a letter or byte that has no token."""
    segments = {}
    for word in words:
        tokens = tokenizer.model.tokenize(word)
        if "".join(token.value for token in tokens) == word:
            segments[word] = tuple(token.id for token in tokens)
    return segments


class _PairCounts:
    """The adjacent pairs in the words of texts, and how often each occurs.

    ``segments`` has the current ids of each word. A heap finds the most frequent pair.
    """

    def __init__(self, segments: dict[str, tuple[int, ...]], word_counts: Mapping[str, int]) -> None:
        """Count the pairs in ``segments``, the ids of each word; ``word_counts`` says how often each word occurs."""
        self.segments = segments
        self._word_counts = word_counts
        self._counts: dict[Pair, int] = defaultdict(int)
        self._words: dict[Pair, set[str]] = defaultdict(set)  # that have the pair, or had it
        for word, token_ids in segments.items():
            for pair in pairwise(token_ids):
                self._counts[pair] += word_counts[word]
                self._words[pair].add(word)
        # An entry has the count, negative, when its pair was pushed; the pair may come less often now.
        self._heap = [(-count, pair) for pair, count in self._counts.items()]
        heapq.heapify(self._heap)

    def most_frequent(self) -> Pair | None:
        """Return the most frequent pair, among equals the one with the lowest ids; None if no pair occurs twice."""
        while self._heap:
            negative_count, pair = self._heap[0]
            count = self._counts.get(pair, 0)
            if count == -negative_count and count >= _MIN_COUNT:
                return pair
            heapq.heappop(self._heap)  # an outdated entry
            if count >= _MIN_COUNT:
                heapq.heappush(self._heap, (-count, pair))
        return None

    def forbid(self, pair: Pair) -> None:
        """Never again return a pair that was the most frequent one."""
        heapq.heappop(self._heap)
        self._counts.pop(pair)

    def merge(self, pair: Pair, token_id: int) -> None:
        """Join a pair into a token in all words, from left to right."""
        more_frequent: set[Pair] = set()
        for word in self._words.pop(pair):
            token_ids = self.segments[word]
            joined: list[int] = []
            index = 0
            while index < len(token_ids):
                if token_ids[index : index + 2] == pair:
                    joined.append(token_id)
                    index += 2
                else:
                    joined.append(token_ids[index])
                    index += 1
            more_frequent |= self._recount(word, tuple(joined))
        self._push(more_frequent)

    def replace(self, word: str, token_ids: tuple[int, ...]) -> None:
        """Give a word other ids."""
        self._push(self._recount(word, token_ids))

    def _recount(self, word: str, token_ids: tuple[int, ...]) -> set[Pair]:
        """Give a word other ids; return the pairs that now occur more often, for the heap."""
        word_count = self._word_counts[word]
        old_pairs = Counter(pairwise(self.segments[word]))
        new_pairs = Counter(pairwise(token_ids))
        self.segments[word] = token_ids
        for pair, times in (old_pairs - new_pairs).items():
            if pair in self._counts:  # not a forbidden one
                self._counts[pair] -= times * word_count
        added_pairs = new_pairs - old_pairs
        for pair, times in added_pairs.items():
            self._counts[pair] += times * word_count
            self._words[pair].add(word)
        return set(added_pairs)

    def _push(self, pairs: Iterable[Pair]) -> None:
        for pair in pairs:
            heapq.heappush(self._heap, (-self._counts[pair], pair))
