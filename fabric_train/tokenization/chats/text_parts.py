"""Decide whether the texts between the control tokens of a rendering can be encoded one by one.

The ``tokenizers`` library splits a text at the added tokens, then normalizes, splits and encodes what is between them
separately. So the ids of such a text depend on nothing else, unless an added token looks at what is around it or is
matched after normalization, or the start of the whole text is treated differently.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from fabric_train.tokenization.chats.chat_template import ChatTemplate
from fabric_train.tokenization.chats.control_tokens import ControlTokens
from fabric_train.tokenization.documents import BadRowError
from fabric_train.tokenization.tokenizers.hard_strings import HARD_STRINGS
from fabric_train.tokenization.tokenizers.text_encoder import TextEncoder, open_encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_LONGEST_TRIED = 200  # characters


def open_part_encoder(tokenizer_file: Path, tokenizer: "PreTrainedTokenizerFast") -> TextEncoder | None:
    """Return an encoder of the texts between control tokens; None if they cannot be encoded one by one.

    It encodes the text of a special token as plain text.

    Args:
        tokenizer_file: the ``tokenizer.json``.
        tokenizer: the same, loaded.

    Raises:
        InputError: the file is damaged.
    """
    normalizer, pre_tokenizer = tokenizer.backend_tokenizer.normalizer, tokenizer.backend_tokenizer.pre_tokenizer
    for token in tokenizer.added_tokens_decoder.values():
        if token.single_word or token.lstrip or token.rstrip or (token.normalized and normalizer is not None):
            return None
    if pre_tokenizer is not None and b'"prepend_scheme":"first"' in pre_tokenizer.__getstate__():
        return None
    return open_encoder(tokenizer_file, special_text_is_plain=True)[0]


def gives_whole_ids(tokens: ControlTokens, template: ChatTemplate, tokenizer: "PreTrainedTokenizerFast") -> bool:
    """Return whether ``tokens`` gives chats of hard strings the ids that the tokenizer gives the whole renderings.

    These are the ids of ``apply_chat_template``, because no content has the text of a control token.
    """
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
