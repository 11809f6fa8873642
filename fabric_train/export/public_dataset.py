"""What is published of a token dataset: its files, a card, and its manifest without names of private places."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from fabric_train.export.dataset_card import dataset_card
from fabric_train.export.model_card.public_names import PublicNames, last_part, public_value
from fabric_train.tokenization.cleaning import contamination, dropped_sample
from fabric_train.tokenization.manifest import FILE_NAME, Manifest, Settings, SourceRecord, write_manifest

_PRIVATE = (dropped_sample.FILE_NAME, contamination.FILE_NAME)  # texts that were left out, and places


@contextmanager
def public_copy(
    folder: Path, manifest: Manifest, repository: str, license: str | None, languages: list[str] | None
) -> Iterator[Path]:
    """Yield a folder with links to the files of the token dataset ``folder``, a public manifest and a card.

    Args:
        folder: a token dataset.
        manifest: its manifest.
        repository: OWNER/NAME on the hub, for the card.
        license: for the card: the licence's identifier on the hub.
        languages: for the card: ISO 639 codes.
    """
    with TemporaryDirectory(prefix="fabric-train-push-") as place:
        copy = Path(place)
        for file in folder.rglob("*"):
            if file.is_file() and file.name not in (FILE_NAME, "README.md", *_PRIVATE):
                link = copy / file.relative_to(folder)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(os.path.abspath(file))
        public = public_manifest(manifest)
        write_manifest(copy, public)
        (copy / "README.md").write_text(dataset_card(public, repository, license, languages), encoding="utf-8")
        yield copy


def public_manifest(manifest: Manifest) -> Manifest:
    """Return a manifest in which paths and URLs are their last parts; two sources never get the same name.

    Files keep their paths within their source. ``manifest`` is not of a merge, which no program pushes.
    """
    names = PublicNames(manifest)
    splits = {
        name: replace(split, sources={names[source]: sums for source, sums in split.sources.items()})
        for name, split in manifest.ledger.splits.items()
    }
    return replace(
        manifest,
        ledger=replace(manifest.ledger, splits=splits),
        sources=tuple(_public_source(source, names) for source in manifest.sources),
        tokenizer=replace(manifest.tokenizer, name=public_value(manifest.tokenizer.name)),
        settings=_public_settings(manifest.settings),
    )


def _public_source(source: SourceRecord, names: PublicNames) -> SourceRecord:
    place = source.place or source.name
    files = tuple(
        replace(file, path=last_part(file.path) if "://" in file.path or os.path.isabs(file.path) else file.path)
        for file in source.files
    )
    public = place if source.kind == "hub" else last_part(place)
    return replace(source, name=names[source.name], place=public, folder=None, files=files)


def _public_settings(settings: Settings) -> Settings:
    held_out, template, lines = settings.validation_dataset, settings.chat_template, settings.boilerplate
    return replace(
        settings,
        validation_dataset=held_out and [public_value(name) for name in held_out],
        chat_template=template and last_part(template),
        boilerplate=last_part(lines) if isinstance(lines, str) else lines,
    )
