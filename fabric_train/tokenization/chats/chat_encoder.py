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
T = TypeVar("T")
# passed to the encoder at once
_BATCH_CHARACTERS = 500_000
_BATCH_ROWS = 1_000


def open_part_encoder(tokenizer_file: Path, tokenizer: "PreTrainedTokenizerFast") -> TextEncoder | None:
    """Return an encoder of the texts between control tokens; None if they cannot be encoded one by one."""
    normalizer = tokenizer.backend_tokenizer.normalizer
    pre_tokenizer = tokenizer.backend_tokenizer.pre_tokenizer
    for token in tokenizer.added_tokens_decoder.values():
        if token.single_word or token.lstrip or token.rstrip or (token.normalized and normalizer is not None):
            return None
    if pre_tokenizer is not None and b'"prepend_scheme":"first"' in pre_tokenizer.__getstate__():
        return None
    return open_encoder(tokenizer_file, special_text_is_plain=True)[0]


def gives_whole_ids(tokens: ControlTokens, template: ChatTemplate, tokenizer: "PreTrainedTokenizerFast") -> bool:
    """Return whether ``tokens`` gives chats of hard strings the same ids as ``apply_chat_template``."""
    contents = [text for text in HARD_STRINGS if len(text) <= _LONGEST_TRIED and tokens.shield(text) == text]
    renderings = []
    for question, answer in zip(contents[::2], contents[1::2], strict=False):
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        try:
            renderings.append(template.render(chat))
        except BadRowError:
            continue  # the template refuses an empty content, for example
    tokens.encode_ahead(renderings)
    try:
        ids = [tokens.encode(text, [])[0].tolist() for text in renderings]
    except BadRowError:  # a control token is made from text
        return False
    return ids == [tokenizer.encode(text, add_special_tokens=False) for text in renderings]


class ChatEncoder:
    """An encoder of chats and instructions that returns token ids with labels.

    The ids equal the tokenizer's ``apply_chat_template``, with BOS only where the template writes it. Most chats
    end with the end-of-turn token; a chat that does not end with a control token gets EOS. InputError if the chat
    template cannot be used; without one, Llama-3's cannot.

    Args:
        data_format, train_on, too_long: as on the command line. With ``cut_end``, the last turn left is the
            assistant's, unless all are supervised; with ``cut_start``, the first turn left is the user's.
        max_length: None is no limit.
        by_parts: encode the texts between control tokens one by one, with the fastest encoder, if a trial shows that
            this gives the tokenizer's ids. Otherwise ``tokenizers`` encodes each chat whole, which takes longer.
        is_chosen: whether the user has chosen the folder's chat template, so that no other one can replace it.
    """

    def __init__(
        self,
        tokenizer_folder: Path,
        data_format: str,
        train_on: str,
        too_long: str,
        max_length: int | None,
        by_parts: bool = True,
        is_chosen: bool = False,
    ) -> None:
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
        self._data_format = data_format
        self._train_on = train_on
        self._too_long = too_long
        self._max_length = max_length
        self._template, notes = _choose_template(tokenizer, train_on, is_chosen)
        self._shown = ShownMessages(self._template)
        self.notes = (*notes, *_notes(tokenizer, self._template))
        self.chat_template = self._template.source
        self.chat_template_sha256 = hashlib.sha256(self.chat_template.encode()).hexdigest()
        self._eos_token_id: int = tokenizer.eos_token_id
        control = {token: tokenizer.convert_tokens_to_ids(token) for token in self._template.control_tokens}
        self.end_of_turn_token_id: int | None = control.get(self._template.end_of_turn or "")
        self._control_ids = frozenset(control.values()) | {self._eos_token_id}
        file = tokenizer_folder / "tokenizer.json"
        encoder = open_part_encoder(file, tokenizer) if by_parts else None
        self._tokens = ControlTokens(file, control, encoder)
        if encoder and not gives_whole_ids(self._tokens, self._template, tokenizer):
            self._tokens = ControlTokens(file, control, None)

    def encode(self, record: Mapping[str, Any]) -> EncodedDocument | LeftOut:
        """Encode a row, or leave it out with the ledger's reason; BadRowError if that fails."""
        chat = read_chat(record, self._data_format, calls_as_text=self.calls_as_text)
        (result,) = self.encode_all([chat])
        if isinstance(result, BadRowError):
            raise result
        return result

    @property
    def calls_as_text(self) -> bool:
        """Whether a turn that is a function call must be read as text, as the template has no tool calls."""
        return not self._shown.has_tool_calls

    def encode_all(self, chats: Iterable[Chat | BadRowError]) -> Iterator[EncodedDocument | LeftOut | BadRowError]:
        """Yield what ``encode`` returns or raises for each chat, which are read ahead; a given error stays as it is."""
        batch: list[_RenderedChat | LeftOut | BadRowError] = []
        num_characters = 0
        for chat in chats:
            batch.append(rendered := _or_bad_row(self._render, chat))
            num_characters += len(rendered.whole.text) if isinstance(rendered, _RenderedChat) else 0
            if num_characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_ROWS:
                yield from self._encode_batch(batch)
                batch = []
                num_characters = 0
        yield from self._encode_batch(batch)

    def _encode_batch(
        self, batch: Iterable["_RenderedChat | LeftOut | BadRowError"]
    ) -> Iterator[EncodedDocument | LeftOut | BadRowError]:
        self._tokens.encode_ahead(chat.whole.text for chat in batch if isinstance(chat, _RenderedChat))
        for chat in batch:
            yield _or_bad_row(self._encode_rendered, chat) if isinstance(chat, _RenderedChat) else chat

    def _render(self, chat: Chat) -> "_RenderedChat | LeftOut":
        reason = why_left_out(chat, self._train_on)
        if reason is not None:
            return LeftOut(reason)
        turns = supervised_turns(chat, self._train_on)
        messages = self._tokens.shield_messages(self._shown.messages(chat))
        tools = self._tokens.shield(chat.tools)
        variables = self._tokens.shield(dict(chat.template_variables))
        whole = self._render_shielded(messages, tools, variables)
        unused = chat.unused | self._shown.check(whole, turns)
        if self._train_on == "all" and any(_is_context(message) for message in chat.messages):
            unused |= {"what leaves out turns that are not the assistant's"}
        return _RenderedChat(chat, turns, whole, unused)

    def _render_shielded(
        self, messages: list[Message], tools: list[Any] | None, variables: Mapping[str, Any]
    ) -> Rendering:
        rendering = self._template.render_to_mark(messages, tools, variables)
        if not rendering.text.isascii():
            check_surrogates(rendering.text)
        return rendering

    def _encode_rendered(self, rendered: "_RenderedChat") -> EncodedDocument | LeftOut:
        whole = self._encode_part(rendered, range(len(rendered.chat.messages)), rendered.whole)
        num_tokens = len(whole.input_ids)
        if self._max_length is None or num_tokens <= self._max_length:
            return whole
        part = None if self._too_long == "drop" else self._longest_part(rendered, num_tokens, self._max_length)
        if part is None:
            return LeftOut(manifest.TOO_LONG, num_tokens)
        if not rendered.turns.intersection(part[0]):
            return LeftOut(manifest.NOTHING_SUPERVISED, num_tokens)
        encoded = self._encode_part(rendered, *part)
        return replace(encoded, num_tokens_cut=num_tokens - len(encoded.input_ids))

    def _encode_part(self, rendered: "_RenderedChat", kept: Sequence[int], rendering: Rendering) -> EncodedDocument:
        """Encode ``rendering``, which is of the messages ``kept``; those that are to be supervised are."""
        spans: list[Span] = []
        supervises_all = self._train_on == "all"
        # with --train_on all, the turns are marked that are not to be supervised
        marked = [index for index, turn in enumerate(kept) if (turn in rendered.turns) is not supervises_all]
        if marked:
            spans = self._template.mark(rendering, marked)
        input_ids, supervised = self._tokens.encode(rendering.text, spans)
        if supervises_all:
            supervised = ~supervised
        if not self._template.ends_with_control_token(rendering.text):
            input_ids = np.append(input_ids, np.int32(self._eos_token_id))
            supervised = np.append(supervised, kept[-1] in rendered.turns)
        is_last = supervised & ~np.append(supervised[1:], False)  # of the supervised tokens of a turn
        contents = [rendered.chat.messages[index]["content"] for index in kept]
        return EncodedDocument(
            input_ids=input_ids,
            supervised=None if supervises_all and not marked else supervised,
            num_characters=sum(map(len, contents)),
            num_bytes=sum(map(utf8_length, contents)),
            turn_ends=self._control_ids.intersection(input_ids[is_last].tolist()),
            unused=rendered.unused,
        )

    def _longest_part(
        self, rendered: "_RenderedChat", num_tokens: int, max_length: int
    ) -> tuple[list[int], Rendering] | None:
        """Return the messages of the longest part of a conversation that fits, and its rendering; None if none fits.

        The ``num_tokens`` tokens of the whole conversation show which part that should be. It is
        rendered, and so is the next longer one: their lengths decide.
        """
        messages = rendered.whole.messages
        tools = rendered.whole.tools
        variables = rendered.whole.variables
        roles = [message["role"] for message in messages]
        places = _places_of_contents(rendered.whole)
        begin_at, end_at = self._tokens.estimate(rendered.whole.text, np.array(places)).T
        if self._too_long == "cut_end":
            ends = [end for end in range(1, len(roles)) if roles[end - 1] == "assistant" or self._train_on == "all"]
            parts = [list(range(end)) for end in ends]
            lengths = [num_tokens - end_at[-1] + end_at[end - 1] for end in ends]
        else:
            always = next((index for index, role in enumerate(roles) if role != "system"), len(roles))
            begins = [begin for begin in range(len(roles) - 1, always, -1) if roles[begin] == "user"]
            parts = [[*range(always), *range(begin, len(roles))] for begin in begins]
            lengths = [num_tokens - begin_at[begin] + begin_at[always] for begin in begins]
        fitting: dict[int, Rendering] = {}

        def fits(number: int) -> bool:
            rendering = self._render_shielded([messages[index] for index in parts[number]], tools, variables)
            num_eos = not self._template.ends_with_control_token(rendering.text)
            if self._tokens.count(rendering.text) + num_eos > max_length:
                return False
            fitting[number] = rendering
            return True

        num_fitting = _count_first(fits, len(parts), bisect_right(lengths, max_length))
        return (parts[num_fitting - 1], fitting[num_fitting - 1]) if num_fitting else None


def _is_context(message: Message) -> bool:
    """Return whether a row says that a turn, which is not the assistant's, is not trained."""
    return message.get(TRAINED) is False and message["role"] != "assistant"


@dataclass(frozen=True)
class _RenderedChat:
    """A chat, the indices of its messages that are supervised, and its rendering with shielded messages."""

    chat: Chat
    turns: frozenset[int]
    whole: Rendering
    unused: frozenset[str]  # columns and keys of which nothing is in the rendering


def _or_bad_row(function: Callable[[Any], T], given: Any) -> T | BadRowError:
    """Return what ``function`` makes of ``given``, or the error that it raises; a given error stays as it is."""
    try:
        return given if isinstance(given, BadRowError) else function(given)
    except BadRowError as error:
        return error
    except RecursionError:
        return BadRowError(TOO_DEEP)


def _places_of_contents(rendering: Rendering) -> list[Span]:
    """Return about where in the text the contents of the messages are, as (start, end)."""
    places = [(0, 0)]
    for message in rendering.messages:
        content = message["content"].strip()
        begin = rendering.text.find(content, places[-1][1])
        places.append((begin, begin + len(content)) if begin >= 0 else places[-1])
    return places[1:]


def _count_first(holds: Callable[[int], bool], number: int, guess: int) -> int:
    """Return how many of ``range(number)``, the first ones, ``holds`` is true of; a right ``guess`` takes two calls."""
    low = 0
    high = number
    for probe in (guess - 1, guess):
        if low <= probe < high:
            low, high = (probe + 1, high) if holds(probe) else (low, probe)
    return bisect_left(range(high), True, lo=low, key=lambda probe: not holds(probe))


def _choose_template(
    tokenizer: "PreTrainedTokenizerFast", train_on: str, is_chosen: bool
) -> tuple[ChatTemplate, tuple[str, ...]]:
    """Return the tokenizer's own template or, if the user chose none, Llama-3's; and notes about the choice."""
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
    """Return the tokenizer's template, None if it has none; InputError, with ``advice``, if it cannot be used."""
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
    if own := template.built_in_prompt():
        notes.append(
            f"the chat template has a system prompt of its own, which begins each chat that gives none: {own!r}; "
            "to leave it out, give a template without it by --chat_template"
        )
    if "strftime_now" in template.source:
        notes.append("the chat template may write today's date; chats tokenized on another day may differ")
    if template.end_of_turn is None:
        notes.append(
            f"the chat template writes no token at the end of turns; only chats end with one, {tokenizer.eos_token}"
        )
    return notes
