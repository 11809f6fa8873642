"""Render messages with a chat template, and find the assistant's part of the text.

The assistant's part of a turn starts at the end of the prompt that a model would get (the turns before it, rendered
with ``add_generation_prompt``) and ends with the end-of-turn token:

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello!<|im_end|>\\n
                                                           ^^^^^^^^^^^^^^^^

A template with ``{% generation %}`` marks these parts itself. For any other, the conversation is rendered turn by turn:
the whole text must start with the prompt before the turn, and with the conversation up to the end of the turn. If it
does not (as with a template that removes thoughts from earlier turns), the template cannot mark that turn.

Rendering turn by turn takes time quadratic in the number of turns. So the *separators*, which the template writes
between two contents, are learned once from a conversation rendered turn by turn. If the rendering of a conversation
equals its contents with these separators between them, no other rendering is needed.

A template is a program from strangers. It is first tried in a separate process, so that a template that takes all it
can get never gets it here, and each rendering has limits on processor time and memory.
"""

import json
import re
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabric_train.cli.errors import InputError, first_line
from fabric_train.reading.documents import BadRowError, Message, check_surrogates
from fabric_train.tokenization.chats.control_tokens import Span
from fabric_train.tokenization.chats.limits import OutOfTimeError, find_fault_in_child, limited_memory, limited_time
from fabric_train.tokenization.chats.lost_text import check_turn_rendered
from fabric_train.tokenization.tokenizers.tokenizer_folder import read_chat_template

if TYPE_CHECKING:
    from fabric_train.tokenization.tokenizers.tokenizer_folder import CorpusTokenizer

# as in Meta's llama-models, llama3/chat_format.py: contents are stripped, the role of tools is ipython
LLAMA3_TEMPLATE = Path(__file__).with_name("llama3.jinja").read_text(encoding="utf-8")
LLAMA3_CONTROL_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SECONDS = 5.0  # of processor time for one rendering; an ordinary one takes less than a millisecond
MEMORY = 1 << 30  # bytes that a rendering may take beyond what the process has
_MOST_CHARACTERS = 1 << 24  # of a rendering; more only if the conversation itself is so long
_MOST_TIMES = 16  # as long as its conversation is such a rendering at most
_LONGEST_REASON = 300  # characters of a template's own message
_tried_sources: set[str] = set()
"""The templates that a forked process has tried without a fault. This process keeps them, since the same template is
opened again and again, by code that knows nothing of the time before."""


@dataclass(frozen=True)
class _Separator:
    """The text between two contents, before the first one, or after the last one."""

    text: str
    previous_turn_length: int  # its first characters that belong to the previous turn, one of the assistant
    next_turn_length: int  # its last characters that belong to the next turn, one of the assistant


@dataclass(frozen=True)
class Rendering:
    """A conversation with its tools and variables, and the text that the template makes from them."""

    messages: list[Message]
    tools: list[Any] | None
    variables: Mapping[str, Any]
    text: str
    generated: list[Span]  # the parts that the template marks with ``{% generation %}``
    is_prompt: bool = False  # whether the text ends with the header of the assistant's turn


class ChatTemplate:
    """A chat template of a tokenizer, in Jinja, which runs in transformers' sandbox.

    ``variables`` are special tokens by the names that templates use (``bos_token``), ``added_tokens`` the texts of all
    added tokens, and ``special_tokens`` those that are special. BadRowError if the template is invalid, or refuses a
    question with an answer, fails on it, does not end, or takes too much memory.
    """

    def __init__(
        self, source: str, variables: Mapping[str, Any], added_tokens: Collection[str], special_tokens: Collection[str]
    ) -> None:
        if not source.isascii():
            check_surrogates(source)
        self.source = source
        self._variables = dict(variables)
        self._has_generation = _GENERATION.search(source) is not None
        self._separators: dict[tuple[str | None, str | None], _Separator | None] = {}
        # the special tokens, and the added tokens that the template writes between turns
        self.control_tokens: tuple[str, ...] = tuple(special_tokens)
        self.end_of_turn: str | None = None  # the control token that follows the assistant's content
        self._generation_prompt = ""
        self._try_in_child(added_tokens)
        self._learn(added_tokens)

    def _try_in_child(self, added_tokens: Collection[str]) -> None:
        """Raise a BadRowError if a separate process finds the source unusable; each source is tried once."""
        if self.source in _tried_sources:
            return
        import transformers.utils.chat_template_utils  # noqa: F401 - slow: here, and not in the child

        fault = find_fault_in_child(lambda: self._learn(added_tokens))
        if fault:
            raise BadRowError(fault)
        _tried_sources.add(self.source)

    def _learn(self, added_tokens: Collection[str]) -> None:
        """Learn the control tokens and the header of the assistant's turn."""
        self._find_control_tokens(added_tokens)
        question = _speak(["user"])
        text = self.render(question)
        prompt = self.render(question, generation_prompt=True)
        self._generation_prompt = ""
        if prompt.startswith(text):
            self._generation_prompt = prompt.removeprefix(text)

    def render(
        self,
        messages: list[Message],
        tools: list[Any] | None = None,
        generation_prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a conversation; with ``generation_prompt``, also the header of the assistant's turn.

        ``variables`` are passed to the template in addition to messages and tools, such as enable_thinking.
        """
        text, _ = self._render(messages, tools, variables or {}, generation_prompt=generation_prompt, marks=False)
        return text

    def render_to_mark(
        self, messages: list[Message], tools: list[Any] | None, variables: Mapping[str, Any]
    ) -> Rendering:
        """Render a conversation whose turns may be marked; raises as ``render``."""
        text, generated = self._render(messages, tools, variables, generation_prompt=False, marks=self._has_generation)
        return Rendering(messages, tools, variables, text, generated)

    def mentions(self, name: str) -> bool:
        """Return whether the template contains a word, such as the key of a message."""
        return re.search(rf"\b{re.escape(name)}\b", self.source) is not None

    def mark(self, rendering: Rendering, turns: Sequence[int]) -> list[Span]:
        """Return (start, end) in the text of the assistant's ``turns``, indices of messages, or raise a BadRowError."""
        if self._has_generation:
            return self._mark_by_generation(rendering, turns)

        # a plain conversation: its contents with the learned separators between them
        messages = rendering.messages
        is_plain = all(message.keys() == {"role", "content"} for message in messages)
        if is_plain and rendering.tools is None and not rendering.variables:
            roles = [message["role"] for message in messages]
            self._learn_separators(roles)
            contents = [message["content"] for message in messages]
            stripped_contents = [content.strip() for content in contents]  # as many templates write them
            for written_contents in (contents, stripped_contents):
                text, spans = self._compose(roles, written_contents)
                if text == rendering.text:
                    return [spans[turn] for turn in turns]

        # any other: turn by turn
        return [self._mark_turn(rendering, turn) for turn in turns]

    def can_mark(self, roles: list[str], turns: Sequence[int]) -> bool:
        """Return whether the template can render a conversation of these roles and mark ``turns`` of the assistant."""
        try:
            rendering = self.render_to_mark(_speak(roles), tools=None, variables={})
            self.mark(rendering, turns)
        except BadRowError:
            return False
        return True

    def built_in_prompt(self) -> str:
        """Return the beginning of the text that the template writes before a conversation; usually there is none."""
        try:
            text = self.render(_speak(["user", "assistant", "user"]))
        except BadRowError:  # of a template for single turns
            return ""
        for token in sorted(self.control_tokens, key=len, reverse=True):
            text = text.replace(token, "\0")
        texts_between = _SPOKEN.split(text)  # before, between and after the three contents
        if len(texts_between) != 4:  # the template leaves out a content
            return ""

        # before each user's turn is its header: what the text before the first and before the second end alike with
        beginning = texts_between[0]
        before_second_question = texts_between[2]
        while beginning and before_second_question.endswith(beginning[-1]):
            beginning = beginning[:-1]
            before_second_question = before_second_question[:-1]
        prompt = beginning.replace("\0", " ").strip()
        return textwrap.shorten(prompt.removeprefix("system").strip(), 120, placeholder=" …")

    def ends_with_control_token(self, text: str) -> bool:
        """Return whether a rendering ends with a control token and perhaps white space."""
        return text.rstrip().endswith(self.control_tokens)

    def _render(
        self,
        messages: list[Message],
        tools: list[Any] | None,
        variables: Mapping[str, Any],
        *,
        generation_prompt: bool,
        marks: bool,
    ) -> tuple[str, list[Span]]:
        """Return the text of a conversation and, if ``marks``, the parts within ``{% generation %}``."""
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            with limited_time(_SECONDS), limited_memory(MEMORY):
                rendered: Any = render_jinja_template(
                    [messages],
                    tools=tools,
                    chat_template=self.source,
                    add_generation_prompt=generation_prompt,
                    return_assistant_tokens_mask=marks,
                    **{**variables, **self._variables},
                )
        except OutOfTimeError:
            raise BadRowError(f"the chat template is still running after {_SECONDS:g} s; it may never end") from None
        except MemoryError:
            raise BadRowError(f"the chat template needs more than {MEMORY >> 20} MiB of memory") from None
        except TemplateError as error:
            raise BadRowError(f"the chat template rejects it: {first_line(error)[:_LONGEST_REASON]}") from None
        except Exception as error:  # noqa: BLE001 - a template is a program, which can raise anything
            reason = f"{type(error).__name__}: {first_line(error)[:_LONGEST_REASON]}"
            raise BadRowError(f"the chat template fails with {reason}") from None
        (text,), all_spans = rendered  # one conversation
        if len(text) > _MOST_CHARACTERS:
            num_characters = len(json.dumps([messages, tools], default=str))
            if len(text) > _MOST_TIMES * num_characters:
                raise BadRowError(f"the chat template expands it to {len(text):,} characters, far more than it has")
        return text, all_spans[0] if marks else []

    def _find_control_tokens(self, added_tokens: Iterable[str]) -> None:
        """Find the tokens around turns. Other added tokens (<think>) may be in a content, and are tokens there."""
        # a conversation without its contents is what the template writes
        messages = _speak(["user", "assistant"])
        answered = self.render(messages)
        frame = answered
        with suppress(BadRowError):  # some templates end a turn only if another follows
            frame = self.render(_speak(["user", "assistant", "user"]))
        for message in messages:
            frame = frame.replace(message["content"], "")
        written_tokens = {token for token in added_tokens if token in frame}
        self.control_tokens = tuple(sorted(written_tokens.union(self.control_tokens)))

        # the longest token that follows the answer
        _, _, after_answer = answered.partition(messages[-1]["content"])
        after_answer = after_answer.lstrip()
        end_tokens = [token for token in self.control_tokens if after_answer.startswith(token)]
        self.end_of_turn = max(end_tokens, key=len, default=None)

    def _mark_turn(self, rendering: Rendering, turn: int) -> Span:
        """Return the assistant's part of one turn, found by rendering the conversation up to it."""
        messages = rendering.messages
        tools = rendering.tools
        variables = rendering.variables
        text = rendering.text

        # the text up to the end of the turn
        text_with_turn = text
        if turn < len(messages) - 1:
            text_with_turn = self.render(messages[: turn + 1], tools, variables=variables)

        # the prompt before the turn
        if turn > 0:
            prompt = self.render(messages[:turn], tools, generation_prompt=True, variables=variables)
        elif self._generation_prompt:
            # templates refuse an empty conversation, so this is the text up to the first header of the assistant
            before_header, header, _ = text_with_turn.partition(self._generation_prompt)
            prompt = before_header + header
        else:  # no header shows where the turn begins, so nothing is taken for it
            prompt = text_with_turn
        if not (text_with_turn.startswith(prompt) and text.startswith(text_with_turn)):
            raise BadRowError(
                f"the chat template renders assistant turn {turn + 1} differently when it is generated or when other "
                "turns follow, so it cannot be marked; use --train_on last, or give --chat_template a "
                "template with {% generation %}"
            )
        begin, end = self._with_end_of_turn(text, len(prompt), len(text_with_turn))
        check_turn_rendered(messages[turn], turn, text[begin:end])
        return begin, end

    def _mark_by_generation(self, rendering: Rendering, turns: Iterable[int]) -> list[Span]:
        """Return the assistant's parts of turns that the template has marked."""
        messages = rendering.messages
        text = rendering.text
        generated = rendering.generated
        assistant_turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if len(generated) != len(assistant_turns):
            raise BadRowError(
                f"the chat template has {{% generation %}} around {len(generated)} of {len(assistant_turns)} turns of "
                "the assistant; give --chat_template a corrected template"
            )
        generated_by_turn = dict(zip(assistant_turns, generated, strict=True))
        spans: list[Span] = []
        for turn in turns:
            generated_begin, generated_end = generated_by_turn[turn]
            begin, end = self._with_end_of_turn(text, generated_begin, generated_end)
            check_turn_rendered(messages[turn], turn, text[begin:end])
            spans.append((begin, end))
        return spans

    def _with_end_of_turn(self, text: str, begin: int, end: int) -> Span:
        """Return the span with the end-of-turn token if it follows, and without whitespace after a control token."""
        if self.end_of_turn and text.startswith(self.end_of_turn, end):
            return begin, end + len(self.end_of_turn)
        turn = text[begin:end].rstrip()
        if turn.endswith(self.control_tokens):
            end = begin + len(turn)
        return begin, end

    def _learn_separators(self, roles: list[str]) -> None:
        """Learn the separators of a conversation of these roles, unless all are known."""
        ends = [None, *roles, None]
        unknown_pairs = [pair for pair in pairwise(ends) if pair not in self._separators]
        if not unknown_pairs:
            return
        self._separators.update(dict.fromkeys(unknown_pairs))  # those that cannot be learned are not tried again

        # render a conversation whose contents are easy to find, and mark it turn by turn
        messages = _speak(roles)
        spans: dict[int, Span] = {}  # of the assistant's turns
        try:
            text = self.render(messages)
            rendering = Rendering(messages, tools=None, variables={}, text=text, generated=[])
            for index, role in enumerate(roles):
                if role == "assistant":
                    spans[index] = self._mark_turn(rendering, index)
        except BadRowError:
            return
        matches = list(_SPOKEN.finditer(text))
        if [match[0] for match in matches] != [message["content"] for message in messages]:
            return

        # each separator is between two contents; a span reaches into the separators around its content
        content_spans = [(0, 0), *(match.span() for match in matches), (len(text), len(text))]
        for index, pair in enumerate(pairwise(ends)):
            _, begin = content_spans[index]
            end, _ = content_spans[index + 1]
            previous_turn_length = 0
            if index - 1 in spans:
                _, span_end = spans[index - 1]
                previous_turn_length = span_end - begin
            next_turn_length = 0
            if index in spans:
                span_begin, _ = spans[index]
                next_turn_length = end - span_begin
            if self._separators[pair] is None:
                self._separators[pair] = _Separator(text[begin:end], previous_turn_length, next_turn_length)

    def _compose(self, roles: Iterable[str], contents: Sequence[str]) -> tuple[str, dict[int, Span]]:
        """Return the text made of contents and separators, and the assistant's spans; "" if a separator is unknown."""
        texts: list[str] = []
        spans: dict[int, Span] = {}
        position = 0  # the length of the texts
        span_begin = 0  # of the turn whose content was appended last
        for index, pair in enumerate(pairwise([None, *roles, None])):
            separator = self._separators[pair]
            if separator is None:
                return "", {}
            previous_role, _ = pair
            if previous_role == "assistant":
                spans[index - 1] = (span_begin, position + separator.previous_turn_length)
            texts.append(separator.text)
            position += len(separator.text)
            span_begin = position - separator.next_turn_length
            if index < len(contents):
                texts.append(contents[index])
                position += len(contents[index])
        return "".join(texts), spans


_SPOKEN = re.compile(r"turn\d+said")


def _speak(roles: Iterable[str]) -> list[Message]:
    """Return a conversation whose contents are easy to find in a rendering."""
    return [{"role": role, "content": f"turn{index}said"} for index, role in enumerate(roles)]


def read_chosen_template(file: str, tokenizer: "CorpusTokenizer") -> str:
    """Return the template in the --chat_template ``file``, tried before sources are read; InputError if it fails."""
    template = read_chat_template(Path(file).expanduser())
    if not template.strip():
        raise InputError(f"--chat_template {file}: the file is empty; give a Jinja template")
    tokens = {"bos_token": tokenizer.bos_token or "", "eos_token": tokenizer.eos_token}
    try:
        ChatTemplate(template, tokens, (), ())
    except BadRowError as error:
        raise InputError(f"--chat_template {file}: {error}; correct the template") from None
    return template
