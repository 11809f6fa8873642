# PYTHON_ARGCOMPLETE_OK
"""Publish a finished token dataset:  python -m fabric_train.export.publish DIR --push_to_hub OWNER/NAME

Modules that are slow to import are imported where they are used.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fabric_train.cli.argument_types import POSITIONAL
from fabric_train.cli.errors import InputError, run_program, terminated_as_interrupted
from fabric_train.cli.parser import parse_arguments
from fabric_train.tokenization.arguments import CardArguments

if TYPE_CHECKING:
    from fabric_train.tokenization.manifest import Manifest


@dataclass(frozen=True, kw_only=True)
class PublishArguments(CardArguments):
    """Publish a finished token dataset on the Hugging Face hub: of one run, merged, or of parts

    PROGRAM data/tokens --push_to_hub OWNER/NAME --license cc-by-4.0 --card_language ca
    PROGRAM data/whole --push_to_hub OWNER/NAME --private false
    PROGRAM data/whole --push_to_hub OWNER/NAME --create_pr true
    """

    dataset_dir: str = field(metadata=POSITIONAL)
    """Token dataset: an --output_dir of tokenize_dataset.py or of a merge. It stays as it is."""

    def faults(self) -> list[str]:
        """Return what :class:`CardArguments` finds, and a missing repository."""
        missing = [] if self.push_to_hub else ["--push_to_hub is missing: give OWNER/NAME"]
        return [*missing, *CardArguments.faults(self)]


def main(argv: list[str] | None = None) -> None:
    """Push the token dataset of the command line.

    Raises:
        InputError: it cannot be published, or the hub does not allow it; nothing has been sent.
        RunError: the push failed; the token dataset is as before.
    """
    arguments = parse_arguments(PublishArguments, argv)
    from fabric_train.export.hub import PushRequest, check_push

    folder = Path(arguments.dataset_dir).expanduser()
    manifest = open_finished(folder)
    check_push(PushRequest.of(arguments, "dataset"))
    print(f"pushed to  {publish(arguments, folder, manifest)}")


def open_finished(folder: Path) -> "Manifest":
    """Return the manifest of a token dataset that is complete, with all its parts; otherwise raise an InputError."""
    from fabric_train.tokenization.manifest import changed_tokenizer, read_manifest
    from fabric_train.tokenization.merge_parts import without_parts
    from fabric_train.tokenization.packing.token_folder import open_splits
    from fabric_train.tokenization.slice_folder import is_slice

    if is_slice(folder):
        raise InputError(f"{folder} is a slice of --shard; merge all slices, and publish the result")
    without_parts([folder])  # none is missing or has changed
    splits, manifest = open_splits(folder), read_manifest(folder)
    if manifest is None:
        raise InputError(f"{folder}: no manifest.json, so its sources and tokenizer are unknown; tokenize again")
    faults = changed_tokenizer(folder, manifest.tokenizer)
    if sorted(splits) != sorted(manifest.ledger.splits):
        faults.append(f"{folder}: its splits differ from its manifest.json; tokenize again")
    if faults:
        raise InputError(*faults)
    return manifest


def publish(arguments: CardArguments, folder: Path, manifest: "Manifest") -> str:
    """Push the token dataset ``folder`` with a card; return its address, or raise a RunError if the hub refuses it."""
    from fabric_train.export.hub import PushRequest, push
    from fabric_train.export.public_dataset import public_copy

    request = PushRequest.of(arguments, "dataset")
    public = public_copy(folder, manifest, request.repository, arguments.license, arguments.card_language)
    with terminated_as_interrupted(), public as copy:
        return push(folder, request, arguments.commit_message or "Token dataset made by Fabric Train", copy)


if __name__ == "__main__":
    run_program(main)
