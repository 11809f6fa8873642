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
from fabric_train.cleaning.language import open_language_filter
from fabric_train.cleaning.personal_data import open_redaction
from fabric_train.cleaning.quality import open_quality_filter
from fabric_train.cleaning.results import Cleaned, Dropped, Marked, TaskHit
from fabric_train.cli.errors import InputError
from fabric_train.reading.documents import TOO_DEEP, BadRowError, Chat, Message, Pair, check_surrogates

# keys of messages and of their tool calls whose values a program reads, so no step may change them
_KEYS_WITHOUT_TEXT = frozenset(["role", "type", "id", "name", "tool_call_id", "tools"])
_SPEAKERS = ("user", "assistant")
Conversation = TypeVar("Conversation", bound=Chat | Pair)
_REASONS_AGAINST_CHATS = {
    "boilerplate": "it would remove single lines from a turn",
    "language_by paragraph": "it would remove single paragraphs from a turn",
    "quality": "its rules are for web pages, but a good answer may be a single word",
}
"""The switches that cannot be used if a source has chats, with the reason."""


class CleaningStep(Protocol):
    """The cleaning step for one switch.

    A step has only plain attributes, because it may be pickled for other processes. Models are loaded on first use.
    """

    def clean(self, text: str, edits: Counter[str]) -> str | Marked | Dropped:
        """Return the text, changed or not, or why it is marked or dropped; count the changes in ``edits`` by kind."""

    def settings(self) -> dict[str, Any]:
        """Return everything that determines the result, as JSON: thresholds, versions of packages, hashes of files."""


@dataclass(frozen=True)
class Cleaner:
    """Cleaning steps in their order; afterwards a document gets the signature that finds near duplicates."""

    steps: dict[str, CleaningStep]  # by the name of the switch, in the order in which they are applied
    near_duplicates: float | None  # the smallest similarity of near duplicates; None computes no signatures

    def clean(self, text: str) -> Cleaned[str] | Dropped:
        """Apply every step to a text, or return why a step drops it; the first step that drops it decides."""
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
        """Redact each text of a chat or pair, or return why a step drops it; the first step that drops it decides.

        A pair is dropped if one of its two conversations is. Only redaction changes a chat; the other steps judge
        it as it is.

        Raises:
            BadRowError: the chat is nested too deeply, or has half of a surrogate pair.
        """
        edits: Counter[str] = Counter()
        hits: list[TaskHit] = []
        for name, step in self.steps.items():
            if name == "redact":
                chat = change_texts(chat, partial(self._redact, edits=edits))
                continue
            for conversation in chat.conversations:
                result = step.clean(_JUDGED_TEXT[name](conversation), edits)
                if isinstance(result, Dropped):
                    return result
                if isinstance(result, Marked):
                    # the two conversations of a pair share their prompt, and so its hits
                    hits += [hit for hit in result.hits if hit not in hits]
        return Cleaned(chat, dict(edits), self._sign(text_without_system(chat.joined)), tuple(hits))

    def redact(self, text: str) -> str:
        """Return the text without personal data if --redact is given, for samples of dropped documents."""
        if "redact" not in self.steps:
            return text
        return self._redact(text, Counter())

    def with_boilerplate(self, step: Boilerplate) -> "Cleaner":
        """Return a cleaner that first removes the lines of ``step``; they are redacted before a user sees them."""
        later_steps = {name: later_step for name, later_step in self.steps.items() if name != "boilerplate"}
        steps: dict[str, CleaningStep] = {"boilerplate": step.redacted(self.redact), **later_steps}
        return replace(self, steps=steps)

    def settings(self) -> dict[str, Any]:
        """Return the settings of each step, by switch."""
        settings = {name: step.settings() for name, step in self.steps.items()}
        if self.near_duplicates is not None:
            settings["near_duplicates"] = near_duplicates.settings(self.near_duplicates)
        return settings

    def _sign(self, text: str) -> np.ndarray | None:
        if self.near_duplicates is None:
            return None
        return near_duplicates.signature(text)

    def _redact(self, text: str, edits: Counter[str]) -> str:
        result = self.steps["redact"].clean(text, edits)
        assert isinstance(result, str), "redaction drops nothing"
        return result


def open_cleaner(arguments: CleaningArguments, data_formats: Sequence[str], text_column: str) -> Cleaner:
    """Return the cleaner with a step for each switch in ``arguments``, in the order of this function.

    Args:
        arguments: the switches of cleaning.
        data_formats: the format of each source, such as ``text`` or ``messages``.
        text_column: the column with the texts; a folder of repeated lines must have been counted in the same column.

    Raises:
        InputError: a source has chats, and a switch does not support chats; or a step cannot be opened.
    """
    _check_switches_for_chats(arguments, data_formats)
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
        boilerplate = open_boilerplate(arguments.boilerplate, text_column)
        cleaner = cleaner.with_boilerplate(boilerplate)
    return cleaner


def _check_switches_for_chats(arguments: CleaningArguments, data_formats: Sequence[str]) -> None:
    """Raise an InputError, with a line for each switch that does not support chats, if a source has chats."""
    chat_formats = [data_format for data_format in data_formats if data_format != "text"]
    if not chat_formats:
        return
    is_used = {
        "boilerplate": arguments.boilerplate is not None,
        "language_by paragraph": arguments.language_by == "paragraph",
        "quality": arguments.quality is not None,
    }
    faults = []
    for switch, reason in _REASONS_AGAINST_CHATS.items():
        if is_used[switch]:
            remedy = f"tokenize that source without --{switch}, then merge"
            faults.append(
                f"--{switch} does not work with chats ({reason}), but a source has {chat_formats[0]}; {remedy}"
            )
    if faults:
        raise InputError(*faults)


def change_texts(chat: Conversation, change: Callable[[str], str]) -> Conversation:
    """Apply ``change`` to each text of a chat or pair: contents, and the values of a tool call's arguments.

    Raises:
        BadRowError: a message is nested too deeply.
    """
    try:
        messages = [_change_texts_in(message, change, _KEYS_WITHOUT_TEXT) for message in chat.joined.messages]
        return cast("Conversation", chat.with_messages(messages))
    except RecursionError:
        raise BadRowError(TOO_DEEP) from None


def _change_texts_in(value: Any, change: Callable[[str], str], keys_without_text: frozenset[str]) -> Any:
    """Return a JSON value with ``change`` applied to all texts, except those under ``keys_without_text``."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_change_texts_in(element, change, keys_without_text) for element in value]
    if isinstance(value, Mapping):
        changed = {}
        for key, element in value.items():
            if key in keys_without_text:
                changed[key] = element
            elif key == "arguments":
                # the arguments of a tool call have names of their own: one may be called id or name
                changed[key] = _change_texts_in(element, change, frozenset())
            else:
                changed[key] = _change_texts_in(element, change, keys_without_text)
        return changed
    return value


def all_text(chat: Chat) -> str:
    """Return all texts of a chat, one per line, including system messages and the arguments of tool calls."""
    return _join_lines(_texts_of(chat, chat.messages))


def text_without_system(chat: Chat) -> str:
    """Return all texts except system messages, which chats may share without being duplicates."""
    messages = [message for message in chat.messages if message["role"] != "system"]
    return _join_lines(_texts_of(chat, messages))


def spoken_text(chat: Chat) -> str:
    """Return the messages of user and assistant: the language of system messages and tools does not matter."""
    return _join_lines(message["content"] for message in chat.messages if message["role"] in _SPEAKERS)


def _texts_of(chat: Chat, messages: list[Message]) -> list[str]:
    """Return the texts of these messages of a chat, in order."""
    texts: list[str] = []

    def collect_text(text: str) -> str:
        texts.append(text)
        return text

    change_texts(replace(chat, messages=messages), collect_text)
    return texts


def _join_lines(texts: Iterable[str]) -> str:
    text = "\n".join(texts)
    check_surrogates(text)
    return text


_JUDGED_TEXT: dict[str, Callable[[Chat], str]] = {"language": spoken_text, "decontaminate": all_text}
"""The part of a chat's text that a step judges, by the step's name."""
