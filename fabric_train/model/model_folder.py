"""Check that a model's name is a folder with a model or a possible hub name, without importing torch."""

from pathlib import Path

from fabric_train.cli.errors import InputError
from fabric_train.files.typed_json import read_json


def check_model_folder(source: str) -> tuple[str, str]:
    """Return the model's name in messages, and the advice that they give.

    Raises:
        InputError: ``source`` is neither a folder with a config.json nor a possible hub name.
    """
    folder = Path(source)
    is_checkpoint = (folder / "trainer.json").is_file()
    name = source if is_checkpoint else f"--model_name {source}"
    advice = "use another checkpoint" if is_checkpoint else "give a Hugging Face model folder"
    if folder.is_file():
        raise InputError(f"{name}: this is a file; give the folder that holds the model's config.json and weights")
    if not folder.is_dir():
        # no hub name looks like this
        if source.startswith(("/", ".", "~")) or source.endswith("/") or source.count("/") > 1:
            raise InputError(f"{name}: no such folder")
        return name, advice
    if not (folder / "config.json").is_file():
        raise InputError(f"{name}: the folder has no config.json; {advice}")
    read_json(folder / "config.json", dict, advice)  # in transformers, some damage ends in any exception
    return name, advice
