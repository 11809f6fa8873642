"""Read a file of prompts without torch."""

import sys
from dataclasses import dataclass
from pathlib import Path

from fabric_train.cli.errors import InputError
from fabric_train.files.regular_file import open_regular
from fabric_train.files.typed_json import parse_json
from fabric_train.reading.documents import Chat, Message
from fabric_train.tokenization.chats.formats import read_chat

_ADVICE = 'give a .txt file with one prompt per line, or a .jsonl file with {"prompt": ...} or {"messages": ...}'


@dataclass(frozen=True)
class Prompt:
    """A text to continue, or a chat whose next turn is the assistant's."""

    content: str | Chat
    place: str = "the prompt"
    """The prompt's name in error messages: its file and line."""
    line: int = 1
    is_from_file: bool = False

    @property
    def is_chat(self) -> bool:
        return isinstance(self.content, Chat)


def chat_turn(text: str, system: str | None) -> Chat:
    """Return a chat with a user's turn, after a system turn if ``system`` is given."""
    messages: list[Message] = []
    if system is not None:
        messages.append({"role": "system", "content": system})
    messages.append({"role": "user", "content": text})
    return Chat(messages)


def read_prompts(file: Path, *, chat: bool = False, system: str | None = None) -> list[Prompt]:
    """Read a file of prompts; empty lines are left out. An InputError lists all lines that are not valid.

    A line on standard error names the keys of the lines, and of their messages, that are not used.

    Args:
        file: .txt with a prompt on each line; or .jsonl, where each line has a text ``prompt``, or ``messages`` (and
            ``tools``) of a chat that ends before the assistant's turn.
        chat: whether a text is a user's turn.
        system: the system turn for chats that have none.
    """
    prompts, unused_keys = _read_file(file, chat=chat, system=system)
    if unused_keys:
        print(f"{file}: columns not used: {', '.join(sorted(unused_keys))}", file=sys.stderr)
    return prompts


def check_prompts(file: Path) -> None:
    """Raise the InputError of :func:`read_prompts`, and print nothing."""
    _read_file(file, chat=False, system=None)


def _read_file(file: Path, *, chat: bool, system: str | None) -> tuple[list[Prompt], set[str]]:
    """Return the prompts in a file, and the keys that are not used."""
    if file.suffix not in (".txt", ".jsonl"):
        raise InputError(f"{file}: unknown file type; {_ADVICE}")
    try:
        with open_regular(file, _ADVICE) as opened:
            lines = opened.read().split(b"\n")
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}; {_ADVICE}") from None
    prompts = []
    faults = []
    unused_keys: set[str] = set()
    for line_number, line in enumerate(lines, 1):
        place = f"{file}, line {line_number}"
        try:
            text = line.decode("utf-8-sig" if line_number == 1 else "utf-8").strip()
            content = _read_line(text, unused_keys, is_json=file.suffix == ".jsonl")
        except UnicodeDecodeError as error:
            faults.append(f"{place}: byte {error.start} is not UTF-8; save the file as UTF-8")
            continue
        except ValueError as error:
            faults.append(f"{place}: {error}")
            continue
        if not content:
            continue
        if chat:
            content = _with_system_turn(content, system)
        prompts.append(Prompt(content, place, line_number, is_from_file=True))
    if not prompts and not faults:
        faults.append(f"{file}: it has no prompts; {_ADVICE}")
    if faults:
        raise InputError(*faults)
    return prompts, unused_keys


def _with_system_turn(content: str | Chat, system: str | None) -> Chat:
    """Return a chat, or a text as a user's turn, with the ``system`` turn before it if it has none."""
    if isinstance(content, str):
        return chat_turn(content, system)
    if system is None or content.messages[0]["role"] == "system":
        return content
    return content.with_messages([{"role": "system", "content": system}, *content.messages])


def _read_line(line: str, unused_keys: set[str], *, is_json: bool) -> str | Chat:
    """Return the content of a line, "" for an empty one; raise a ValueError if it is not valid.

    Keys that are not used are added to ``unused_keys``.
    """
    if not line or not is_json:
        return line
    row = parse_json(line, dict)
    if ("prompt" in row) == ("messages" in row):
        raise ValueError('give either {"prompt": ...} or {"messages": ...}')
    if "prompt" in row:
        if not isinstance(row["prompt"], str) or not row["prompt"]:
            raise ValueError('"prompt" must be a string that is not empty')
        unused_keys.update(row.keys() - {"prompt"})
        return row["prompt"]
    chat = read_chat(row, "messages")
    unused_keys.update(chat.unused)
    if not chat.messages or chat.messages[-1]["role"] in ("assistant", "system"):
        raise ValueError('"messages" must end with a user or tool turn for the model to answer')
    return chat
