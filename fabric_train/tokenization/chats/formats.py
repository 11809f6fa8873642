"""Recognise and read the formats of rows with chats, and list the columns that each format uses."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from fabric_train.cli.tables import CHAT_FORMATS
from fabric_train.reading.documents import TOO_DEEP, BadRowError, Chat, Message, Pair, excerpt
from fabric_train.tokenization.chats.columns import (
    OF_EVERY_FORMAT,
    RowColumns,
    begin_with_system,
    check_label,
    check_what_is_trained,
    find_label,
    read_history,
    read_instruction,
    read_is_undesirable,
    read_template_variables,
    read_tools,
)
from fabric_train.tokenization.chats.turns import TurnReader, list_of_turns
from fabric_train.tokenization.pairs import PAIR_COLUMNS, pair_of

Row = Mapping[str, Any]
PREFERENCE = "preference"
UNPAIRED = "unpaired"
_EXCHANGES = (("input", "output"), ("human", "assistant"))
"""The keys of a question and its answer, in data sets whose conversations are lists of exchanges."""
_PROMPTS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("inputs", "targets"),
    ("question", "response"),
)
"""The columns of a prompt and its completion: TRL's, HelpSteer's, Aya's, OpenOrca's."""


@dataclass(frozen=True)
class ChatFormat:
    """A format of rows with chats, instructions, preference pairs or unpaired answers."""

    example: str
    """The columns that the format needs, for messages."""
    columns: tuple[str, ...]
    """Every column that the format may use, in addition to ``OF_EVERY_FORMAT``."""
    recognises: Callable[[Row], bool]
    read: Callable[[RowColumns, TurnReader], Chat | Pair]


def _read_turns_of(column: str) -> Callable[[RowColumns, TurnReader], Chat]:
    """Return a reader of the conversation in a column."""

    def read(columns: RowColumns, turns: TurnReader) -> Chat:
        return Chat(begin_with_system(columns, turns.read(columns[column])))

    return read


def _read_exchanges_of(column: str) -> Callable[[RowColumns, TurnReader], Chat]:
    """Return a reader of turns, or of exchanges as in Capybara: ``[{"input": "...", "output": "..."}, ...]``."""

    def read(columns: RowColumns, turns: TurnReader) -> Chat:
        conversation: list[Mapping[str, Any]] = []
        for entry in list_of_turns(columns[column]):
            exchange_keys = _exchange_keys(entry)
            if exchange_keys is None:
                conversation.append(entry)
                continue
            question_key, answer_key = exchange_keys
            conversation.append(_user(entry[question_key]))
            conversation.append(_assistant(entry[answer_key]))
            for key in entry.keys() - set(exchange_keys):
                turns.leave(key)
        # all turns at once: the reader counts them, and joins calls that belong to one turn
        return Chat(begin_with_system(columns, turns.read(conversation)))

    return read


def _exchange_keys(entry: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the keys of the question and the answer; None if the entry is a turn."""
    for question_key, answer_key in _EXCHANGES:
        if question_key in entry and answer_key in entry:
            return question_key, answer_key
    return None


def _read_alpaca(columns: RowColumns, turns: TurnReader) -> Chat:
    prompt = [*read_history(columns, turns), _user(read_instruction(columns))]
    output_column = "output"
    if columns.row.get("output") is None and columns.row.get("response") is not None:
        output_column = "response"
    return _answered_chat(columns, prompt, [_assistant(columns[output_column])])


def _read_prompt_and_completion(columns: RowColumns, turns: TurnReader) -> Chat:
    prompt_column, completion_column = _PROMPTS[0]  # which are missing, if all are
    for names in _PROMPTS:
        if _has_values(*names)(columns.row):
            prompt_column, completion_column = names
            break
    prompt = columns[prompt_column]
    completion = columns[completion_column]
    if isinstance(prompt, str):
        messages = [*read_history(columns, turns), _user(prompt)]
        return _answered_chat(columns, messages, [_assistant(completion)])
    return _answered_chat(columns, turns.read(prompt), turns.read(completion))


def _read_query_and_calls(columns: RowColumns, turns: TurnReader) -> Chat:
    query = _user(columns["query"])
    calls = turns.read([{"role": "function_call", "content": columns["answers"]}])
    return _answered_chat(columns, [query], calls)


def _answered_chat(columns: RowColumns, prompt: list[Message], answer: list[Message]) -> Chat:
    """Return a chat in which only the answer may be supervised."""
    prompt = begin_with_system(columns, prompt)
    return Chat(prompt + answer, num_prompt_messages=len(prompt))


def _user(text: Any) -> Message:
    if not isinstance(text, str):
        raise TypeError("a question must be text")
    return {"role": "user", "content": text}


def _assistant(text: Any) -> Message:
    if not isinstance(text, str):
        raise TypeError("the completion of a text prompt must be text")
    return {"role": "assistant", "content": text}


def _has_turns(column: str) -> Callable[[Row], bool]:
    """Return a test for rows with turns in a column; an empty list counts, unless the row has a text instead."""
    return lambda row: isinstance(row.get(column), list) and (bool(row[column]) or "text" not in row)


def _has_values(*columns: str) -> Callable[[Row], bool]:
    return lambda row: all(row.get(column) is not None for column in columns)


def _has_instruction_and_answer(row: Row) -> bool:
    return _has_values("instruction", "output")(row) or _has_values("instruction", "response")(row)


def _has_prompt_and_completion(row: Row) -> bool:
    if row.get("context"):  # a context that a question is about has no place of its own in a chat
        return False
    return any(_has_values(*names)(row) for names in _PROMPTS)


def _has_query_and_calls(row: Row) -> bool:
    return _has_values("query", "answers", "tools")(row)


def _has_answers_to_compare(row: Row) -> bool:
    answer_types = (str, list, Mapping)
    return isinstance(row.get("chosen"), answer_types) and isinstance(row.get("rejected"), answer_types)


def _format_of_turns(column: str, example: str, read: Callable[[RowColumns, TurnReader], Chat]) -> ChatFormat:
    """Return the format of rows with a conversation in one column; ``example`` shows the column's content."""
    return ChatFormat(f"{column} {example}", columns=(column,), recognises=_has_turns(column), read=read)


MESSAGES = _format_of_turns(
    "messages",
    example='[{"role": "user", "content": "..."}, ...]',
    read=_read_turns_of("messages"),
)
CONVERSATIONS = _format_of_turns(
    "conversations",
    example='[{"from": "human", "value": "..."}, ...]',
    read=_read_turns_of("conversations"),
)
CONVERSATION = _format_of_turns(
    "conversation",
    example='[{"input": "...", "output": "..."}, ...], or turns as in messages',
    read=_read_exchanges_of("conversation"),
)
ALPACA = ChatFormat(
    example="instruction, input or context (may be absent), output or response",
    columns=("instruction", "input", "context", "output", "response", "history"),
    recognises=_has_instruction_and_answer,
    read=_read_alpaca,
)
PROMPT_COMPLETION = ChatFormat(
    example="prompt, completion (both text, or both lists of messages; or "
    + ", ".join(" and ".join(names) for names in _PROMPTS[1:])
    + ")",
    columns=(*dict.fromkeys(chain.from_iterable(_PROMPTS)), "context", "history"),
    recognises=_has_prompt_and_completion,
    read=_read_prompt_and_completion,
)
QUERY_CALLS = ChatFormat(
    example="query, answers (tool calls as JSON), tools",
    columns=("query", "answers"),
    recognises=_has_query_and_calls,
    read=_read_query_and_calls,
)
PREFERENCE_PAIRS = ChatFormat(
    example="chosen, rejected (messages, whole or after prompt; or texts after prompt)",
    columns=PAIR_COLUMNS,
    recognises=_has_answers_to_compare,
    read=pair_of,
)
_FORMATS_WITH_LABEL = (MESSAGES, CONVERSATIONS, CONVERSATION, ALPACA, PROMPT_COMPLETION)


def _format_beside_label(row: Row) -> ChatFormat | None:
    """Return the format of the chat in a row that may have a label; None if there is no chat."""
    for chat_format in _FORMATS_WITH_LABEL:
        if chat_format.recognises(row):
            return chat_format
    return None


def _has_label_and_chat(row: Row) -> bool:
    return find_label(row) is not None and _format_beside_label(row) is not None


def _read_unpaired(columns: RowColumns, turns: TurnReader) -> Chat:
    """Read an answer with a label as a chat whose first ``num_prompt_messages`` messages are the prompt."""
    chat_format = _format_beside_label(columns.row)
    if chat_format is None:
        raise ValueError("it has neither prompt and completion nor messages")
    check_label(columns)
    chat = chat_format.read(columns, turns)
    assert isinstance(chat, Chat)  # none of these formats reads pairs
    prompt_length = chat.num_prompt_messages
    if not prompt_length:  # a whole conversation, whose last turn is the answer
        prompt_length = len(chat.messages) - 1
    answer = chat.messages[prompt_length:]
    if not answer or answer[0]["role"] != "assistant":
        raise ValueError("the conversation must end with the assistant's answer, which the label rates")
    if prompt_length == 0:
        raise ValueError("the answer has no prompt")
    return replace(chat, num_prompt_messages=prompt_length)


UNPAIRED_ANSWERS = ChatFormat(
    example="label (true or false) beside prompt and completion (texts or messages), or beside messages",
    columns=tuple(dict.fromkeys(chain.from_iterable(chat_format.columns for chat_format in _FORMATS_WITH_LABEL))),
    recognises=_has_label_and_chat,
    read=_read_unpaired,
)


def detect_format(record: Row) -> str | None:
    """Return the data format of a row by its columns; None if no format has them."""
    recognised = [name for name, chat_format in CHAT_FORMATS.items() if chat_format.recognises(record)]
    if not recognised:
        return None
    for name in recognised:
        if name in CHAT_FORMATS.registered:  # for the user's own data
            return name
    for name in (PREFERENCE, UNPAIRED):  # whatever else it has
        if name in recognised:
            return name
    return recognised[0]


def columns(data_format: str) -> tuple[str, ...]:
    """Return the columns from which ``data_format`` (auto: any format) is read; a row may lack some."""
    formats = CHAT_FORMATS.values() if data_format == "auto" else [CHAT_FORMATS[data_format]]
    names: dict[str, None] = {}
    for chat_format in formats:
        names |= dict.fromkeys(chat_format.columns)
    return (*names, *(name for name in OF_EVERY_FORMAT if name not in names))


def read_chat(record: Row | BadRowError, data_format: str, *, calls_as_text: bool = False) -> Chat:
    """Read a row with a chat, an instruction, or a prompt and its completion.

    An instruction and its input, with an empty line between them, become the user's turn, and the output becomes the
    assistant's. A prompt and a completion that are texts become two turns as well. ``calls_as_text``: see
    :class:`TurnReader`. Raise a BadRowError that shows the row if the row has a different format.
    """
    if isinstance(record, BadRowError):
        raise record
    chat = _read(record, data_format, calls_as_text)
    if isinstance(chat, Pair):
        raise BadRowError(unexpected_format(record, data_format, "a preference pair, where a chat is expected"))
    return chat


def read_pair(record: Row | BadRowError, *, calls_as_text: bool = False) -> Pair:
    """Read a row with a preference pair; BadRowError if it has none, or if an answer is empty or equal to the other."""
    if isinstance(record, BadRowError):
        raise record
    pair = _read(record, PREFERENCE, calls_as_text)
    assert isinstance(pair, Pair)
    return pair


def _read(record: Row, data_format: str, calls_as_text: bool) -> Chat | Pair:
    name = detect_format(record) if data_format == "auto" else data_format
    if name is None:
        raise BadRowError(unexpected_format(record, data_format, "it has no columns of a chat or an instruction"))
    try:
        return _read_columns(RowColumns(record), CHAT_FORMATS[name], calls_as_text)
    except BadRowError:
        raise
    except KeyError as error:
        raise BadRowError(unexpected_format(record, data_format, f"{error} is missing")) from None
    except (TypeError, ValueError) as error:
        raise BadRowError(unexpected_format(record, data_format, str(error))) from None
    except RecursionError:
        raise BadRowError(TOO_DEEP) from None


def _read_columns(row_columns: RowColumns, chat_format: ChatFormat, calls_as_text: bool) -> Chat | Pair:
    chat = chat_format.read(row_columns, TurnReader(row_columns.leave, calls_as_text))
    check_what_is_trained(row_columns)
    tools = read_tools(row_columns)
    variables = read_template_variables(row_columns)
    if isinstance(chat, Pair):
        return replace(chat, tools=tools, template_variables=variables, unused=row_columns.unused)
    is_undesirable = read_is_undesirable(row_columns)
    return replace(
        chat,
        tools=tools,
        template_variables=variables,
        is_undesirable=is_undesirable,
        unused=row_columns.unused,
    )


def unexpected_format(record: Row, data_format: str, reason: str) -> str:
    """Return the message for a row: the reason, the formats that ``data_format`` accepts, and the row."""
    formats = CHAT_FORMATS.values() if data_format == "auto" else [CHAT_FORMATS[data_format]]
    accepted = "; ".join(chat_format.example for chat_format in formats)
    return f"{reason}; accepted: {accepted}; the row: {excerpt(dict(record))}"
