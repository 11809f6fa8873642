"""Encode unpaired answers: each with its prompt, and then the same prompt with the answer of another row.

KTO compares an answer with the KL divergence between policy and reference, which it estimates from answers to other
prompts (arXiv:2402.01306, section 4.1). The other answer depends only on the rows of a file and their order. So the
estimate depends neither on packing nor on the batches of a run.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from fabric_train.reading.documents import BadRowError, Chat, EncodedDocument, LeftOut, Message, Pair
from fabric_train.token_dataset.manifest import NO_OTHER_ANSWER
from fabric_train.tokenization.pairs import PairEncoder

_ROWS_AT_ONCE = 500  # that are read ahead, and among which another answer is chosen
_Result = EncodedDocument | LeftOut | BadRowError


@dataclass(frozen=True)
class _Answer:
    """An answer that can be used, encoded with its own prompt."""

    row: int  # its index among the rows that were read ahead
    chat: Chat
    document: EncodedDocument

    @property
    def prompt(self) -> list[Message]:
        return self.chat.messages[: self.chat.num_prompt_messages]

    @property
    def messages(self) -> list[Message]:
        """The messages of the answer itself."""
        return self.chat.messages[self.chat.num_prompt_messages :]


@dataclass(frozen=True)
class UnpairedEncoder:
    """An encoder of unpaired answers that returns each as one document of two sequences.

    The first sequence is the prompt with its answer. The second one is the same prompt with another answer: that of the
    nearest earlier row with a different prompt, or of the previous row if all have the same prompt. The last row
    comes before the first one. Both sequences together have the same limit as those of a pair.
    """

    pairs: PairEncoder

    def encode_all(self, chats: Iterable[Chat | BadRowError]) -> Iterator[_Result]:
        """Yield each answer encoded, or why it is left out or bad; rows are read ahead. Errors are passed through."""
        chats_left = iter(chats)
        earlier: _Answer | None = None
        while rows := list(islice(chats_left, _ROWS_AT_ONCE)):
            # each answer with its own prompt
            results = list(self.pairs.chats.encode_all(_without_label(chat) for chat in rows))
            answers: list[_Answer] = []
            for index, chat in enumerate(rows):
                document = results[index]
                if isinstance(chat, Chat) and isinstance(document, EncodedDocument):
                    answers.append(_Answer(index, chat, document))

            # and each prompt with another answer
            compared: list[Pair] = []
            for position, answer in enumerate(answers):
                other = _find_other(answers, position, earlier)
                compared.append(_compare(answer, other or answer))
            mismatched = self.pairs.chats.encode_all(pair.conversations[1] for pair in compared)
            for answer, pair, mismatched_result in zip(answers, compared, list(mismatched), strict=True):
                results[answer.row] = self._join(answer, pair, mismatched_result)
            if len(answers) == 1 and earlier is None:
                results[answers[0].row] = LeftOut(NO_OTHER_ANSWER)
            if answers:
                earlier = answers[-1]
            yield from results

    def _join(self, answer: _Answer, pair: Pair, mismatched: _Result) -> _Result:
        """Return both sequences of a row as one document; or why it is left out or bad."""
        if not isinstance(mismatched, EncodedDocument):
            return mismatched
        document = self.pairs.fit(pair, answer.document, mismatched)
        if isinstance(document, EncodedDocument):
            assert document.pair is not None
            document.pair["is_desirable"] = not answer.chat.is_undesirable
        return document


def _find_other(answers: Sequence[_Answer], position: int, earlier: _Answer | None) -> _Answer | None:
    """Return the mismatched answer for the prompt of ``answers[position]``; None if there is no other answer.

    ``earlier`` is the last answer before these, which is used if there is only one.
    """
    if len(answers) == 1:
        return earlier
    for distance in range(1, len(answers)):
        other = answers[position - distance]
        if other.prompt != answers[position].prompt:
            return other
    return answers[position - 1]


def _compare(answer: _Answer, other: _Answer) -> Pair:
    """Return an answer and another one, both as answers to the first one's prompt."""
    return Pair(
        prompt=answer.prompt,
        chosen=answer.messages,
        rejected=other.messages,
        tools=answer.chat.tools,
        template_variables=answer.chat.template_variables,
        unused=answer.chat.unused,
    )


def _without_label(chat: Chat | BadRowError) -> Chat | BadRowError:
    """Return a chat without its label, so that it is encoded even if its answer is undesirable."""
    if isinstance(chat, BadRowError):
        return chat
    return replace(chat, is_undesirable=False)
