"""Read the turns of a conversation, in the notations of many data sets, as messages for chat templates.

A turn says who speaks, what is said, and perhaps whether it is trained::

    {"from": "gpt", "value": "Seven.", "train": false}
    {"role": "assistant", "content": "Seven.", TRAINED: False}
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fabric_train.reading.documents import TRAINED, Message, excerpt

_ROLE_KEYS = ("role", "from")
_TEXT_KEYS = ("content", "value")
_PLAIN_TURN = {"role", "content"}
_PLAIN_ROLES = ("system", "user", "assistant", "tool")
_FUNCTION_CALL = "function_call"
_SPEAKERS: dict[str, tuple[str, ...]] = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "chatgpt", "bing", "bard", "model"),
    "tool": ("tool", "observation", "tool_response", "function_response", "function", "ipython"),
    _FUNCTION_CALL: (_FUNCTION_CALL, "tool_call"),  # of the assistant; its text has the calls as JSON
}
"""The names that data sets have for each role of a message."""


def _roles_by_speaker() -> dict[str, str]:
    roles = {}
    for role, names in _SPEAKERS.items():
        roles.update(dict.fromkeys(names, role))
    return roles


_ROLE_OF = _roles_by_speaker()
_KNOWN_ROLES = "system, user, assistant, tool, human, gpt, function_call, observation"
_TRAINED_KEYS = {
    "weight": True,  # OpenAI, axolotl, SlimOrca
    "train": True,  # axolotl
    "trained": True,
    "training": True,  # axolotl
    "loss": True,  # ms-swift
    "loss_scale": True,  # ms-swift
    "loss_mask": True,
    "loss_weight": True,
    "masked": False,  # torchtune
}
"""The keys of a turn that say whether it is trained, and the value that means yes."""
_TRAINED_PARTS = "train_detail"  # axolotl: [{"begin_offset": 0, "end_offset": 8, "train": false}, ...]


def is_spoken_by(role: str, name: str) -> bool:
    """Return whether ``name`` is a name for the speaker of messages with this role."""
    return _ROLE_OF.get(name.lower()) == role


def is_speaker(name: Any) -> bool:
    """Return whether a value is a name for the speaker of a turn."""
    return isinstance(name, str) and name.lower() in _ROLE_OF


def list_of_turns(turns: Any) -> list[Mapping[str, Any]]:
    """Return a conversation unchanged; TypeError if it is not a list of objects."""
    if not (isinstance(turns, list) and all(isinstance(turn, Mapping) for turn in turns)):
        raise TypeError("a conversation must be a list of objects")
    return turns


@dataclass(frozen=True)
class TurnReader:
    """A reader of conversations."""

    leave: Callable[[str], None]
    """A function that is called with each key of a turn that is not used."""
    calls_as_text: bool = False
    """Whether a function_call turn becomes the assistant's text, for a chat template without tool calls."""

    def read(self, turns: Any) -> list[Message]:
        """Return a conversation as messages; TypeError, ValueError or KeyError if it is not a conversation."""
        messages: list[Message] = []
        for turn_number, turn in enumerate(list_of_turns(turns), 1):
            message = self._read_turn(turn, turn_number)
            calls = message.pop(_FUNCTION_CALL, None)
            if calls is None:
                messages.append(message)
            elif messages and _is_same_turn(messages[-1], message):
                messages[-1].setdefault("tool_calls", []).extend(calls)
            else:
                messages.append({**message, "tool_calls": calls})
        return messages

    def _read_turn(self, turn: Mapping[str, Any], turn_number: int) -> Message:
        """Return a turn as a message, without null entries; the calls of a function_call turn have their own key."""
        if turn.keys() == _PLAIN_TURN and isinstance(turn["content"], str) and turn["role"] in _PLAIN_ROLES:
            return {"role": turn["role"], "content": turn["content"]}  # most turns: what follows takes time

        # each key that is understood is removed from the entries; the others stay, for the template
        entries = {key: value for key, value in turn.items() if value is not None}
        speaker = entries.pop(_find_key(entries, _ROLE_KEYS, turn, turn_number))
        role = _ROLE_OF.get(speaker.lower()) if isinstance(speaker, str) else None
        if role is None:
            raise ValueError(
                f"role {excerpt(speaker)} of turn {turn_number} is not one of {_KNOWN_ROLES} (docs/tokenization.md "
                "lists all roles)"
            )
        is_trained = self._pop_trained(entries, turn_number)
        calls = _pop_tool_calls(entries, turn_number)
        if calls and not any(key in entries for key in _TEXT_KEYS):
            entries["content"] = ""
        content = entries.pop(_find_key(entries, _TEXT_KEYS, turn, turn_number))
        text, is_content_trained = self._read_content(content, turn_number)
        if is_content_trained is not None:
            # the turn is trained if its content is, unless the turn itself says that it is not
            is_trained = is_content_trained and is_trained is not False

        # the message
        message: Message = {"role": role, "content": text, **entries}
        if calls:
            message["tool_calls"] = calls
        if role == _FUNCTION_CALL:
            message["role"] = "assistant"
            if not self.calls_as_text:
                message["content"] = ""
                message[_FUNCTION_CALL] = _read_calls(_parse_json(text, f"the call of turn {turn_number}"), turn_number)
        if is_trained is False:
            message[TRAINED] = False
        elif is_trained and message["role"] != "assistant":
            self.leave("what trains turns that are not the assistant's")
        return message

    def _read_content(self, content: Any, turn_number: int) -> tuple[str, bool | None]:
        """Return a content as one text, and whether its parts say that it is trained; None if they do not say."""
        if isinstance(content, str):
            return content, None
        if not (isinstance(content, list) and all(isinstance(part, Mapping) for part in content)):
            raise TypeError("content must be text or a list of parts of type text")
        texts: list[str] = []
        is_trained: set[bool | None] = set()
        for part in content:
            entries = {key: value for key, value in part.items() if value is not None}
            if entries.pop("type", None) != "text" or not isinstance(entries.get("text"), str):
                raise TypeError("content must be text or a list of parts of type text")
            texts.append(entries.pop("text"))
            is_trained.add(self._pop_trained(entries, turn_number))
            for key in entries:
                self.leave(f"content.{key}")
        if len(is_trained) > 1:
            raise ValueError(f"only parts of turn {turn_number} are trained; split it into turns, or remove the row")
        return "".join(texts), is_trained.pop() if is_trained else None

    def _pop_trained(self, entries: dict[str, Any], turn_number: int) -> bool | None:
        """Remove the keys that say whether a turn is trained, and return their answer; None if there are none."""
        answers: dict[str, bool] = {}
        for key, value_if_trained in _TRAINED_KEYS.items():
            if key in entries:
                value = entries.pop(key)
                if not isinstance(value, bool | int | float) or value not in (0, 1):
                    raise ValueError(
                        f"{key} {excerpt(value)} of turn {turn_number} must be true, 1, false or 0: whether the turn "
                        "is trained"
                    )
                answers[key] = bool(value) is value_if_trained
        parts = entries.pop(_TRAINED_PARTS, None)
        if parts:
            part_answers = {bool(part.get("train", True)) for part in list_of_turns(parts)}
            if len(part_answers) > 1:
                raise ValueError(f"{_TRAINED_PARTS}: only parts of turn {turn_number} are trained; split it into turns")
            answers[_TRAINED_PARTS] = part_answers.pop()
        distinct_answers = set(answers.values())
        if len(distinct_answers) > 1:
            raise ValueError(f"{' and '.join(answers)} of turn {turn_number} contradict each other")
        return distinct_answers.pop() if distinct_answers else None


def _is_same_turn(previous: Message, message: Message) -> bool:
    """Return whether the calls of a message belong to the previous message, the same turn of the assistant."""
    return (
        previous["role"] == "assistant"
        and previous.get(TRAINED) == message.get(TRAINED)
        and previous.keys() - {"tool_calls"} == message.keys()
    )


def _find_key(entries: Mapping[str, Any], keys: tuple[str, ...], turn: Mapping[str, Any], turn_number: int) -> str:
    """Return the first of ``keys`` that a turn has; ValueError, with the key in the file, if there is none."""
    for key in keys:
        if key in entries:
            return key
    for key in keys:
        if key in turn:
            raise ValueError(f"{key!r} of turn {turn_number} is null")
    # a turn in the notation of ShareGPT lacks a value, any other a content
    openai_key, sharegpt_key = keys
    is_sharegpt = _ROLE_KEYS[1] in turn or _TEXT_KEYS[1] in turn
    missing_key = sharegpt_key if is_sharegpt else openai_key
    raise ValueError(f"{missing_key!r} is missing in turn {turn_number}")


def _parse_json(value: Any, name: str) -> Any:
    """Return a value that may be JSON text; ``name`` is for the message of the ValueError."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        raise ValueError(f"{name} is not JSON: {excerpt(value)}") from None


def _pop_tool_calls(entries: dict[str, Any], turn_number: int) -> list[dict[str, Any]]:
    """Remove and return the tool calls of a message; there may be none."""
    calls = _parse_json(entries.pop("tool_calls", None), f"tool_calls of turn {turn_number}")
    if not calls:  # as the OpenAI API had a call before there were several
        calls = _parse_json(entries.pop(_FUNCTION_CALL, None), f"{_FUNCTION_CALL} of turn {turn_number}")
    if not calls:
        return []
    return _read_calls(calls, turn_number)


def _read_calls(calls: Any, turn_number: int) -> list[dict[str, Any]]:
    """Return tool calls in OpenAI's form; TypeError if one has no name."""
    if not isinstance(calls, list):
        calls = [calls]
    return [_tool_call(call, turn_number) for call in calls]


def _tool_call(call: Any, turn_number: int) -> dict[str, Any]:
    """Return a tool call with its arguments as an object instead of JSON text, because templates expect an object."""
    entries: dict[str, Any] = {}
    if isinstance(call, Mapping):
        entries = {key: value for key, value in call.items() if value is not None}
    if "name" in entries and "function" not in entries:
        entries = {"type": "function", "function": entries}
    function = entries.get("function")
    if not (isinstance(function, Mapping) and isinstance(function.get("name"), str)):
        raise TypeError('a tool call must have {"function": {"name": ...}}')
    function = {key: value for key, value in function.items() if value is not None}
    if "arguments" not in function and isinstance(function.get("parameters"), Mapping):
        function["arguments"] = function.pop("parameters")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        if arguments.strip():
            function["arguments"] = _parse_json(arguments, f"a call's arguments in turn {turn_number}")
        else:
            function["arguments"] = {}
    return {**entries, "function": function}
