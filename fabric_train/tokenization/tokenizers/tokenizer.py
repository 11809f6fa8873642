"""Load a tokenizer: from a Hugging Face folder or hub name, a SentencePiece model, or Llama-3's tiktoken file."""

from pathlib import Path
from typing import TYPE_CHECKING

from fabric_train.cli.errors import InputError, first_line
from fabric_train.files.regular_file import check_not_pointer
from fabric_train.tokenization.reading.hf_datasets import hub_fault, is_hub_name
from fabric_train.tokenization.tokenizers.text_encoder import load_fast, panics_as_errors
from fabric_train.tokenization.tokenizers.tokenizer_folder import (
    CorpusTokenizer,
    chat_template_in,
    no_eos,
    read_object,
    read_plain_folder,
)

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
    plain = read_plain_folder(folder, name) if model_file is None else None
    return plain or _from_transformers(name, folder, model_file)


def _from_transformers(name: str, folder: Path, model_file: Path | None) -> CorpusTokenizer:
    from transformers.utils import logging

    logging.set_verbosity(logging.CRITICAL)
    special_text_is_plain = False
    if model_file is None:
        fast = _load_folder(folder)
    else:
        fast, special_text_is_plain = _load_model_file(model_file)
    if fast.eos_token_id is None:
        raise no_eos(name, has_bos=fast.bos_token_id is not None)
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
        read_object(folder / name)  # for a clearer error than transformers gives
    chat_template_in(folder)
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
    config = read_object(folder / "tokenizer_config.json")
    listed = [token["content"] for token in config.get("added_tokens_decoder", {}).values()]
    listed += read_object(folder / "added_tokens.json")
    for role in ("bos_token", "eos_token", "pad_token"):
        token = getattr(fast, role)
        if token is not None and token not in listed and known.token_to_id(token) is None:
            raise InputError(
                f"--tokenizer_name {folder}: its {role} {token!r} is not in its vocabulary; name one of its tokens in "
                "tokenizer_config.json"
            )


def _load_model_file(file: Path) -> tuple["PreTrainedTokenizerFast", bool]:
    """Return the tokenizer of a ``tokenizer.model``, and whether the text of special tokens is plain text to it."""
    from fabric_train.tokenization.tokenizers.tokenizer_model import (
        is_rank_file,
        load_llama3_ranks,
        load_sentencepiece_bpe,
    )

    chat_template = chat_template_in(file.parent)
    if is_rank_file(file):
        return load_llama3_ranks(file, chat_template), False
    fast = load_sentencepiece_bpe(file, chat_template)
    extra = _added_tokens(file.parent, fast.vocab_size)
    if extra:
        raise InputError(
            f"--tokenizer_name {file.parent}: its configuration adds {', '.join(extra)} to tokenizer.model; "
            "give a folder with tokenizer.json, which has both"
        )
    return fast, True


def _added_tokens(folder: Path, num_pieces: int) -> list[str]:
    """Return the tokens that the folder's configuration adds after the ``num_pieces`` of its tokenizer.model."""
    added = read_object(folder / "added_tokens.json")
    listed = read_object(folder / "tokenizer_config.json").get("added_tokens_decoder", {})
    try:
        added |= {token["content"]: int(index) for index, token in listed.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        file = folder / "tokenizer_config.json"
        raise InputError(f"{file}: damaged (added_tokens_decoder); fetch the file again") from None
    return sorted(token for token, index in added.items() if index >= num_pieces)
