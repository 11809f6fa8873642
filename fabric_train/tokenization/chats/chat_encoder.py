"""Encode chats and instructions with labels on the assistant's tokens, and shorten those that are too long."""

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from fabric_train.cli.errors import InputError
from fabric_train.reading.documents import (
    TOO_DEEP,
    TRAINED,
    BadRowError,
    Chat,
    EncodedDocument,
    LeftOut,
    Message,
    check_surrogates,
    supervised_turns,
    utf8_length,
    why_left_out,
)
from fabric_train.token_dataset import manifest
from fabric_train.tokenization.chats.chat_template import (
    LLAMA3_CONTROL_TOKENS,
    LLAMA3_TEMPLATE,
    ChatTemplate,
    Rendering,
)
from fabric_train.tokenization.chats.control_tokens import ControlTokens, Span
from fabric_train.tokenization.chats.formats import read_chat
from fabric_train.tokenization.chats.shown_messages import ShownMessages
from fabric_train.tokenization.tokenizers.parity_check import HARD_STRINGS
from fabric_train.tokenization.tokenizers.text_encoder import TextEncoder, open_encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_LONGEST_TRIED = 200  # characters
_ADVICE = "give the tokenizer of an instruct model, or a template with --chat_template"
T = TypeVar("T")
# passed to the encoder at once
_BATCH_CHARACTERS = 500_000
_BATCH_ROWS = 1_000


def open_segment_encoder(tokenizer_file: Path, tokenizer: "PreTrainedTokenizerFast") -> TextEncoder | None:
    """Return an encoder for the texts between control tokens; None if they cannot be encoded one by one."""
    # a token that looks at the text around it, or is matched in normalized text
    normalizer = tokenizer.backend_tokenizer.normalizer
    for token in tokenizer.added_tokens_decoder.values():
        is_normalized = token.normalized and normalizer is not None
        if token.single_word or token.lstrip or token.rstrip or is_normalized:
            return None
    # a pre-tokenizer that treats the first text differently
    pre_tokenizer = tokenizer.backend_tokenizer.pre_tokenizer
    if pre_tokenizer is not None and b'"prepend_scheme":"first"' in pre_tokenizer.__getstate__():
        return None
    encoder, _ = open_encoder(tokenizer_file, special_text_is_plain=True)
    return encoder


def gives_tokenizer_ids(tokens: ControlTokens, template: ChatTemplate, tokenizer: "PreTrainedTokenizerFast") -> bool:
    """Return whether ``tokens`` gives chats of hard strings the same ids as ``apply_chat_template``."""
    contents = [text for text in HARD_STRINGS if len(text) <= _LONGEST_TRIED and tokens.shield(text) == text]
    renderings: list[str] = []
    for question, answer in zip(contents[::2], contents[1::2], strict=False):
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        try:
            renderings.append(template.render(chat))
        except BadRowError:
            continue  # the template refuses an empty content, for example
    tokens.encode_ahead(renderings)
    for text in renderings:
        try:
            ids, _ = tokens.encode(text, [])
        except BadRowError:  # a control token is made from text
            return False
        if ids.tolist() != tokenizer.encode(text, add_special_tokens=False):
            return False
    return True


class ChatEncoder:
    """An encoder of chats and instructions that returns token ids with labels.

    The ids equal the tokenizer's ``apply_chat_template``, with BOS only where the template writes it. Most chats
    end with the end-of-turn token; a chat that does not end with a control token gets EOS.
    """

    def __init__(
        self,
        tokenizer_folder: Path,
        data_format: str,
        train_on: str,
        too_long: str,
        max_length: int | None,
        *,
        split_at_control_tokens: bool = True,
        is_template_from_user: bool = False,
    ) -> None:
        """Open the tokenizer in a folder, and choose the chat template and the way to encode.

        Args:
            tokenizer_folder: A saved tokenizer with its chat template.
            data_format: As on the command line.
            train_on: As on the command line.
            too_long: As on the command line. With ``cut_end``, the last remaining turn is the assistant's, unless all
                are supervised; with ``cut_start``, the first remaining turn is the user's.
            max_length: The most tokens of a chat; None for no limit.
            split_at_control_tokens: Split a rendered chat at its control tokens, and encode the texts between them
                separately, with the fastest encoder, if a trial shows that this gives the tokenizer's ids. Otherwise
                ``tokenizers`` encodes each rendered chat in full, which takes longer.
            is_template_from_user: Whether the chat template in the folder is from ``--chat_template``; then Llama-3's
                never replaces it.

        Raises:
            InputError: no chat template can be used: neither the tokenizer's nor Llama-3's.
        """
        from transformers import PreTrainedTokenizerFast

        self._data_format = data_format
        self._train_on = train_on
        self._too_long = too_long
        self._max_length = max_length

        # the template
        tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
        self._template, choice_notes = _choose_template(tokenizer, train_on, is_template_from_user)
        self._shown = ShownMessages(self._template)
        self.notes = (*choice_notes, *_template_notes(tokenizer, self._template))
        self.chat_template = self._template.source
        self.chat_template_sha256 = hashlib.sha256(self.chat_template.encode()).hexdigest()

        # its control tokens: their ids by their text
        control = {token: tokenizer.convert_tokens_to_ids(token) for token in self._template.control_tokens}
        self._eos_token_id: int = tokenizer.eos_token_id
        self._control_ids = frozenset(control.values()) | {self._eos_token_id}
        self.end_of_turn_token_id: int | None = None
        if self._template.end_of_turn:
            self.end_of_turn_token_id = control[self._template.end_of_turn]

        # the encoder of the texts between control tokens; without one, each rendered chat is encoded in full
        tokenizer_file = tokenizer_folder / "tokenizer.json"
        segment_encoder: TextEncoder | None = None
        if split_at_control_tokens:
            segment_encoder = open_segment_encoder(tokenizer_file, tokenizer)
        self._tokens = ControlTokens(tokenizer_file, control, segment_encoder)
        if segment_encoder and not gives_tokenizer_ids(self._tokens, self._template, tokenizer):
            self._tokens = ControlTokens(tokenizer_file, control, encoder=None)

    def encode(self, record: Mapping[str, Any]) -> EncodedDocument | LeftOut:
        """Encode a row, or leave it out with the ledger's reason; BadRowError if that fails."""
        chat = read_chat(record, self._data_format, calls_as_text=self.calls_as_text)
        (result,) = self.encode_all([chat])
        if isinstance(result, BadRowError):
            raise result
        return result

    @property
    def calls_as_text(self) -> bool:
        """Whether a turn that is a function call must be read as text, because the template has no tool calls."""
        return not self._shown.has_tool_calls

    def encode_all(self, chats: Iterable[Chat | BadRowError]) -> Iterator[EncodedDocument | LeftOut | BadRowError]:
        """Yield the result or the error of ``encode`` for each chat; an error in ``chats`` is passed through.

        Chats are read ahead, so that many are encoded together.
        """
        batch: list[_RenderedChat | LeftOut | BadRowError] = []
        num_characters = 0
        for chat in chats:
            rendered = _or_bad_row(self._render, chat)
            batch.append(rendered)
            if isinstance(rendered, _RenderedChat):
                num_characters += len(rendered.rendering.text)
            if num_characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_ROWS:
                yield from self._encode_batch(batch)
                batch = []
                num_characters = 0
        yield from self._encode_batch(batch)

    def _encode_batch(
        self, batch: Iterable["_RenderedChat | LeftOut | BadRowError"]
    ) -> Iterator[EncodedDocument | LeftOut | BadRowError]:
        self._tokens.encode_ahead(chat.rendering.text for chat in batch if isinstance(chat, _RenderedChat))
        for chat in batch:
            if isinstance(chat, _RenderedChat):
                yield _or_bad_row(self._encode_rendered, chat)
            else:
                yield chat

    def _render(self, chat: Chat) -> "_RenderedChat | LeftOut":
        """Render a chat with its messages shielded, or leave it out if nothing of it would be supervised."""
        reason = why_left_out(chat, self._train_on)
        if reason is not None:
            return LeftOut(reason)
        turns = supervised_turns(chat, self._train_on)
        messages = self._tokens.shield_messages(self._shown.messages(chat))
        tools = self._tokens.shield(chat.tools)
        variables = self._tokens.shield(dict(chat.template_variables))
        rendering = self._render_shielded(messages, tools, variables)
        unused = chat.unused | self._shown.check(rendering, turns)
        if self._train_on == "all" and any(_is_untrained_context(message) for message in chat.messages):
            unused |= {"what leaves out turns that are not the assistant's"}
        return _RenderedChat(chat, turns, rendering, unused)

    def _render_shielded(
        self, messages: list[Message], tools: list[Any] | None, variables: Mapping[str, Any]
    ) -> Rendering:
        rendering = self._template.render_to_mark(messages, tools, variables)
        if not rendering.text.isascii():
            check_surrogates(rendering.text)
        return rendering

    def _encode_rendered(self, chat: "_RenderedChat") -> EncodedDocument | LeftOut:
        """Encode a chat, shortened if it is too long."""
        all_messages = range(len(chat.chat.messages))
        document = self._encode_slice(chat, _ChatSlice(all_messages, chat.rendering))
        num_tokens = len(document.input_ids)
        if self._max_length is None or num_tokens <= self._max_length:
            return document
        chat_slice: _ChatSlice | None = None
        if self._too_long != "drop":
            chat_slice = self._longest_slice(chat, num_tokens, self._max_length)
        if chat_slice is None:
            return LeftOut(manifest.TOO_LONG, num_tokens)
        if chat.turns.isdisjoint(chat_slice.messages):
            return LeftOut(manifest.NOTHING_SUPERVISED, num_tokens)
        shortened = self._encode_slice(chat, chat_slice)
        return replace(shortened, num_tokens_cut=num_tokens - len(shortened.input_ids))

    def _encode_slice(self, chat: "_RenderedChat", chat_slice: "_ChatSlice") -> EncodedDocument:
        """Encode a part of a chat, and supervise the messages in it that are to be supervised."""
        # Mark the turns that are supervised. With --train_on all, the text between turns is supervised too, so the
        # turns that are not supervised are marked instead.
        supervises_all = self._train_on == "all"
        marked: list[int] = []
        for index, turn in enumerate(chat_slice.messages):
            is_supervised = turn in chat.turns
            if is_supervised != supervises_all:
                marked.append(index)
        spans: list[Span] = []
        if marked:
            spans = self._template.mark(chat_slice.rendering, marked)
        text = chat_slice.rendering.text
        input_ids, is_marked = self._tokens.encode(text, spans)
        supervised = ~is_marked if supervises_all else is_marked
        if not self._template.ends_with_control_token(text):
            input_ids = np.append(input_ids, np.int32(self._eos_token_id))
            supervised = np.append(supervised, chat_slice.messages[-1] in chat.turns)

        # the control tokens that are the last supervised tokens of a turn
        is_next_supervised = np.append(supervised[1:], np.False_)
        last_ids = input_ids[supervised & ~is_next_supervised]
        contents = [chat.chat.messages[index]["content"] for index in chat_slice.messages]
        return EncodedDocument(
            input_ids=input_ids,
            supervised=None if supervises_all and not marked else supervised,
            num_characters=sum(map(len, contents)),
            num_bytes=sum(map(utf8_length, contents)),
            turn_ends=self._control_ids.intersection(last_ids.tolist()),
            unused=chat.unused,
        )

    def _longest_slice(self, chat: "_RenderedChat", num_tokens: int, max_length: int) -> "_ChatSlice | None":
        """Return the longest part of a conversation that fits; None if none fits.

        The ``num_tokens`` tokens of the full conversation show which part that should be. It is rendered, and so is
        the next longer part; their lengths decide.
        """
        messages = chat.rendering.messages
        roles = [message["role"] for message in messages]
        # about where the content of each message begins and ends, in tokens
        spans = _spans_of_contents(chat.rendering)
        begins, ends = self._tokens.estimate(chat.rendering.text, np.array(spans)).T  # [messages] each
        tokens_after_contents = num_tokens - ends[-1]  # that end the conversation, also a shorter one

        # the parts from the shortest to the longest, as indices of messages, and about how many tokens each has
        slices: list[list[int]] = []
        lengths: list[float] = []
        if self._too_long == "cut_end":
            for end in range(1, len(roles)):
                if roles[end - 1] == "assistant" or self._train_on == "all":
                    slices.append(list(range(end)))
                    lengths.append(ends[end - 1] + tokens_after_contents)
        else:  # cut_start: the system turns stay, and then a turn of the user comes first
            num_system = 0
            while num_system < len(roles) and roles[num_system] == "system":
                num_system += 1
            for begin in range(len(roles) - 1, num_system, -1):
                if roles[begin] == "user":
                    slices.append([*range(num_system), *range(begin, len(roles))])
                    tokens_of_system_turns = begins[num_system]
                    lengths.append(tokens_of_system_turns + num_tokens - begins[begin])
        fitting: dict[int, Rendering] = {}

        def fits(slice_index: int) -> bool:
            slice_messages = [messages[index] for index in slices[slice_index]]
            rendering = self._render_shielded(slice_messages, chat.rendering.tools, chat.rendering.variables)
            num_slice_tokens = self._tokens.count(rendering.text)
            if not self._template.ends_with_control_token(rendering.text):
                num_slice_tokens += 1  # EOS
            if num_slice_tokens > max_length:
                return False
            fitting[slice_index] = rendering
            return True

        num_fitting = _count_first(fits, len(slices), guess=bisect_right(lengths, max_length))
        if num_fitting == 0:
            return None
        return _ChatSlice(slices[num_fitting - 1], fitting[num_fitting - 1])


def _is_untrained_context(message: Message) -> bool:
    """Return whether a row says that a turn, which is not the assistant's, is not trained."""
    return message.get(TRAINED) is False and message["role"] != "assistant"


@dataclass(frozen=True)
class _RenderedChat:
    """A chat and its rendering with shielded messages."""

    chat: Chat
    turns: frozenset[int]  # the indices of its messages that are supervised
    rendering: Rendering
    unused: frozenset[str]  # columns and keys that the rendering does not show


@dataclass(frozen=True)
class _ChatSlice:
    """Some messages of a chat, by their indices in it, and their rendering."""

    messages: Sequence[int]
    rendering: Rendering


def _or_bad_row(function: Callable[[Any], T], value: Any) -> T | BadRowError:
    """Return ``function(value)``, or the error that it raises; a value that is an error is returned unchanged."""
    if isinstance(value, BadRowError):
        return value
    try:
        return function(value)
    except BadRowError as error:
        return error
    except RecursionError:
        return BadRowError(TOO_DEEP)


def _spans_of_contents(rendering: Rendering) -> list[Span]:
    """Return the approximate positions of the messages' contents in the text, as (start, end)."""
    spans: list[Span] = []
    span = (0, 0)
    for message in rendering.messages:
        content = message["content"].strip()
        _, previous_end = span
        begin = rendering.text.find(content, previous_end)
        if begin >= 0:  # otherwise the template has changed it, and the span of the previous message has to do
            span = (begin, begin + len(content))
        spans.append(span)
    return spans


def _count_first(holds: Callable[[int], bool], count: int, guess: int) -> int:
    """Return for how many integers below ``count`` a condition holds, which only holds for the first ones.

    If ``guess`` is right, the condition is tested twice.
    """
    low = 0
    high = count
    for probe in (guess - 1, guess):  # the last for which it should hold, and the first for which it should not
        if low <= probe < high:
            if holds(probe):
                low = probe + 1
            else:
                high = probe
    return bisect_left(range(high), True, lo=low, key=lambda probe: not holds(probe))


def _choose_template(
    tokenizer: "PreTrainedTokenizerFast", train_on: str, is_template_from_user: bool
) -> tuple[ChatTemplate, tuple[str, ...]]:
    """Return the tokenizer's template, or Llama-3's if that cannot be used and the user chose none; with notes."""
    # its own, if it can mark the turns of a longer conversation
    template = own_template(tokenizer)
    turns = {"assistant": [1, 3], "last": [3], "all": []}[train_on]
    if template and template.can_mark(["user", "assistant", "user", "assistant"], turns):
        return template, ()

    # Llama-3's, if the tokenizer has its tokens
    fault = "has a chat template that cannot mark the assistant's tokens" if template else "has no chat template"
    vocabulary = tokenizer.get_added_vocab()
    if not is_template_from_user and all(token in vocabulary for token in LLAMA3_CONTROL_TOKENS):
        return _open_template(tokenizer, LLAMA3_TEMPLATE), (f"the tokenizer {fault}; using Llama-3's",)

    # its own, for conversations with one answer
    if template and template.can_mark(["user", "assistant"], [1]):
        return template, (
            "the tokenizer's chat template renders turns differently when other turns follow; chats with several "
            "assistant turns are refused, except with --train_on last",
        )
    raise InputError(f"the tokenizer {fault}; {_ADVICE}")


def own_template(tokenizer: "PreTrainedTokenizerFast", advice: str = _ADVICE) -> ChatTemplate | None:
    """Return the tokenizer's template, or None if it has none; InputError with ``advice`` if it cannot be used."""
    if not tokenizer.chat_template:
        return None
    try:
        source = str(tokenizer.get_chat_template())
    except ValueError:
        raise InputError(f"the tokenizer has several chat templates but no default; {advice}") from None
    try:
        return _open_template(tokenizer, source)
    except BadRowError as error:
        raise InputError(f"the tokenizer has an unusable chat template ({error}); {advice}") from None


def _open_template(tokenizer: "PreTrainedTokenizerFast", source: str) -> ChatTemplate:
    added_tokens = tokenizer.added_tokens_decoder.values()
    return ChatTemplate(
        source,
        tokenizer.special_tokens_map,
        [token.content for token in added_tokens],
        [token.content for token in added_tokens if token.special],
    )


def _template_notes(tokenizer: "PreTrainedTokenizerFast", template: ChatTemplate) -> list[str]:
    """Return notes for users about chats that the template renders."""
    notes: list[str] = []
    text = template.render([{"role": "user", "content": "Hi"}])
    bos_token_id = tokenizer.bos_token_id
    adds_bos = bos_token_id is not None and tokenizer("Hi")["input_ids"][:1] == [bos_token_id]
    if adds_bos and not text.startswith(tokenizer.bos_token):
        notes.append(f"the chat template does not write {tokenizer.bos_token}; chats begin without it")
    system_prompt = template.built_in_prompt()
    if system_prompt:
        notes.append(
            f"the chat template adds its own system prompt to chats without one: {system_prompt!r}; to avoid this, "
            "give --chat_template a template without a system prompt"
        )
    if "strftime_now" in template.source:
        notes.append("the chat template may write the current date, so chats tokenized on another day may differ")
    if template.end_of_turn is None:
        notes.append(
            f"the chat template writes no end-of-turn token; only entire chats end with a token, {tokenizer.eos_token}"
        )
    return notes
