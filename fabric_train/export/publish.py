# PYTHON_ARGCOMPLETE_OK
"""Publish a finished token dataset:  fabric-train publish DIR --push_to_hub OWNER/NAME

The public copy has the files of the token dataset, a card, and its manifest without names of private places. Parts
become one plain token dataset, with the files of the full merge.
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from fabric_train.cleaning.dropped import CONTAMINATION_FILE, DROPPED_FILE
from fabric_train.cli.argument_types import POSITIONAL
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
_WHAT_BECAME = {"drop": "left out", "mark": "kept"}
# two files that are written again, and two with texts that cleaning removed
_NOT_SENT = (FILE_NAME, "README.md", DROPPED_FILE, CONTAMINATION_FILE)


@dataclass(frozen=True, kw_only=True)
class PublishArguments(CardArguments):
    """Publish a finished token dataset on the Hugging Face hub: of one run, merged, or of parts

    PROGRAM data/tokens --push_to_hub OWNER/NAME --license cc-by-4.0 --card_language ca
    PROGRAM data/whole --push_to_hub OWNER/NAME --private false
    PROGRAM data/whole --push_to_hub OWNER/NAME --create_pr true
    """

    dataset_dir: str = field(metadata=POSITIONAL)
    """Token dataset: an --output_dir of fabric-train tokenize or of a merge. It stays as it is."""

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
    from fabric_train.export.hub import PushRequest, check_push  # slow

    folder = Path(arguments.dataset_dir).expanduser()
    manifest = open_finished(folder)
    check_push(PushRequest.of(arguments, "dataset"))
    print(f"pushed to  {publish(arguments, folder, manifest)}")


def open_finished(folder: Path) -> Manifest:
    """Return the manifest of a token dataset that is complete, with all its parts; otherwise raise an InputError."""
    if is_slice(folder):
        raise InputError(f"{folder} is a slice of --shard; merge all slices, and publish the result")
    without_parts([folder])  # none is missing or has changed
    splits = open_splits(folder)
    manifest = read_manifest(folder)
    if manifest is None:
        raise InputError(f"{folder}: no manifest.json, so its sources and tokenizer are unknown; tokenize again")
    faults = changed_tokenizer(folder, manifest.tokenizer)
    if sorted(splits) != sorted(manifest.ledger.splits):
        faults.append(f"{folder}: its splits differ from its manifest.json; tokenize again")
    if faults:
        raise InputError(*faults)
    return manifest


def publish(arguments: CardArguments, folder: Path, manifest: Manifest) -> str:
    """Push the token dataset ``folder`` with a card; return its address, or raise a RunError if the hub refuses it."""
    from fabric_train.export.hub import PushRequest, push  # slow

    request = PushRequest.of(arguments, "dataset")
    public = public_copy(folder, manifest, request.repository, arguments.license, arguments.card_language)
    with terminated_as_interrupted(), public as copy:
        return push(folder, request, arguments.commit_message or "Token dataset made by Fabric Train", copy)


def dataset_card(
    manifest: Manifest, repository: str, license: str | None, languages: list[str] | None
) -> "DatasetCard":
    """Return the card of the token dataset ``repository``, OWNER/NAME; its text is in ``templates/dataset_card.md.j2``.

    What the manifest says is shown as it is. ``license`` is an identifier on the hub, ``languages`` are ISO 639 codes.
    """
    from huggingface_hub import DatasetCard, DatasetCardData  # slow

    files = [{"split": name, "path": f"{name}/*.arrow"} for name in manifest.ledger.splits]
    metadata = DatasetCardData(
        license=license,
        language=languages,
        tags=["fabric-train"],
        task_categories=["text-generation"],
        source_datasets=sorted({one.hub_name for one in manifest.sources if one.kind == "hub"}) or None,
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
        has_pairs=manifest.has_pairs,
        source_rows=_source_rows(manifest),
        cleaning=read_cleaning(manifest),
    )
    return DatasetCard(f"---\n{metadata.to_yaml()}\n---\n\n{text}\n")


def _source_rows(manifest: Manifest) -> "list[Row]":
    """Return the rows of :func:`_source_row`. After a merge, a source that several parts have read is one row."""
    if not manifest.parts:
        return [_source_row([source]) for source in manifest.sources]
    same = defaultdict[object, list[SourceRecord]](list)
    for source in manifest.sources:
        same[source.name, source.kind, source.place, source.revision].append(source)
    return [_source_row(records) for records in same.values()]


def _source_row(records: Sequence[SourceRecord]) -> "Row":
    """Return name, counts and share of a source, and its revision on the hub or the number of its files."""
    source = records[0]
    share = None if source.share_reached is None else f"{source.share_reached:.2%}"
    place = markdown.Markdown("")
    count = len({file for one in records for file in one.files})
    if source.kind == "hub":
        revision = f" at {markdown.code(source.revision[: markdown.SHOWN_DIGITS])}" if source.revision else ""
        place = markdown.Markdown(markdown.dataset_link(source.hub_name) + revision)
    elif count:  # their hashes are in manifest.json
        place = markdown.Markdown(f"{count:,} file{'s' * (count != 1)}, SHA-256 in `manifest.json`")
    documents = sum(one.documents for one in records)
    tokens = sum(one.tokens for one in records)
    return markdown.code(source.name), documents, tokens, share, place


def _settings_rows(manifest: Manifest) -> "list[Row]":
    """Return name and value of each setting, or the values of all parts."""
    all_settings = [vars(part.settings) for part in manifest.parts] or [vars(manifest.settings)]
    found = {name: list(dict.fromkeys(str(one[name]) for one in all_settings)) for name in all_settings[0]}
    return [(markdown.code(name), markdown.listed(values)) for name, values in found.items() if values != ["None"]]


@dataclass(frozen=True)
class Cleaning:
    """The changes to the texts of a token dataset before they became tokens."""

    of_several: bool  # several token datasets were merged, and differ
    steps: "list[Row]"  # name and settings, or token dataset, name and settings
    edits: "list[Row]"
    checks: list[dict[str, Any]]  # at most one, against evaluation tasks


def read_cleaning(manifest: Manifest) -> Cleaning:
    """Return what a manifest says about the cleaning of the texts."""
    parts = [(markdown.last_part(part.name), part.cleaning) for part in manifest.parts]
    by_dataset = parts or [("", manifest.cleaning)]
    of_each = [{name: json.dumps(part[name]) for name in part if name != _TASKS} for _, part in by_dataset]
    of_several = any(one != of_each[0] for one in of_each)
    steps: list[Row] = [tuple(map(markdown.code, one)) for one in of_each[0].items()]
    if of_several:
        steps = [
            (markdown.code(dataset), markdown.code(name) if name else "none", markdown.code(settings) if name else "")
            for (dataset, _), one in zip(by_dataset, of_each, strict=True)
            for name, settings in (one or {"": ""}).items()
        ]
    checks = _checked_tasks([part for _, part in by_dataset], manifest.ledger.contaminated)
    return Cleaning(of_several, steps, list(manifest.ledger.edits.items()), checks)


def _checked_tasks(parts: Sequence[dict[str, Any]], contaminated: dict[str, int]) -> list[dict[str, Any]]:
    checks = [part[_TASKS] for part in parts if _TASKS in part]
    if not checks:
        return []
    actions = {check["contaminated"] for check in checks}
    rows = []
    for task in dict.fromkeys(task for check in checks for task in check["tasks"]):
        counts = [check["tasks"][task] for check in checks if task in check["tasks"]]
        items, too_short = (max(one[name] for one in counts) for name in ("items", "too_short"))
        where = "all" if len(counts) == len(parts) else f"{len(counts):,} of {len(parts):,} parts"
        rows.append((markdown.code(task), items, too_short, where, contaminated.get(task, 0)))
    became = " or ".join(word for action, word in _WHAT_BECAME.items() if action in actions)
    return [{**checks[0], "became": became, "tasks": rows}]


@contextmanager
def public_copy(
    folder: Path, manifest: Manifest, repository: str, license: str | None, languages: list[str] | None
) -> Iterator[Path]:
    """Yield a folder with links to the files of the token dataset ``folder``, a public manifest and a card.

    Of parts, it has the files that a full merge writes: links to their rows, and their document indexes joined.
    """
    of_parts = is_of_parts(folder)
    beside = folder.absolute().parent if of_parts else None  # the index of a large dataset may be too large for /tmp
    with TemporaryDirectory(prefix=".fabric-train-push-", dir=beside) as place:
        copy = Path(place)
        if of_parts:
            write_rows(open_inputs(without_parts([folder])), manifest, copy, _link)
        for file in (folder / "tokenizer" if of_parts else folder).rglob("*"):
            place_there = file.relative_to(folder)
            if file.is_file() and file.name not in _NOT_SENT and place_there.parts[0] != REFERENCE:
                (copy / place_there).parent.mkdir(parents=True, exist_ok=True)
                _link(file, copy / place_there)
        public = public_manifest(manifest)
        write_manifest(copy, public)
        dataset_card(public, repository, license, languages).save(copy / "README.md")
        yield copy


def _link(file: Path, link: Path) -> None:
    link.symlink_to(os.path.abspath(file))


def public_manifest(manifest: Manifest) -> Manifest:
    """Return a manifest in which paths and URLs are their last parts; two sources never get the same name.

    Files keep their paths within their source. Merged token datasets get different names too.
    """
    from fabric_train.export.card_facts import PublicNames  # slow

    names = PublicNames(manifest)
    part_names = PublicNames(None)
    splits = {
        name: replace(split, sources={names[source]: sums for source, sums in split.sources.items()})
        for name, split in manifest.ledger.splits.items()
    }
    return replace(
        manifest,
        ledger=replace(manifest.ledger, splits=splits),
        sources=tuple(_public_source(source, names) for source in manifest.sources),
        tokenizer=replace(manifest.tokenizer, name=markdown.public_value(manifest.tokenizer.name)),
        settings=_public_settings(manifest.settings),
        parts=tuple(
            replace(
                part,
                name=part_names[part.name],
                settings=_public_settings(part.settings),
                cleaning=_without_places(part.cleaning),
            )
            for part in manifest.parts
        ),
        cleaning=_without_places(manifest.cleaning),
    )


def _without_places(content: Any) -> Any:
    """Return settings of cleaning with the last part of each URL and absolute path in them."""
    if isinstance(content, dict):
        return {name: _without_places(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_without_places(value) for value in content]
    if isinstance(content, str) and ("://" in content or os.path.isabs(content)):
        return markdown.last_part(content)
    return content


def _public_settings(settings: Settings) -> Settings:
    held_out = settings.validation_dataset
    template = settings.chat_template
    lines = settings.boilerplate
    return replace(
        settings,
        validation_dataset=held_out and [markdown.public_value(name) for name in held_out],
        chat_template=template and markdown.last_part(template),
        boilerplate=markdown.last_part(lines) if isinstance(lines, str) else lines,
    )


def _public_source(source: SourceRecord, names: "PublicNames") -> SourceRecord:
    place = source.place or source.name
    files = tuple(
        replace(
            file, path=markdown.last_part(file.path) if "://" in file.path or os.path.isabs(file.path) else file.path
        )
        for file in source.files
    )
    public = place if source.kind == "hub" else markdown.last_part(place)
    return replace(source, name=names[source.name], place=public, folder=None, files=files)


if __name__ == "__main__":
    run_program(main)
