"""The training data of a model card: sources with shares, counts and hashes, and the mixture with its phases."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fabric_train.export.model_card.card_cleaning import cleaning
from fabric_train.export.model_card.markdown import code, folded, table
from fabric_train.export.model_card.public_names import last_part, public_value
from fabric_train.export.model_card.record import HubDataset, ModelRecord
from fabric_train.tokenization.manifest import Manifest, SourceRecord

HASHES = "training_data.sha256"
_SHOWN_DIGITS = 12


@dataclass(frozen=True)
class SourceRow:
    """A source of the training split: its public name, its records in the manifest, its documents and its tokens."""

    name: str
    records: tuple[SourceRecord, ...]
    documents: int
    tokens: int


def source_rows(record: ModelRecord) -> list[SourceRow]:
    """Return the sources of a token dataset in their order; none without a manifest."""
    if record.manifest is None:
        return []
    by_name: dict[str, list[SourceRecord]] = {}
    for source in record.training_sources():
        by_name.setdefault(source.name, []).append(source)
    train = record.manifest.ledger.splits.get("train")
    rows = []
    for name, records in by_name.items():
        counted = train.sources.get(name) if train else None
        documents = counted.documents if counted else sum(one.documents for one in records)
        tokens = counted.tokens_in_rows if counted else sum(one.train_tokens or one.tokens for one in records)
        rows.append(SourceRow(record.names[name], tuple(records), documents, tokens))
    return rows


def seen_shares(record: ModelRecord) -> list[tuple[str, float]]:
    """Return the public name of each source and its share of the tokens that were seen; none if they are not known."""
    names = record.trainer.get("mixture_sources") or ()
    rows, parts = record.state.rows_of_sources, source_rows(record)
    if names and rows and len(names) == len(rows):
        pairs = [(name, float(count)) for name, count in zip(_mixture_names(record), rows, strict=True)]
    else:
        pairs = [] if names else [(part.name, float(part.tokens)) for part in parts]
    total = sum(number for _, number in pairs)
    return [(name, number / total) for name, number in pairs] if total else []


def training_data(record: ModelRecord) -> str:
    """Return the section of the training data."""
    if record.stream or record.trainer["arguments"].get("streaming_dataset"):
        parts = _streamed(record)
    elif record.manifest is None:
        parts = ["The token dataset had no manifest."]
    else:
        parts = _stored(record, record.manifest)
    if record.manifest and record.trainer.get("mixture_sources"):
        parts.append(_mixture(record, record.manifest.settings.max_length))
    return "\n\n".join(["## Training data", *parts])


def write_hashes(record: ModelRecord, folder: Path) -> None:
    """Write the SHA-256 of each source file, as ``sha256sum`` does, with names of the form SOURCE/FILE.

    Nothing is written if there are no source files.
    """
    lines = [line for row in source_rows(record) for line in _hash_lines(row)]
    if lines:
        (folder / HASHES).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _stored(record: ModelRecord, manifest: Manifest) -> list[str]:
    rows = source_rows(record)
    total = max(sum(row.tokens for row in rows), 1)
    cells = [
        (_linked(row), f"{row.tokens / total:.2%}", f"{row.tokens:,}", f"{row.documents:,}", *_files(row))
        for row in rows
    ]
    texts = ["What the token dataset has of each source for training:"]
    texts.append(table("source | share | tokens | documents | files | SHA-256 or revision", cells))
    if any(_hash_lines(row) for row in rows):
        of_several = any(len(_hash_lines(row)) > 1 for row in rows)
        note = " That of several files is the hash of their lines there." if of_several else ""
        texts.append(f"The SHA-256 of every source file is in [{HASHES}]({HASHES}).{note}")
    splits = [
        (name, f"{split.documents:,}", f"{split.characters:,}", f"{split.tokens_in_rows:,}", f"{split.rows:,}")
        for name, split in manifest.ledger.splits.items()
    ]
    texts.append(
        f"Tokenizer: {code(public_value(manifest.tokenizer.name))}. Rows of {manifest.settings.max_length:,} tokens."
    )
    texts.append(table("split | documents | characters | tokens | rows", splits))
    return [*texts, *cleaning(manifest)]


def _linked(row: SourceRow) -> str:
    """Return the name of a source, with links to its datasets on the hub."""
    hub = {one.hub_name: HubDataset(one.hub_name, one.revision) for one in row.records if one.kind == "hub"}
    if not hub:
        return code(row.name)
    links = ", ".join(map(_link, hub.values()))
    return links if row.name in hub else f"{code(row.name)}: {links}"


def _link(dataset: HubDataset) -> str:
    return f"[{dataset.repository}](https://huggingface.co/datasets/{dataset.repository})"


def _files(row: SourceRow) -> tuple[str, str]:
    """Return the number of source files, and their hash or the revision of a dataset on the hub, in short."""
    lines = _hash_lines(row)
    if not lines:
        revisions = [one.revision[:_SHOWN_DIGITS] for one in row.records if one.revision]
        return "", ", ".join(map(code, dict.fromkeys(revisions)))
    digest = lines[0].split()[0] if len(lines) == 1 else hashlib.sha256("\n".join([*lines, ""]).encode()).hexdigest()
    return f"{len(lines):,}", code(digest[:_SHOWN_DIGITS])


def _hash_lines(row: SourceRow) -> list[str]:
    files = [file for record in row.records for file in record.files]
    return [f"{last_part(file.sha256)}  {row.name}/{last_part(file.path)}" for file in files]


def _streamed(record: ModelRecord) -> list[str]:
    """Return the places of a stream with their shares, and what identifies their files."""
    cells = []
    for place in record.stream_places():
        revision = (place.dataset.revision or "") if place.dataset else ""
        name = code(place.name)
        if place.dataset:
            link = _link(place.dataset)
            name = link if place.name == place.dataset.repository else f"{name}: {link}"
        cells.append((name, f"{place.share:g}", code(revision[:_SHOWN_DIGITS]) if revision else ""))
    texts = ["Documents were read and tokenized during training.", table("source | share of a pass | revision", cells)]
    identities = [line.rsplit(", ", 2) for line in (record.stream.sources if record.stream else ())]
    files = [f"- {last_part(one[0])}, {one[1]}, {one[2]}" for one in identities if one[-1].startswith("sha256")]
    if files:
        texts.append(folded("Size, and hash of the first and last MiB, of each file", "\n".join(files)))
    return texts


def _mixture(record: ModelRecord, tokens_per_row: int) -> str:
    """Return the tokens that were seen of each source of a mixture, and the shares of the phases that have begun."""
    trainer, state = record.trainer, record.state
    names = [code(name) for name in _mixture_names(record)]
    seen = state.rows_of_sources or [0] * len(names)
    rows = [
        (name, f"{count / max(sum(seen), 1):.2%}", f"{count * tokens_per_row:,}")
        for name, count in zip(names, seen, strict=True)
    ]
    text = "### Mixture\n\nWhat was read of each source up to this step:\n\n" + table(
        "source | share | tokens seen", rows
    )
    phases = [phase for phase in trainer["data"].get("phases", []) if phase["first_step"] <= state.step]
    if not phases:
        return text
    schedules = {one["first_step"]: one["arguments"] for one in trainer["phase_schedules"]}
    stretches = [{"first_step": 1, "rows_per_epoch": trainer["data"]["rows_per_epoch"]}, *phases]
    lines = [
        (f"{one['first_step']:,}", _shares_in_words(names, one["rows_per_epoch"]), _rates(schedules, one["first_step"]))
        for one in stretches[phases[0]["first_step"] == 1 :]
    ]
    return text + "\n\n" + table("from step | shares | learning rate", lines)


def _mixture_names(record: ModelRecord) -> list[str]:
    """Return the public names of what has a share: SOURCE for FOLDER:SOURCE, if no two folders have it."""
    given = record.trainer["mixture_sources"]
    sources = [name.rpartition(":")[2] for name in given]
    known = {source.name for source in record.training_sources()}
    if known.issuperset(sources) and len(set(sources)) == len(sources):
        return [record.names[name] for name in sources]
    return [last_part(name) for name in given]


def _shares_in_words(names: Sequence[str], rows: Sequence[int]) -> str:
    return ", ".join(f"{name} {count / sum(rows):.2%}" for name, count in zip(names, rows, strict=True) if count)


def _rates(schedules: dict[int, dict[str, Any]], first_step: int) -> str:
    """Return the learning rate of a phase in short: its own, or that of the hyperparameters."""
    own = schedules.get(first_step)
    return f"{own['lr_schedule']}, `lr` {own['lr']:g}, `min_lr` {own['min_lr']:g}" if own else "that of the run"
