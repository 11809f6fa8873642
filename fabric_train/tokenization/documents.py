"""Documents as they are read, encoded or left out: the text of a row, or a chat in one of four formats; bad rows."""

import json
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fabric_train.cli.errors import InputError
from fabric_train.tokenization.manifest import BAD_ROW

Row = Mapping[str, Any]
Message = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"} | {role: role for role in ROLES}
# numbers for the chosen and the rejected answer
RATINGS = (
    ("score_chosen", "score_rejected"),
    ("chosen_score", "rejected_score"),
    ("chosen_rating", "rejected_rating"),
    ("chosen-rating", "rejected-rating"),
)
_FORMATS = {
    "messages": 'messages [{"role": "user", "content": "..."}, ...]',
    "conversations": 'conversations [{"from": "human", "value": "..."}, ...]',
    "alpaca": "instruction, input (may be absent), output",
    "prompt_completion": "prompt, completion (both text, or both lists of messages)",
    "preference": "chosen, rejected (messages, whole or after prompt; or texts after prompt)",
}
_COLUMNS = {
    "messages": ("messages", "tools"),
    "conversations": ("conversations",),
    "alpaca": ("instruction", "input", "output"),
    "prompt_completion": ("prompt", "completion", "tools"),
    "preference": (
        *("chosen", "rejected", "prompt", "conversations", "system", "question", "instruction", "input", "tools"),
        *(name for names in RATINGS for name in names),
    ),
}
# columns that rows of other formats may have with something else in them
_ONLY_OF_PAIRS = frozenset(_COLUMNS["preference"]).difference(
    *(_COLUMNS[name] for name in _COLUMNS if name != "preference")
)
_LONGEST_EXCERPT = 200
TOO_DEEP = "its objects are nested too deeply; leave the row out"

# rejected_at: where the rejected sequence begins; chosen, rejected: supervised tokens; is_prefix: whether one answer is
# the beginning of the other; rating_margin: rating of the chosen answer minus the rejected one's, NaN without
PAIR = np.dtype(
    [("rejected_at", "u4"), ("chosen", "u4"), ("rejected", "u4"), ("is_prefix", "?"), ("rating_margin", "f8")]
)


@dataclass(frozen=True)
class EncodedDocument:
    """A document, a chat or a preference pair as tokens, BOS and EOS included."""

    input_ids: np.ndarray  # int32 [number of tokens]
    supervised: np.ndarray | None  # bool [number of tokens], whether the token is a target; None if all are
    num_characters: int  # code points of the encoded text; of a chat, of the content of its messages
    num_bytes: int  # UTF-8 bytes of the same
    num_tokens_cut: int = 0  # tokens of the turns that were removed because they did not fit into a row
    turn_ends: frozenset[int] = frozenset()  # the ids of the control tokens with which supervised turns of a chat end
    pair: np.ndarray | None = None  # PAIR [1] of a preference pair: one sequence after the other


@dataclass(frozen=True)
class LeftOut:
    """A document that is left out: the ledger's reason, and its tokens if it did not fit into a row."""

    reason: str
    num_tokens_cut: int = 0


def utf8_length(text: str) -> int:
    """Return the number of bytes of ``text`` in UTF-8; half of a surrogate pair has three."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


class BadRowError(ValueError):
    """A row that cannot be used. The message names the fault and, once a reader has added it, the place.

    ``reason`` is the key under which the ledger counts it if such rows are left out.
    """

    def __init__(self, message: str, reason: str = BAD_ROW) -> None:
        super().__init__(message)
        self.reason = reason

    def at(self, place: str) -> "BadRowError":
        """Return the error with the place of the row before its message."""
        return BadRowError(f"{place}: {self}", self.reason)

    def fault(self) -> InputError:
        """Return the error that ends the run with ``--on_bad_rows fail``."""
        return InputError(f"{self}; --on_bad_rows skip leaves such rows out")


def name_in(column: str, names: Container[str]) -> str:
    """Return the name of ``column`` in a table with these ``names``: NAME for NAME:SEPARATOR, unless that is a name."""
    return column if column in names else column.partition(":")[0]


def check_not_repeated(place: str, columns: Sequence[str], names: Sequence[str]) -> None:
    """Raise an InputError if one of ``columns`` comes twice among the ``names`` of a table."""
    for name in (name_in(column, names) for column in columns):
        if (count := names.count(name)) > 1:
            raise InputError(f"{place}: {count} columns are called {name!r}; rename all but one of them")


def check_text_columns(place: str, schema: Any, columns: list[str]) -> None:
    """Raise an InputError if a column of a pyarrow schema holds neither text nor nested values."""
    from pyarrow import types

    for name in columns:
        kind = schema.field(name).type
        if types.is_dictionary(kind):
            kind = kind.value_type
        is_text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
        if not (is_text or types.is_nested(kind) or types.is_null(kind) or name in _ONLY_OF_PAIRS):
            raise InputError(f"{place}: {_not_text(name, kind)}")


def text_of(row: "Row | BadRowError", column: str, place: Callable[[], str]) -> tuple[str, bytes]:
    """Return the text in ``column`` and the same in UTF-8; both are empty if there is none.

    A list of strings is joined if ``column`` is NAME:SEPARATOR, where a backslash with n or t is a line break or a tab.
    BadRowError if the column is missing, or holds something that is not text; ``place`` names the row.
    """
    if isinstance(row, BadRowError):
        raise row
    name = name_in(column, row)
    text = row.get(name)
    if text is None:
        if name in row:
            return "", b""
        raise BadRowError(str(missing_column(place(), column, row)))
    if isinstance(text, list) and all(isinstance(one, str) for one in text):
        if name == column:
            raise BadRowError(
                f"{place()}: column {name!r} holds a list of texts; --text_column '{name}: ' joins them with a space, "
                f"'{name}:\\n' with line breaks"
            )
        text = column[len(name) + 1 :].replace("\\n", "\n").replace("\\t", "\t").join(text)
    if not isinstance(text, str):
        raise BadRowError(f"{place()}: {_not_text(name, type(text).__name__)}")
    try:
        return text, text.encode()
    except UnicodeEncodeError as error:
        raise BadRowError(
            f"{place()}: column {name!r} holds half a surrogate pair at character {error.start}, which is not text"
        ) from None


def _not_text(column: str, kind: object) -> str:
    return f"column {column!r} holds {kind}, not text; choose another with --text_column"


def missing_column(place: str, column: str, columns: Any) -> InputError:
    """Return the error for a missing column, which lists the columns there are."""
    names = ", ".join(map(str, columns)) or "none"
    return InputError(f"{place}: no column {column!r}; there are: {names}; choose one with --text_column")


@dataclass(frozen=True)
class Chat:
    """A conversation in the form that chat templates take."""

    messages: list[Message]  # ``role`` is one of ROLES, ``content`` is text; other keys are kept as given
    num_given: int = 0  # messages at the start that are a prompt, in which no turn of the assistant is supervised
    tools: list[Any] | None = None  # JSON schemas of the tools that may be called

    @property
    def conversations(self) -> "tuple[Chat, ...]":
        return (self,)

    @property
    def joined(self) -> "Chat":
        return self

    def with_messages(self, messages: list[Message]) -> "Chat":
        """Return the chat with other messages, as many."""
        return replace(self, messages=messages)


def detect_format(record: Mapping[str, Any]) -> str | None:
    """Return the data format of a row by its columns; None if it is no chat, instruction or preference pair."""
    if all(isinstance(record.get(name), str | list | Mapping) for name in ("chosen", "rejected")):
        return "preference"
    for data_format in ("messages", "conversations"):
        if isinstance(record.get(data_format), list):
            return data_format
    if record.get("instruction") is not None and record.get("output") is not None:
        return "alpaca"
    if record.get("prompt") is not None and record.get("completion") is not None:
        return "prompt_completion"
    return None


def columns(data_format: str) -> tuple[str, ...]:
    """Return the columns that ``data_format`` (auto: any format) is read from; a row may lack some."""
    if data_format == "auto":
        return tuple(dict.fromkeys(name for names in _COLUMNS.values() for name in names))
    return _COLUMNS[data_format]


def read_chat(record: Mapping[str, Any] | BadRowError, data_format: str) -> Chat:
    """Read a row.

    An instruction and its input, with an empty line between them, become the user's turn, and the output becomes the
    assistant's. A prompt and a completion that are texts become two turns as well. BadRowError if the row has another
    format; the message shows the row.
    """
    if isinstance(record, BadRowError):
        raise record
    found = detect_format(record) if data_format == "auto" else data_format
    with bad_rows_explained(record, data_format):
        if found == "messages":
            return Chat(_messages(record["messages"]), tools=read_tools(record))
        if found == "conversations":
            return Chat([read_message(openai_turn(turn)) for turn in list_of_turns(record[found])])
        if found == "alpaca":
            return _exchange(read_instruction(record), record["output"])
        if found == "prompt_completion":
            return _prompt_and_completion(record)
        if found == "preference":
            raise TypeError("a preference pair, where a chat is expected")
    raise BadRowError(unexpected_format(record, data_format, "no columns of a chat or an instruction"))


@contextmanager
def bad_rows_explained(record: Mapping[str, Any], data_format: str) -> Iterator[None]:
    """Turn an error from a row of another format into a BadRowError that shows the row and the formats."""
    try:
        yield
    except BadRowError:
        raise
    except KeyError as error:
        raise BadRowError(unexpected_format(record, data_format, f"{error} is missing")) from None
    except (TypeError, ValueError) as error:
        raise BadRowError(unexpected_format(record, data_format, str(error))) from None
    except RecursionError:
        raise BadRowError(TOO_DEEP) from None


def is_blank(chat: Chat) -> bool:
    """Return whether a conversation has neither text nor tool calls."""
    return not any(message["content"].strip() or message.get("tool_calls") for message in chat.messages)


def supervised_turns(chat: Chat, train_on: str) -> frozenset[int]:
    """Return the indices of the messages that are supervised with ``--train_on``."""
    if train_on == "all":
        return frozenset(range(len(chat.messages)))
    roles = [message["role"] for message in chat.messages]
    spoken = [index for index, role in enumerate(roles) if role == "assistant" and index >= chat.num_given]
    return frozenset(spoken[-1:] if train_on == "last" else spoken)


def excerpt(value: Any) -> str:
    """Return ``value`` as JSON on one line, shortened."""
    text = json.dumps(value, ensure_ascii=False, default=str).encode(errors="backslashreplace").decode()
    return text if len(text) <= _LONGEST_EXCERPT else f"{text[:_LONGEST_EXCERPT]}…"


def unexpected_format(record: Mapping[str, Any], data_format: str, reason: str) -> str:
    """Return the message for a row: the reason, the formats that ``data_format`` accepts, and the row."""
    accepted = "; ".join(_FORMATS.values()) if data_format == "auto" else _FORMATS[data_format]
    return f"{reason}; accepted: {accepted}; the row: {excerpt(dict(record))}"


def _prompt_and_completion(record: Mapping[str, Any]) -> Chat:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, str):
        return _exchange(prompt, completion)
    given = _messages(prompt)
    return Chat(given + _messages(completion), num_given=len(given), tools=read_tools(record))


def _exchange(question: str, answer: Any) -> Chat:
    if not isinstance(answer, str):
        raise TypeError("the completion of a text must be text")
    return Chat(_messages([{"role": "user", "content": question}, {"role": "assistant", "content": answer}]))


def read_instruction(record: Mapping[str, Any]) -> str:
    """Return an instruction and its input as one text; TypeError if they are not text."""
    instruction, more = record["instruction"], record.get("input")
    if not isinstance(instruction, str) or not isinstance(more, str | None):
        raise TypeError("instruction and input must be text")
    return f"{instruction}\n\n{more}" if more else instruction


def _messages(turns: Any) -> list[Message]:
    return [read_message(turn) for turn in list_of_turns(turns)]


def list_of_turns(turns: Any) -> list[Mapping[str, Any]]:
    """Return a conversation as it is; TypeError if it is not a list of objects."""
    if not (isinstance(turns, list) and all(isinstance(turn, Mapping) for turn in turns)):
        raise TypeError("a conversation must be a list of objects")
    return turns


def openai_turn(turn: Mapping[str, Any]) -> Message:
    """Return a turn of ShareGPT as a message; ValueError if nobody known says it."""
    if turn["from"] not in _SHAREGPT_ROLES:
        raise ValueError(f"from {excerpt(turn['from'])} is not one of {', '.join(_SHAREGPT_ROLES)}")
    return {"role": _SHAREGPT_ROLES[turn["from"]], "content": turn["value"]}


def read_message(turn: Mapping[str, Any]) -> Message:
    """Return a message with its content as one text and without null entries, which tables add."""
    message = {key: value for key, value in turn.items() if value is not None}
    if message["role"] not in ROLES:
        raise ValueError(f"role {excerpt(message['role'])} is not one of {', '.join(ROLES)}")
    if message.get("tool_calls"):
        message["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
        message.setdefault("content", "")
    else:
        message.pop("tool_calls", None)
    message["content"] = _content(message["content"])
    return message


def _content(content: Any) -> str:
    if isinstance(content, list) and all(isinstance(part, Mapping) and part["type"] == "text" for part in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise TypeError("content must be text or a list of parts of type text")
    return content


def _tool_call(call: Any) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, not as JSON text: templates expect an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not (isinstance(function, Mapping) and isinstance(function.get("name"), str)):
        raise TypeError('a tool call must have {"function": {"name": ...}}')
    function = {key: value for key, value in function.items() if value is not None}
    if isinstance(function.get("arguments"), str):
        function["arguments"] = json.loads(function["arguments"])
    return {key: value for key, value in call.items() if value is not None} | {"function": function}


def read_tools(record: Mapping[str, Any]) -> list[Any] | None:
    """Return the JSON schemas of the tools of a row, which may be JSON text; None if it has none."""
    tools = record.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) and tools.strip() else tools
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise TypeError("tools must be a list of JSON schemas")
    return tools or None
