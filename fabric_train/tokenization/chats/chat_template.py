"""A chat template: messages to text, and where in that text the assistant speaks.

The assistant's part of a turn begins where the prompt ends that a model would get there (the turns before it, rendered
with ``add_generation_prompt``) and ends with its end-of-turn token:

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello!<|im_end|>\\n
                                                           ^^^^^^^^^^^^^^^^

A template that has ``{% generation %}`` says so itself. Of any other the parts are found by rendering turn by turn: the
prompt before the turn and the conversation up to its end must both be beginnings of the whole conversation's rendering.
A template for which they are not (one that strips thoughts from earlier turns) cannot mark that turn.

Rendering turn by turn takes time that grows with the square of the turns. So what the template writes between two
contents, its *joints*, is taken once from a conversation rendered turn by turn. A conversation whose rendering is
character by character its contents with these joints between them needs no other rendering.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from fabric_train.tokenization.chats.chat_format import Message
from fabric_train.tokenization.chats.control_tokens import Span
from fabric_train.tokenization.documents import BadRowError

# Meta's format, as in llama-models' llama3/chat_format.py: contents without blanks around them, tools under ipython
LLAMA3_TEMPLATE = (
    "{{- '<|begin_of_text|>' }}\n"
    "{%- for message in messages %}\n"
    "    {%- set role = 'ipython' if message['role'] == 'tool' else message['role'] %}\n"
    "    {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\n"
    "{%- endif %}\n"
)
LLAMA3_CONTROL_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class _Joint:
    """What stands between two contents, or at the rendering's beginning or end.

    The first ``before`` characters belong to the assistant's turn before it, the last ``after`` to the one after it.
    """

    text: str
    before: int
    after: int


class ChatTemplate:
    """A template that renders.

    Args:
        source: Jinja, run in transformers' sandbox.
        variables: the names of special tokens that templates use (``bos_token``) and their text.
        added_tokens: the text of all tokens that the tokenizer knows beside its vocabulary.
        special_tokens: those of them that are special.

    Attributes:
        control_tokens: special tokens, and added tokens that the template writes between turns.
        end_of_turn: the control token that follows the assistant's content; None where none does.

    Raises:
        BadRowError: the template is not valid, or refuses a question and its answer.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, Any],
        added_tokens: Collection[str],
        special_tokens: Collection[str],
    ) -> None:
        self.source = source
        self._variables = dict(variables)
        self._marks_itself = _GENERATION.search(source) is not None
        self._joints: dict[tuple[str | None, str | None], _Joint | None] = {}
        self.control_tokens: tuple[str, ...] = tuple(special_tokens)
        self.end_of_turn: str | None = None
        self._find_control_tokens(added_tokens)
        question = _speak(["user"])
        begin, prompt = self.render(question), self.render(question, generation_prompt=True)
        self._generation_prompt = prompt.removeprefix(begin) if prompt.startswith(begin) else ""

    def render(self, messages: list[Message], tools: list[Any] | None = None, generation_prompt: bool = False) -> str:
        """Return the text of a conversation, up to where the assistant speaks next with ``generation_prompt``.

        Raises:
            BadRowError: the template refuses the conversation.
        """
        return self._render(messages, tools, generation_prompt, False)[0]

    def mark(self, messages: list[Message], tools: list[Any] | None, turns: Sequence[int]) -> tuple[str, list[Span]]:
        """Return the text of a conversation and the assistant's part in each of ``turns``, indices of its messages.

        Raises:
            BadRowError: the template refuses the conversation, or cannot mark these turns.
        """
        if self._marks_itself:
            return self._marked_by_itself(messages, tools, turns)
        text = self.render(messages, tools)
        if tools is None and all(message.keys() == {"role", "content"} for message in messages):
            roles = [message["role"] for message in messages]
            self._learn(roles)
            contents = [message["content"] for message in messages]
            for composed in (contents, [content.strip() for content in contents]):
                whole, spans = self._compose(roles, composed)
                if whole == text:
                    return text, [spans[turn] for turn in turns]
        return text, [self._mark_turn(messages, tools, turn, text) for turn in turns]

    def can_mark(self, roles: list[str], turns: Sequence[int]) -> bool:
        """Return whether the template renders a conversation of these roles and marks the assistant's ``turns``."""
        try:
            self.mark(_speak(roles), None, turns)
        except BadRowError:
            return False
        return True

    def ends_with_control_token(self, text: str) -> bool:
        """Return whether nothing but blanks follows the last control token in a rendering."""
        return text.rstrip().endswith(self.control_tokens)

    def _render(
        self, messages: list[Message], tools: list[Any] | None, generation_prompt: bool, marks: bool
    ) -> tuple[str, list[Span]]:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered: Any = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=self.source,
                add_generation_prompt=generation_prompt,
                return_assistant_tokens_mask=marks,
                **self._variables,
            )
        except (TemplateError, TypeError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise BadRowError(f"the chat template refuses it: {reason}") from None
        (text,), spans = rendered
        return text, spans[0] if marks else []

    def _find_control_tokens(self, added_tokens: Iterable[str]) -> None:
        """Find what frames turns. Other added tokens (<think>) may be in a content, and are tokens there too."""
        contents = [message["content"] for message in _speak(["user", "assistant"])]
        try:
            frame = self.render(_speak(["user", "assistant", "user"]))
        except BadRowError:
            frame = self.render(_speak(["user", "assistant"]))
        for content in contents:
            frame = frame.replace(content, "")
        written = {token for token in added_tokens if token in frame}
        self.control_tokens = tuple(sorted(written.union(self.control_tokens)))
        after = self.render(_speak(["user", "assistant"])).partition(contents[1])[2].lstrip()
        self.end_of_turn = max(
            (token for token in self.control_tokens if after.startswith(token)), key=len, default=None
        )

    def _mark_turn(self, messages: list[Message], tools: list[Any] | None, turn: int, text: str) -> Span:
        """Mark a turn by rendering the conversation up to its beginning and to its end."""
        until = text if turn == len(messages) - 1 else self.render(messages[: turn + 1], tools)
        if turn:
            prompt = self.render(messages[:turn], tools, generation_prompt=True)
        else:  # templates refuse a conversation without messages
            begin, found, _ = until.partition(self._generation_prompt or until)
            prompt = begin + found
        if not (until.startswith(prompt) and text.startswith(until)):
            raise BadRowError(
                f"the chat template renders turn {turn + 1}, the assistant's, otherwise when it is generated or others "
                "follow, so it cannot be marked; use --train_on last, or put a chat_template.jinja with "
                "{% generation %} into the tokenizer's folder"
            )
        span = self._with_end_of_turn(text, len(prompt), len(until))
        _refuse_left_out(messages, turn, text, span)
        return span

    def _marked_by_itself(
        self, messages: list[Message], tools: list[Any] | None, turns: Iterable[int]
    ) -> tuple[str, list[Span]]:
        text, marked = self._render(messages, tools, False, True)
        spoken = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if len(marked) != len(spoken):
            raise BadRowError(
                f"the chat template has {{% generation %}} around {len(marked)} of {len(spoken)} turns of the assistant"
            )
        spans = {
            turn: self._with_end_of_turn(text, begin, end) for turn, (begin, end) in zip(spoken, marked, strict=True)
        }
        for turn in turns:
            _refuse_left_out(messages, turn, text, spans[turn])
        return text, [spans[turn] for turn in turns]

    def _with_end_of_turn(self, text: str, begin: int, end: int) -> Span:
        """Let the span end with the turn's control token: without the blanks after it, with it if it comes next."""
        if self.end_of_turn and text.startswith(self.end_of_turn, end):
            return begin, end + len(self.end_of_turn)
        turn = text[begin:end].rstrip()
        return begin, begin + len(turn) if turn.endswith(self.control_tokens) else end

    def _learn(self, roles: list[str]) -> None:
        """Learn the joints of a conversation of these roles where some are unknown."""
        ends = [None, *roles, None]
        unknown = [pair for pair in pairwise(ends) if pair not in self._joints]
        if not unknown:
            return
        self._joints.update(dict.fromkeys(unknown))  # what cannot be learnt is not tried again
        messages = _speak(roles)
        try:
            text = self.render(messages)
            spoken = [index for index, role in enumerate(roles) if role == "assistant"]
            spans = {index: self._mark_turn(messages, None, index, text) for index in spoken}
        except BadRowError:
            return
        borders = [(0, 0), *(match.span() for match in _SPOKEN.finditer(text)), (len(text), len(text))]
        if [text[begin:end] for begin, end in borders[1:-1]] != [message["content"] for message in messages]:
            return
        for index, ((_, begin), (end, _)) in enumerate(pairwise(borders)):
            before = spans[index - 1][1] - begin if index - 1 in spans else 0
            after = end - spans[index][0] if index in spans else 0
            pair = ends[index], ends[index + 1]
            self._joints[pair] = self._joints[pair] or _Joint(text[begin:end], before, after)

    def _compose(self, roles: Iterable[str], contents: Sequence[str]) -> tuple[str, dict[int, Span]]:
        """Return contents with the joints between them, and the spans of the assistant's turns; "" without joints."""
        text, spans = [], {}
        begin = position = 0
        for index, pair in enumerate(pairwise([None, *roles, None])):
            joint = self._joints[pair]
            if joint is None:
                return "", {}
            if pair[0] == "assistant":
                spans[index - 1] = begin, position + joint.before
            position += len(joint.text)
            begin = position - joint.after
            text.append(joint.text)
            if index < len(contents):
                text.append(contents[index])
                position += len(contents[index])
        return "".join(text), spans


_SPOKEN = re.compile(r"turn\d+said")


def _speak(roles: Iterable[str]) -> list[Message]:
    """Return a conversation whose contents can be found again."""
    return [{"role": role, "content": f"turn{index}said"} for index, role in enumerate(roles)]


def _refuse_left_out(messages: list[Message], turn: int, text: str, span: Span) -> None:
    """Refuse a turn of which the template leaves something out, as some do with thoughts; blanks may change."""
    content, rendered = messages[turn].get("content", ""), text[span[0] : span[1]]
    if content.strip() not in rendered and "".join(content.split()) not in "".join(rendered.split()):
        raise BadRowError(
            f"the chat template leaves out a part of turn {turn + 1}, which would not be trained on; put a "
            "chat_template.jinja that keeps it into the tokenizer's folder"
        )
