"""Make token ids from prompts, which are texts or chats."""

import sys
from dataclasses import dataclass
from typing import Any

from fabric_train.cli.errors import InputError
from fabric_train.inference.prompt_file import Prompt
from fabric_train.reading.documents import BadRowError
from fabric_train.tokenization.chats.chat_encoder import own_template
from fabric_train.tokenization.chats.chat_template import ChatTemplate, Rendering
from fabric_train.tokenization.chats.shown_messages import ShownMessages


class PromptEncoder:
    """Make the token ids of prompts.

    ``end_ids`` has the token that ends the assistant's turn, if prompts are chats and the template writes one.
    """

    def __init__(self, tokenizer: Any, name: str, *, prompts_chats: bool) -> None:
        """``name`` is the model's name in messages; with ``prompts_chats``, prompts may be chats."""
        self._tokenizer = tokenizer
        self._template: ChatTemplate | None = None
        self._shown: ShownMessages | None = None
        self.not_shown: set[str] = set()  # keys of messages in files that the template does not show, so far
        self.end_ids: tuple[int, ...] = ()
        if not prompts_chats:
            return
        self._template = own_template(tokenizer, f"give a chat model instead of {name}")
        if self._template is None:
            raise InputError(
                f"{name} has no chat template, because it is a base model that only continues text; leave out "
                "--chat, --system and messages, or give a chat model"
            )
        self._shown = ShownMessages(self._template)
        if self._template.end_of_turn:
            self.end_ids = (tokenizer.convert_tokens_to_ids(self._template.end_of_turn),)

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the ids of a prompt: a text after one BOS, or a chat in the template's form.

        Raise an InputError if the template refuses a chat, or leaves out a part of a chat that was read from a file.
        """
        content = prompt.content
        if isinstance(content, str):
            return encode_text(self._tokenizer, content)
        assert self._template is not None
        assert self._shown is not None
        messages = self._shown.messages(content)
        variables = content.template_variables
        try:
            text = self._template.render(messages, content.tools, generation_prompt=True, variables=variables)
            if prompt.is_from_file:
                rendering = Rendering(messages, content.tools, variables, text, generated=[], is_prompt=True)
                self.not_shown |= self._shown.check(rendering, frozenset())
        except BadRowError as error:
            raise InputError(f"{prompt.place}: {error}") from None
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Return the text's ids after exactly one BOS, as at the start of a document in training."""
    token_ids = list(tokenizer.encode(text, add_special_tokens=False))
    bos_id = tokenizer.bos_token_id
    if bos_id is None or token_ids[:1] == [bos_id]:
        return token_ids
    return [bos_id, *token_ids]


@dataclass(frozen=True)
class PromptLimits:
    """A model's limits: token ids below ``vocab_size``, and ``max_positions`` tokens, which is None without a limit."""

    vocab_size: int
    max_positions: int | None


def limits_of(model: Any) -> PromptLimits:
    """Return the size of a model's vocabulary and its number of positions, which is None without a limit."""
    vocab_size: int = model.get_input_embeddings().weight.shape[0]
    max_positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return PromptLimits(vocab_size, max_positions)


def encode_prompts(
    encoder: PromptEncoder, prompts: list[Prompt], limits: PromptLimits, num_tokens: int, option: str = "--num_tokens"
) -> list[list[int]]:
    """Return the ids of prompts; an InputError lists all that have no room for the ``num_tokens`` of ``option``.

    A line on standard error names the parts of chats in files that the chat template does not show.
    """
    encoded = [encoder.encode(prompt) for prompt in prompts]
    faults = []
    if encoder.not_shown:
        print(f"the chat template does not show {', '.join(sorted(encoder.not_shown))}", file=sys.stderr)
    for prompt, token_ids in zip(prompts, encoded, strict=True):
        if not token_ids:
            faults.append(f"{prompt.place} has no tokens; give some text")
        elif max(token_ids) >= limits.vocab_size:
            faults.append(
                f"{prompt.place} has token id {max(token_ids)}, but the model's vocabulary ends at "
                f"{limits.vocab_size - 1}; use the model's own tokenizer"
            )
        elif limits.max_positions is not None and len(token_ids) + num_tokens > limits.max_positions:
            faults.append(
                f"{prompt.place} has {len(token_ids)} tokens, which with {option} {num_tokens} exceeds the model's "
                f"{limits.max_positions} positions; shorten it, or give a smaller {option}"
            )
    if faults:
        raise InputError(*faults)
    return encoded
