"""Recognize the finished token dataset of a command line, so that it is not made again to be pushed."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from fabric_train.cli.errors import InputError
from fabric_train.cli.redaction import redact
from fabric_train.tokenization.manifest import Manifest, read_manifest
from fabric_train.tokenization.reading.source_names import split_names

if TYPE_CHECKING:
    from arguments import TokenizeArguments


def find_finished(arguments: "TokenizeArguments") -> Manifest | None:
    """Return the manifest of the token dataset in --output_dir, or None if nothing is there.

    Only arguments are compared, not the content of the sources, which takes as long as reading them.

    Raises:
        InputError: the folder has something else, or a token dataset that was made with other arguments.
    """
    folder = Path(arguments.output_dir).expanduser()
    if not any(folder.glob("*")):
        return None
    manifest = read_manifest(folder)
    if manifest is None or manifest.parts:
        raise InputError(f"{folder} already exists and is not a token dataset of this program; choose another folder")
    differences = [f"--{name} {made}, not {asked}" for name, made, asked in _differences(manifest, arguments)]
    if differences:
        raise InputError(f"{folder} was made with other arguments: {', '.join(differences)}; choose another folder")
    return manifest


def _differences(manifest: Manifest, arguments: "TokenizeArguments") -> Iterator[tuple[str, object, object]]:
    """Yield the arguments that differ: the name, the value that the dataset was made with, and the given one."""
    if manifest.tokenizer.name != arguments.tokenizer_name:
        yield "tokenizer_name", manifest.tokenizer.name, arguments.tokenizer_name
    made = [(source.name, source.place) for source in manifest.sources]
    given = [
        (name, redact(place))
        for option in ("--dataset", "--validation_dataset")
        for name, place in split_names(getattr(arguments, option[2:]) or [], option)
    ]
    if made != given:
        yield "dataset", [place for _, place in made], [place for _, place in given]
    for name, value in asdict(manifest.settings).items():
        asked = getattr(arguments, name)
        # without --packing, it was chosen by the rows; the sources of validation are compared above
        if asked != value and (name, asked) != ("packing", None) and name != "validation_dataset":
            yield name, value, asked
