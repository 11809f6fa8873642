"""Load a tokenizer: from a Hugging Face folder or hub name, a SentencePiece model, or Llama-3's tiktoken file."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabric_train.cli.errors import InputError, first_line
from fabric_train.files.regular_file import check_not_pointer
from fabric_train.files.typed_json import read_json
from fabric_train.tokenization.reading.sources import hub_fault, is_hub_name
from fabric_train.tokenization.tokenizers import tokenizer_folder
from fabric_train.tokenization.tokenizers.text_encoder import load_fast, panics_as_errors
from fabric_train.tokenization.tokenizers.tokenizer_folder import TokenizerFolder, copy_plain_folder, read_plain_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_TOKENIZER_FILES = (
    "tokenizer*",
    "*.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "config.json",
)


@dataclass(frozen=True)
class CorpusTokenizer:
    """A tokenizer's special tokens, and the files or the object that it is saved from.

    Attributes:
        bos_token: None for a tokenizer without BOS (Qwen's); documents then begin without one.
        vocab_size: the largest id plus one.
        special_text_is_plain: whether the text of a special token in a document is encoded as text, as in the
            sentencepiece library, not as the token.
        source: a folder that ``read_plain_folder`` accepts, or transformers' tokenizer.
    """

    name: str
    bos_token: str | None
    eos_token: str
    bos_token_id: int | None
    eos_token_id: int
    pad_token_id: int | None
    vocab_size: int
    special_text_is_plain: bool
    chat_template: str | None
    source: "Path | PreTrainedTokenizerFast"

    def save(self, folder: Path) -> None:
        """Write a Hugging Face tokenizer folder with ``tokenizer.json``."""
        if isinstance(self.source, Path):
            copy_plain_folder(self.source, folder)
        else:
            self.source.save_pretrained(folder)


def find_tokenizer_json(name: str) -> Path | None:
    """Return the ``tokenizer.json`` that ``load_tokenizer`` uses unchanged, or None if it builds one.

    Raises:
        InputError: there is no such tokenizer.
    """
    folder, model_file = _find(name)
    file = folder / "tokenizer.json"
    return file if model_file is None and file.is_file() else None


def load_tokenizer(name: str) -> CorpusTokenizer:
    """Load the tokenizer called ``name``: a folder, a ``tokenizer.json`` or ``tokenizer.model`` file, or a hub name.

    A ``tokenizer.json`` is used unchanged: the classes that transformers chooses for some model families (such as
    ``LlamaTokenizer``) rebuild it and give other ids. transformers is imported only if ``read_plain_folder`` returns
    None.

    Raises:
        InputError: there is no such tokenizer, a file is damaged, or the tokenizer has no fast version or no EOS.
    """
    folder, model_file = _find(name)
    plain = read_plain_folder(folder) if model_file is None else None
    return _from_plain_folder(name, plain) if plain else _from_transformers(name, folder, model_file)


def _from_plain_folder(name: str, plain: TokenizerFolder) -> CorpusTokenizer:
    if plain.eos is None:
        raise _no_eos(name, has_bos=plain.bos is not None)
    return CorpusTokenizer(
        name=name,
        bos_token=plain.bos.content if plain.bos else None,
        eos_token=plain.eos.content,
        bos_token_id=plain.bos.id if plain.bos else None,
        eos_token_id=plain.eos.id,
        pad_token_id=plain.pad.id if plain.pad else None,
        vocab_size=plain.vocab_size,
        special_text_is_plain=False,
        chat_template=plain.chat_template,
        source=plain.folder,
    )


def _from_transformers(name: str, folder: Path, model_file: Path | None) -> CorpusTokenizer:
    from transformers.utils import logging

    logging.set_verbosity(logging.CRITICAL)
    special_text_is_plain = False
    if model_file is None:
        fast = _load_folder(folder)
    else:
        fast, special_text_is_plain = _load_model_file(model_file)
    if fast.eos_token_id is None:
        raise _no_eos(name, has_bos=fast.bos_token_id is not None)
    templates = fast.chat_template
    return CorpusTokenizer(
        name=name,
        bos_token=fast.bos_token,
        eos_token=fast.eos_token,
        bos_token_id=fast.bos_token_id,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        vocab_size=max(fast.get_vocab().values()) + 1,
        special_text_is_plain=special_text_is_plain,
        chat_template=templates.get("default") if isinstance(templates, dict) else templates,
        source=fast,
    )


def _no_eos(name: str, *, has_bos: bool) -> InputError:
    lacking = "EOS token" if has_bos else "EOS token and no BOS token"
    return InputError(
        f"--tokenizer_name {name}: it has no {lacking}, so nothing would separate documents; "
        "set eos_token (and bos_token) in its tokenizer_config.json"
    )


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


def _load_folder(folder: Path) -> "PreTrainedTokenizerFast":
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    file = folder / "tokenizer.json"
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        _read_json(folder / name)  # for a clearer error than transformers gives
    _chat_template(folder)
    try:
        if file.is_file():
            check_not_pointer(file)
            with panics_as_errors():
                fast = PreTrainedTokenizerFast.from_pretrained(folder)
        else:
            fast = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except InputError:
        raise
    except Exception as error:  # noqa: BLE001 - tokenizers raises no narrower type
        if file.is_file():
            load_fast(file, special_text_is_plain=False)  # raises if the file itself is damaged
        reason = first_line(error).rstrip(".")
        raise InputError(
            f"--tokenizer_name {folder}: transformers cannot load it: {reason}; fetch it again or give another"
        ) from None
    if not getattr(fast, "is_fast", False):
        raise InputError(f"--tokenizer_name {folder}: it has no fast version; give a folder with tokenizer.json")
    if file.is_file():
        _check_named_tokens(folder, fast)
    return fast


def _check_named_tokens(folder: Path, fast: "PreTrainedTokenizerFast") -> None:
    """Check that the tokens which can be in rows are in the tokenizer's files; transformers adds those that are not.

    Raises:
        InputError: BOS, EOS or padding is not, so that no model has an embedding for it.
    """
    known = load_fast(folder / "tokenizer.json", special_text_is_plain=False)
    config = _read_json(folder / "tokenizer_config.json")
    listed = [token["content"] for token in config.get("added_tokens_decoder", {}).values()]
    listed += _read_json(folder / "added_tokens.json")
    for role in ("bos_token", "eos_token", "pad_token"):
        token = getattr(fast, role)
        if token is not None and token not in listed and known.token_to_id(token) is None:
            raise InputError(
                f"--tokenizer_name {folder}: its {role} {token!r} is not in its vocabulary; name one of its tokens in "
                "tokenizer_config.json"
            )


def _load_model_file(file: Path) -> tuple["PreTrainedTokenizerFast", bool]:
    """Return the tokenizer of a ``tokenizer.model``, and whether the text of special tokens is plain text to it."""
    from fabric_train.tokenization.tokenizers.tokenizer_model import is_rank_file, load_llama3_ranks

    chat_template = _chat_template(file.parent)
    if is_rank_file(file):
        return load_llama3_ranks(file, chat_template), False
    from fabric_train.tokenization.tokenizers.tokenizer_model import load_sentencepiece_bpe

    fast = load_sentencepiece_bpe(file, chat_template)
    extra = _added_tokens(file.parent, fast.vocab_size)
    if extra:
        raise InputError(
            f"--tokenizer_name {file.parent}: its configuration adds {', '.join(extra)} to tokenizer.model; "
            "give a folder with tokenizer.json, which has both"
        )
    return fast, True


def _chat_template(folder: Path) -> str | None:
    file = folder / tokenizer_folder.FILE_NAME
    if file.is_file():
        return tokenizer_folder.read_chat_template(file)
    template = _read_json(folder / "tokenizer_config.json").get("chat_template")
    return template if isinstance(template, str) else None


def _added_tokens(folder: Path, num_pieces: int) -> list[str]:
    """Return the tokens that the folder's configuration adds after the ``num_pieces`` of its tokenizer.model."""
    added = _read_json(folder / "added_tokens.json")
    listed = _read_json(folder / "tokenizer_config.json").get("added_tokens_decoder", {})
    try:
        added |= {token["content"]: int(index) for index, token in listed.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        file = folder / "tokenizer_config.json"
        raise InputError(f"{file}: damaged (added_tokens_decoder); fetch the file again") from None
    return sorted(token for token, index in added.items() if index >= num_pieces)


def _read_json(file: Path) -> dict[str, Any]:
    return read_json(file, dict, "fetch the file again") if file.exists() else {}
