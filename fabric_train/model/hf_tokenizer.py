"""Load the tokenizer of a checkpoint, a Hugging Face folder or the hub, as the users of an export will."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from fabric_train.cli.errors import InputError, first_line, raise_reached_limit
from fabric_train.files.regular_file import check_no_pipes
from fabric_train.files.rust_panic import panics_as_errors
from fabric_train.files.typed_json import read_json

_ADVICE = "fetch it again, or use another"


def load_hf_tokenizer(source: Path | str) -> Any:
    """Return transformers' tokenizer of a folder or a hub name. No code from it runs.

    Raises:
        InputError: there is none, or a file of it is damaged.
    """
    folder = Path(source)
    if folder.is_dir():
        check_no_pipes(folder)
        for file in folder.glob("*.json"):
            if file.name in _FILES:
                read_json(file, dict, _ADVICE)
    try:
        with panics_as_errors():
            return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:
        raise_reached_limit(error)
        reason = first_line(error).rstrip(".")
        raise InputError(f"{source}: its tokenizer cannot be loaded: {reason}; {_ADVICE}") from error


_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
