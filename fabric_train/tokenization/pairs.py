"""Read rows with preference pairs, a chosen and a rejected answer in any form, and encode each as one document."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from fabric_train.reading.documents import (
    PAIR,
    BadRowError,
    Chat,
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
"""The columns with ratings of the chosen and the rejected answer."""
PAIR_COLUMNS = (
    *("chosen", "rejected", "prompt", "conversations", "question", "instruction", "input", "history"),
    *(name for names in RATINGS for name in names),
)
"""Every column that a row with a preference pair may use, in addition to the columns of every format."""
_LARGEST_RATING = 1e12  # the sum of a ledger stays finite
_PAIRS_AT_ONCE = 500  # that are read ahead
SAME_ANSWERS = "the chosen and the rejected answer are the same"
_Result = EncodedDocument | LeftOut | BadRowError


def pair_of(columns: RowColumns, turns: TurnReader) -> Pair:
    """Read a row with a preference pair; BadRowError if it has none, or if an answer is empty or equal to the other.

    ``chosen`` and ``rejected`` are whole conversations that begin alike, or answers to a prompt: to ``prompt`` (text or
    messages), ``conversations``, ``question``, or ``instruction`` and ``input``. A text next to whole conversations
    only repeats a turn of the user.
    """
    # both conversations, from the first turn on
    chosen_answer = _read_answer(columns["chosen"], turns)
    rejected_answer = _read_answer(columns["rejected"], turns)
    prompt = _read_prompt(columns, chosen_answer, rejected_answer, turns)
    chosen = prompt + chosen_answer
    rejected = prompt + rejected_answer
    if not (_ends_with_answer(chosen) and _ends_with_answer(rejected)):
        raise ValueError("chosen and rejected must end with the assistant's answer")

    # what they have in common is the prompt; the last turn of each is an answer even if it is the same
    max_common = min(len(chosen), len(rejected)) - 1
    num_common = 0
    while num_common < max_common and chosen[num_common] == rejected[num_common]:
        num_common += 1
    if not chosen[num_common]["role"] == rejected[num_common]["role"] == "assistant":
        raise ValueError("chosen and rejected differ in the prompt, before the assistant's answer")
    if not num_common:
        raise ValueError("chosen and rejected are answers without a prompt")

    # there is something to compare
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


def _ends_with_answer(messages: list[Message]) -> bool:
    return bool(messages) and messages[-1]["role"] == "assistant"


def _begins_with_prompt(messages: list[Message]) -> bool:
    return bool(messages) and messages[0]["role"] in ("system", "user")


def _read_answer(value: Any, turns: TurnReader) -> list[Message]:
    """Return the messages of an answer or a conversation: a text, a turn, or a list of turns."""
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    if isinstance(value, Mapping):
        return turns.read([value])
    return turns.read(list_of_turns(value))


def _read_prompt(
    columns: RowColumns, chosen: list[Message], rejected: list[Message], turns: TurnReader
) -> list[Message]:
    """Return the messages that come before ``chosen`` and ``rejected``, which may have the prompt in them."""
    prompt_messages: list[Message] = []
    prompt = columns.get("conversations")
    if not prompt:
        prompt = columns.get("prompt")
    if prompt is not None and not isinstance(prompt, str):
        # a prompt of messages, which whole conversations repeat
        prompt_messages = _read_answer(prompt, turns)
        length = len(prompt_messages)
        if chosen[:length] == rejected[:length] == prompt_messages:
            prompt_messages = []
    elif _begins_with_prompt(chosen) and _begins_with_prompt(rejected):
        # whole conversations: a text beside them repeats a turn of the user
        user_texts = [turn["content"].strip() for turn in chosen if turn["role"] == "user"]
        if prompt and prompt.strip() not in user_texts:
            raise ValueError("the prompt is not among the user's turns in chosen, which has its own prompt")
    else:
        # answers to a text
        text = prompt or columns.get("question")
        if not text and columns.get("instruction"):
            text = read_instruction(columns)
        if text and isinstance(text, str):
            prompt_messages = [*read_history(columns, turns), {"role": "user", "content": text}]
        elif text:
            raise TypeError("question must be text")
        elif isinstance(columns["chosen"], str):
            raise TypeError("chosen and rejected are texts without a prompt; add the prompt as a column named prompt")

    # the column system, unless both conversations begin with its text
    system = read_system(columns)
    if system is None:
        return prompt_messages
    first_messages = (prompt_messages + chosen)[:1] + (prompt_messages + rejected)[:1]
    if all(message == system for message in first_messages):
        return prompt_messages
    if any(message["role"] == "system" for message in first_messages):
        raise ValueError("the column system differs from the system message")
    return [system, *prompt_messages]


def _rating_margin(columns: RowColumns) -> float:
    """Return by how much the chosen answer is rated higher than the rejected one; NaN without ratings."""
    for chosen_column, rejected_column in RATINGS:
        if chosen_column in columns and rejected_column in columns:
            chosen_rating = columns[chosen_column]
            rejected_rating = columns[rejected_column]
            if _is_rating(chosen_rating) and _is_rating(rejected_rating):
                return float(chosen_rating) - float(rejected_rating)
    return math.nan


def _is_rating(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < _LARGEST_RATING


@dataclass(frozen=True)
class PairEncoder:
    """An encoder of preference pairs that returns the tokens of two chats, as ``chats`` encodes them, as one document.

    Both sequences together have at most ``max_length`` tokens. ``cut_start`` shortens a longer pair: it removes turns
    after the system turn, the same from both prompts, until the prompt begins with a turn of the user and the pair
    fits. Other longer pairs are left out: no answer is cut.
    """

    chats: "ChatEncoder"  # without a limit of length
    too_long: str
    max_length: int

    def encode_all(self, pairs: Iterable[Pair | BadRowError]) -> Iterator[_Result]:
        """Yield each pair encoded, or why it is left out or bad; pairs are read ahead. Errors are passed through."""
        pairs_left = iter(pairs)
        while batch := list(islice(pairs_left, _PAIRS_AT_ONCE)):
            # the conversations of all pairs in one list, so that they are encoded together
            conversations: list[Chat | BadRowError] = []
            for pair in batch:
                if isinstance(pair, BadRowError):
                    conversations.append(pair)
                else:
                    conversations += pair.conversations
            results = iter(list(self.chats.encode_all(conversations)))
            for pair in batch:
                if isinstance(pair, BadRowError):
                    yield next(results)
                else:
                    chosen = next(results)
                    rejected = next(results)
                    yield self._join(pair, chosen, rejected)

    def _join(self, pair: Pair, chosen: _Result, rejected: _Result) -> _Result:
        """Return the pair as one document, shortened if it is too long; or why it is left out or bad."""
        if not isinstance(chosen, EncodedDocument):
            return chosen
        if not isinstance(rejected, EncodedDocument):
            return rejected
        if np.array_equal(chosen.input_ids, rejected.input_ids):
            return BadRowError(f"{SAME_ANSWERS}, in tokens", EQUAL_ANSWERS)
        return self.fit(pair, chosen, rejected)

    def fit(self, pair: Pair, chosen: EncodedDocument, rejected: EncodedDocument) -> EncodedDocument | LeftOut:
        """Return both sequences of a pair as one document, shortened if they are too long together."""
        document = _join_documents(pair, chosen, rejected)
        num_tokens = len(document.input_ids)
        if num_tokens <= self.max_length:
            return document
        shorter: EncodedDocument | None = None
        if self.too_long == "cut_start":
            shorter = self._shorten(pair)
        if shorter is None:
            return LeftOut(TOO_LONG, num_tokens)
        return replace(shorter, num_tokens_cut=num_tokens - len(shorter.input_ids))

    def _shorten(self, pair: Pair) -> EncodedDocument | None:
        """Return the pair with as much of the prompt's end as fits into a row; None if not even its last turn does."""
        # system turns stay; the prompt may begin at each later turn of the user, here from the last one to the first
        roles = [message["role"] for message in pair.prompt]
        num_system = 0
        while num_system < len(roles) and roles[num_system] == "system":
            num_system += 1
        system_turns = pair.prompt[:num_system]
        user_turns = [index for index in range(len(roles) - 1, num_system, -1) if roles[index] == "user"]
        fitting: dict[int, EncodedDocument] = {}  # by index of ``user_turns``

        def is_too_long(candidate: int) -> bool:
            first_turn = user_turns[candidate]
            shorter_pair = replace(pair, prompt=system_turns + pair.prompt[first_turn:])
            chosen, rejected = self.chats.encode_all(shorter_pair.conversations)
            if isinstance(chosen, EncodedDocument) and isinstance(rejected, EncodedDocument):
                document = _join_documents(shorter_pair, chosen, rejected)
                if len(document.input_ids) <= self.max_length:
                    fitting[candidate] = document
            return candidate not in fitting

        # an earlier turn gives a longer prompt, so binary search finds the first one that is too long
        num_fitting = bisect_left(range(len(user_turns)), True, key=is_too_long)
        if num_fitting == 0:
            return None
        return fitting[num_fitting - 1]


def _join_documents(pair: Pair, chosen: EncodedDocument, rejected: EncodedDocument) -> EncodedDocument:
    """Return both sequences as one document, the chosen one first."""
    assert chosen.supervised is not None
    assert rejected.supervised is not None
    chosen_text = "\n".join(message["content"] for message in pair.chosen).strip()
    rejected_text = "\n".join(message["content"] for message in pair.rejected).strip()
    is_prefix = chosen_text.startswith(rejected_text) or rejected_text.startswith(chosen_text)
    record = (
        len(chosen.input_ids),
        int(chosen.supervised.sum()),
        int(rejected.supervised.sum()),
        is_prefix and chosen_text != rejected_text,
        pair.rating_margin,
        False,
    )
    return EncodedDocument(
        input_ids=np.concatenate([chosen.input_ids, rejected.input_ids]),
        supervised=np.concatenate([chosen.supervised, rejected.supervised]),
        num_characters=chosen.num_characters + rejected.num_characters,
        num_bytes=chosen.num_bytes + rejected.num_bytes,
        turn_ends=chosen.turn_ends | rejected.turn_ends,
        unused=chosen.unused | rejected.unused,
        pair=np.array([record], dtype=PAIR),
    )
