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

A template is a program by strangers: it is tried in a process of its own first, so that one that takes all it can get
never gets it here, and each rendering has limits of processor time and memory.
"""

import json
import os
import re
import resource
import select
import signal
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from fabric_train.cli.errors import InputError, first_line
from fabric_train.reading.documents import BadRowError, Message, check_surrogates
from fabric_train.tokenization.chats.control_tokens import Span
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
_SECONDS_OF_CHILD = 30  # of processor time, for all renderings of a trial
_LONGEST_TRIAL = 300.0  # seconds; the machine may be busy
_MOST_CHARACTERS = 1 << 24  # of a rendering; more only if the conversation itself is so long
_MOST_TIMES = 16  # as long as its conversation is such a rendering at most
_LONGEST_REASON = 300  # characters of a template's own message
_tried: set[str] = set()  # the sources that have been tried in a process of their own


@dataclass(frozen=True)
class _Separator:
    """The text between two contents, or before the first, or after the last."""

    text: str
    before: int  # its first characters that belong to the assistant's turn before it
    after: int  # its last ones that belong to the assistant's turn after it


@dataclass(frozen=True)
class Rendering:
    """A conversation with its tools and variables, and the text that the template makes of them."""

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
        """Raise BadRowError if a process of its own finds the source unusable; each source is tried once."""
        if self.source in _tried:
            return
        import transformers.utils.chat_template_utils  # noqa: F401 - slow: here, and not in the child

        if fault := find_fault_in_child(lambda: self._learn(added_tokens)):
            raise BadRowError(fault)
        _tried.add(self.source)

    def _learn(self, added_tokens: Collection[str]) -> None:
        self._find_control_tokens(added_tokens)
        question = _speak(["user"])
        begin = self.render(question)
        prompt = self.render(question, generation_prompt=True)
        self._generation_prompt = prompt.removeprefix(begin) if prompt.startswith(begin) else ""

    def render(
        self,
        messages: list[Message],
        tools: list[Any] | None = None,
        generation_prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a conversation; with ``generation_prompt``, also the header of the assistant's turn.

        ``variables`` are what the template gets besides messages and tools, such as enable_thinking.
        """
        return self._render(messages, tools, variables or {}, generation_prompt=generation_prompt, marks=False)[0]

    def render_to_mark(
        self, messages: list[Message], tools: list[Any] | None, variables: Mapping[str, Any]
    ) -> Rendering:
        """Render a conversation whose turns may be marked; raises as ``render``."""
        text, generated = self._render(messages, tools, variables, generation_prompt=False, marks=self._has_generation)
        return Rendering(messages, tools, variables, text, generated)

    def mentions(self, name: str) -> bool:
        """Return whether the template has a word in it, such as the key of a message."""
        return re.search(rf"\b{re.escape(name)}\b", self.source) is not None

    def mark(self, rendering: Rendering, turns: Sequence[int]) -> list[Span]:
        """Return (start, end) in the text of the assistant's ``turns``, indices of messages, or raise a BadRowError."""
        messages = rendering.messages
        text = rendering.text
        if self._has_generation:
            return self._mark_by_generation(rendering, turns)
        is_plain = all(message.keys() == {"role", "content"} for message in messages)
        if is_plain and rendering.tools is None and not rendering.variables:
            roles = [message["role"] for message in messages]
            self._learn_separators(roles)
            contents = [message["content"] for message in messages]
            for composed in (contents, [content.strip() for content in contents]):
                whole, spans = self._compose(roles, composed)
                if whole == text:
                    return [spans[turn] for turn in turns]
        return [self._mark_turn(rendering, turn) for turn in turns]

    def can_mark(self, roles: list[str], turns: Sequence[int]) -> bool:
        """Return whether the template can render a conversation of these roles and mark ``turns`` of the assistant."""
        try:
            self.mark(self.render_to_mark(_speak(roles), None, {}), turns)
        except BadRowError:
            return False
        return True

    def built_in_prompt(self) -> str:
        """Return the start of the text that the template itself writes before a conversation; mostly there is none."""
        try:
            text = self.render(_speak(["user", "assistant", "user"]))
        except BadRowError:  # of a template for single turns
            return ""
        for token in sorted(self.control_tokens, key=len, reverse=True):
            text = text.replace(token, "\0")
        begin, *between = _SPOKEN.split(text)
        if len(between) != 3:  # the template leaves out a content
            return ""
        while begin and between[1].endswith(begin[-1]):  # the header of a user's turn
            begin = begin[:-1]
            between[1] = between[1][:-1]
        own = begin.replace("\0", " ").strip()
        return textwrap.shorten(own.removeprefix("system").strip(), 120, placeholder=" …")

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
            raise BadRowError(f"the chat template is not done after {_SECONDS:g} s; it may never end") from None
        except MemoryError:
            raise BadRowError(f"the chat template takes more than {MEMORY >> 20} MiB of memory") from None
        except TemplateError as error:
            raise BadRowError(f"the chat template refuses it: {first_line(error)[:_LONGEST_REASON]}") from None
        except Exception as error:  # noqa: BLE001 - a template is a program, which can raise anything
            reason = f"{type(error).__name__}: {first_line(error)[:_LONGEST_REASON]}"
            raise BadRowError(f"the chat template fails with {reason}") from None
        (text,), spans = rendered
        if len(text) > _MOST_CHARACTERS and len(text) > _MOST_TIMES * len(json.dumps([messages, tools], default=str)):
            raise BadRowError(f"the chat template makes {len(text):,} characters of it, far more than it has")
        return text, spans[0] if marks else []

    def _find_control_tokens(self, added_tokens: Iterable[str]) -> None:
        """Find the tokens around turns. Other added tokens (<think>) can be in a content, and are tokens there."""
        contents = [message["content"] for message in _speak(["user", "assistant"])]
        answered = frame = self.render(_speak(["user", "assistant"]))
        with suppress(BadRowError):  # some templates end a turn only if another follows
            frame = self.render(_speak(["user", "assistant", "user"]))
        for content in contents:
            frame = frame.replace(content, "")
        written = {token for token in added_tokens if token in frame}
        self.control_tokens = tuple(sorted(written.union(self.control_tokens)))
        after = answered.partition(contents[1])[2].lstrip()
        self.end_of_turn = max((one for one in self.control_tokens if after.startswith(one)), key=len, default=None)

    def _mark_turn(self, rendering: Rendering, turn: int) -> Span:
        messages = rendering.messages
        tools = rendering.tools
        text = rendering.text
        is_last = turn == len(messages) - 1
        until = text if is_last else self.render(messages[: turn + 1], tools, variables=rendering.variables)
        if turn:
            prompt = self.render(messages[:turn], tools, generation_prompt=True, variables=rendering.variables)
        else:  # templates refuse an empty conversation
            begin, found, _ = until.partition(self._generation_prompt or until)
            prompt = begin + found
        if not (until.startswith(prompt) and text.startswith(until)):
            raise BadRowError(
                f"the chat template renders turn {turn + 1}, the assistant's, differently when it is generated or "
                "others follow, so it cannot be marked; use --train_on last, or give a template with "
                "{% generation %} by --chat_template"
            )
        span = self._with_end_of_turn(text, len(prompt), len(until))
        check_turn_rendered(messages[turn], turn, text[slice(*span)])
        return span

    def _mark_by_generation(self, rendering: Rendering, turns: Iterable[int]) -> list[Span]:
        messages = rendering.messages
        text = rendering.text
        marked = rendering.generated
        spoken = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if len(marked) != len(spoken):
            raise BadRowError(
                f"the chat template has {{% generation %}} around {len(marked)} of {len(spoken)} turns of the "
                "assistant; give a corrected one by --chat_template"
            )
        spans = {turn: self._with_end_of_turn(text, *span) for turn, span in zip(spoken, marked, strict=True)}
        for turn in turns:
            check_turn_rendered(messages[turn], turn, text[slice(*spans[turn])])
        return [spans[turn] for turn in turns]

    def _with_end_of_turn(self, text: str, begin: int, end: int) -> Span:
        """Return the span with the end-of-turn token if it follows, and without whitespace after a control token."""
        if self.end_of_turn and text.startswith(self.end_of_turn, end):
            return begin, end + len(self.end_of_turn)
        turn = text[begin:end].rstrip()
        return begin, begin + len(turn) if turn.endswith(self.control_tokens) else end

    def _learn_separators(self, roles: list[str]) -> None:
        """Learn the separators of a conversation of these roles, unless all are known."""
        ends = [None, *roles, None]
        unknown = [pair for pair in pairwise(ends) if pair not in self._separators]
        if not unknown:
            return
        self._separators.update(dict.fromkeys(unknown))  # those that cannot be learned are not tried again
        messages = _speak(roles)
        try:
            rendering = Rendering(messages, None, {}, self.render(messages), [])
            text = rendering.text
            spoken = [index for index, role in enumerate(roles) if role == "assistant"]
            spans = {index: self._mark_turn(rendering, index) for index in spoken}
        except BadRowError:
            return
        borders = [(0, 0), *(match.span() for match in _SPOKEN.finditer(text)), (len(text), len(text))]
        if [text[begin:end] for begin, end in borders[1:-1]] != [message["content"] for message in messages]:
            return
        for index, ((_, begin), (end, _)) in enumerate(pairwise(borders)):
            before = spans[index - 1][1] - begin if index - 1 in spans else 0
            after = end - spans[index][0] if index in spans else 0
            pair = ends[index], ends[index + 1]
            self._separators[pair] = self._separators[pair] or _Separator(text[begin:end], before, after)

    def _compose(self, roles: Iterable[str], contents: Sequence[str]) -> tuple[str, dict[int, Span]]:
        """Return the text of contents and separators, and the assistant's spans; "" if a separator is unknown."""
        text = []
        spans = {}
        begin = position = 0
        for index, pair in enumerate(pairwise([None, *roles, None])):
            separator = self._separators[pair]
            if separator is None:
                return "", {}
            if pair[0] == "assistant":
                spans[index - 1] = begin, position + separator.before
            position += len(separator.text)
            begin = position - separator.after
            text.append(separator.text)
            if index < len(contents):
                text.append(contents[index])
                position += len(contents[index])
        return "".join(text), spans


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


class OutOfTimeError(BaseException):
    """The time is over. It is not an ``Exception``: no library that catches those lets the program go on."""


@contextmanager
def limited_time(seconds: float) -> Iterator[None]:
    """Raise OutOfTimeError in the block after ``seconds`` of this process's processor time. Main thread only."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGPROF, interrupt)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)  # again each second: an exception in a destructor is lost
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextmanager
def limited_memory(num_bytes: int) -> Iterator[None]:
    """Let allocations in the block raise MemoryError at ``num_bytes`` more address space than before (Linux only)."""
    if sys.platform != "linux":
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    most = int(os.pread(_open_statm(os.getpid()), 64, 0).split()[0]) * resource.getpagesize() + num_bytes
    lowest = min([most, *(limit for limit in before if limit != resource.RLIM_INFINITY)])
    resource.setrlimit(resource.RLIMIT_AS, (lowest, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@lru_cache(maxsize=1)
def _open_statm(_process: int) -> int:
    """Return a descriptor of the file with this process's size in pages; a forked process needs its own."""
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)


def find_fault_in_child(attempt: Callable[[], object]) -> str | None:
    """Return the message of the BadRowError that ``attempt`` raises in a forked process, None if it raises none.

    The child is killed if it does not end. ``attempt`` must touch no device and wait for no other thread.
    """
    if sys.platform != "linux":
        return None
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _attempt(attempt, writer)
    os.close(writer)
    text = b""
    is_over = False
    try:
        while not is_over and select.select([reader], [], [], _LONGEST_TRIAL)[0]:
            part = os.read(reader, 1 << 16)
            text = text + part
            is_over = not part
    finally:
        os.close(reader)
        if not is_over:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return "the chat template was stopped: it does not end, or crashes"
    return text.decode() or None


def _attempt(attempt: Callable[[], object], writer: int) -> None:
    """End this process, a forked child, after ``attempt``; write the message of its BadRowError."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM):  # the parent's handlers are not for the child
            signal.signal(number, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        with suppress(ValueError):  # a lower limit is set already
            resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS_OF_CHILD, _SECONDS_OF_CHILD))
        try:
            attempt()
        except BadRowError as error:
            os.write(writer, str(error).encode(errors="backslashreplace"))
    finally:
        os._exit(0)  # any other exception: the parent will have it, too
