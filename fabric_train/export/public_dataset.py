"""What is published of a token dataset: its files, a card, and its manifest without names of private places."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import DatasetCardData

from fabric_train.export.model_card.card_data import cleaning
from fabric_train.export.model_card.record import Markdown, PublicNames, code, last_part, link, public_value, table
from fabric_train.tokenization.cleaning.dropped import CONTAMINATION_FILE, DROPPED_FILE
from fabric_train.tokenization.manifest import FILE_NAME, Manifest, Settings, SourceRecord, write_manifest

_SHOWN_DIGITS = 12
_PRIVATE = (DROPPED_FILE, CONTAMINATION_FILE)  # texts that were left out, and places


def dataset_card(manifest: Manifest, repository: str, license: str | None, languages: list[str] | None) -> str:
    """Return the card of the token dataset ``repository``, OWNER/NAME.

    Args:
        manifest: the manifest that is published; what it says is shown as it is.
        repository: where it is published.
        license: the licence's identifier on the hub.
        languages: ISO 639 codes.
    """
    splits = list(manifest.ledger.splits)
    metadata = DatasetCardData(
        license=license,
        language=languages,
        tags=["fabric-train"],
        task_categories=["text-generation"],
        source_datasets=sorted({one.hub_name for one in manifest.sources if one.kind == "hub"}) or None,
        configs=[
            {
                "config_name": "default",
                "data_files": [{"split": name, "path": f"{name}/*.arrow"} for name in splits],
            }
        ],
    )
    length, tokenizer = manifest.settings.max_length, manifest.tokenizer
    name = repository.partition("/")[2]
    sections = [
        f"# {name}",
        f"Rows of {length:,} token ids of the tokenizer {code(tokenizer.name)}, to train language models with Fabric "
        "Train. The tokenizer turns them back into the documents, so their licences apply here too.",
        _usage(repository, name),
        "## Rows\n\n" + _splits(manifest),
        "## Sources\n\n" + _sources(manifest),
        "## Ledger\n\nEvery document that was read is in a split, or counted here:\n\n" + _ledger(manifest),
        *(["## Cleaning", *cleaned] if (cleaned := cleaning(manifest)) else []),
        _tokenizer(manifest),
        "## Settings\n\n" + _settings(manifest),
        "## Versions\n\n"
        + table("package | version", [(code(one), value) for one, value in manifest.versions.items()]),
    ]
    return f"---\n{metadata.to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n"


def _usage(repository: str, name: str) -> str:
    return (
        f"```bash\nhf download {repository} --repo-type dataset --local-dir {name}\n"
        f"fabric run fabric_train --train_data_dir {name} --model_name MODEL --output_dir RUN\n```\n\n"
        f'`datasets.load_dataset("{repository}")` loads the rows alone. A row has `input_ids`, the positions at which '
        "documents begin (`document_starts`), and `labels` if not every token is supervised."
    )


def _splits(manifest: Manifest) -> str:
    rows = [
        (
            name,
            f"{split.rows:,}",
            f"{split.documents:,}",
            f"{split.tokens_in_rows:,}",
            f"{split.tokens_supervised:,}",
            f"{split.tokens_padding:,}",
            f"{sum(split.tokens_dropped.values()):,}",
        )
        for name, split in manifest.ledger.splits.items()
    ]
    return table("split | rows | documents | tokens | supervised | padding | tokens left over", rows)


def _sources(manifest: Manifest) -> str:
    rows = [
        (
            code(source.name),
            f"{source.documents:,}",
            f"{source.tokens:,}",
            "" if source.share_reached is None else f"{source.share_reached:.2%}",
            _origin(source),
        )
        for source in manifest.sources
    ]
    return table("source | documents | tokens | share of train | files, or revision", rows)


def _origin(source: SourceRecord) -> str:
    """Return a hub dataset's link and revision, or the number of files; their hashes are in manifest.json."""
    if source.kind == "hub":
        revision = f" at {code(source.revision[:_SHOWN_DIGITS])}" if source.revision else ""
        return Markdown(link(source.hub_name, f"https://huggingface.co/datasets/{source.hub_name}") + revision)
    count = len(source.files)
    return Markdown(f"{count:,} file{'s' * (count != 1)}, SHA-256 in `manifest.json`") if count else ""


def _ledger(manifest: Manifest) -> str:
    ledger = manifest.ledger
    counts = {
        "documents read": ledger.documents_read,
        **{f"left out: {reason.replace('_', ' ')}": count for reason, count in ledger.documents_skipped.items()},
        "kept": ledger.documents_kept,
        "repeated by weights": ledger.documents_repeated,
        "not drawn by weights": ledger.documents_unsampled,
        **{f"tokens cut: {reason.replace('_', ' ')}": count for reason, count in ledger.tokens_cut.items()},
    }
    return table("what | count", [(what, f"{count:,}") for what, count in counts.items()])


def _tokenizer(manifest: Manifest) -> str:
    tokenizer = manifest.tokenizer
    begin = f"begin with {code(tokenizer.bos_token)}" if tokenizer.bos_token else "have no token at their beginning"
    return (
        f"## Tokenizer\n\n{code(tokenizer.name)}, {tokenizer.vocab_size:,} tokens, in `tokenizer/`. Documents {begin} "
        f"and end with {code(tokenizer.eos_token)}.\n\n"
        + table("file | SHA-256", [(name, code(digest)) for name, digest in tokenizer.sha256.items()])
    )


def _settings(manifest: Manifest) -> str:
    values = vars(manifest.settings).items()
    return table("argument | value", [(code(name), f"{value}") for name, value in values if value is not None])


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
