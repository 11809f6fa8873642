"""Make a token dataset fit to be published: its files, a card, and its manifest without names of private places."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import DatasetCard, DatasetCardData

from fabric_train.export.card_facts import PublicNames, Row
from fabric_train.pages import markdown
from fabric_train.tokenization.cleaning.dropped import CONTAMINATION_FILE, DROPPED_FILE
from fabric_train.tokenization.manifest import FILE_NAME, REFERENCE, Manifest, SourceRecord, write_manifest

_TASKS = "decontaminate"
_WHAT_BECAME = {"drop": "left out", "mark": "kept"}
# the first two are written anew; the others hold texts that were left out of the rows
_NOT_SENT = (FILE_NAME, "README.md", DROPPED_FILE, CONTAMINATION_FILE)


def dataset_card(manifest: Manifest, repository: str, license: str | None, languages: list[str] | None) -> DatasetCard:
    """Return the card of the token dataset ``repository``, OWNER/NAME; its text is in ``templates/dataset_card.md.j2``.

    What the manifest says is shown as it is. ``license`` is an identifier on the hub, ``languages`` are ISO 639 codes.
    """
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
        settings=vars(manifest.settings),
        tokenizer=manifest.tokenizer,
        ledger=manifest.ledger,
        versions=manifest.versions,
        has_pairs=manifest.has_pairs,
        source_rows=list(map(_source_row, manifest.sources)),
        cleaning=read_cleaning(manifest),
    )
    return DatasetCard(f"---\n{metadata.to_yaml()}\n---\n\n{text}\n")


def _source_row(source: SourceRecord) -> Row:
    """Return name, counts and share of a source, and its revision on the hub or the number of its files."""
    share = None if source.share_reached is None else f"{source.share_reached:.2%}"
    place, count = markdown.Markdown(""), len(source.files)
    if source.kind == "hub":
        revision = f" at {markdown.code(source.revision[: markdown.SHOWN_DIGITS])}" if source.revision else ""
        place = markdown.Markdown(markdown.dataset_link(source.hub_name) + revision)
    elif count:  # their hashes are in manifest.json
        place = markdown.Markdown(f"{count:,} file{'s' * (count != 1)}, SHA-256 in `manifest.json`")
    return markdown.code(source.name), source.documents, source.tokens, share, place


@dataclass(frozen=True)
class Cleaning:
    """The changes to the texts of a token dataset before they became tokens."""

    of_several: bool  # several token datasets were merged, and differ
    steps: list[Row]  # name and settings, or token dataset, name and settings
    edits: list[Row]
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
    """Yield a folder with links to the files of the token dataset ``folder``, a public manifest and a card."""
    with TemporaryDirectory(prefix="fabric-train-push-") as place:
        copy = Path(place)
        for file in folder.rglob("*"):
            place_there = file.relative_to(folder)
            if file.is_file() and file.name not in _NOT_SENT and place_there.parts[0] != REFERENCE:
                link = copy / place_there
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(os.path.abspath(file))
        public = public_manifest(manifest)
        write_manifest(copy, public)
        dataset_card(public, repository, license, languages).save(copy / "README.md")
        yield copy


def public_manifest(manifest: Manifest) -> Manifest:
    """Return a manifest in which paths and URLs are their last parts; two sources never get the same name.

    Files keep their paths within their source. ``manifest`` is not of a merge, which no program pushes.
    """
    names, settings = PublicNames(manifest), manifest.settings
    held_out, template, lines = settings.validation_dataset, settings.chat_template, settings.boilerplate
    splits = {
        name: replace(split, sources={names[source]: sums for source, sums in split.sources.items()})
        for name, split in manifest.ledger.splits.items()
    }
    return replace(
        manifest,
        ledger=replace(manifest.ledger, splits=splits),
        sources=tuple(_public_source(source, names) for source in manifest.sources),
        tokenizer=replace(manifest.tokenizer, name=markdown.public_value(manifest.tokenizer.name)),
        settings=replace(
            settings,
            validation_dataset=held_out and [markdown.public_value(name) for name in held_out],
            chat_template=template and markdown.last_part(template),
            boilerplate=markdown.last_part(lines) if isinstance(lines, str) else lines,
        ),
    )


def _public_source(source: SourceRecord, names: PublicNames) -> SourceRecord:
    place = source.place or source.name
    files = tuple(
        replace(
            file, path=markdown.last_part(file.path) if "://" in file.path or os.path.isabs(file.path) else file.path
        )
        for file in source.files
    )
    public = place if source.kind == "hub" else markdown.last_part(place)
    return replace(source, name=names[source.name], place=public, folder=None, files=files)
