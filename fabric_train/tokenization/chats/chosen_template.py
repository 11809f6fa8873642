"""Read the chat template that the user has chosen instead of the tokenizer's own."""

from pathlib import Path
from typing import TYPE_CHECKING

from fabric_train.cli.errors import InputError
from fabric_train.tokenization.documents import BadRowError
from fabric_train.tokenization.tokenizers.chat_template_file import read_chat_template

if TYPE_CHECKING:
    from fabric_train.tokenization.tokenizers.tokenizer import CorpusTokenizer


def read_chosen_template(file: str, tokenizer: "CorpusTokenizer") -> str:
    """Return the template in ``file``, the argument of --chat_template.

    It is checked without loading the tokenizer, so that a fault is found before anything is read or downloaded.

    Raises:
        InputError: there is no such file, it is no template, or it cannot render a question with an answer.
    """
    from fabric_train.tokenization.chats.chat_template import ChatTemplate

    template = read_chat_template(Path(file).expanduser())
    if not template.strip():
        raise InputError(f"--chat_template {file}: the file is empty; give a Jinja template")
    tokens = {"bos_token": tokenizer.bos_token or "", "eos_token": tokenizer.eos_token}
    try:
        ChatTemplate(template, tokens, (), ())
    except BadRowError as error:
        raise InputError(f"--chat_template {file}: {error}; correct the template") from None
    return template
