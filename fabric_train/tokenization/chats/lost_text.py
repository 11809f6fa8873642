"""Find what a chat template leaves out of a conversation: contents, thoughts, tool calls, tool answers.

A template may change white space, write text as JSON, and move the system turn. Each text of the messages must have a
separate place in the rendering::

    messages     {"role": "assistant", "content": "5", "reasoning_content": "Count: 1, 2, 3, 4, 5."}
    rendering    <|im_start|>assistant\\n5<|im_end|>        the 5 has its place, the thoughts have none
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fabric_train.reading.documents import REASONING, BadRowError, Message

_END_OF_THOUGHTS = "</think>"
_CALLS = "tool_calls"


@dataclass(frozen=True)
class MessageText:
    """A text, or another JSON value, that must be in a rendering; ``key`` is its place in the message."""

    turn: int
    key: str
    value: Any

    @property
    def plain(self) -> str:
        """The form in which most templates write the value."""
        return self.value if isinstance(self.value, str) else json.dumps(self.value)

    def forms(self) -> tuple[str, ...]:
        """Return the forms in which a template may write the value: unchanged, as JSON, or as Python does."""
        value = self.value
        if isinstance(value, str):
            # without the quotes
            as_json = json.dumps(value, ensure_ascii=False)[1:-1]
            as_ascii_json = json.dumps(value)[1:-1]
            as_python = repr(value)[1:-1]
            return (value, as_json, as_ascii_json, as_python)
        return (json.dumps(value), str(value))


def check_turn_rendered(message: Message, turn: int, rendered: str) -> None:
    """Raise a BadRowError if ``rendered``, the assistant's part of a rendering, lacks a text of its message."""
    texts = list(_texts_of(message, turn))
    if len(texts) == 1 and texts[0].plain in rendered:
        return
    lost = find_lost(texts, rendered)
    if lost is not None:
        raise _fault(lost, "so this text would not be trained on")


def check_rendered(messages: Sequence[Message], supervised: frozenset[int], text: str) -> frozenset[str]:
    """Raise a BadRowError if the rendering of a conversation lacks a text of a message.

    A template may leave out the thoughts of turns that are not ``supervised``, as it does when the model answers; the
    keys of thoughts that it has left out are returned.
    """
    if _are_plain_and_in_order(messages, text):
        return frozenset()

    # the texts that must be in the rendering, and the thoughts that need not
    required: list[MessageText] = []
    thoughts: list[MessageText] = []
    for turn, message in enumerate(messages):
        is_context = message["role"] == "assistant" and turn not in supervised
        if is_context and _END_OF_THOUGHTS in message["content"]:
            _, _, answer = message["content"].rpartition(_END_OF_THOUGHTS)
            message = {**message, "content": answer}
        for message_text in _texts_of(message, turn):
            if is_context and message_text.key in REASONING:
                thoughts.append(message_text)
            else:
                required.append(message_text)

    lost = find_lost(required, text)
    if lost is not None:
        raise _fault(lost, "so the model would not see this text")
    lost_thoughts: set[str] = set()
    for thought in thoughts:
        if find_lost([thought], text) is not None:
            lost_thoughts.add(f"{thought.key} of turns that are not supervised")
    return frozenset(lost_thoughts)


def find_lost(texts: Iterable[MessageText], rendered: str) -> MessageText | None:
    """Return a text that is not in a rendering, or None if all are; white space is ignored.

    Each text needs a separate place, so a text that was found is removed from the rendering.
    """
    remaining = _without_space(rendered)
    # the longest first: a short text may be a part of a longer one
    for message_text in sorted(texts, key=lambda message_text: -len(message_text.plain)):
        is_found = False
        for form in message_text.forms():
            form_without_space = _without_space(form)
            if form_without_space in remaining:
                # a line break, so that the texts around it do not become one
                remaining = remaining.replace(form_without_space, "\n", 1)
                is_found = True
                break
        if not is_found:
            return message_text
    return None


def _are_plain_and_in_order(messages: Sequence[Message], rendered: str) -> bool:
    """Return whether messages have only contents, which follow one another in a rendering, as is usual."""
    end = 0
    for message in messages:
        if len(message) > 2:  # role and content
            return False
        content = message["content"].strip()
        begin = rendered.find(content, end)
        if begin < 0:
            return False
        end = begin + len(content)
    return True


def _fault(lost: MessageText, consequence: str) -> BadRowError:
    if lost.key in REASONING:  # the row may have them under another of these names
        description = f"the thoughts ({', '.join(REASONING)})"
        advice = "give --chat_template a template that keeps this text"
    elif lost.key == _CALLS:
        description = "part of the tool_calls"
        advice = "use the tokenizer of a model that supports tools"
    else:
        description = "a part"
        advice = "give --chat_template a template that keeps this text"
    return BadRowError(f"the chat template drops {description} of turn {lost.turn + 1}, {consequence}; {advice}")


def _texts_of(message: Message, turn: int) -> Iterator[MessageText]:
    """Yield the texts of a message in the order in which most templates write them."""
    for key in REASONING:
        if isinstance(message.get(key), str) and message[key].strip():
            yield MessageText(turn, key, message[key].strip())
    content = message["content"].strip()
    if content:
        yield MessageText(turn, "content", content)
    for call in message.get(_CALLS, ()):
        function = call["function"]
        yield MessageText(turn, _CALLS, function["name"])
        for leaf in _leaves(function.get("arguments")):
            yield MessageText(turn, _CALLS, leaf)


def _leaves(value: Any) -> Iterator[Any]:
    """Yield all keys and values of JSON."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    elif value != "":
        yield value


def _without_space(text: str) -> str:
    return "".join(text.split())
