"""Read the formats of chats and instructions into one: a list of messages."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fabric_train.tokenization.documents import BadRowError

Message = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"} | {role: role for role in ROLES}
_FORMATS = {
    "messages": 'messages [{"role": "user", "content": "..."}, ...]',
    "conversations": 'conversations [{"from": "human", "value": "..."}, ...]',
    "alpaca": "instruction, input (may be absent), output",
    "prompt_completion": "prompt, completion (both text, or both lists of messages)",
}
_COLUMNS = {
    "messages": ("messages", "tools"),
    "conversations": ("conversations",),
    "alpaca": ("instruction", "input", "output"),
    "prompt_completion": ("prompt", "completion", "tools"),
}
_LONGEST_EXCERPT = 200
TOO_DEEP = "its objects are nested too deeply; leave the row out"


@dataclass(frozen=True)
class Chat:
    """A conversation in the form that chat templates take."""

    messages: list[Message]  # ``role`` is one of ROLES, ``content`` is text; other keys are kept as given
    num_given: int = 0  # messages at the start that are a prompt, in which no turn of the assistant is supervised
    tools: list[Any] | None = None  # JSON schemas of the tools that may be called


def detect_format(record: Mapping[str, Any]) -> str | None:
    """Return the data format of a row by its columns, or None if it is neither a chat nor an instruction."""
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
    try:
        if found == "messages":
            return Chat(_messages(record["messages"]), tools=_tools(record))
        if found == "conversations":
            return Chat([_message(_openai_turn(turn)) for turn in _list(record[found])])
        if found == "alpaca":
            return _exchange(_instruction(record), record["output"])
        if found == "prompt_completion":
            return _prompt_and_completion(record)
    except KeyError as error:
        raise BadRowError(unexpected_format(record, data_format, f"{error} is missing")) from None
    except (TypeError, ValueError) as error:
        raise BadRowError(unexpected_format(record, data_format, str(error))) from None
    except RecursionError:
        raise BadRowError(TOO_DEEP) from None
    raise BadRowError(unexpected_format(record, data_format, "no columns of a chat or an instruction"))


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
    return Chat(given + _messages(completion), num_given=len(given), tools=_tools(record))


def _exchange(question: str, answer: Any) -> Chat:
    if not isinstance(answer, str):
        raise TypeError("the completion of a text must be text")
    return Chat(_messages([{"role": "user", "content": question}, {"role": "assistant", "content": answer}]))


def _instruction(record: Mapping[str, Any]) -> str:
    instruction, more = record["instruction"], record.get("input")
    if not isinstance(instruction, str) or not isinstance(more, str | None):
        raise TypeError("instruction and input must be text")
    return f"{instruction}\n\n{more}" if more else instruction


def _messages(turns: Any) -> list[Message]:
    return [_message(turn) for turn in _list(turns)]


def _list(turns: Any) -> list[Mapping[str, Any]]:
    if not (isinstance(turns, list) and all(isinstance(turn, Mapping) for turn in turns)):
        raise TypeError("a conversation must be a list of objects")
    return turns


def _openai_turn(turn: Mapping[str, Any]) -> Message:
    if turn["from"] not in _SHAREGPT_ROLES:
        raise ValueError(f"from {excerpt(turn['from'])} is not one of {', '.join(_SHAREGPT_ROLES)}")
    return {"role": _SHAREGPT_ROLES[turn["from"]], "content": turn["value"]}


def _message(turn: Mapping[str, Any]) -> Message:
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


def _tools(record: Mapping[str, Any]) -> list[Any] | None:
    tools = record.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) and tools.strip() else tools
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise TypeError("tools must be a list of JSON schemas")
    return tools or None
