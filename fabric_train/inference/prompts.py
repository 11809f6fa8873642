"""Prompts: read them from a file, and make token ids of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fabric_train.cli.errors import InputError
from fabric_train.files.regular_file import open_regular
from fabric_train.files.typed_json import parse_json
from fabric_train.tokenization.chats.chat_encoder import own_template
from fabric_train.tokenization.chats.chat_format import Chat, read_chat
from fabric_train.tokenization.chats.chat_template import ChatTemplate
from fabric_train.tokenization.documents import BadRowError

_ADVICE = 'give a .txt file with a prompt on each line, or a .jsonl file with {"prompt": ...} or {"messages": ...}'


@dataclass(frozen=True)
class Prompt:
    """A text to continue, or a chat whose next turn is the assistant's. ``place`` names it in an error message."""

    content: str | Chat
    place: str = "the prompt"
    line: int = 1

    @property
    def is_chat(self) -> bool:
        """Whether it needs a chat template."""
        return isinstance(self.content, Chat)


def chat_turn(text: str, system: str | None) -> Chat:
    """Return a chat with a user's turn, after a system turn if there is one."""
    begin = [{"role": "system", "content": system}] if system is not None else []
    return Chat([*begin, {"role": "user", "content": text}])


def read_prompts(file: Path, *, chat: bool = False, system: str | None = None) -> list[Prompt]:
    """Read a file of prompts; empty lines are left out.

    Args:
        file: .txt with a prompt on each line; or .jsonl, where each line has a text ``prompt``, or ``messages`` (and
            ``tools``) of a chat that ends before the assistant's turn.
        chat: take a text for a user's turn.
        system: system turn of chats that have none.

    Raises:
        InputError: the file cannot be read, or has no prompts; or one line for each line of it that is not valid.
    """
    if file.suffix not in (".txt", ".jsonl"):
        raise InputError(f"{file}: unknown kind of file; {_ADVICE}")
    try:
        with open_regular(file, _ADVICE) as opened:
            lines = opened.read().split(b"\n")
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}; {_ADVICE}") from None
    prompts, faults = [], []
    for number, line in enumerate(lines, 1):
        try:
            content = _read_line(line.decode("utf-8-sig" if number == 1 else "utf-8").strip(), file.suffix == ".jsonl")
        except UnicodeDecodeError as error:
            faults.append(f"{file}, line {number}: byte {error.start} is not UTF-8; save the file as UTF-8")
            continue
        except ValueError as error:
            faults.append(f"{file}, line {number}: {error}")
            continue
        if content:
            place = f"{file}, line {number}"
            prompts.append(Prompt(_in_chat(content, system) if chat else content, place, number))
    if not prompts and not faults:
        faults.append(f"{file}: there is no prompt in it; {_ADVICE}")
    if faults:
        raise InputError(*faults)
    return prompts


def _read_line(line: str, is_json: bool) -> str | Chat:
    """Return the content of a line, "" for an empty one.

    Raises:
        ValueError: it is not valid.
    """
    if not line or not is_json:
        return line
    row = parse_json(line, dict)
    if ("prompt" in row) == ("messages" in row):
        raise ValueError('give either {"prompt": ...} or {"messages": ...}')
    if "prompt" in row:
        if not isinstance(row["prompt"], str) or not row["prompt"]:
            raise ValueError('"prompt" must be a text, not empty')
        return row["prompt"]
    chat = read_chat(row, "messages")
    if not chat.messages or chat.messages[-1]["role"] in ("assistant", "system"):
        raise ValueError('"messages" must end with a turn of the user or of a tool, which the model answers')
    return chat


def _in_chat(content: str | Chat, system: str | None) -> str | Chat:
    if isinstance(content, str):
        return chat_turn(content, system)
    if system is None or content.messages[0]["role"] == "system":
        return content
    return Chat([{"role": "system", "content": system}, *content.messages], tools=content.tools)


class PromptEncoder:
    """Make the token ids of prompts.

    Args:
        tokenizer: the model's tokenizer.
        name: the model's name, for error messages.
        prompts_chats: whether there are chats among the prompts.

    Attributes:
        end_ids: the token that ends the assistant's turn, if chats are prompted and the template writes one.

    Raises:
        InputError: there are chats, and the tokenizer has no chat template or one that cannot be used.
    """

    def __init__(self, tokenizer: Any, name: str, prompts_chats: bool) -> None:
        self._tokenizer = tokenizer
        self._template: ChatTemplate | None = None
        self.end_ids: tuple[int, ...] = ()
        if prompts_chats:
            self._template = own_template(tokenizer, f"give a model that has learned to chat instead of {name}")
            if self._template is None:
                raise InputError(
                    f"{name} has no chat template: it is a base model, which continues texts; leave --chat, --system "
                    "and messages out, or give a model that has learned to chat"
                )
            if self._template.end_of_turn:
                self.end_ids = (tokenizer.convert_tokens_to_ids(self._template.end_of_turn),)

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the ids of a prompt: a text after one BOS, or a chat in the template's form.

        Raises:
            InputError: the template refuses the chat.
        """
        if isinstance(prompt.content, str):
            return encode_text(self._tokenizer, prompt.content)
        assert self._template is not None
        chat = prompt.content
        try:
            text = self._template.render(chat.messages, chat.tools, generation_prompt=True)
        except BadRowError as error:
            raise InputError(f"{prompt.place}: {error}") from None
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Return the text's ids after exactly one BOS, as at the start of a document in training."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    bos = tokenizer.bos_token_id
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]


@dataclass(frozen=True)
class PromptLimits:
    """What a model can take: token ids below ``vocab_size``, and ``max_positions`` tokens, None for no limit."""

    vocab_size: int
    max_positions: int | None

    def find_fault(self, ids: Sequence[int], place: str, num_tokens: int, option: str = "--num_tokens") -> str | None:
        """Return why a prompt cannot be continued by ``num_tokens``, the value of ``option``; None if it can."""
        if not ids:
            return f"{place} has no tokens: give some text"
        if max(ids) >= self.vocab_size:
            return (
                f"{place} has token id {max(ids)}, but the model's vocabulary ends at {self.vocab_size - 1}: "
                "use the model's own tokenizer"
            )
        if self.max_positions is not None and len(ids) + num_tokens > self.max_positions:
            return (
                f"{place} has {len(ids)} tokens, which with {option} {num_tokens} exceed the model's "
                f"{self.max_positions} positions: shorten it, or give a smaller {option}"
            )
        return None


def limits_of(model: Any) -> PromptLimits:
    """Return the limits of a loaded model."""
    vocab_size: int = model.get_input_embeddings().weight.shape[0]
    return PromptLimits(vocab_size, getattr(model.config.get_text_config(), "max_position_embeddings", None))


def check_fits(model: Any, ids: Sequence[int], place: str, num_tokens: int) -> None:
    """Check that a model can continue a prompt by ``num_tokens``.

    Raises:
        InputError: prompt and new tokens exceed its positions, or an id of the prompt its vocabulary.
    """
    if fault := limits_of(model).find_fault(ids, place, num_tokens):
        raise InputError(fault)


def encode_prompts(
    encoder: PromptEncoder,
    prompts: Sequence[Prompt],
    limits: PromptLimits,
    num_tokens: int,
    option: str = "--num_tokens",
) -> list[list[int]]:
    """Return the ids of all prompts of a file.

    Raises:
        InputError: one line for each prompt that cannot be continued by ``num_tokens``, the value of ``option``.
    """
    encoded = [encoder.encode(prompt) for prompt in prompts]
    found = (
        limits.find_fault(ids, prompt.place, num_tokens, option) for prompt, ids in zip(prompts, encoded, strict=True)
    )
    if faults := [fault for fault in found if fault]:
        raise InputError(*faults)
    return encoded
