# PYTHON_ARGCOMPLETE_OK
"""Merge token datasets, or slices, into one:  fabric-train merge DIR DIR ... --output_dir OUT"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.metadata import version
from pathlib import Path

from fabric_train.cleaning.dropped import CONTAMINATION_FILE, join_samples
from fabric_train.cli.argument_types import POSITIONAL, given_twice
from fabric_train.cli.errors import InputError, run_program
from fabric_train.cli.output import open_console
from fabric_train.cli.parser import parse_arguments
from fabric_train.cli.tables import Component
from fabric_train.files.atomic_folder import check_not_inside, check_not_taken, complete_folder
from fabric_train.files.regular_file import copy_folder
from fabric_train.reading.sources import open_each
from fabric_train.token_dataset.manifest import (
    Ledger,
    Manifest,
    MergedPart,
    PairLedger,
    SourceLedger,
    SplitLedger,
    TokenizerRecord,
    changed_tokenizer,
    read_manifest,
    write_manifest,
)
from fabric_train.token_dataset.token_folder import open_splits
from fabric_train.tokenization.merge_rows import MergeInput, without_parts, write_parts, write_rows
from fabric_train.tokenization.shards import SIZES, ShardSizes
from fabric_train.tokenization.slice_folder import (
    Slice,
    fill_hashes,
    is_slice,
    open_slice,
    open_slices,
)
from fabric_train.tokenization.slices import encode_command, merge_counts, merge_slices
from fabric_train.tokenization.tokenizers.tokenizer_folder import CHAT_TEMPLATE_FILE

_VERSIONS_OF = ("fabric-train", "pyarrow")
_MOST_NAMED = 10


@dataclass(frozen=True)
class MergeArguments:
    """Merge token datasets that were made with the same tokenizer and --max_length, or the slices of --shard

    PROGRAM data/part-1 data/part-2 --output_dir data/whole
    PROGRAM slices/* --output_dir data/tokens
    PROGRAM data/part-* --parts true --output_dir data/whole
    """

    dataset_dirs: list[str] = field(metadata=POSITIONAL)
    """Token datasets, in the order of their rows in the result; or all slices made by --shard, in any order, encoded or
    with their lines counted for --boilerplate.
    """
    output_dir: str
    """Token dataset to write, or of counted lines, the folder for --boilerplate; must not exist yet."""
    parts: bool = False
    """Copy no row: write a small folder that says where the token datasets are, whose rows programs read as one
    dataset. They must stay where they are, seen from this folder. Each one's last incomplete row stays its own.
    """

    def faults(self) -> list[str]:
        """Return a fault for a folder that is given again."""
        return [f"--dataset_dirs: {fault}" for _, fault in given_twice(self.dataset_dirs)]


def open_inputs(
    folders: Sequence[Path], manifest_of: Callable[[Path], Manifest | None] = read_manifest
) -> list[MergeInput]:
    """Open token datasets that can be read as one, with what ``manifest_of`` returns for the folder of each.

    InputError, with one line for each dataset that cannot be read, or whose tokenizer, row length, chat template or
    columns differ from the first one's.
    """

    def open_one(folder: Path) -> MergeInput:
        splits = open_splits(folder)
        manifest = manifest_of(folder)
        if manifest is None:
            raise InputError(f"{folder}: no manifest.json, so its tokenizer is unknown; tokenize again")
        if sorted(splits) != sorted(manifest.ledger.splits):
            raise InputError(f"{folder}: its splits differ from its manifest.json; tokenize again")
        return MergeInput(folder, manifest, splits)

    opened = open_each(open_one, folders)
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
            if source.num_files or source.documents  # a packed slice names all sources
        ),
        tokenizer=_tokenizer(merged),
        settings=merged[0].manifest.settings,
        versions={name: version(name) for name in _VERSIONS_OF},
        parts=tuple(part for dataset in merged for part in dataset.parts()),
        has_index=has_index,
        has_pairs=merged[0].manifest.has_pairs,
        chat_formats=_chat_formats(merged),
    )


def _chat_formats(merged: Sequence[MergeInput]) -> tuple[Component, ...]:
    """Return the registered formats of all parts, each once."""
    chat_formats: list[Component] = []
    for dataset in merged:
        for chat_format in dataset.manifest.chat_formats:
            if chat_format not in chat_formats:
                chat_formats.append(chat_format)
    return tuple(chat_formats)


def _differences(first: MergeInput, other: MergeInput) -> Iterator[str]:
    """Yield one line for each difference that prevents a merge."""
    ours = first.manifest
    theirs = other.manifest
    if ours.settings.max_length != theirs.settings.max_length:
        yield (
            f"{other.folder}: its rows have {theirs.settings.max_length:,} tokens, the rows of {first.folder} have "
            f"{ours.settings.max_length:,}; tokenize one of them again with the --max_length of the other"
        )
    if ours.has_pairs != theirs.has_pairs:
        has, lacks = (first, other) if ours.has_pairs else (other, first)
        yield f"{has.folder} has preference pairs, {lacks.folder} has none; keep them apart"
    digests = ours.tokenizer.sha256
    others = theirs.tokenizer.sha256
    names = [name for name in sorted({*digests, *others}) if digests.get(name) != others.get(name)]
    if names == [CHAT_TEMPLATE_FILE]:
        has, lacks = (other, first) if names[0] in others else (first, other)
        yield (
            f"{other.folder}: its chat template differs from {first.folder}'s; tokenize {lacks.folder} again with "
            f"--chat_template {has.folder / 'tokenizer' / names[0]}"
        )
    elif names:
        yield (
            f"{other.folder}: its tokenizer differs from {first.folder}'s: {', '.join(names)} differ"
            f"{'s' if len(names) == 1 else ''}; tokenize one of them again with the --tokenizer_name of the other"
        )
    templates = {ours.tokenizer.chat_template_sha256, theirs.tokenizer.chat_template_sha256} - {None}
    if len(templates) == 2 and not names:
        yield (
            f"{other.folder}: its chats are rendered with another template than {first.folder}'s; "
            "tokenize one of them again"
        )
    for name in first.splits.keys() & other.splits.keys():
        schemas = (dataset.splits[name].schema for dataset in (first, other))
        here, there = ({field.name: field.type for field in schema if field.name != "labels"} for schema in schemas)
        if here != there:
            yield f"{other.folder}: {name} has other columns than {first.folder}'s; tokenize again"


def _sum(ledgers: Sequence[Ledger], with_sources: bool) -> Ledger:
    splits = {}
    for name in dict.fromkeys(name for ledger in ledgers for name in ledger.splits):
        of_split = [ledger.splits[name] for ledger in ledgers if name in ledger.splits]
        names = dict.fromkeys(source for one in of_split for source in one.sources) if with_sources else ()
        of_sources = {source: [one.sources[source] for one in of_split if source in one.sources] for source in names}
        sources = {source: SourceLedger(**_totals(own)) for source, own in of_sources.items()}
        pairs = [one.pairs for one in of_split if one.pairs is not None]
        of_pairs = PairLedger(**_totals(pairs)) if pairs else None
        splits[name] = SplitLedger(**_totals(of_split), sources=sources, pairs=of_pairs)
    return Ledger(splits=splits, **_totals(ledgers))


def _totals(
    ledgers: Sequence[Ledger] | Sequence[SplitLedger] | Sequence[SourceLedger] | Sequence[PairLedger],
) -> dict:
    """Return the sum of each count, and per reason the sums of the counts by reason."""
    totals: dict = {}
    for ledger in ledgers:
        for counted in fields(ledger):
            value = getattr(ledger, counted.name)
            if isinstance(value, int | float):
                totals[counted.name] = totals.get(counted.name, 0) + value
            elif counted.name not in ("splits", "sources", "pairs"):
                totals[counted.name] = dict(Counter(totals.get(counted.name, {})) + Counter(value))
    return totals


def _tokenizer(merged: Sequence[MergeInput]) -> TokenizerRecord:
    """Return the first tokenizer record with a chat template, or the first record, with the ends of all turns."""
    records = [dataset.manifest.tokenizer for dataset in merged]
    ends = {end for record in records for end in record.turn_end_token_ids}
    first = next((record for record in records if record.chat_template_sha256), records[0])
    return replace(first, turn_end_token_ids=tuple(sorted(ends)))


def main(argv: list[str] | None = None, sizes: ShardSizes = SIZES) -> None:
    """Merge the token datasets of the command line and print a summary; slices have shards of these ``sizes``."""
    arguments = parse_arguments(MergeArguments, argv)
    folders = [Path(name).expanduser() for name in arguments.dataset_dirs]
    target = Path(arguments.output_dir)
    are_slices = any(is_slice(folder) for folder in folders)
    if not are_slices and len(without_parts(folders)) < 2 and not arguments.parts:
        raise InputError("--dataset_dirs: give two token datasets or more")
    slices = open_slices(folders, target) if are_slices else []
    if slices and slices[0].arguments.counts_lines:
        _merge_counts(slices, target, sizes)
        return
    if slices and not slices[0].arguments.parts:
        if arguments.parts:
            raise InputError(
                f"--parts true: {slices[0].folder} is encoded and has no rows; run the tasks with --parts true, or "
                "merge without it"
            )
        manifest, notes = merge_slices(slices, target, sizes)
    else:
        manifest, notes = merge([one.folder for one in slices] or folders, target, arguments.parts)
    console = open_console()
    several = "slices" if are_slices else "parts"
    is_long = are_slices or len(manifest.parts) > _MOST_NAMED
    merged = f"{len(folders):,} {several}" if is_long else ", ".join(part.name for part in manifest.parts)
    rows = ", ".join(f"{split.rows:,} rows of {name}" for name, split in manifest.ledger.splits.items())
    lines = [f"merged   {merged}", *(f"note     {note}" for note in notes)]
    lines += [f"warning  {loss}" for loss in manifest.losses()] if are_slices else []
    for line in (*lines, f"written  {target}: {rows}"):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _merge_counts(slices: Sequence[Slice], target: Path, sizes: ShardSizes) -> None:
    """Write the lines that repeat in all counted slices, and print some of them and what follows."""
    lines = merge_counts(slices, target, sizes)
    given = slices[0].arguments
    print(
        f"merged   {len(slices):,} counted slices",
        f"lines    {len(lines.hashes):,} are in {lines.num_documents:,} documents or more; look at the most frequent:",
        *("         " + "".join(one if one.isprintable() else "?" for one in line) for line in lines.shown()),
        f"written  {target}",
        f"next     slice {given.shard}, and the others likewise: {encode_command(given, str(target))}",
        sep="\n",
    )


def merge(folders: Sequence[Path], target: Path, as_parts: bool = False) -> tuple[Manifest, list[str]]:
    """Write the rows of ``folders``, in this order, as the token dataset ``target``, which is complete or absent.

    With ``as_parts``, write only where they are. Documents are not compared: one that is in two of the datasets comes
    twice. Return the manifest, and notes for the user.
    """
    check_not_taken(target)
    folders = without_parts(folders)
    for folder in folders:
        check_not_inside(target, folder)
    merged = open_inputs(folders)
    if are_slices := [open_slice(one.folder) for one in merged if is_slice(one.folder)]:
        filled = fill_hashes([one.manifest for one in merged], are_slices)
        merged = [replace(one, manifest=manifest) for one, manifest in zip(merged, filled, strict=True)]
    faults = [fault for one in merged for fault in changed_tokenizer(one.folder, one.manifest.tokenizer)]
    if faults:
        raise InputError(*faults)
    first = merged[0]
    manifest = merge_manifests(merged)
    without_index = [dataset.folder for dataset in merged if not dataset.manifest.has_index]
    with complete_folder(target) as folder:
        copy_folder(first.folder / "tokenizer", folder / "tokenizer")
        if as_parts:
            write_parts(folder, target, merged, manifest)
        else:
            write_rows(merged, manifest, folder)
        lists = [dataset.folder / CONTAMINATION_FILE for dataset in merged]
        if hits := b"".join(file.read_bytes() for file in lists if file.exists()):
            (folder / CONTAMINATION_FILE).write_bytes(hits)
        join_samples([dataset.folder for dataset in merged], folder)
        write_manifest(folder, manifest)
    notes = [
        f"{folder} has no document index, because an older version wrote it, so {target} has none; tokenize it again "
        "to have one"
        for folder in without_index
    ]
    names = [chat_format.name for chat_format in manifest.chat_formats]
    notes += [
        f"the parts were read by different versions of the data_format {name}; manifest.json has each"
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    return manifest, [*notes, *_settings_that_differ(manifest.parts), *_sources_in_common(merged)]


def _settings_that_differ(parts: Sequence[MergedPart]) -> Iterator[str]:
    settings = [asdict(part.settings) for part in parts]
    for name in settings[0]:
        values = list(dict.fromkeys(json.dumps(given[name]) for given in settings))
        if len(values) > 1:
            shown = [*values[:_MOST_NAMED], *["…"] * (len(values) > _MOST_NAMED)]
            yield f"--{name} differs: {', '.join(shown)}; manifest.json keeps each part's"
    if len({json.dumps(part.cleaning, sort_keys=True) for part in parts}) > 1:
        yield "the parts were cleaned differently; manifest.json has the settings of each part"


def _sources_in_common(merged: Sequence[MergeInput]) -> Iterator[str]:
    """Yield a line for each token dataset whose files were also read for later ones."""
    first: dict[str, tuple[Path, str]] = {}
    again: dict[Path, tuple[dict[str, None], dict[Path, None]]] = {}  # by folder, its files and the other folders
    for dataset in merged:
        for source in () if is_slice(dataset.folder) else dataset.manifest.sources:  # slices share files, not documents
            for file in source.files:
                folder, path = first.setdefault(file.sha256, (dataset.folder, file.path))
                if folder != dataset.folder:
                    files, others = again.setdefault(folder, ({}, {}))
                    files[path] = others[dataset.folder] = None
    for folder, (files, others) in again.items():
        read = _first_of([*files])
        verb = "was" if len(files) == 1 else "were"
        yield f"{read} of {folder} {verb} also read for {_first_of([*others])}: documents may come twice"


def _first_of(values: Sequence[object]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]} and {len(values) - 1:,} more"


if __name__ == "__main__":
    run_program(main)
