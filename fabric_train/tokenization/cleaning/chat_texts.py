"""Change the texts of a chat, and say which of them each cleaning step judges."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from fabric_train.tokenization.chats.chat_format import TOO_DEEP, Chat, Message
from fabric_train.tokenization.chats.control_tokens import check_surrogates
from fabric_train.tokenization.documents import BadRowError

_NO_TEXT = frozenset(["role", "type", "id", "name", "tool_call_id", "tools"])  # what a program reads
_SPEAKERS = ("user", "assistant")


def change_texts(chat: Chat, change: Callable[[str], str]) -> Chat:
    """Return the chat with ``change`` of each text: contents, and the values of a tool call's arguments.

    Raises:
        BadRowError: the chat is nested too deeply.
    """
    try:
        return replace(chat, messages=[_changed(message, change, _NO_TEXT) for message in chat.messages])
    except RecursionError:
        raise BadRowError(TOO_DEEP) from None


def all_text(chat: Chat) -> str:
    """Return all texts, on lines of their own: those of a tool call's arguments and of system messages too.

    Raises:
        BadRowError: the chat is nested too deeply, or has half of a surrogate pair.
    """
    return _joined(_texts(chat, chat.messages))


def text_without_system(chat: Chat) -> str:
    """Return all texts but those of system messages, which chats share without repeating each other.

    Raises:
        BadRowError: the chat is nested too deeply, or has half of a surrogate pair.
    """
    return _joined(_texts(chat, [message for message in chat.messages if message["role"] != "system"]))


def spoken_text(chat: Chat) -> str:
    """Return what the user and the assistant say, whatever the language of system messages and of tools is.

    Raises:
        BadRowError: it has half of a surrogate pair.
    """
    return _joined(message["content"] for message in chat.messages if message["role"] in _SPEAKERS)


def _texts(chat: Chat, messages: list[Message]) -> list[str]:
    texts: list[str] = []

    def take(text: str) -> str:
        texts.append(text)
        return text

    change_texts(replace(chat, messages=messages), take)
    return texts


def _joined(texts: Iterable[str]) -> str:
    text = "\n".join(texts)
    check_surrogates(text)
    return text


def _changed(value: Any, change: Callable[[str], str], kept: frozenset[str]) -> Any:
    """Return the value with all texts changed, but those under a key in ``kept``."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_changed(part, change, kept) for part in value]
    if isinstance(value, Mapping):
        return {
            key: part if key in kept else _changed(part, change, _kept_in(key, kept)) for key, part in value.items()
        }
    return value


def _kept_in(key: str, kept: frozenset[str]) -> frozenset[str]:
    return frozenset() if key == "arguments" else kept  # an argument may be called id or name
