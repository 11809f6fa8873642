"""Apply the cleaning steps to one document after another, in a fixed order."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from fabric_train.cleaning import near_duplicates
from fabric_train.cleaning.arguments import CleaningArguments
from fabric_train.cleaning.boilerplate import Boilerplate, open_boilerplate
from fabric_train.cleaning.decontamination import open_decontamination
from fabric_train.cleaning.dropped import Cleaned, Dropped, Marked, TaskHit
from fabric_train.cleaning.language import open_language_filter
from fabric_train.cleaning.personal_data import open_redaction
from fabric_train.cleaning.quality import open_quality_filter
from fabric_train.cli.errors import InputError
from fabric_train.reading.documents import TOO_DEEP, BadRowError, Chat, Message, Pair, check_surrogates

_NO_TEXT = frozenset(["role", "type", "id", "name", "tool_call_id", "tools"])  # what a program reads
_SPEAKERS = ("user", "assistant")
Conversation = TypeVar("Conversation", bound=Chat | Pair)
_NOT_FOR_CHATS = {  # and why
    "boilerplate": "a chat cannot lose a line of a turn",
    "language_by paragraph": "a chat cannot lose a paragraph of a turn",
    "quality": "its rules are for web pages, and a good answer may be one word",
}


class CleaningStep(Protocol):
    """One switch. It has plain settings only, because processes may get it by pickle; models load on first use."""

    def clean(self, text: str, edits: Counter[str]) -> str | Marked | Dropped:
        """Return the text, changed or not, or why it is marked or dropped; count changes in ``edits`` by kind."""

    def settings(self) -> dict[str, Any]:
        """Return everything that decides the result, as JSON: thresholds, versions of packages, hashes of files."""


@dataclass(frozen=True)
class Cleaner:
    """Steps by the names of their switches, in the order in which they are applied; then documents get a signature."""

    steps: dict[str, CleaningStep]
    near_duplicates: float | None  # the smallest similarity of near duplicates; None for no signatures

    def clean(self, text: str) -> Cleaned[str] | Dropped:
        """Return the text that all steps leave, or why one of them drops it; the first that does decides."""
        edits: Counter[str] = Counter()
        hits: tuple[TaskHit, ...] = ()
        for step in self.steps.values():
            result = step.clean(text, edits)
            if isinstance(result, Dropped):
                return result
            if isinstance(result, Marked):
                text = result.text
                hits = (*hits, *result.hits)
            else:
                text = result
        return Cleaned(text, dict(edits), self._sign(text), hits)

    def clean_chat(self, chat: Conversation) -> Cleaned[Conversation] | Dropped:
        """Return the chat or pair with each text redacted, or why a step drops it; the first that does decides.

        A pair is dropped if one of its two conversations is.

        BadRowError if the chat is nested too deeply, or has half of a surrogate pair.
        """
        edits: Counter[str] = Counter()
        hits: tuple[TaskHit, ...] = ()
        for name, step in self.steps.items():
            if name == "redact":
                chat = change_texts(chat, partial(self._redact, edits=edits))
                continue
            for one in chat.conversations:
                result = step.clean(_JUDGED_TEXT[name](one), edits)
                if isinstance(result, Dropped):
                    return result
                hits += tuple(hit for hit in result.hits if hit not in hits) if isinstance(result, Marked) else ()
        return Cleaned(chat, dict(edits), self._sign(text_without_system(chat.joined)), hits)

    def redact(self, text: str) -> str:
        """Return the text without personal data if there is such a step: for samples of what other steps drop."""
        return self._redact(text, Counter()) if "redact" in self.steps else text

    def with_boilerplate(self, step: Boilerplate) -> "Cleaner":
        """Return the cleaner that first removes the lines of ``step``; it shows them without personal data."""
        others = {name: one for name, one in self.steps.items() if name != "boilerplate"}
        return replace(self, steps={"boilerplate": step.redacted(self.redact), **others})

    def settings(self) -> dict[str, Any]:
        """Return the settings of each step, by switch."""
        settings = {name: step.settings() for name, step in self.steps.items()}
        if self.near_duplicates is not None:
            settings["near_duplicates"] = near_duplicates.settings(self.near_duplicates)
        return settings

    def _sign(self, text: str) -> np.ndarray | None:
        return None if self.near_duplicates is None else near_duplicates.signature(text)

    def _redact(self, text: str, edits: Counter[str]) -> str:
        result = self.steps["redact"].clean(text, edits)
        assert isinstance(result, str), "redaction drops nothing"
        return result


def open_cleaner(arguments: CleaningArguments, kinds: Sequence[str], text_column: str) -> Cleaner:
    """Return the cleaner for the switches that are given; ``kinds`` has the data format of each source.

    ``text_column`` is the column with the texts, in which repeated lines must have been counted.
    """
    _check_for_chats(arguments, kinds)
    steps: dict[str, CleaningStep] = {}
    if arguments.language is not None:
        steps["language"] = open_language_filter(arguments.language, arguments.language_by)
    if arguments.quality is not None:
        steps["quality"] = open_quality_filter(arguments.quality)
    if arguments.redact is not None:
        steps["redact"] = open_redaction(arguments.redact.split(","))
    if arguments.decontaminate is not None:
        steps["decontaminate"] = open_decontamination(arguments.decontaminate, arguments.contaminated)
    cleaner = Cleaner(steps, arguments.near_duplicates)
    if arguments.boilerplate is not None:
        cleaner = cleaner.with_boilerplate(open_boilerplate(arguments.boilerplate, text_column))
    return cleaner


def _check_for_chats(arguments: CleaningArguments, kinds: Sequence[str]) -> None:
    """Raise InputError, with a line for each switch that is not for chats, if a source has chats."""
    chats = [kind for kind in kinds if kind != "text"]
    given = {
        "boilerplate": arguments.boilerplate is not None,
        "language_by paragraph": arguments.language_by == "paragraph",
        "quality": arguments.quality is not None,
    }
    faults = [
        f"--{name}: {reason}, and a source has {chats[0]}; tokenize it without --{name}, then merge"
        for name, reason in _NOT_FOR_CHATS.items()
        if chats and given[name]
    ]
    if faults:
        raise InputError(*faults)


def change_texts(chat: Conversation, change: Callable[[str], str]) -> Conversation:
    """Return the chat or pair with ``change`` of each text: contents, and the values of a tool call's arguments."""
    try:
        changed = [_changed(message, change, _NO_TEXT) for message in chat.joined.messages]
        return cast("Conversation", chat.with_messages(changed))
    except RecursionError:
        raise BadRowError(TOO_DEEP) from None


def _changed(value: Any, change: Callable[[str], str], kept: frozenset[str]) -> Any:
    """Return the value with all texts changed, except those under a key in ``kept``."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_changed(part, change, kept) for part in value]
    if isinstance(value, Mapping):
        return {
            # an argument may be called id or name
            key: part if key in kept else _changed(part, change, frozenset() if key == "arguments" else kept)
            for key, part in value.items()
        }
    return value


def all_text(chat: Chat) -> str:
    """Return all texts, on lines of their own: also a tool call's arguments and system messages."""
    return _joined(_texts(chat, chat.messages))


def text_without_system(chat: Chat) -> str:
    """Return all texts except system messages, which chats share without repeating each other."""
    return _joined(_texts(chat, [message for message in chat.messages if message["role"] != "system"]))


def spoken_text(chat: Chat) -> str:
    """Return what the user and the assistant say, whatever the language of system messages and of tools is."""
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


_JUDGED_TEXT: dict[str, Callable[[Chat], str]] = {"language": spoken_text, "decontaminate": all_text}
"""What a step that leaves out chats judges."""
