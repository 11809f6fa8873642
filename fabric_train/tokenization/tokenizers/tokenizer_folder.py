"""Read a *plain* Hugging Face tokenizer folder without transformers, whose import takes a second; copy it.

In a plain folder, transformers would use ``tokenizer.json`` unchanged. A folder is not plain if its other files add
tokens, change tokens or have options that are not known here.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabric_train.cli.errors import InputError
from fabric_train.files.typed_json import read_json
from fabric_train.tokenization.tokenizers.tokenizer_json import AddedToken, read_tokenizer_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE_FILE = "chat_template.jinja"
CONFIG = "tokenizer_config.json"
_OTHER_FILES = ("tokenizer.json", "special_tokens_map.json", "added_tokens.json", CHAT_TEMPLATE_FILE)
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA_TOKENS = ("extra_special_tokens", "additional_special_tokens")
# options that do not change the ids of a text if there is a tokenizer.json
_HARMLESS_OPTIONS = frozenset(
    {
        *("add_bos_token", "add_eos_token", "backend", "chat_template", "clean_up_tokenization_spaces", "errors"),
        *("is_local", "legacy", "local_files_only", "max_length", "model_input_names", "model_max_length"),
        *("name_or_path", "pad_to_multiple_of", "pad_token_type_id", "padding_side", "processor_class"),
        *("sp_model_kwargs", "stride", "tokenizer_class", "truncation_side", "truncation_strategy", "use_fast"),
        *("use_default_system_prompt", "added_tokens_decoder", *_NAMED_TOKENS, *_EXTRA_TOKENS),
    }
)
# these classes use tokenizer.json unchanged; the classes of some models build another tokenizer from it
_PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")


@dataclass(frozen=True)
class CorpusTokenizer:
    """A tokenizer's special tokens, and the files or the object from which it is saved."""

    name: str
    bos_token: str | None  # None for a tokenizer without BOS (Qwen's); documents then begin without one
    eos_token: str
    bos_token_id: int | None
    eos_token_id: int
    pad_token_id: int | None
    vocab_size: int  # the largest id plus one
    special_text_is_plain: bool
    """Whether the text of a special token in a document is encoded as text, as in the sentencepiece library, not as
    the token.
    """
    chat_template: str | None
    source: "Path | PreTrainedTokenizerFast"  # a plain folder, or transformers' tokenizer

    def save(self, folder: Path) -> None:
        """Write a Hugging Face tokenizer folder with ``tokenizer.json``."""
        if isinstance(self.source, Path):
            copy_plain_folder(self.source, folder)
        else:
            self.source.save_pretrained(folder)


@dataclass(frozen=True)
class _PlainTokens:
    """The tokens of a plain folder."""

    named: dict[str, AddedToken]  # by role, such as bos_token
    vocab_size: int


def read_plain_folder(folder: Path, name: str) -> CorpusTokenizer | None:
    """Read a tokenizer folder without transformers; return None if it is not plain, or its files do not fit together.

    Its ``tokenizer.json`` stays in memory until it, or a copy of it, is read again.

    Args:
        folder: the tokenizer's folder.
        name: the name by which the user called the tokenizer.

    Raises:
        InputError: a file is damaged, the chat template cannot be read, or the tokenizer has dropout or no EOS.
    """
    try:
        tokens = _read_plain_tokens(folder)
    except InputError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # transformers says what does not fit together
    if tokens is None:
        return None
    bos = tokens.named.get("bos_token")
    eos = tokens.named.get("eos_token")
    pad = tokens.named.get("pad_token")
    chat_template = chat_template_in(folder)
    if eos is None:
        raise no_eos(name, has_bos=bos is not None)
    return CorpusTokenizer(
        name=name,
        bos_token=bos.content if bos else None,
        eos_token=eos.content,
        bos_token_id=bos.id if bos else None,
        eos_token_id=eos.id,
        pad_token_id=pad.id if pad else None,
        vocab_size=tokens.vocab_size,
        special_text_is_plain=False,
        chat_template=chat_template,
        source=folder,
    )


def _read_plain_tokens(folder: Path) -> _PlainTokens | None:
    """Return the tokens of a folder, or None if it is not plain; other exceptions if files do not fit together."""
    config = read_object(folder / CONFIG)
    special_tokens = config
    if "added_tokens_decoder" not in config:  # an older folder names its tokens in two files
        special_tokens = config | read_object(folder / "special_tokens_map.json")
    file = folder / "tokenizer.json"
    tokenizer = read_tokenizer_json(file, keep=True)
    dropout = tokenizer.model.get("dropout")
    if dropout:
        raise InputError(
            f"{file}: with dropout {dropout}, a text gets different ids each time; set dropout to null in it"
        )
    added_tokens = {token.content: token for token in tokenizer.added_tokens}
    if not _has_plain_config(config, folder) or not _has_same_tokens(config, folder, added_tokens):
        return None
    named_tokens = {}
    for role in _NAMED_TOKENS:
        if special_tokens.get(role) is not None:
            named_tokens[role] = added_tokens[_token_text(special_tokens[role])]
    for role in _EXTRA_TOKENS:
        for token in special_tokens.get(role) or ():
            if added_tokens[_token_text(token)].normalized:
                return None  # transformers matches these before normalization
    token_ids = [*tokenizer.model["vocab"].values(), *(token.id for token in tokenizer.added_tokens)]
    return _PlainTokens(named_tokens, vocab_size=max(token_ids) + 1)


def _has_plain_config(config: dict[str, Any], folder: Path) -> bool:
    """Return whether the configuration exists and has only harmless options and at most one chat template."""
    if not config or not config.keys() <= _HARMLESS_OPTIONS:
        return False
    for role in _NAMED_TOKENS:
        token = config.get(role)
        if isinstance(token, dict) and token.get("__type") != "AddedToken":
            return False
    template = config.get("chat_template")
    has_one_template = template is None or isinstance(template, str)
    return has_one_template and not (folder / "additional_chat_templates").exists()


def _has_same_tokens(config: dict[str, Any], folder: Path, added_tokens: dict[str, AddedToken]) -> bool:
    """Return whether the tokens that the other files list are in tokenizer.json with the same properties.

    ``added_tokens`` are those of tokenizer.json, by text.
    """
    for token_id, properties in config.get("added_tokens_decoder", {}).items():
        token = AddedToken(id=int(token_id), **properties)
        if added_tokens.get(token.content) != token:
            return False
    for content, token_id in read_object(folder / "added_tokens.json").items():
        if added_tokens[content].id != token_id:
            return False
    return True


def _token_text(token: str | dict[str, Any]) -> str:
    """Return the text of a token in a configuration, which has it as text or as an object."""
    return token if isinstance(token, str) else str(token["content"])


def no_eos(name: str, *, has_bos: bool) -> InputError:
    """Return the error for a tokenizer without EOS, with which nothing would separate documents."""
    missing_tokens = "EOS token" if has_bos else "EOS token and no BOS token"
    return InputError(
        f"--tokenizer_name {name}: it has no {missing_tokens}, so nothing would separate documents; "
        "set eos_token (and bos_token) in its tokenizer_config.json"
    )


def copy_plain_folder(source: Path, target: Path) -> None:
    """Copy the tokenizer's files of a plain folder, with a transformers class that does not change its ids."""
    target.mkdir(parents=True, exist_ok=True)
    for name in _OTHER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    config = read_object(source / CONFIG)
    if config.get("tokenizer_class") in _PLAIN_CLASSES:
        shutil.copyfile(source / CONFIG, target / CONFIG)
    else:
        config["tokenizer_class"] = _PLAIN_CLASSES[0]
        (target / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_chat_template(file: Path) -> str:
    """Return the template in ``file``; InputError if there is no such file, or it cannot be read or is not UTF-8."""
    try:
        if not file.is_file():
            fault = "not a file" if file.exists() else "no such file"
            raise InputError(f"{file}: {fault}; give a Jinja template")
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise InputError(f"{file}: byte {error.start} is not UTF-8 (0x{byte:02x}); save the file as UTF-8") from None
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}; give a readable Jinja template") from None


def set_chat_template(folder: Path, template: str) -> None:
    """Make ``template`` the only chat template of a Hugging Face tokenizer folder.

    transformers prefers ``chat_template.jinja``, but llama.cpp's converter prefers ``tokenizer_config.json``.
    """
    (folder / CHAT_TEMPLATE_FILE).write_text(template, encoding="utf-8")
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    old_template = config.pop("chat_template", None)
    if old_template is not None:
        file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def chat_template_in(folder: Path) -> str | None:
    """Return the chat template of a tokenizer folder, or None if it has none; InputError if it cannot be read."""
    file = folder / CHAT_TEMPLATE_FILE
    if file.is_file():
        return read_chat_template(file)
    template = read_object(folder / CONFIG).get("chat_template")
    return template if isinstance(template, str) else None


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty one if there is no file; InputError if the file is damaged."""
    return read_json(file, dict, "download the file again") if file.exists() else {}
