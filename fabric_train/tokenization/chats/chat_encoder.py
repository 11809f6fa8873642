"""Encode chats and instructions with the chat template, with labels on the assistant's tokens."""

import hashlib
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fabric_train.cli.errors import InputError
from fabric_train.tokenization import manifest
from fabric_train.tokenization.chats.chat_format import TOO_DEEP, Chat, is_blank, read_chat, supervised_turns
from fabric_train.tokenization.chats.chat_template import LLAMA3_CONTROL_TOKENS, LLAMA3_TEMPLATE, ChatTemplate
from fabric_train.tokenization.chats.control_tokens import ControlTokens
from fabric_train.tokenization.documents import BadRowError, EncodedDocument, LeftOut, utf8_length

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class ChatEncoder:
    """An encoder of chats and instructions that returns token ids with labels.

    The ids are those of the tokenizer's ``apply_chat_template``, with BOS only where the template writes it. Most chats
    end with the end-of-turn token; a chat that does not end with a control token gets EOS.

    Args:
        tokenizer_folder: a Hugging Face tokenizer folder with ``tokenizer.json``.
        data_format: format of the rows: messages, conversations, alpaca or prompt_completion; auto detects it in each
            row.
        train_on: what is supervised: ``assistant`` (its turns), ``all`` tokens, or ``last`` (the assistant's last
            turn). The assistant's turns in a prompt are not supervised, except with ``all``.
        too_long: what happens to a chat of more than ``max_length`` tokens.
            cut_end: it loses turns at the end; the last turn left is the assistant's, unless all are supervised.
            cut_start: it loses turns after the system message; the first turn left is the user's.
            drop: it is left out.
        max_length: in tokens; None is no limit.
        with_tiktoken: use tiktoken if it gives the tokenizer's ids; the ids are the same without it.
        is_chosen: whether the user has chosen the folder's chat template, so that no other one can replace it.

    Attributes:
        chat_template: the source of the template in use; ``chat_template_sha256`` is its hash.
        end_of_turn_token_id: the token that ends the assistant's turns; None if the template writes none.
        notes: lines that a user should read.

    Raises:
        InputError: the tokenizer's chat template cannot be used; without one, Llama-3's cannot.
    """

    def __init__(
        self,
        tokenizer_folder: Path,
        data_format: str,
        train_on: str,
        too_long: str,
        max_length: int | None,
        with_tiktoken: bool = True,
        is_chosen: bool = False,
    ) -> None:
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
        self._data_format, self._train_on, self._too_long = data_format, train_on, too_long
        self._max_length = max_length
        self._template, notes = _choose_template(tokenizer, train_on, is_chosen)
        self.notes = (*notes, *_notes(tokenizer, self._template))
        self.chat_template = self._template.source
        self.chat_template_sha256 = hashlib.sha256(self.chat_template.encode()).hexdigest()
        self._eos_token_id: int = tokenizer.eos_token_id
        control = {token: tokenizer.convert_tokens_to_ids(token) for token in self._template.control_tokens}
        self.end_of_turn_token_id: int | None = control.get(self._template.end_of_turn or "")
        self._control_ids = frozenset(control.values()) | {self._eos_token_id}
        self._tokens = ControlTokens(tokenizer_folder / "tokenizer.json", control, with_tiktoken)

    def encode(self, record: Mapping[str, Any]) -> EncodedDocument | LeftOut:
        """Encode a row, or leave it out as ``manifest.EMPTY``, ``TOO_LONG`` or ``NOTHING_SUPERVISED``.

        Raises:
            BadRowError: the row has another format, or the template cannot render or mark it.
        """
        try:
            return self._encode_chat(read_chat(record, self._data_format))
        except RecursionError:
            raise BadRowError(TOO_DEEP) from None

    def _encode_chat(self, chat: Chat) -> EncodedDocument | LeftOut:
        if is_blank(chat):
            return LeftOut(manifest.EMPTY)
        turns = supervised_turns(chat, self._train_on)
        if not turns:
            return LeftOut(manifest.NOTHING_SUPERVISED)
        self._check_tools_rendered(chat)
        whole = self._encode(chat, range(len(chat.messages)), turns)
        if self._max_length is None or len(whole.input_ids) <= self._max_length:
            return whole
        kept = None if self._too_long == "drop" else self._longest_part(chat, self._max_length)
        if kept is None:
            return LeftOut(manifest.TOO_LONG, len(whole.input_ids))
        if not turns.intersection(kept):
            return LeftOut(manifest.NOTHING_SUPERVISED, len(whole.input_ids))
        part = self._encode(chat, kept, turns)
        return replace(part, num_tokens_cut=len(whole.input_ids) - len(part.input_ids))

    def _encode(self, chat: Chat, kept: Sequence[int], turns: Collection[int]) -> EncodedDocument:
        """Encode the messages ``kept`` as a conversation; those of ``turns`` that are kept are supervised."""
        messages = [chat.messages[index] for index in kept]
        shielded, tools = self._tokens.shield(messages), self._tokens.shield(chat.tools)
        if self._train_on == "all":
            text = self._template.render(shielded, tools)
            input_ids, supervised = self._tokens.encode(text, [])
        else:
            marked = [position for position, index in enumerate(kept) if index in turns]
            text, spans = self._template.mark(shielded, tools, marked)
            input_ids, supervised = self._tokens.encode(text, spans)
        if not self._template.ends_with_control_token(text):
            input_ids = np.append(input_ids, np.int32(self._eos_token_id))
            supervised = np.append(supervised, kept[-1] in turns)
        is_last = supervised & ~np.append(supervised[1:], False)  # of the supervised tokens of a turn
        return EncodedDocument(
            input_ids=input_ids,
            supervised=None if self._train_on == "all" else supervised,
            num_characters=sum(len(message["content"]) for message in messages),
            num_bytes=sum(utf8_length(message["content"]) for message in messages),
            turn_ends=self._control_ids.intersection(input_ids[is_last].tolist()),
        )

    def _longest_part(self, chat: Chat, max_length: int) -> Sequence[int] | None:
        """Return the messages of the longest part of a conversation that fits, or None if none fits."""
        roles = [message["role"] for message in chat.messages]
        if self._too_long == "cut_end":
            always = 0
            ends = [end for end in range(1, len(roles)) if roles[end - 1] == "assistant" or self._train_on == "all"]
            parts = [range(end) for end in ends]
        else:
            always = next((index for index, role in enumerate(roles) if role != "system"), len(roles))
            begins = [begin for begin in range(always + 1, len(roles)) if roles[begin] == "user"]
            parts = [range(begin, len(roles)) for begin in reversed(begins)]

        def num_tokens(part: range) -> int:
            return len(self._encode(chat, [*range(always), *part], ()).input_ids)

        num_fitting = bisect_right(parts, max_length, key=num_tokens)
        return [*range(always), *parts[num_fitting - 1]] if num_fitting else None

    def _check_tools_rendered(self, chat: Chat) -> None:
        """Raise BadRowError if the template silently leaves out tools or tool calls."""
        calls = any("tool_calls" in message for message in chat.messages)
        if not (calls or chat.tools):
            return
        bare = [{key: value for key, value in message.items() if key != "tool_calls"} for message in chat.messages]
        whole = self._template.render(chat.messages, chat.tools)
        if calls and self._template.render(bare, chat.tools) == whole:
            raise BadRowError(
                "the chat template leaves out its tool_calls; use the tokenizer of a model that has tools"
            )
        if chat.tools and self._template.render(chat.messages) == whole:
            raise BadRowError("the chat template leaves out its tools; use the tokenizer of a model that has tools")


def _choose_template(
    tokenizer: "PreTrainedTokenizerFast", train_on: str, is_chosen: bool
) -> tuple[ChatTemplate, tuple[str, ...]]:
    """Return the tokenizer's own template or, if none is chosen, Llama-3's; and notes about the choice."""
    own = own_template(tokenizer)
    fault = "has a chat template that cannot mark the assistant's tokens" if own else "has no chat template"
    turns = {"assistant": [1, 3], "last": [3], "all": []}[train_on]
    if own and own.can_mark(["user", "assistant", "user", "assistant"], turns):
        return own, ()
    if not is_chosen and all(token in tokenizer.get_added_vocab() for token in LLAMA3_CONTROL_TOKENS):
        return _template(tokenizer, LLAMA3_TEMPLATE), (f"the tokenizer {fault}; Llama-3's is used",)
    if own and own.can_mark(["user", "assistant"], [1]):
        return own, (
            "the tokenizer's chat template renders turns differently once others follow; chats with several turns of "
            "the assistant are refused, except with --train_on last",
        )
    raise InputError(f"the tokenizer {fault}; {_ADVICE}")


_ADVICE = "give the tokenizer of an instruct model, or a template by --chat_template"


def own_template(tokenizer: "PreTrainedTokenizerFast", advice: str = _ADVICE) -> ChatTemplate | None:
    """Return the tokenizer's template, or None if it has none.

    Raises:
        InputError: the template cannot be used, or there are several; ``advice`` ends the message.
    """
    if not tokenizer.chat_template:
        return None
    try:
        source = str(tokenizer.get_chat_template())
    except ValueError:
        raise InputError(f"the tokenizer has several chat templates and none is the default; {advice}") from None
    try:
        return _template(tokenizer, source)
    except BadRowError as error:
        raise InputError(f"the tokenizer has an unusable chat template ({error}); {advice}") from None


def _template(tokenizer: "PreTrainedTokenizerFast", source: str) -> ChatTemplate:
    added = tokenizer.added_tokens_decoder.values()
    return ChatTemplate(
        source,
        tokenizer.special_tokens_map,
        [token.content for token in added],
        [token.content for token in added if token.special],
    )


def _notes(tokenizer: "PreTrainedTokenizerFast", template: ChatTemplate) -> list[str]:
    notes = []
    text = template.render([{"role": "user", "content": "Hi"}])
    adds_bos = tokenizer.bos_token_id is not None and tokenizer("Hi")["input_ids"][:1] == [tokenizer.bos_token_id]
    if adds_bos and not text.startswith(tokenizer.bos_token):
        notes.append(f"the chat template writes no {tokenizer.bos_token}; chats begin without it")
    if "strftime_now" in template.source:
        notes.append("the chat template may write today's date; chats tokenized on another day may differ")
    if template.end_of_turn is None:
        notes.append(
            f"the chat template writes no token at the end of turns; only chats end with one, {tokenizer.eos_token}"
        )
    return notes
