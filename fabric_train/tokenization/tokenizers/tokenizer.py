"""Load a tokenizer: a *plain* Hugging Face folder without transformers, whose import takes a second; others with it.

In a plain folder, transformers would use ``tokenizer.json`` unchanged. ``tokenizer_model.py`` loads with transformers:
a folder whose other files add tokens, change tokens or have options that are not known here, and a tokenizer.model.
"""

import gc
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from fabric_train.cli.errors import InputError
from fabric_train.files.regular_file import check_not_pointer, open_regular, read_json
from fabric_train.reading.hf_datasets import hub_fault, is_hub_name

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
_TOKENIZER_FILES = (
    *("tokenizer*", "*.jinja", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "config.json"),
)


@dataclass(frozen=True)
class AddedToken:
    """A token that is matched in the text itself, before the model gets it."""

    id: int
    content: str
    single_word: bool  # whether it must have word borders around it
    lstrip: bool  # whether it includes the whitespace before it; `rstrip`: after it
    rstrip: bool
    normalized: bool  # whether it is matched after normalization
    special: bool


@dataclass(frozen=True)
class TokenizerJson:
    """The parts of a ``tokenizer.json``; all but ``added_tokens`` are the parsed JSON."""

    model: dict[str, Any]
    normalizer: dict[str, Any] | None
    pre_tokenizer: dict[str, Any] | None
    added_tokens: tuple[AddedToken, ...]


_kept: list[tuple[bytes, TokenizerJson]] = []  # at most one file's bytes and content


def read_tokenizer_json(file: Path, *, keep: bool = False) -> TokenizerJson:
    """Read ``file``, ValueError if it is no such file; ``keep`` it in memory until it, or a copy, is read again."""
    with open_regular(file, "fetch the file again") as opened:
        raw = opened.read()
    content = next((content for kept, content in _kept if kept == raw), None) or _parse(raw)
    _kept[:] = [(raw, content)] if keep else []
    return content


def _parse(raw: bytes) -> TokenizerJson:
    with _without_garbage_collection():
        content = orjson.loads(raw)
    try:
        return TokenizerJson(
            model=dict(content["model"]),
            normalizer=content.get("normalizer"),
            pre_tokenizer=content.get("pre_tokenizer"),
            added_tokens=tuple(AddedToken(**token) for token in content.get("added_tokens") or ()),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is not a tokenizer.json: {error}") from None


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Halve the time to parse 280,000 merges: each is a list, which the collector would visit again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def read_chat_template(file: Path) -> str:
    """Return the template in ``file``; InputError if there is no such file, or it cannot be read or is not UTF-8."""
    try:
        if not file.is_file():
            raise InputError(f"{file}: {'not a file' if file.exists() else 'no such file'}; give a Jinja template")
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{file}: byte {error.start} is not UTF-8 (0x{error.object[error.start]:02x}); save the file as UTF-8"
        ) from None
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}; give a Jinja template that can be read") from None


def set_chat_template(folder: Path, template: str) -> None:
    """Make ``template`` the chat template of a Hugging Face tokenizer folder, in the only place where one is.

    transformers prefers ``chat_template.jinja``, but llama.cpp's converter prefers ``tokenizer_config.json``.
    """
    (folder / CHAT_TEMPLATE_FILE).write_text(template, encoding="utf-8")
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    if config.pop("chat_template", None) is not None:
        file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class CorpusTokenizer:
    """A tokenizer's special tokens, and the files or the object that it is saved from."""

    name: str
    bos_token: str | None  # None for a tokenizer without BOS (Qwen's); documents then begin without one
    eos_token: str
    bos_token_id: int | None
    eos_token_id: int
    pad_token_id: int | None
    vocab_size: int  # the largest id plus one
    # whether the text of a special token in a document is encoded as text, as in the sentencepiece library, not
    # as the token
    special_text_is_plain: bool
    chat_template: str | None
    source: "Path | PreTrainedTokenizerFast"  # a plain folder, or transformers' tokenizer

    def save(self, folder: Path) -> None:
        """Write a Hugging Face tokenizer folder with ``tokenizer.json``."""
        if isinstance(self.source, Path):
            copy_plain_folder(self.source, folder)
        else:
            self.source.save_pretrained(folder)


def find_tokenizer_json(name: str) -> Path | None:
    """Return the ``tokenizer.json`` that ``load_tokenizer`` uses unchanged, or None if it builds one."""
    folder, model_file = _find(name)
    file = folder / "tokenizer.json"
    return file if model_file is None and file.is_file() else None


def load_tokenizer(name: str) -> CorpusTokenizer:
    """Load the tokenizer called ``name``: a folder, a ``tokenizer.json`` or ``tokenizer.model`` file, or a hub name.

    A ``tokenizer.json`` is used unchanged: the classes that transformers chooses for some model families (such as
    ``LlamaTokenizer``) rebuild it and give other ids. transformers is imported only if ``read_plain_folder`` returns
    None. InputError if there is no such tokenizer, a file is damaged, or the tokenizer has no fast version or no EOS.
    """
    folder, model_file = _find(name)
    plain = read_plain_folder(folder, name) if model_file is None else None
    if plain is not None:
        return plain
    from fabric_train.tokenization.tokenizers.tokenizer_model import load_with_transformers  # slow to import

    return load_with_transformers(name, folder, model_file)


def _find(name: str) -> tuple[Path, Path | None]:
    """Return the tokenizer's folder and its ``tokenizer.model``, or None to load the folder itself."""
    path = Path(name).expanduser()
    if is_hub_name(name):
        path = _from_hub(name)
    if path.is_file():
        check_not_pointer(path)
        if path.name == "tokenizer.json":
            return path.parent, None
        if path.suffix == ".json":
            raise InputError(f"--tokenizer_name {path}: give the folder with tokenizer.json, or a tokenizer.model file")
        return path.parent, path
    if not path.is_dir():
        raise InputError(f"--tokenizer_name {name}: no such file or folder; give an existing path or a hub name")
    if (path / "tokenizer.json").is_file() or (path / "merges.txt").is_file():
        return path, None
    if (path / "tokenizer.model").is_file():
        check_not_pointer(path / "tokenizer.model")
        return path, path / "tokenizer.model"
    raise InputError(f"--tokenizer_name {name}: no tokenizer.json and no tokenizer.model in it; give another folder")


def _from_hub(name: str) -> Path:
    """Download only the tokenizer's files, never weights; return their folder."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    try:
        return Path(snapshot_download(name, allow_patterns=list(_TOKENIZER_FILES)))
    except (OSError, ValueError) as error:
        raise hub_fault("--tokenizer_name", name, error) from None


def read_plain_folder(folder: Path, name: str) -> CorpusTokenizer | None:
    """Read the tokenizer called ``name`` in a folder; return None if it is not plain, or its files do not fit together.

    Its ``tokenizer.json`` stays in memory until it, or a copy of it, is read again. InputError if one of its files is
    damaged, the chat template cannot be read, or the tokenizer has dropout or no EOS.
    """
    try:
        config = read_object(folder / CONFIG)
        given = config if "added_tokens_decoder" in config else config | read_object(folder / "special_tokens_map.json")
        content = read_tokenizer_json(folder / "tokenizer.json", keep=True)
        if content.model.get("dropout"):
            file = folder / "tokenizer.json"
            share = content.model["dropout"]
            raise InputError(f"{file}: dropout {share} gives a text other ids each time; set dropout to null in it")
        added = {token.content: token for token in content.added_tokens}
        if not (_is_plain(config, folder) and _agree(config, folder, added)):
            return None
        named = {role: added[_text(given[role])] for role in _NAMED_TOKENS if given.get(role) is not None}
        if any(added[_text(token)].normalized for role in _EXTRA_TOKENS for token in given.get(role) or ()):
            return None  # transformers matches these before normalization
        ids = (*content.model["vocab"].values(), *(token.id for token in content.added_tokens))
        vocab_size = max(ids) + 1
    except InputError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    bos, eos, pad = (named.get(role) for role in ("bos_token", "eos_token", "pad_token"))
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
        vocab_size=vocab_size,
        special_text_is_plain=False,
        chat_template=chat_template,
        source=folder,
    )


def no_eos(name: str, *, has_bos: bool) -> InputError:
    """Return the error for a tokenizer without EOS, after which documents could not be told apart."""
    lacking = "EOS token" if has_bos else "EOS token and no BOS token"
    return InputError(
        f"--tokenizer_name {name}: it has no {lacking}, so nothing would separate documents; "
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


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file, an empty one if there is no file; InputError if the file is damaged."""
    return read_json(file, dict, "fetch the file again") if file.exists() else {}


def _is_plain(config: dict[str, Any], folder: Path) -> bool:
    """Return whether the configuration exists and has only harmless options and at most one chat template."""
    template = config.get("chat_template")
    token_objects = [config[name] for name in _NAMED_TOKENS if isinstance(config.get(name), dict)]
    return (
        bool(config)
        and config.keys() <= _HARMLESS_OPTIONS
        and all(token.get("__type") == "AddedToken" for token in token_objects)
        and (template is None or isinstance(template, str))
        and not (folder / "additional_chat_templates").exists()
    )


def _agree(config: dict[str, Any], folder: Path, added: dict[str, AddedToken]) -> bool:
    """Return whether the tokens that the other files list are in tokenizer.json with the same properties."""
    listed = [AddedToken(id=int(index), **token) for index, token in config.get("added_tokens_decoder", {}).items()]
    ids = read_object(folder / "added_tokens.json")
    return all(added.get(token.content) == token for token in listed) and all(
        added[content].id == index for content, index in ids.items()
    )


def _text(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def chat_template_in(folder: Path) -> str | None:
    """Return the chat template of a tokenizer folder, or None if it has none; InputError if it cannot be read."""
    file = folder / CHAT_TEMPLATE_FILE
    if file.is_file():
        return read_chat_template(file)
    template = read_object(folder / CONFIG).get("chat_template")
    return template if isinstance(template, str) else None
