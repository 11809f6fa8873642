"""Preference pairs: read a row with a chosen and a rejected answer in any form, and encode it as one document."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from fabric_train.reading.documents import (
    PAIR,
    BadRowError,
    EncodedDocument,
    LeftOut,
    Message,
    Pair,
    excerpt,
    says_something,
)
from fabric_train.token_dataset.manifest import EMPTY_ANSWER, EQUAL_ANSWERS, TOO_LONG
from fabric_train.tokenization.chats.columns import RowColumns, read_history, read_instruction, read_system
from fabric_train.tokenization.chats.turns import TurnReader, list_of_turns

if TYPE_CHECKING:
    from fabric_train.tokenization.chats.chat_encoder import ChatEncoder

RATINGS = (
    ("score_chosen", "score_rejected"),
    ("chosen_score", "rejected_score"),
    ("chosen_rating", "rejected_rating"),
    ("chosen-rating", "rejected-rating"),
)
"""Columns with numbers for the chosen and the rejected answer."""
PAIR_COLUMNS = (
    *("chosen", "rejected", "prompt", "conversations", "question", "instruction", "input", "history"),
    *(name for names in RATINGS for name in names),
)
"""Every column that a row with a preference pair may use, besides those of every format."""
_LARGEST_RATING = 1e12  # the sum of a ledger stays finite
_PAIRS_AT_ONCE = 500  # that are read ahead
SAME_ANSWERS = "the chosen and the rejected answer are the same"
_Result = EncodedDocument | LeftOut | BadRowError


def pair_of(columns: RowColumns, turns: TurnReader) -> Pair:
    """Read a row with a preference pair; BadRowError if it has none, or an answer is empty or the same as the other.

    ``chosen`` and ``rejected`` are whole conversations that begin alike, or answers to a prompt: to ``prompt`` (text or
    messages), ``conversations``, ``question``, or ``instruction`` and ``input``. A text beside whole conversations only
    repeats a turn of the user.
    """
    chosen = _answer(columns["chosen"], turns)
    rejected = _answer(columns["rejected"], turns)
    given = _prompt_of(columns, chosen, rejected, turns)
    chosen = given + chosen
    rejected = given + rejected
    if not all(messages and messages[-1]["role"] == "assistant" for messages in (chosen, rejected)):
        raise ValueError("chosen and rejected must end with the assistant's answer")
    most = min(len(chosen), len(rejected)) - 1  # each keeps an answer
    alike = [message == other for message, other in zip(chosen[:most], rejected, strict=False)]
    num_common = [*alike, False].index(False)
    if not chosen[num_common]["role"] == rejected[num_common]["role"] == "assistant":
        raise ValueError("chosen and rejected differ in the prompt, before the assistant's answer")
    if not num_common:
        raise ValueError("chosen and rejected are answers without a prompt")
    for name, messages in (("chosen", chosen), ("rejected", rejected)):
        if not says_something(messages[-1]):
            raise BadRowError(f"the {name} answer is empty; the row: {excerpt(dict(columns.row))}", EMPTY_ANSWER)
    if chosen == rejected:
        raise BadRowError(f"{SAME_ANSWERS}; the row: {excerpt(dict(columns.row))}", EQUAL_ANSWERS)
    return Pair(
        prompt=chosen[:num_common],
        chosen=chosen[num_common:],
        rejected=rejected[num_common:],
        rating_margin=_rating_margin(columns),
    )


def _answer(value: Any, turns: TurnReader) -> list[Message]:
    """Return the messages of an answer or a conversation: a text, a turn, or a list of turns."""
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    return turns.read([value] if isinstance(value, Mapping) else list_of_turns(value))


def _prompt_of(columns: RowColumns, chosen: list[Message], rejected: list[Message], turns: TurnReader) -> list[Message]:
    """Return the messages that come before ``chosen`` and ``rejected``, which may have the prompt in them."""
    conversation = columns.get("conversations")
    prompt = conversation if conversation else columns.get("prompt")
    is_whole = all(messages[:1] and messages[0]["role"] in ("system", "user") for messages in (chosen, rejected))
    given: list[Message] = []
    if prompt is not None and not isinstance(prompt, str):
        given = _answer(prompt, turns)
        if given and chosen[: len(given)] == rejected[: len(given)] == given:
            given = []
    elif not is_whole:
        text = prompt or columns.get("question")
        if not text and columns.get("instruction"):
            text = read_instruction(columns)
        if text and isinstance(text, str):
            given = [*read_history(columns, turns), {"role": "user", "content": text}]
        elif text:
            raise TypeError("question must be text")
        elif isinstance(columns["chosen"], str):
            raise TypeError("chosen and rejected are texts without a prompt; write the prompt into a column prompt")
    elif prompt and prompt.strip() not in [turn["content"].strip() for turn in chosen if turn["role"] == "user"]:
        raise ValueError("the prompt is none of the user's turns of chosen, which has a prompt of its own")
    system = read_system(columns)
    if system is None:
        return given
    first_messages = (given + chosen)[:1] + (given + rejected)[:1]
    if all(message == system for message in first_messages):
        return given
    if any(message["role"] == "system" for message in first_messages):
        raise ValueError("the column system has another text than the system message")
    return [system, *given]


def _rating_margin(columns: RowColumns) -> float:
    """Return by how much the chosen answer is rated higher than the rejected one; NaN if there are no such numbers."""
    for names in RATINGS:
        if names[0] not in columns or names[1] not in columns:
            continue
        ratings = [columns[name] for name in names]
        numbers = [
            float(rating) for rating in ratings if isinstance(rating, int | float) and abs(rating) < _LARGEST_RATING
        ]
        if len(numbers) == len(names):
            return numbers[0] - numbers[1]
    return math.nan


@dataclass(frozen=True)
class PairEncoder:
    """An encoder of preference pairs that returns the tokens of two chats, as ``chats`` encodes them, as one document.

    Both sequences together have at most ``max_length`` tokens. Of a longer pair, ``cut_start`` removes turns at the
    start of the prompt, the same of both sequences and after the system turn; the first turn left is the user's. A pair
    that is still too long is left out, as each is with another value of ``too_long``: no answer is cut.
    """

    chats: "ChatEncoder"  # without a limit of length
    too_long: str
    max_length: int

    def encode_all(self, pairs: Iterable[Pair | BadRowError]) -> Iterator[_Result]:
        """Yield each pair encoded, or why it is left out or bad; pairs are read ahead. An error stays as it is."""
        given = iter(pairs)
        while batch := list(islice(given, _PAIRS_AT_ONCE)):
            singles = ((one,) if isinstance(one, BadRowError) else one.conversations for one in batch)
            results = iter(list(self.chats.encode_all(chain.from_iterable(singles))))
            for pair in batch:
                first = next(results)
                yield first if isinstance(pair, BadRowError) else self._join(pair, first, next(results))

    def _join(self, pair: Pair, chosen: _Result, rejected: _Result) -> _Result:
        if not isinstance(chosen, EncodedDocument):
            return chosen
        if not isinstance(rejected, EncodedDocument):
            return rejected
        if np.array_equal(chosen.input_ids, rejected.input_ids):
            return BadRowError(f"{SAME_ANSWERS}, in tokens", EQUAL_ANSWERS)
        joined = _joined(pair, chosen, rejected)
        num_tokens = len(joined.input_ids)
        if num_tokens <= self.max_length:
            return joined
        shorter = self._shortened(pair) if self.too_long == "cut_start" else None
        if shorter is None:
            return LeftOut(TOO_LONG, num_tokens)
        return replace(shorter, num_tokens_cut=num_tokens - len(shorter.input_ids))

    def _shortened(self, pair: Pair) -> EncodedDocument | None:
        """Return the pair with as much of the prompt's end as fits into a row, None if not even its last turn does."""
        roles = [message["role"] for message in pair.prompt]
        always = next((index for index, role in enumerate(roles) if role != "system"), len(roles))
        begins = [begin for begin in range(len(roles) - 1, always, -1) if roles[begin] == "user"]
        fitting: dict[int, EncodedDocument] = {}

        def is_too_long(number: int) -> bool:
            part = replace(pair, prompt=pair.prompt[:always] + pair.prompt[begins[number] :])
            chosen, rejected = self.chats.encode_all(part.conversations)
            if isinstance(chosen, EncodedDocument) and isinstance(rejected, EncodedDocument):
                joined = _joined(part, chosen, rejected)
                if len(joined.input_ids) <= self.max_length:
                    fitting[number] = joined
            return number not in fitting

        num_fitting = bisect_left(range(len(begins)), True, key=is_too_long)
        return fitting[num_fitting - 1] if num_fitting else None


def _joined(pair: Pair, chosen: EncodedDocument, rejected: EncodedDocument) -> EncodedDocument:
    assert chosen.supervised is not None
    assert rejected.supervised is not None
    counts = (int(chosen.supervised.sum()), int(rejected.supervised.sum()))
    one = _said(pair.chosen)
    other = _said(pair.rejected)
    is_prefix = one != other and (one.startswith(other) or other.startswith(one))
    return EncodedDocument(
        input_ids=np.concatenate([chosen.input_ids, rejected.input_ids]),
        supervised=np.concatenate([chosen.supervised, rejected.supervised]),
        num_characters=chosen.num_characters + rejected.num_characters,
        num_bytes=chosen.num_bytes + rejected.num_bytes,
        turn_ends=chosen.turn_ends | rejected.turn_ends,
        unused=chosen.unused | rejected.unused,
        pair=np.array([(len(chosen.input_ids), *counts, is_prefix, pair.rating_margin)], dtype=PAIR),
    )


def _said(answer: Sequence[Message]) -> str:
    return "\n".join(message["content"] for message in answer).strip()
