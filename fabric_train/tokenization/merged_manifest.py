"""Check that token datasets fit together, and describe them as one: for a merge, and for training on several."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path

import pyarrow as pa

from fabric_train.cli.errors import InputError
from fabric_train.tokenization.manifest import (
    FILE_NAME,
    Ledger,
    Manifest,
    MergedPart,
    SourceLedger,
    SplitLedger,
    TokenizerRecord,
    read_manifest,
)
from fabric_train.tokenization.packing.token_folder import Split, open_splits
from fabric_train.tokenization.tokenizers import chat_template_file

_VERSIONS_OF = ("fabric-train", "pyarrow")


@dataclass(frozen=True)
class MergeInput:
    """A token dataset to merge."""

    folder: Path
    manifest: Manifest
    splits: dict[str, Split]

    def parts(self) -> tuple[MergedPart, ...]:
        """Return the parts that were merged into this token dataset, or the dataset itself as the only part."""
        if self.manifest.parts:
            return self.manifest.parts
        return (
            MergedPart(
                name=str(self.folder),
                manifest_sha256=hashlib.sha256((self.folder / FILE_NAME).read_bytes()).hexdigest(),
                rows={name: split.num_rows for name, split in self.splits.items()},
                settings=self.manifest.settings,
                versions=self.manifest.versions,
                cleaning=self.manifest.cleaning,
            ),
        )


def open_inputs(
    folders: Sequence[Path], manifest_of: Callable[[Path], Manifest | None] = read_manifest
) -> list[MergeInput]:
    """Open token datasets that can be read as one, with what ``manifest_of`` returns for the folder of each.

    Raises:
        InputError: one line for each dataset that cannot be read, or whose tokenizer, row length, chat template or
            columns differ from those of the first.
    """
    opened: list[MergeInput] = []
    faults: list[str] = []
    for folder in folders:
        try:
            splits, manifest = open_splits(folder), manifest_of(folder)
        except InputError as error:
            faults += error.faults
            continue
        if manifest is None:
            faults.append(f"{folder}: no manifest.json, so its tokenizer is unknown; tokenize again")
        elif sorted(splits) != sorted(manifest.ledger.splits):
            faults.append(f"{folder}: its splits are not those of its manifest.json; tokenize again")
        else:
            opened.append(MergeInput(folder, manifest, splits))
    if faults:
        raise InputError(*faults)
    faults = [fault for other in opened[1:] for fault in _differences(opened[0], other)]
    if faults:
        raise InputError(*faults)
    return opened


def merge_manifests(merged: Sequence[MergeInput]) -> Manifest:
    """Return the manifest of all rows of the token datasets together; it has a document index if each has one."""
    has_index = all(dataset.manifest.has_index for dataset in merged)
    return Manifest(
        ledger=_sum([dataset.manifest.ledger for dataset in merged], with_sources=has_index),
        # weights and shares are relative to the other sources of one part; the part's settings keep the weights
        sources=tuple(
            replace(source, weight=None, share_asked=None, share_reached=None)
            for dataset in merged
            for source in dataset.manifest.sources
        ),
        tokenizer=_tokenizer(merged),
        settings=merged[0].manifest.settings,
        versions={name: version(name) for name in _VERSIONS_OF},
        parts=tuple(part for dataset in merged for part in dataset.parts()),
        has_index=has_index,
    )


def _differences(first: MergeInput, other: MergeInput) -> Iterator[str]:
    """Yield one line for each difference that prevents a merge."""
    ours, theirs = first.manifest, other.manifest
    if ours.settings.max_length != theirs.settings.max_length:
        yield (
            f"{other.folder}: its rows have {theirs.settings.max_length:,} tokens, those of {first.folder} have "
            f"{ours.settings.max_length:,}; tokenize one of them again with the --max_length of the other"
        )
    digests, others = ours.tokenizer.sha256, theirs.tokenizer.sha256
    names = [name for name in sorted({*digests, *others}) if digests.get(name) != others.get(name)]
    if names == [chat_template_file.FILE_NAME]:
        has, lacks = (other, first) if names[0] in others else (first, other)
        yield (
            f"{other.folder}: its chat template is not that of {first.folder}; tokenize {lacks.folder} again with "
            f"--chat_template {has.folder / 'tokenizer' / names[0]}"
        )
    elif names:
        yield (
            f"{other.folder}: its tokenizer is not that of {first.folder}, {', '.join(names)} differ"
            f"{'s' if len(names) == 1 else ''}; tokenize one of them again with the --tokenizer_name of the other"
        )
    templates = {ours.tokenizer.chat_template_sha256, theirs.tokenizer.chat_template_sha256} - {None}
    if len(templates) == 2 and not names:
        yield (
            f"{other.folder}: its chats are rendered with another template than those of {first.folder}; "
            "tokenize one of them again"
        )
    for name in first.splits.keys() & other.splits.keys():
        if _without_labels(first.splits[name].schema) != _without_labels(other.splits[name].schema):
            yield f"{other.folder}: {name} has other columns than that of {first.folder}; tokenize again"


def _without_labels(schema: pa.Schema) -> dict[str, pa.DataType]:
    return {field.name: field.type for field in schema if field.name != "labels"}


def _sum(ledgers: Sequence[Ledger], with_sources: bool) -> Ledger:
    names = dict.fromkeys(name for ledger in ledgers for name in ledger.splits)
    splits = {}
    for name in names:
        of_split = [ledger.splits[name] for ledger in ledgers if name in ledger.splits]
        splits[name] = SplitLedger(**_totals(of_split), sources=_sum_sources(of_split) if with_sources else {})
    return Ledger(splits=splits, **{key: value for key, value in _totals(ledgers).items() if key != "splits"})


def _sum_sources(ledgers: Sequence[SplitLedger]) -> dict[str, SourceLedger]:
    names = dict.fromkeys(name for ledger in ledgers for name in ledger.sources)
    return {
        name: SourceLedger(**_totals([ledger.sources[name] for ledger in ledgers if name in ledger.sources]))
        for name in names
    }


def _totals(ledgers: Sequence[Ledger] | Sequence[SplitLedger] | Sequence[SourceLedger]) -> dict:
    """Return the sum of each count, and per reason the sums of the counts by reason."""
    totals: dict = {}
    for ledger in ledgers:
        for field in fields(ledger):
            value = getattr(ledger, field.name)
            if isinstance(value, int):
                totals[field.name] = totals.get(field.name, 0) + value
            elif field.name not in ("splits", "sources"):
                totals[field.name] = dict(Counter(totals.get(field.name, {})) + Counter(value))
    return totals


def _tokenizer(merged: Sequence[MergeInput]) -> TokenizerRecord:
    """Return the first tokenizer record with a chat template, or the first record, with the ends of all turns."""
    records = [dataset.manifest.tokenizer for dataset in merged]
    ends = {end for record in records for end in record.turn_end_token_ids}
    first = next((record for record in records if record.chat_template_sha256), records[0])
    return replace(first, turn_end_token_ids=tuple(sorted(ends)))
