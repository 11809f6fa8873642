"""Open the texts of an evaluation: documents of files and datasets, or the validation split of token datasets."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fabric_train.checkpoint import read_trainer_json
from fabric_train.cli.errors import InputError
from fabric_train.data.stream_documents import StreamedSource
from fabric_train.data.token_dataset import TokenDataset, open_dataset
from fabric_train.tokenization.manifest import FILE_NAME
from fabric_train.tokenization.reading.opening import open_sources
from fabric_train.tokenization.reading.source_names import split_names
from fabric_train.tokenization.source_formats import find_kind


@dataclass(frozen=True)
class DocumentTexts:
    """The documents of a source as text. ``places`` says where each is: file and line."""

    name: str
    texts: tuple[str, ...]
    places: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class HeldOutRows:
    """The validation split of a token dataset. ``name`` is that of all its documents; None: of their own sources."""

    name: str | None
    dataset: TokenDataset


EvaluatedText = DocumentTexts | HeldOutRows


def open_texts(given: Sequence[str], text_column: str, downloads: Path) -> list[EvaluatedText]:
    """Read the documents that ``--texts`` names.

    Args:
        given: NAME=PLACE or PLACE.
        text_column: column with the text.
        downloads: folder for files that are named by a URL.

    Raises:
        InputError: a place cannot be read, or has no text.
    """
    opened: list[EvaluatedText] = []
    faults: list[str] = []
    for value, (name, place) in zip(given, split_names(given, "--texts"), strict=True):
        try:
            if (Path(place) / FILE_NAME).is_file():
                opened.append(_open_rows(place, None if value == place else name, isolates=True))
            else:
                opened.append(_read_documents(name, place, text_column, downloads))
        except InputError as error:
            faults += (fault.replace("--train_data_dir", "--texts") for fault in error.faults)
    if faults:
        raise InputError(*faults)
    return opened


def open_validation_of(checkpoint: Path) -> list[EvaluatedText]:
    """Open the validation split of what a checkpoint's run was trained on, to be read as the run itself does.

    Raises:
        InputError: the run had none, or it is not there any more.
    """
    saved = read_trainer_json(checkpoint)
    if saved.stream is not None:
        raise InputError(f"{checkpoint}: its run read a stream, which has no validation split; give --texts")
    arguments = saved.arguments
    folders = arguments.get("train_data_dir") or []
    isolates = bool(arguments.get("isolate_documents", True))
    try:
        return [_open_rows(place, None, isolates) for place in ([folders] if isinstance(folders, str) else folders)]
    except InputError as error:
        raise InputError(*(f"the validation split of {checkpoint}: {fault}" for fault in error.faults)) from None


def _open_rows(place: str, name: str | None, isolates: bool) -> HeldOutRows:
    dataset = open_dataset(place, isolates)
    if dataset.validation is None:
        raise InputError(f"{place}: the token dataset has no validation split; tokenize with --validation_split")
    return HeldOutRows(name, dataset)


def _read_documents(name: str, place: str, text_column: str, downloads: Path) -> DocumentTexts:
    (source,) = open_sources([place], "--texts", False, downloads)
    kind = find_kind(source, text_column, skips_bad_rows=True)  # reading it refuses a bad row
    if kind != "text":
        raise InputError(
            f"--texts {place}: its rows are chats or instructions, which are texts only with a template; tokenize them "
            "with tokenize_dataset.py and give the token dataset"
        )
    read = [document for _, document in StreamedSource(name, source, kind, (text_column,)).read(0)]
    if not read:
        raise InputError(f"--texts {place}: no document has text; give another place")
    return DocumentTexts(name, tuple(str(document.content) for document in read), tuple(each.place() for each in read))
