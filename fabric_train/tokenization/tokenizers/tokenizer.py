"""Load a tokenizer: a folder, a ``tokenizer.json`` or ``tokenizer.model`` file, or a hub name.

``tokenizer_folder.py`` reads most folders without transformers; ``transformers_tokenizer.py`` loads all others.
"""

from pathlib import Path

from fabric_train.cli.errors import InputError
from fabric_train.files.regular_file import check_not_pointer
from fabric_train.reading.hf_datasets import hub_fault, is_hub_name
from fabric_train.tokenization.tokenizers.tokenizer_folder import CorpusTokenizer, read_plain_folder

_TOKENIZER_FILES = (
    *("tokenizer*", "*.jinja", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "config.json"),
)


def find_tokenizer_json(name: str) -> Path | None:
    """Return the ``tokenizer.json`` that :func:`load_tokenizer` uses unchanged, or None if it builds a tokenizer."""
    folder, model_file = _find_files(name)
    file = folder / "tokenizer.json"
    return file if model_file is None and file.is_file() else None


def load_tokenizer(name: str) -> CorpusTokenizer:
    """Load the tokenizer called ``name``: a folder, a ``tokenizer.json`` or ``tokenizer.model`` file, or a hub name.

    A ``tokenizer.json`` is used unchanged: the classes that transformers chooses for some model families (such as
    ``LlamaTokenizer``) rebuild it and give other ids. transformers is imported only if the folder is not plain.

    Raises:
        InputError: there is no such tokenizer, a file is damaged, or the tokenizer has no fast version or no EOS.
    """
    folder, model_file = _find_files(name)
    if model_file is None:
        tokenizer = read_plain_folder(folder, name)
        if tokenizer is not None:
            return tokenizer
    from fabric_train.tokenization.tokenizers.transformers_tokenizer import load_with_transformers  # slow to import

    return load_with_transformers(name, folder, model_file)


def _find_files(name: str) -> tuple[Path, Path | None]:
    """Return the tokenizer's folder and its ``tokenizer.model``, or None to load the folder itself."""
    path = Path(name).expanduser()
    if is_hub_name(name):
        path = _download(name)

    # a file
    if path.is_file():
        check_not_pointer(path)
        if path.name == "tokenizer.json":
            return path.parent, None
        if path.suffix == ".json":
            raise InputError(
                f"--tokenizer_name {path}: expected the folder with tokenizer.json, or a tokenizer.model file"
            )
        return path.parent, path

    # a folder, in which tokenizer.json comes before tokenizer.model
    if not path.is_dir():
        raise InputError(f"--tokenizer_name {name}: no such file or folder; give an existing path or a hub name")
    if (path / "tokenizer.json").is_file() or (path / "merges.txt").is_file():
        return path, None
    model_file = path / "tokenizer.model"
    if not model_file.is_file():
        raise InputError(
            f"--tokenizer_name {name}: it has neither tokenizer.json nor tokenizer.model; give another folder"
        )
    check_not_pointer(model_file)
    return path, model_file


def _download(name: str) -> Path:
    """Download only the tokenizer's files, never weights; return their folder."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    try:
        return Path(snapshot_download(name, allow_patterns=list(_TOKENIZER_FILES)))
    except (OSError, ValueError) as error:
        raise hub_fault("--tokenizer_name", name, error) from None
