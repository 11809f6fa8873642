"""The prompts of the needle test: facts hidden at depths of a long text, and a question about each of them.

Shapes: T tokens of a prompt with its answer, H tokens of the text that hides the facts.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fabric_train.cli.errors import InputError
from fabric_train.evaluation.texts import NUM_DIGITS, DocumentTexts, device_kind

DEPTHS = (0, 25, 50, 75, 100)
"""Percent of the text that stand before each fact."""
SPARE_TOKENS = 2
"""Tokens after the answer, which show whether the number goes on."""
_SEARCHED_SHARE = 20  # a fact goes to the nearest end of a sentence within this part of the text
_LOWEST = 10**6
_HIGHEST = 10**7
_CHARACTERS_OF_TOKEN = 12  # more than any tokenizer makes of a token on average
_DOCUMENT_CHARACTERS = 50_000  # tokenizers slow down on longer texts
_CODES = {"en": "en", "es": "es", "ca": "ca", "va": "ca"}


@dataclass(frozen=True)
class Language:
    """How a fact is written: ``question`` about one of the ``towns`` begins it, a number and a full stop end it."""

    question: str
    towns: str


LANGUAGES = {
    "en": Language(
        "The secret number of {} is",
        "Valencia Madrid London Paris Rome Berlin Vienna Lisbon Dublin Prague Oslo Cairo Boston Tokyo",
    ),
    "es": Language(
        "El número secreto de {} es",
        "Valencia Madrid Londres París Roma Berlín Viena Lisboa Dublín Praga Oslo Toledo Sevilla Burgos",
    ),
    "ca": Language(
        "El número secret de {} és",
        "València Madrid Londres París Roma Berlín Viena Lisboa Gandia Sagunt Xàtiva Morella Dénia Sueca",
    ),
}
_PARTS = (
    "The baker|The captain|The doctor|The farmer|The gardener|The judge|The painter|The pilot|The poet|The teacher",
    "from the old mill|from the harbour|with the grey coat|of the north bank|from the next village|of the long street",
    "repaired|sold|described|found|carried|forgot|admired|borrowed|measured|painted",
    "a wooden cart|the green door|a small boat|the first map|an iron lamp|the broken clock|the tall fence",
    "before the rain|after the market|in early spring|without a word|for the third time|on the way home|at noon",
)


@dataclass(frozen=True)
class Fact:
    """A number of a town, hidden after ``depth`` percent of a text; ``place`` is the token at which it begins.

    ``answer_tokens``, the number's and the spare ones, are to be generated after the question.
    """

    depth: int
    town: str
    number: str
    place: int
    question_ids: list[int]
    answer_tokens: int


@dataclass(frozen=True)
class HiddenFacts:
    """A text with hidden facts: ``input_ids``, which the questions follow one at a time.

    With the longest question, its answer and the spare tokens, the text has exactly ``length`` tokens. ``digest`` tells
    the prompt from others.
    """

    length: int
    trial: int
    input_ids: list[int]
    facts: tuple[Fact, ...]
    digest: str


class Haystack:
    """A text in the tokens of a tokenizer, in which facts of its language can be hidden.

    Args:
        name: the source.
        texts: its documents; they are repeated if they have too few tokens.
        language: a key of ``LANGUAGES``.
        tokenizer: of transformers.
        longest: tokens of the longest prompt.
    """

    def __init__(self, name: str, texts: Sequence[str], language: str, tokenizer: Any, longest: int) -> None:
        self.name = name
        self._language = LANGUAGES[language]
        self._tokenizer = tokenizer
        first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        self._prefix = [first]
        ids: list[int] = []
        for part in _parts(texts, 2 * longest * _CHARACTERS_OF_TOKEN):
            ids += self._encode(part)
            if len(ids) >= 2 * longest:
                break
        self.num_tokens = len(ids)
        """Tokens that are there, at most about twice as many as in the longest prompt."""
        self._ids = np.resize(np.array(ids, dtype=np.int64), max(2 * longest, len(ids)))
        ends = [id_ for id_ in set(ids) if re.search(r"[.!?\n] *$", tokenizer.decode([id_]))]
        self._is_end = np.isin(self._ids, ends)

    def hide(self, length: int, trial: int, seed: int) -> HiddenFacts:
        """Return a text with a fact at each of ``DEPTHS``.

        Towns, numbers and the part of the text are random, and the same for all models; so are numbers for all texts.

        Raises:
            InputError: ``length`` has no room for the facts, or for at least as much text.
        """
        random = np.random.default_rng([seed, length, trial])
        towns = random.permutation(self._language.towns.split())[: len(DEPTHS)].tolist()
        numbers = random.integers(_LOWEST, _HIGHEST, len(DEPTHS)).tolist()
        questions = [self._language.question.format(town) for town in towns]
        written = [self._encode(f"\n{one} {number}.\n") for one, number in zip(questions, numbers, strict=True)]
        asked = [self._encode(f"\n{question}") for question in questions]
        answer_tokens = [len(self._encode(f" {number}")) + SPARE_TOKENS for number in numbers]
        after = max(len(ids) + answer for ids, answer in zip(asked, answer_tokens, strict=True))
        of_facts = sum(map(len, written))
        room = length - len(self._prefix) - of_facts - after
        if room < of_facts:
            needed = length + of_facts - room
            raise InputError(f"--needle {length}: too short for {len(DEPTHS)} facts in a text; give {needed} or more")
        last = len(self._ids) - room
        begin = self._nearest_end(int(random.random() * last), 0, last, room)
        places = [self._nearest_end(begin + room * depth // 100, begin, begin + room, room) for depth in DEPTHS]
        input_ids = list(self._prefix)
        facts: list[Fact] = []
        done = begin
        for number, place in enumerate(places):
            input_ids += self._ids[done:place].tolist()
            own = (towns[number], str(numbers[number]), len(input_ids), asked[number], answer_tokens[number])
            facts.append(Fact(DEPTHS[number], *own))
            input_ids += written[number]
            done = place
        digest = hashlib.sha256(repr((input_ids, asked, device_kind())).encode()).hexdigest()[:NUM_DIGITS]
        return HiddenFacts(length, trial, input_ids, tuple(facts), digest)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _nearest_end(self, place: int, first: int, last: int, room: int) -> int:
        """Return the nearest place at which a sentence has ended, from ``first`` to ``last``; else the place itself."""
        if place in (first, last):
            return place
        near = room // _SEARCHED_SHARE
        begin = max(first + 1, place - near)
        end = min(last - 1, place + near)
        ends = begin + np.flatnonzero(self._is_end[begin - 1 : end])
        return int(ends[np.abs(ends - place).argmin()]) if len(ends) else place


def number_in(answer: str) -> str:
    """Return the number, with all its digits, that an answer begins with; "" if it begins with something else."""
    found = re.match(r"\s*(\d+)", answer)
    return found[1] if found else ""


def find_language(documents: DocumentTexts) -> str:
    """Return the language of facts for a text: of its name, such as ``es`` or ``va-news``, or else as identified.

    A text in a language without facts of its own gets English ones. An InputError if the identifier is needed and not
    installed.
    """
    from fabric_train.cleaning.language import identify, load_identifier  # slow

    code = re.split(r"[-_]", documents.name, maxsplit=1)[0]
    if code not in _CODES:
        load_identifier(f"--texts {documents.name}, a name that does not begin with en, es, ca or va,")
        code = identify(documents.texts[0])[0]
    return _CODES.get(code, "en")


def invented_text(num_tokens: int) -> DocumentTexts:
    """Return English sentences without a meaning, about as many as ``num_tokens`` tokens need, from a fixed seed."""
    random = np.random.default_rng(0)
    parts = [part.split("|") for part in _PARTS]
    sentences = (" ".join(part[random.integers(len(part))] for part in parts) for _ in range(num_tokens // 5))
    text = " ".join(f"{sentence}." for sentence in sentences)
    return DocumentTexts("en", (text,), ("invented sentences",))


def _parts(texts: Sequence[str], num_characters: int) -> Iterator[str]:
    """Yield parts of texts up to a number of characters, a blank line between texts."""
    left = num_characters
    for text in texts:
        for begin in range(0, len(text), _DOCUMENT_CHARACTERS):
            if left <= 0:
                return
            part = text[begin : begin + _DOCUMENT_CHARACTERS]
            left -= len(part)
            yield part if begin else f"\n\n{part}"
