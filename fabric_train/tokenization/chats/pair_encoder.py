"""Encode preference pairs: the prompt with the chosen answer, then the prompt with the rejected one."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

import numpy as np

from fabric_train.tokenization import manifest
from fabric_train.tokenization.chats.chat_encoder import ChatEncoder
from fabric_train.tokenization.documents import PAIR, BadRowError, EncodedDocument, LeftOut, Message
from fabric_train.tokenization.pairs import SAME_ANSWERS, Pair

_PAIRS_AT_ONCE = 500
_Result = EncodedDocument | LeftOut | BadRowError


@dataclass(frozen=True)
class PairEncoder:
    """An encoder of preference pairs that returns the tokens of two chats, as ``chats`` encodes them, as one document.

    Both sequences together have at most ``max_length`` tokens. Of a longer pair, ``cut_start`` removes turns at the
    start of the prompt, the same of both sequences and after the system turn; the first turn left is the user's. A pair
    that is still too long is left out, as each is with another value of ``too_long``: no answer is cut.
    """

    chats: ChatEncoder  # without a limit of length
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
            return BadRowError(f"{SAME_ANSWERS}, in tokens", manifest.EQUAL_ANSWERS)
        joined = _joined(pair, chosen, rejected)
        num_tokens = len(joined.input_ids)
        if num_tokens <= self.max_length:
            return joined
        shorter = self._shortened(pair) if self.too_long == "cut_start" else None
        if shorter is None:
            return LeftOut(manifest.TOO_LONG, num_tokens)
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
    one, other = _said(pair.chosen), _said(pair.rejected)
    is_prefix = one != other and (one.startswith(other) or other.startswith(one))
    return EncodedDocument(
        input_ids=np.concatenate([chosen.input_ids, rejected.input_ids]),
        supervised=np.concatenate([chosen.supervised, rejected.supervised]),
        num_characters=chosen.num_characters + rejected.num_characters,
        num_bytes=chosen.num_bytes + rejected.num_bytes,
        turn_ends=chosen.turn_ends | rejected.turn_ends,
        pair=np.array([(len(chosen.input_ids), *counts, is_prefix, pair.rating_margin)], dtype=PAIR),
    )


def _said(answer: Sequence[Message]) -> str:
    return "\n".join(message["content"] for message in answer).strip()
