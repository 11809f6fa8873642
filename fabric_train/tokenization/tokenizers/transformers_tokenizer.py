"""Load a tokenizer with transformers: a folder, or a ``tokenizer.model`` (SentencePiece BPE or Llama-3's ranks)."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import logging

from fabric_train.cli.errors import InputError, first_line, note
from fabric_train.files.regular_file import check_not_pointer
from fabric_train.tokenization.tokenizers.fast_tokenizer import load_fast, panics_as_errors
from fabric_train.tokenization.tokenizers.llama3_ranks import is_rank_file, load_llama3_ranks
from fabric_train.tokenization.tokenizers.sentencepiece_model import load_sentencepiece_bpe
from fabric_train.tokenization.tokenizers.tokenizer_folder import CorpusTokenizer, chat_template_in, no_eos, read_object


def load_with_transformers(name: str, folder: Path, model_file: Path | None) -> CorpusTokenizer:
    """Load a tokenizer with transformers.

    Args:
        name: the name by which the user called the tokenizer.
        folder: the tokenizer's folder.
        model_file: its ``tokenizer.model``; None loads the other files of the folder.

    Raises:
        InputError: as for ``load_tokenizer``.
    """
    logging.set_verbosity(logging.CRITICAL)
    special_text_is_plain = False
    if model_file is None:
        tokenizer = _load_folder(folder)
    elif is_rank_file(model_file):
        tokenizer = load_llama3_ranks(model_file, chat_template_in(model_file.parent))
    else:
        tokenizer = _load_sentencepiece_file(model_file)
        special_text_is_plain = True
    if tokenizer.eos_token_id is None:
        raise no_eos(name, has_bos=tokenizer.bos_token_id is not None)
    chat_template = tokenizer.chat_template
    if isinstance(chat_template, dict):  # several templates by name
        chat_template = chat_template.get("default")
    return CorpusTokenizer(
        name=name,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        vocab_size=max(tokenizer.get_vocab().values()) + 1,
        special_text_is_plain=special_text_is_plain,
        chat_template=chat_template,
        source=tokenizer,
    )


def _load_folder(folder: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a folder, from its ``tokenizer.json`` if it has one."""
    # read the files first, for clearer errors than transformers gives
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        read_object(folder / name)
    chat_template_in(folder)
    file = folder / "tokenizer.json"
    has_json = file.is_file()
    try:
        if has_json:
            check_not_pointer(file)
            with panics_as_errors():
                tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        else:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except InputError:
        raise
    except Exception as error:  # noqa: BLE001 - tokenizers raises no narrower type
        if has_json:
            load_fast(file, special_text_is_plain=False)  # raises if the file itself is damaged
        reason = first_line(error).rstrip(".")
        raise InputError(
            f"--tokenizer_name {folder}: transformers cannot load it: {reason}; download it again, or give another "
            "tokenizer"
        ) from None
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(f"--tokenizer_name {folder}: it has no fast version; give a folder with tokenizer.json")
    if has_json:
        _check_named_tokens(folder, tokenizer)
    if tokenizer.init_kwargs.pop("auto_map", None) is not None:  # it would lead nowhere in the copy of a token dataset
        note(f"--tokenizer_name {folder}: its tokenizer_config.json names Python code (auto_map), which is never run")
    return tokenizer


def _check_named_tokens(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise an InputError if BOS, EOS or padding is not in the tokenizer's files: no model has an embedding for it."""
    json_tokenizer = load_fast(folder / "tokenizer.json", special_text_is_plain=False)
    config = read_object(folder / "tokenizer_config.json")
    listed_tokens = [token["content"] for token in config.get("added_tokens_decoder", {}).values()]
    listed_tokens += read_object(folder / "added_tokens.json")
    for role in ("bos_token", "eos_token", "pad_token"):
        token = getattr(tokenizer, role)
        if token is None or token in listed_tokens or json_tokenizer.token_to_id(token) is not None:
            continue
        raise InputError(
            f"--tokenizer_name {folder}: its {role} {token!r} is not in its vocabulary; name one of its tokens in "
            "tokenizer_config.json"
        )


def _load_sentencepiece_file(file: Path) -> PreTrainedTokenizerFast:
    """Load a SentencePiece ``tokenizer.model``; InputError if its folder adds tokens to it."""
    tokenizer = load_sentencepiece_bpe(file, chat_template_in(file.parent))
    added_tokens = _find_added_tokens(file.parent, tokenizer.vocab_size)
    if added_tokens:
        raise InputError(
            f"--tokenizer_name {file.parent}: its configuration adds {', '.join(added_tokens)} to tokenizer.model; "
            "give a folder with tokenizer.json, which contains both"
        )
    return tokenizer


def _find_added_tokens(folder: Path, num_pieces: int) -> list[str]:
    """Return the tokens that the folder's configuration adds after the ``num_pieces`` of its tokenizer.model."""
    token_ids = read_object(folder / "added_tokens.json")
    config_file = folder / "tokenizer_config.json"
    listed_tokens = read_object(config_file).get("added_tokens_decoder", {})
    try:
        for token_id, token in listed_tokens.items():
            token_ids[token["content"]] = int(token_id)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise InputError(f"{config_file}: damaged (added_tokens_decoder); download the file again") from None
    return sorted(token for token, token_id in token_ids.items() if token_id >= num_pieces)
