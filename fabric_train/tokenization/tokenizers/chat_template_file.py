"""Read the file of a chat template, and make it the template of a tokenizer's folder."""

import json
from pathlib import Path

from fabric_train.cli.errors import InputError

FILE_NAME = "chat_template.jinja"


def read_chat_template(file: Path) -> str:
    """Return the template in ``file``.

    Raises:
        InputError: there is no such file, or it cannot be read or is not UTF-8.
    """
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
    (folder / FILE_NAME).write_text(template, encoding="utf-8")
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    if config.pop("chat_template", None) is not None:
        file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
