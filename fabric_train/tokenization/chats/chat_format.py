"""The shapes in which chats and instructions come, and the one in which they go on: a list of messages."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fabric_train.tokenization.documents import BadRowError

Message = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"} | {role: role for role in ROLES}
_SHAPES = {
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


@dataclass(frozen=True)
class Chat:
    """A conversation as chat templates take it.

    Args:
        messages: ``role`` is one of ROLES, ``content`` text or absent (of tool calls); further keys as they were given.
        num_given: messages at the beginning that are a prompt: what the assistant says there is never supervised.
        tools: JSON schemas of the tools that may be called, None where there are none.
    """

    messages: list[Message]
    num_given: int = 0
    tools: list[Any] | None = None


def recognise(record: Mapping[str, Any]) -> str | None:
    """Return the data format of a row by its columns; None where it is neither a chat nor an instruction."""
    for data_format in ("messages", "conversations"):
        if isinstance(record.get(data_format), list):
            return data_format
    if record.get("instruction") is not None and record.get("output") is not None:
        return "alpaca"
    if record.get("prompt") is not None and record.get("completion") is not None:
        return "prompt_completion"
    return None


def columns(data_format: str) -> tuple[str, ...]:
    """Return the columns that rows of ``data_format`` (auto: any) are read from; some may be absent."""
    if data_format == "auto":
        return tuple(dict.fromkeys(name for names in _COLUMNS.values() for name in names))
    return _COLUMNS[data_format]


def read_chat(record: Mapping[str, Any], data_format: str) -> Chat:
    """Read a row.

    An instruction becomes a user's turn, its input after a blank line, and the output the assistant's; so do the two
    texts of a prompt and its completion.

    Raises:
        BadRowError: the row is of another shape; the message shows it.
    """
    found = recognise(record) if data_format == "auto" else data_format
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
        raise BadRowError(other_shape(record, data_format, f"{error} is missing")) from None
    except (TypeError, ValueError) as error:
        raise BadRowError(other_shape(record, data_format, str(error))) from None
    raise BadRowError(other_shape(record, data_format, "no columns of a chat or an instruction"))


def excerpt(value: Any) -> str:
    """Return ``value`` as JSON on one line, shortened."""
    text = json.dumps(value, ensure_ascii=False, default=str).encode(errors="backslashreplace").decode()
    return text if len(text) <= _LONGEST_EXCERPT else f"{text[:_LONGEST_EXCERPT]}…"


def other_shape(record: Mapping[str, Any], data_format: str, reason: str) -> str:
    """Return the fault of a row with the shapes that ``data_format`` accepts and the row."""
    accepted = "; ".join(_SHAPES.values()) if data_format == "auto" else _SHAPES[data_format]
    return f"{reason}; accepted: {accepted}; the row: {excerpt(dict(record))}"


def _prompt_and_completion(record: Mapping[str, Any]) -> Chat:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, str):
        return _exchange(prompt, completion)
    given = _messages(prompt)
    return Chat(given + _messages(completion), num_given=len(given), tools=_tools(record))


def _exchange(question: str, answer: Any) -> Chat:
    if not isinstance(answer, str):
        raise TypeError("the answer to a text is a text")
    return Chat(_messages([{"role": "user", "content": question}, {"role": "assistant", "content": answer}]))


def _instruction(record: Mapping[str, Any]) -> str:
    instruction, more = record["instruction"], record.get("input")
    if not isinstance(instruction, str) or not isinstance(more, str | None):
        raise TypeError("instruction and input are texts")
    return f"{instruction}\n\n{more}" if more else instruction


def _messages(turns: Any) -> list[Message]:
    return [_message(turn) for turn in _list(turns)]


def _list(turns: Any) -> list[Mapping[str, Any]]:
    if not (isinstance(turns, list) and all(isinstance(turn, Mapping) for turn in turns)):
        raise TypeError("a conversation is a list of objects")
    return turns


def _openai_turn(turn: Mapping[str, Any]) -> Message:
    if turn["from"] not in _SHAREGPT_ROLES:
        raise ValueError(f"from {excerpt(turn['from'])} is none of {', '.join(_SHAREGPT_ROLES)}")
    return {"role": _SHAREGPT_ROLES[turn["from"]], "content": turn["value"]}


def _message(turn: Mapping[str, Any]) -> Message:
    """Return a message without its null entries, which tables fill in, and with its content as one text."""
    message = {key: value for key, value in turn.items() if value is not None}
    if message["role"] not in ROLES:
        raise ValueError(f"role {excerpt(message['role'])} is none of {', '.join(ROLES)}")
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
        raise TypeError("content is neither text nor a list of parts of type text")
    return content


def _tool_call(call: Any) -> dict[str, Any]:
    """Return a call of a tool with its arguments as templates take them: an object, and not its JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not (isinstance(function, Mapping) and isinstance(function.get("name"), str)):
        raise TypeError('a call of a tool has no {"function": {"name": ...}}')
    function = {key: value for key, value in function.items() if value is not None}
    if isinstance(function.get("arguments"), str):
        function["arguments"] = json.loads(function["arguments"])
    return {key: value for key, value in call.items() if value is not None} | {"function": function}


def _tools(record: Mapping[str, Any]) -> list[Any] | None:
    tools = record.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) and tools.strip() else tools
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise TypeError("tools is no list of JSON schemas")
    return tools or None
