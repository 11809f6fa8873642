"""Prepare messages for a chat template, and find the keys of messages that the template does not show."""

from typing import Any

from fabric_train.reading.documents import REASONING, TRAINED, BadRowError, Chat, Message
from fabric_train.tokenization.chats.chat_template import ChatTemplate, Rendering
from fabric_train.tokenization.chats.lost_text import check_rendered

# checked elsewhere: a row is refused if the template leaves out what they have, or thoughts that are text
_ALWAYS_SHOWN = frozenset(["role", "content", "tool_calls"])
_THOUGHT = "turn1thought"
_CALLED = "turn1called"
_TOOL_CALL = {"type": "function", "function": {"name": _CALLED, "arguments": {"turn1key": "turn1value"}}}
_QUESTION: Message = {"role": "user", "content": "turn0said"}


class ShownMessages:
    """Finds what a template shows of messages."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._reasoning_key: str | None = None  # the key under which the template looks for thoughts
        for key in REASONING:
            if self._shows_reasoning(key):
                self._reasoning_key = key
                break
        self._is_shown: dict[tuple[str, str], bool] = {}  # by role and key
        self.has_tool_calls = self._shows_tool_calls()

    def messages(self, chat: Chat) -> list[Message]:
        """Return the messages of a chat for the template, with thoughts under the template's name for them."""
        return [self._message(message) for message in chat.messages]

    def check(self, rendering: Rendering, supervised: frozenset[int]) -> frozenset[str]:
        """Return the keys of messages that the template does not show.

        ``supervised`` are indices of messages; the template may leave out the thoughts of other messages. BadRowError
        if it leaves out tools, or another text of a message.
        """
        # tool calls and tools are left out if the text is the same without them
        fault = "the chat template drops its {}; use the tokenizer of a model that supports tools"
        has_calls = any("tool_calls" in message for message in rendering.messages)
        if has_calls and not self.has_tool_calls:
            without_calls: list[Message] = []
            for message in rendering.messages:
                without_calls.append({key: value for key, value in message.items() if key != "tool_calls"})
            if self._render(rendering, without_calls, rendering.tools) == rendering.text:
                raise BadRowError(fault.format("tool_calls"))
        if rendering.tools and self._render(rendering, rendering.messages, tools=None) == rendering.text:
            raise BadRowError(fault.format("tools"))

        lost_thoughts = check_rendered(rendering.messages, supervised, rendering.text)
        return lost_thoughts | self.unused_keys(rendering)

    def unused_keys(self, rendering: Rendering) -> frozenset[str]:
        """Return the keys of messages, and the variables, that the template does not show.

        For each role and key, the first rendering decides: whether it is the same without the key.
        """
        unused: set[str] = set()
        for message in rendering.messages:
            role = message["role"]
            for key in message.keys() - _ALWAYS_SHOWN:
                if key in REASONING and isinstance(message[key], str):
                    continue
                if (role, key) not in self._is_shown:
                    self._is_shown[role, key] = self._shows(rendering, role, key)
                if not self._is_shown[role, key]:
                    unused.add(f"{key} of the {role}'s turns")
        for name in rendering.variables:
            if not self._template.mentions(name):
                unused.add(f"chat_template_kwargs.{name}")
        return frozenset(unused)

    def _message(self, message: Message) -> Message:
        """Return a message with thoughts under the template's key, without the key that says whether it is trained."""
        if message.keys() == {"role", "content"}:
            return message
        shown = {key: value for key, value in message.items() if key != TRAINED}
        keys = [key for key in REASONING if isinstance(shown.get(key), str)]
        if not keys:
            return shown
        # the thoughts under the key that the template shows, or else under the first that the message has
        source_key = keys[0]
        if self._reasoning_key is not None and self._reasoning_key in keys:
            source_key = self._reasoning_key
        thoughts = shown[source_key]
        for key in keys:
            if shown[key] == thoughts:  # some data sets have them under several names
                del shown[key]
        shown_key = self._reasoning_key or source_key  # a template that shows no thoughts leaves them under their key
        shown[shown_key] = thoughts
        return shown

    def _shows(self, rendering: Rendering, role: str, key: str) -> bool:
        """Return whether the rendering changes without a key of the messages of a role."""
        if not self._template.mentions(key):
            return False
        messages_without_key: list[Message] = []
        for message in rendering.messages:
            if message["role"] == role:
                messages_without_key.append({name: value for name, value in message.items() if name != key})
            else:
                messages_without_key.append(dict(message))
        try:
            text = self._render(rendering, messages_without_key, rendering.tools)
        except BadRowError:
            return True  # the template needs it
        return text != rendering.text

    def _render(self, rendering: Rendering, messages: list[Message], tools: list[Any] | None) -> str:
        """Return the text of other messages or tools, rendered as ``rendering`` was."""
        return self._template.render(
            messages, tools, generation_prompt=rendering.is_prompt, variables=rendering.variables
        )

    def _shows_reasoning(self, key: str) -> bool:
        if not self._template.mentions(key):
            return False
        answer = {"role": "assistant", "content": "turn1said", key: _THOUGHT}
        try:
            return _THOUGHT in self._template.render([_QUESTION, answer])
        except BadRowError:
            return False

    def _shows_tool_calls(self) -> bool:
        answer = {"role": "assistant", "content": "", "tool_calls": [_TOOL_CALL]}
        try:
            return _CALLED in self._template.render([_QUESTION, answer])
        except BadRowError:
            return False
