# PYTHON_ARGCOMPLETE_OK
"""Publish a finished token dataset:  fabric-train publish DIR --push_to_hub OWNER/NAME

The public copy has the token dataset's files, a card, and the manifest without private paths. Parts
become one plain token dataset, with the files of a full merge.
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from fabric_train.cleaning.dropped import CONTAMINATION_FILE, DROPPED_FILE
from fabric_train.cli.argument_types import POSITIONAL, counted
from fabric_train.cli.errors import InputError, run_program, terminated_as_interrupted
from fabric_train.cli.parser import parse_arguments
from fabric_train.pages import markdown
from fabric_train.token_dataset.manifest import (
    FILE_NAME,
    REFERENCE,
    Manifest,
    Settings,
    SourceRecord,
    changed_tokenizer,
    read_manifest,
    write_manifest,
)
from fabric_train.token_dataset.parts import is_of_parts
from fabric_train.token_dataset.token_folder import open_splits
from fabric_train.tokenization.arguments import CardArguments
from fabric_train.tokenization.merge import open_inputs
from fabric_train.tokenization.merge_rows import without_parts, write_rows
from fabric_train.tokenization.slice_folder import is_slice

if TYPE_CHECKING:
    from huggingface_hub import DatasetCard

    from fabric_train.export.card_facts import PublicNames, Row

_TASKS = "decontaminate"
_OUTCOMES = {"drop": "left out", "mark": "kept"}  # of contaminated documents, by the action of --contaminated
# two files that are written again, and two with texts that cleaning removed
_NOT_SENT = (FILE_NAME, "README.md", DROPPED_FILE, CONTAMINATION_FILE)


@dataclass(frozen=True, kw_only=True)
class PublishArguments(CardArguments):
    """Publish a finished token dataset, merged or not, on the Hugging Face hub

    PROGRAM data/tokens --push_to_hub OWNER/NAME --license cc-by-4.0 --card_language ca
    PROGRAM data/whole --push_to_hub OWNER/NAME --private false
    PROGRAM data/whole --push_to_hub OWNER/NAME --create_pr true
    """

    dataset_dir: str = field(metadata=POSITIONAL)
    """Token dataset: an --output_dir of fabric-train tokenize or merge. It is not changed."""

    def faults(self) -> list[str]:
        """Return what :class:`CardArguments` finds, and a missing repository."""
        faults = CardArguments.faults(self)
        if not self.push_to_hub:
            faults = ["--push_to_hub is required; give OWNER/NAME", *faults]
        return faults


def main(argv: list[str] | None = None) -> None:
    """Push the token dataset of the command line.

    Raises:
        InputError: it cannot be published, or the hub does not allow it; nothing has been sent.
        RunError: the push failed; the token dataset is unchanged.
    """
    arguments = parse_arguments(PublishArguments, argv)
    from fabric_train.export.hub import PushRequest, check_push  # slow

    folder = Path(arguments.dataset_dir).expanduser()
    manifest = open_finished(folder)
    check_push(PushRequest.from_arguments(arguments, "dataset"))
    print(f"pushed to  {publish(arguments, folder, manifest)}")


def open_finished(folder: Path) -> Manifest:
    """Return the manifest of a token dataset that is complete, with all its parts; otherwise raise an InputError."""
    if is_slice(folder):
        raise InputError(f"{folder} is a slice made with --shard; merge all slices and publish the result")
    without_parts([folder])  # raises an error if a part is missing or has changed
    splits = open_splits(folder)
    manifest = read_manifest(folder)
    if manifest is None:
        raise InputError(f"{folder}: it has no manifest.json, so its sources and tokenizer are unknown; tokenize again")
    faults = changed_tokenizer(folder, manifest.tokenizer)
    if sorted(splits) != sorted(manifest.ledger.splits):
        faults.append(f"{folder}: its splits differ from its manifest.json; tokenize again")
    if faults:
        raise InputError(*faults)
    return manifest


def publish(arguments: CardArguments, folder: Path, manifest: Manifest) -> str:
    """Push the token dataset ``folder`` with a card; return its address, or raise a RunError if the hub refuses it."""
    from fabric_train.export.hub import PushRequest, push  # slow

    request = PushRequest.from_arguments(arguments, "dataset")
    copy = public_copy(folder, manifest, request.repository, arguments.license, arguments.card_language)
    with terminated_as_interrupted(), copy as copy_dir:
        return push(folder, request, arguments.commit_message or "Token dataset made by Fabric Train", copy_dir)


def dataset_card(
    manifest: Manifest, repository: str, license: str | None, languages: list[str] | None
) -> "DatasetCard":
    """Return the card of the token dataset ``repository``, OWNER/NAME, from ``templates/dataset_card.md.j2``.

    The manifest's content is shown unchanged. ``license`` is an identifier on the hub, ``languages`` are ISO 639 codes.
    """
    from huggingface_hub import DatasetCard, DatasetCardData  # slow

    files = [{"split": name, "path": f"{name}/*.arrow"} for name in manifest.ledger.splits]
    hub_datasets = {source.hub_name for source in manifest.sources if source.kind == "hub"}
    metadata = DatasetCardData(
        license=license,
        language=languages,
        tags=["fabric-train"],
        task_categories=["text-generation"],
        source_datasets=sorted(hub_datasets) or None,
        configs=[{"config_name": "default", "data_files": files}],
    )
    text = markdown.render(
        Path(__file__).with_name("templates") / "dataset_card.md.j2",
        repository=repository,
        name=repository.partition("/")[2],
        max_length=manifest.settings.max_length,
        num_parts=len(manifest.parts),
        settings=_settings_rows(manifest),
        tokenizer=manifest.tokenizer,
        ledger=manifest.ledger,
        versions=manifest.versions,
        manifest=manifest,
        source_rows=_source_rows(manifest),
        cleaning=read_cleaning(manifest),
    )
    return DatasetCard(f"---\n{metadata.to_yaml()}\n---\n\n{text}\n")


def _source_rows(manifest: Manifest) -> "list[Row]":
    """Return the rows of :func:`_source_row`. After a merge, a source that several parts have read is one row."""
    if not manifest.parts:
        return [_source_row([source]) for source in manifest.sources]
    records_by_source = defaultdict[object, list[SourceRecord]](list)
    for source in manifest.sources:
        records_by_source[source.name, source.kind, source.place, source.revision].append(source)
    return [_source_row(records) for records in records_by_source.values()]


def _source_row(records: Sequence[SourceRecord]) -> "Row":
    """Return name, counts and share of a source, and its revision on the hub or the number of its files.

    ``records`` are the records of the same source in several token datasets.
    """
    source = records[0]
    share = None if source.share_reached is None else f"{source.share_reached:.2%}"
    num_files = len(set(chain.from_iterable(record.files for record in records)))
    origin = markdown.Markdown("")
    if source.kind == "hub":
        origin = markdown.dataset_link(source.hub_name)
        if source.revision:
            origin = markdown.Markdown(f"{origin} at {markdown.code(source.revision[: markdown.SHOWN_DIGITS])}")
    elif num_files:  # their hashes are in manifest.json
        origin = markdown.Markdown(f"{counted(num_files, 'file')}, SHA-256 in `manifest.json`")
    num_documents = sum(record.documents for record in records)
    num_tokens = sum(record.tokens for record in records)
    return markdown.code(source.name), num_documents, num_tokens, share, origin


def _settings_rows(manifest: Manifest) -> "list[Row]":
    """Return name and value of each setting, or the values of all parts."""
    all_settings = [vars(dataset.settings) for dataset in manifest.parts] or [vars(manifest.settings)]
    rows: list[Row] = []
    for name in all_settings[0]:
        values = list(dict.fromkeys(str(settings[name]) for settings in all_settings))  # each once, in order
        if values != ["None"]:
            rows.append((markdown.code(name), markdown.listed(values)))
    return rows


@dataclass(frozen=True)
class Cleaning:
    """The changes to the texts of a token dataset before they became tokens."""

    is_by_dataset: bool
    """Whether token datasets that were cleaned differently were merged."""
    steps: "list[Row]"
    """The name and settings of each step, after the token dataset if there are several."""
    edits: "list[Row]"
    checks: list[dict[str, Any]]
    """The check against evaluation tasks, if there was one."""


def read_cleaning(manifest: Manifest) -> Cleaning:
    """Return the cleaning of the texts that a manifest records."""
    # the token datasets, each with the settings of its steps; a manifest without parts is a single one
    names = [markdown.last_part(dataset.name) for dataset in manifest.parts] or [""]
    cleanings = [dataset.cleaning for dataset in manifest.parts] or [manifest.cleaning]
    steps_of_datasets = []
    for cleaning in cleanings:
        steps = {step: json.dumps(settings) for step, settings in cleaning.items() if step != _TASKS}
        steps_of_datasets.append(steps)

    differ = any(steps != steps_of_datasets[0] for steps in steps_of_datasets)
    rows: list[Row] = []
    if not differ:
        rows = [(markdown.code(step), markdown.code(settings)) for step, settings in steps_of_datasets[0].items()]
    else:
        for name, steps in zip(names, steps_of_datasets, strict=True):
            for step, settings in steps.items():
                rows.append((markdown.code(name), markdown.code(step), markdown.code(settings)))
            if not steps:
                rows.append((markdown.code(name), "none", ""))
    checks = _checked_tasks(cleanings, manifest.ledger.contaminated)
    return Cleaning(is_by_dataset=differ, steps=rows, edits=list(manifest.ledger.edits.items()), checks=checks)


def _checked_tasks(cleanings: Sequence[dict[str, Any]], contaminated: dict[str, int]) -> list[dict[str, Any]]:
    """Return the check of token datasets against evaluation tasks, for ``templates/cleaning.md.j2``.

    ``contaminated`` counts the documents that share words with each task.
    """
    checks = [cleaning[_TASKS] for cleaning in cleanings if _TASKS in cleaning]
    if not checks:
        return []
    # a row for each task; token datasets may have been checked against different ones
    tasks = dict.fromkeys(chain.from_iterable(check["tasks"] for check in checks))
    rows = []
    for task in tasks:
        counts = [check["tasks"][task] for check in checks if task in check["tasks"]]
        num_items = max(count["items"] for count in counts)
        num_too_short = max(count["too_short"] for count in counts)
        checked_in = f"{len(counts):,} of {len(cleanings):,} parts"
        if len(counts) == len(cleanings):
            checked_in = "all"
        rows.append((markdown.code(task), num_items, num_too_short, checked_in, contaminated.get(task, 0)))
    actions = {check["contaminated"] for check in checks}
    outcomes = [outcome for action, outcome in _OUTCOMES.items() if action in actions]
    return [{**checks[0], "became": " or ".join(outcomes), "tasks": rows}]


@contextmanager
def public_copy(
    folder: Path, manifest: Manifest, repository: str, license: str | None, languages: list[str] | None
) -> Iterator[Path]:
    """Yield a folder with links to the files of a token dataset, a public manifest and a card.

    A token dataset of parts becomes a plain one with the files that a full merge writes: links to the rows of the
    parts, and the joined document index.
    """
    has_parts = is_of_parts(folder)
    # the index of a large dataset may be too large for /tmp
    temporary_parent = folder.absolute().parent if has_parts else None
    with TemporaryDirectory(prefix=".fabric-train-push-", dir=temporary_parent) as temporary_folder:
        # links to the rows, the index and the tokenizer
        copy_dir = Path(temporary_folder)
        if has_parts:
            write_rows(open_inputs(without_parts([folder])), manifest, copy_dir, _link)
        linked_folder = folder / "tokenizer" if has_parts else folder
        for file in linked_folder.rglob("*"):
            relative_path = file.relative_to(folder)
            if file.is_file() and file.name not in _NOT_SENT and relative_path.parts[0] != REFERENCE:
                (copy_dir / relative_path).parent.mkdir(parents=True, exist_ok=True)
                _link(file, copy_dir / relative_path)

        # the files that are written for the public
        public = public_manifest(manifest)
        write_manifest(copy_dir, public)
        dataset_card(public, repository, license, languages).save(copy_dir / "README.md")
        yield copy_dir


def _link(file: Path, link: Path) -> None:
    link.symlink_to(os.path.abspath(file))


def public_manifest(manifest: Manifest) -> Manifest:
    """Return a manifest with only the last parts of paths and URLs, in which sources have different names.

    Files keep their paths within their source. Merged token datasets get different names, too.
    """
    from fabric_train.export.card_facts import PublicNames  # slow

    # the counts by source get the public names
    source_names = PublicNames(manifest)
    dataset_names = PublicNames(None)
    splits = {}
    for split_name, split in manifest.ledger.splits.items():
        sums_by_source = {source_names[source]: sums for source, sums in split.sources.items()}
        splits[split_name] = replace(split, sources=sums_by_source)
    # so do merged token datasets
    merged_datasets = []
    for dataset in manifest.parts:
        public_dataset = replace(
            dataset,
            name=dataset_names[dataset.name],
            settings=_public_settings(dataset.settings),
            cleaning=_without_places(dataset.cleaning),
        )
        merged_datasets.append(public_dataset)
    return replace(
        manifest,
        ledger=replace(manifest.ledger, splits=splits),
        sources=tuple(_public_source(source, source_names) for source in manifest.sources),
        tokenizer=replace(manifest.tokenizer, name=markdown.public_value(manifest.tokenizer.name)),
        settings=_public_settings(manifest.settings),
        parts=tuple(merged_datasets),
        cleaning=_without_places(manifest.cleaning),
    )


def _without_places(content: Any) -> Any:
    """Return settings of cleaning with only the last part of each URL and absolute path."""
    if isinstance(content, dict):
        return {name: _without_places(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_without_places(value) for value in content]
    if isinstance(content, str) and ("://" in content or os.path.isabs(content)):
        return markdown.last_part(content)
    return content


def _public_settings(settings: Settings) -> Settings:
    """Return the settings of tokenization with only the last part of each path."""
    validation_dataset = settings.validation_dataset
    if validation_dataset:
        validation_dataset = [markdown.public_value(name) for name in validation_dataset]
    chat_template = settings.chat_template
    if chat_template:
        chat_template = markdown.last_part(chat_template)
    boilerplate = settings.boilerplate
    if isinstance(boilerplate, str):
        boilerplate = markdown.last_part(boilerplate)
    return replace(
        settings, validation_dataset=validation_dataset, chat_template=chat_template, boilerplate=boilerplate
    )


def _public_source(source: SourceRecord, names: "PublicNames") -> SourceRecord:
    """Return a source's record without private paths; its files keep their paths within the source."""
    public_place = source.place or source.name
    if source.kind != "hub":
        public_place = markdown.last_part(public_place)
    files = []
    for file in source.files:
        if "://" in file.path or os.path.isabs(file.path):
            file = replace(file, path=markdown.last_part(file.path))
        files.append(file)
    return replace(source, name=names[source.name], place=public_place, folder=None, files=tuple(files))


if __name__ == "__main__":
    run_program(main)
