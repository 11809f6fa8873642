"""Documents (texts and chats) as they are read, encoded or left out; and bad rows."""

import json
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fabric_train.cli.errors import InputError
from fabric_train.token_dataset.manifest import BAD_ROW, EMPTY, EMPTY_ANSWER, NOTHING_SUPERVISED, UNDESIRABLE_ANSWER

Row = Mapping[str, Any]
Message = dict[str, Any]

TRAINED = "trained"
"""The key of a message that is False if its turn is not supervised; it is not passed to chat templates."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""The keys for the thoughts before an answer; a chat template uses one of these names."""
_LONGEST_EXCERPT = 200
TOO_DEEP = "its objects are nested too deeply; remove the row"

# rejected_at: where the rejected sequence begins; chosen, rejected: supervised tokens; is_prefix: whether one answer is
# the beginning of the other; rating_margin: rating of the chosen answer minus the rejected one's, NaN without.
# Of a unpaired answer, the second sequence is the same prompt with another row's answer, and is_desirable its label.
PAIR = np.dtype(
    [
        ("rejected_at", "u4"),
        ("chosen", "u4"),
        ("rejected", "u4"),
        ("is_prefix", "?"),
        ("rating_margin", "f8"),
        ("is_desirable", "?"),
    ]
)


@dataclass(frozen=True)
class EncodedDocument:
    """A document, a chat, a preference pair or an unpaired answer as tokens, including BOS and EOS."""

    input_ids: np.ndarray  # int32 [number of tokens]
    supervised: np.ndarray | None  # bool [number of tokens], whether the token is a target; None if all are
    num_characters: int  # code points of the encoded text; of a chat, of the content of its messages
    num_bytes: int  # UTF-8 bytes of the same
    num_tokens_cut: int = 0  # tokens of the turns that were removed because they did not fit into a row
    turn_ends: frozenset[int] = frozenset()  # the ids of the control tokens with which supervised turns of a chat end
    pair: np.ndarray | None = None  # PAIR [1] of a pair or a unpaired answer: one sequence after the other
    unused: frozenset[str] = frozenset()  # columns of the row, and keys of its messages, that were not used


@dataclass(frozen=True)
class LeftOut:
    """A document that is left out: the ledger's reason, and the number of tokens if it did not fit into a row."""

    reason: str
    num_tokens_cut: int = 0


def utf8_length(text: str) -> int:
    """Return the number of bytes of ``text`` in UTF-8; half of a surrogate pair counts as three."""
    if text.isascii():  # most texts; this takes no copy
        return len(text)
    return len(text.encode("utf-8", "surrogatepass"))


class BadRowError(ValueError):
    """A row that cannot be used. The message names the fault and, once a reader has added it, the location.

    ``reason`` is the key under which the ledger counts it if such rows are left out.
    """

    def __init__(self, message: str, reason: str = BAD_ROW) -> None:
        super().__init__(message)
        self.reason = reason

    def at(self, place: str) -> "BadRowError":
        """Return the error with the location of the row before its message."""
        return BadRowError(f"{place}: {self}", self.reason)

    def fault(self) -> InputError:
        """Return the error that ends the run with ``--on_bad_rows fail``."""
        return InputError(f"{self}; --on_bad_rows skip skips such rows")


def name_in(column: str, names: Container[str]) -> str:
    """Return ``column``'s name in a table with these ``names``: NAME for NAME:SEPARATOR, unless that is a name too."""
    if column in names:
        return column
    return column.partition(":")[0]


def check_not_repeated(place: str, columns: Sequence[str], names: Sequence[str]) -> None:
    """Raise an InputError if one of ``columns`` occurs twice among the ``names`` of a table."""
    for column in columns:
        name = name_in(column, names)
        count = names.count(name)
        if count > 1:
            raise InputError(f"{place}: {count} columns are named {name!r}; rename all but one of them")


def check_text_column(place: str, schema: Any, column: str) -> None:
    """Raise an InputError if a pyarrow schema has the column and it holds neither text nor nested values."""
    from pyarrow import types

    name = name_in(column, schema.names)
    if name not in schema.names:
        return
    kind = schema.field(name).type
    if types.is_dictionary(kind):
        kind = kind.value_type
    is_text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    if not (is_text or types.is_nested(kind) or types.is_null(kind)):
        raise InputError(f"{place}: {_not_text(name, kind)}")


def text_of(row: "Row | BadRowError", column: str, place: Callable[[], str]) -> tuple[str, bytes]:
    """Return the text in ``column``, and the same text in UTF-8; both are empty if there is none.

    A list of strings is joined if ``column`` is NAME:SEPARATOR, in which a backslash with n or t is a line break or a
    tab. Raise a BadRowError if the column is missing or does not hold text; ``place`` names the row.
    """
    if isinstance(row, BadRowError):
        raise row
    name = name_in(column, row)
    text = row.get(name)
    if text is None:
        if name in row:
            return "", b""
        raise BadRowError(str(missing_column(place(), column, row)))
    if isinstance(text, list) and all(isinstance(item, str) for item in text):
        if name == column:
            raise BadRowError(
                f"{place()}: column {name!r} holds a list of texts; --text_column '{name}: ' joins them with a space, "
                f"'{name}:\\n' with line breaks"
            )
        separator = column[len(name) + 1 :].replace("\\n", "\n").replace("\\t", "\t")
        text = separator.join(text)
    if not isinstance(text, str):
        raise BadRowError(f"{place()}: {_not_text(name, type(text).__name__)}")
    try:
        return text, text.encode()
    except UnicodeEncodeError as error:
        raise BadRowError(
            f"{place()}: column {name!r} holds half a surrogate pair at character {error.start}, which is not text"
        ) from None


def is_empty(value: Any) -> bool:
    """Return whether a column or a key has nothing in it."""
    return value is None or (isinstance(value, str | list | Mapping) and not value)


def columns_beside_text(row: Row, text_column: str) -> set[str]:
    """Return the columns of a row, other than its text, that are not empty."""
    name = name_in(text_column, row)
    return {column for column, value in row.items() if column != name and not is_empty(value)}


def _not_text(column: str, kind: object) -> str:
    return f"column {column!r} holds {kind}, not text; choose another with --text_column"


def missing_column(place: str, column: str, columns: Any) -> InputError:
    """Return the error for a missing column, which lists the columns there are."""
    names = ", ".join(map(str, columns)) or "none"
    return InputError(f"{place}: no column {column!r}; it has {names}; choose one with --text_column")


@dataclass(frozen=True)
class Chat:
    """A conversation in the form for chat templates."""

    messages: list[Message]
    """``role`` is system, user, assistant or tool, ``content`` is text; other keys are as given, except ``TRAINED``."""
    num_prompt_messages: int = 0
    """The number of messages at the start that are a prompt, in which no turn of the assistant is supervised."""
    tools: list[Any] | None = None
    """JSON schemas of the tools that may be called."""
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """The values that the chat template gets in addition to messages and tools, by name."""
    is_undesirable: bool = False
    """Whether the answer is one to avoid (in rows for KTO)."""
    unused: frozenset[str] = frozenset()
    """The columns of the row, and keys of its turns, that were not used."""

    @property
    def conversations(self) -> "tuple[Chat, ...]":
        return (self,)

    @property
    def joined(self) -> "Chat":
        return self

    def with_messages(self, messages: list[Message]) -> "Chat":
        """Return the chat with its messages replaced by the same number of others."""
        return replace(self, messages=messages)


@dataclass(frozen=True)
class Pair:
    """A preference pair: two conversations that begin alike, of which the first is the better one."""

    prompt: list[Message]  # the longest common beginning; ``chosen`` and ``rejected`` begin with the assistant's turn
    chosen: list[Message]
    rejected: list[Message]
    tools: list[Any] | None = None
    template_variables: Mapping[str, Any] = field(default_factory=dict)  # see Chat, as for ``unused``
    rating_margin: float = math.nan  # rating of the chosen answer minus the rejected one's
    unused: frozenset[str] = frozenset()

    @property
    def conversations(self) -> tuple[Chat, ...]:
        """The conversation with the chosen answer, and the one with the rejected answer."""
        return (self._chat(self.chosen), self._chat(self.rejected))

    @property
    def joined(self) -> Chat:
        """The prompt and both answers as one conversation."""
        return self._chat(self.chosen + self.rejected)

    def _chat(self, answer: list[Message]) -> Chat:
        return Chat(
            self.prompt + answer,
            num_prompt_messages=len(self.prompt),
            tools=self.tools,
            template_variables=self.template_variables,
            unused=self.unused,
        )

    def with_messages(self, messages: list[Message]) -> "Pair":
        """Return the pair with the messages of ``joined`` replaced by the same number of others."""
        chosen_start = len(self.prompt)
        rejected_start = chosen_start + len(self.chosen)
        return replace(
            self,
            prompt=messages[:chosen_start],
            chosen=messages[chosen_start:rejected_start],
            rejected=messages[rejected_start:],
        )


def is_blank(chat: Chat) -> bool:
    """Return whether a conversation has no text, no thoughts and no tool calls."""
    return not any(says_something(message) for message in chat.messages)


def says_something(message: Message) -> bool:
    """Return whether a message has text, thoughts or tool calls."""
    if message["content"].strip() or message.get("tool_calls"):
        return True
    return any(message.get(key) for key in REASONING)


def supervised_turns(chat: Chat, train_on: str) -> frozenset[int]:
    """Return the indices of the messages that are supervised with ``--train_on``."""
    # the turns that --train_on selects, in order
    selected: list[int] = []
    for index, message in enumerate(chat.messages):
        is_answer = message["role"] == "assistant" and index >= chat.num_prompt_messages
        if is_answer or train_on == "all":
            selected.append(index)
    if train_on == "last":
        selected = selected[-1:]

    # drop the turns of the assistant that the row marks as untrained. Marks on user or system turns are ignored,
    # because only the assistant's turns can be marked in a rendering; so --train_on all supervises all other turns
    supervised: set[int] = set()
    for index in selected:
        message = chat.messages[index]
        is_untrained = message.get(TRAINED) is False and message["role"] == "assistant"
        if not is_untrained:
            supervised.add(index)
    return frozenset(supervised)


def why_left_out(chat: Chat, train_on: str) -> str | None:
    """Return the ledger's reason if there is nothing to learn in a chat; None if there is."""
    if is_blank(chat):
        return EMPTY
    if chat.is_undesirable:
        return UNDESIRABLE_ANSWER
    turns = supervised_turns(chat, train_on)
    if not turns:
        return NOTHING_SUPERVISED
    for turn in turns:
        message = chat.messages[turn]
        if message["role"] == "assistant" and not says_something(message):
            return EMPTY_ANSWER
    return None


def check_surrogates(text: str) -> None:
    """Raise BadRowError if a text has half of a surrogate pair, which cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRowError("it has half a surrogate pair, which is not a character; save the file as UTF-8") from None


def excerpt(value: Any) -> str:
    """Return ``value`` as JSON on one line, shortened."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    text = text.encode(errors="backslashreplace").decode()  # half of a surrogate pair cannot be printed
    if len(text) > _LONGEST_EXCERPT:
        text = f"{text[:_LONGEST_EXCERPT]}…"
    return text
