# PYTHON_ARGCOMPLETE_OK
"""Merge token datasets, or slices, into one:  fabric-train merge DIR DIR ... --output_dir OUT"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa

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
    SourceRecord,
    SplitLedger,
    TokenizerRecord,
    UnpairedLedger,
    changed_tokenizer,
    read_manifest,
    write_manifest,
)
from fabric_train.token_dataset.token_folder import Split, open_splits
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
    """Merge token datasets with the same tokenizer and --max_length, or the slices made by --shard

    PROGRAM data/part-1 data/part-2 --output_dir data/whole
    PROGRAM slices/* --output_dir data/tokens
    PROGRAM data/part-* --parts true --output_dir data/whole
    """

    dataset_dirs: list[str] = field(metadata=POSITIONAL)
    """Token datasets, in the order of their rows in the result. Or all slices made by --shard, in any order, either
    encoded or with their lines counted for --boilerplate.
    """
    output_dir: str
    """Token dataset to write, or the folder of repeated lines for --boilerplate if the slices hold counted lines; must
    not exist yet.
    """
    parts: bool = False
    """Do not copy any rows: write a small folder that records where the token datasets are, which programs read as one
    dataset. The token datasets must stay at the same path relative to this folder. Each keeps its own last incomplete
    row.
    """

    def faults(self) -> list[str]:
        """Return a fault for a folder that is given again."""
        return [f"--dataset_dirs: {fault}" for _, fault in given_twice(self.dataset_dirs)]


def open_inputs(
    folders: Sequence[Path], manifest_of: Callable[[Path], Manifest | None] = read_manifest
) -> list[MergeInput]:
    """Open token datasets that can be read as one, each with the result of ``manifest_of`` for its folder.

    InputError, with one line for each dataset that cannot be read, or whose tokenizer, row length, chat template or
    columns differ from those of the first dataset.
    """

    def open_input(folder: Path) -> MergeInput:
        splits = open_splits(folder)
        manifest = manifest_of(folder)
        if manifest is None:
            raise InputError(f"{folder}: it has no manifest.json, so its tokenizer is unknown; tokenize again")
        if sorted(splits) != sorted(manifest.ledger.splits):
            raise InputError(f"{folder}: its splits differ from its manifest.json; tokenize again")
        return MergeInput(folder, manifest, splits)

    datasets = open_each(open_input, folders)
    faults: list[str] = []
    for dataset in datasets[1:]:
        faults += _find_differences(datasets[0], dataset)
    if faults:
        raise InputError(*faults)
    return datasets


def merge_manifests(datasets: Sequence[MergeInput]) -> Manifest:
    """Return the manifest for all rows of the token datasets together, with a document index if each has one."""
    has_index = all(dataset.manifest.has_index for dataset in datasets)
    sources: list[SourceRecord] = []
    parts: list[MergedPart] = []
    for dataset in datasets:
        parts += dataset.parts()
        for source in dataset.manifest.sources:
            # a packed slice names all sources of its run, even if it has no documents of some
            if source.num_files or source.documents:
                # weights and shares are relative to the sources of one part; the part's settings keep the weights
                sources.append(replace(source, weight=None, share_asked=None, share_reached=None))
    return Manifest(
        ledger=_add_ledgers([dataset.manifest.ledger for dataset in datasets], with_sources=has_index),
        sources=tuple(sources),
        tokenizer=_merge_tokenizer_records(datasets),
        settings=datasets[0].manifest.settings,
        versions={name: version(name) for name in _VERSIONS_OF},
        parts=tuple(parts),
        has_index=has_index,
        has_pairs=datasets[0].manifest.has_pairs,
        has_unpaired=datasets[0].manifest.has_unpaired,
        chat_formats=_chat_formats(datasets),
    )


def _chat_formats(datasets: Sequence[MergeInput]) -> tuple[Component, ...]:
    """Return the registered formats of all datasets, each once."""
    chat_formats: list[Component] = []
    for dataset in datasets:
        for chat_format in dataset.manifest.chat_formats:
            if chat_format not in chat_formats:
                chat_formats.append(chat_format)
    return tuple(chat_formats)


def _find_differences(reference: MergeInput, dataset: MergeInput) -> Iterator[str]:
    """Yield one line for each difference between two datasets that prevents a merge."""
    reference_manifest = reference.manifest
    manifest = dataset.manifest

    # the form of the rows
    reference_length = reference_manifest.settings.max_length
    max_length = manifest.settings.max_length
    if reference_length != max_length:
        yield (
            f"{dataset.folder}: its rows have {max_length:,} tokens, but the rows of {reference.folder} have "
            f"{reference_length:,}; tokenize one of them again with the other's --max_length"
        )
    if reference_manifest.kind != manifest.kind:
        yield (
            f"{reference.folder} has {reference_manifest.kind}, but {dataset.folder} has {manifest.kind}; do not "
            "merge them"
        )

    # the files of the tokenizer
    reference_hashes = reference_manifest.tokenizer.sha256
    hashes = manifest.tokenizer.sha256
    all_names = sorted({*reference_hashes, *hashes})
    differing_files = [name for name in all_names if reference_hashes.get(name) != hashes.get(name)]
    if differing_files == [CHAT_TEMPLATE_FILE]:
        # the dataset that has the file shows the way; if both have one, the reference decides
        with_template = reference
        without_template = dataset
        if CHAT_TEMPLATE_FILE in hashes:
            with_template = dataset
            without_template = reference
        yield (
            f"{dataset.folder}: its chat template differs from {reference.folder}'s; "
            f"tokenize {without_template.folder} again with "
            f"--chat_template {with_template.folder / 'tokenizer' / CHAT_TEMPLATE_FILE}"
        )
    elif differing_files:
        verb = "differs" if len(differing_files) == 1 else "differ"
        yield (
            f"{dataset.folder}: its tokenizer differs from {reference.folder}'s: {', '.join(differing_files)} "
            f"{verb}; tokenize one of them again with the other's --tokenizer_name"
        )

    # the template that rendered the chats, which may come from --chat_template; None if there are no chats
    reference_template = reference_manifest.tokenizer.chat_template_sha256
    template = manifest.tokenizer.chat_template_sha256
    has_both_templates = reference_template is not None and template is not None
    if has_both_templates and reference_template != template and not differing_files:
        yield (
            f"{dataset.folder}: its chats were rendered with a different template than {reference.folder}'s; "
            "tokenize one of them again"
        )

    # the columns; `labels` are added where they are missing
    for name in reference.splits.keys() & dataset.splits.keys():
        if _types_by_column(reference.splits[name]) != _types_by_column(dataset.splits[name]):
            yield f"{dataset.folder}: {name} has different columns than {reference.folder}'s; tokenize again"


def _types_by_column(split: Split) -> dict[str, pa.DataType]:
    """Return the type of each column except ``labels``."""
    return {column.name: column.type for column in split.schema if column.name != "labels"}


def _add_ledgers(ledgers: Sequence[Ledger], *, with_sources: bool) -> Ledger:
    """Return the sum of the ledgers, by split and, ``with_sources``, by source."""
    ledgers_by_split: dict[str, list[SplitLedger]] = {}
    for ledger in ledgers:
        for split_name, split_ledger in ledger.splits.items():
            ledgers_by_split.setdefault(split_name, []).append(split_ledger)

    splits: dict[str, SplitLedger] = {}
    for split_name, split_ledgers in ledgers_by_split.items():
        ledgers_by_source: dict[str, list[SourceLedger]] = {}
        if with_sources:
            for split_ledger in split_ledgers:
                for source_name, source_ledger in split_ledger.sources.items():
                    ledgers_by_source.setdefault(source_name, []).append(source_ledger)
        sources = {name: SourceLedger(**_totals(group)) for name, group in ledgers_by_source.items()}
        pair_ledgers = [ledger.pairs for ledger in split_ledgers if ledger.pairs is not None]
        pairs = PairLedger(**_totals(pair_ledgers)) if pair_ledgers else None
        unpaired_ledgers = [ledger.unpaired for ledger in split_ledgers if ledger.unpaired is not None]
        unpaired = UnpairedLedger(**_totals(unpaired_ledgers)) if unpaired_ledgers else None
        splits[split_name] = SplitLedger(**_totals(split_ledgers), sources=sources, pairs=pairs, unpaired=unpaired)
    return Ledger(splits=splits, **_totals(ledgers))


def _totals(
    ledgers: Sequence[Ledger]
    | Sequence[SplitLedger]
    | Sequence[SourceLedger]
    | Sequence[PairLedger]
    | Sequence[UnpairedLedger],
) -> dict[str, Any]:
    """Return the sum of each count, and per reason the sums of the counts by reason.

    The nested ledgers (``splits``, ``sources``, ``pairs`` and ``unpaired``) are left out, because the caller adds them
    up by name.
    """
    totals: dict[str, Any] = {}
    for ledger in ledgers:
        for ledger_field in fields(ledger):
            name = ledger_field.name
            value = getattr(ledger, name)
            if isinstance(value, int | float):
                totals[name] = totals.get(name, 0) + value
            elif name not in ("splits", "sources", "pairs", "unpaired"):
                totals[name] = dict(Counter(totals.get(name, {})) + Counter(value))
    return totals


def _merge_tokenizer_records(datasets: Sequence[MergeInput]) -> TokenizerRecord:
    """Return the first tokenizer record with a chat template, or the first one, with the end tokens of all turns."""
    records = [dataset.manifest.tokenizer for dataset in datasets]
    turn_end_ids: set[int] = set()
    for record in records:
        turn_end_ids.update(record.turn_end_token_ids)
    records_with_template = [record for record in records if record.chat_template_sha256]
    base_record = records_with_template[0] if records_with_template else records[0]
    return replace(base_record, turn_end_token_ids=tuple(sorted(turn_end_ids)))


def main(argv: list[str] | None = None, sizes: ShardSizes = SIZES) -> None:
    """Merge the token datasets on the command line and print a summary; slices have shards of these ``sizes``."""
    arguments = parse_arguments(MergeArguments, argv)
    folders = [Path(name).expanduser() for name in arguments.dataset_dirs]
    target = Path(arguments.output_dir)

    # open the slices, if these are slices
    are_slices = any(is_slice(folder) for folder in folders)
    if not are_slices and len(without_parts(folders)) < 2 and not arguments.parts:
        raise InputError("--dataset_dirs: expected two token datasets or more")
    slices: list[Slice] = []
    if are_slices:
        slices = open_slices(folders, target)
        folders = [packed.folder for packed in slices]  # in the order of the input

    # merge what the folders hold: counted lines, encoded shards, or rows
    if slices and slices[0].arguments.counts_lines:
        _merge_counts(slices, target, sizes)
        return
    if slices and not slices[0].arguments.parts:
        if arguments.parts:
            raise InputError(
                f"--parts true: {slices[0].folder} is encoded but not packed into rows; run the tasks with --parts "
                "true, or merge without it"
            )
        manifest, notes = merge_slices(slices, target, sizes)
    else:
        manifest, notes = merge(folders, target, as_parts=arguments.parts)

    # the summary
    if are_slices:
        merged = f"{len(folders):,} slices"
    elif len(manifest.parts) > _MOST_NAMED:
        merged = f"{len(folders):,} parts"
    else:
        merged = ", ".join(part.name for part in manifest.parts)
    lines = [f"merged   {merged}"]
    lines += [f"note     {note}" for note in notes]
    if are_slices:
        lines += [f"warning  {loss}" for loss in manifest.losses()]
    rows = ", ".join(f"{split.rows:,} rows of {name}" for name, split in manifest.ledger.splits.items())
    lines.append(f"written  {target}: {rows}")
    console = open_console()
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _merge_counts(slices: Sequence[Slice], target: Path, sizes: ShardSizes) -> None:
    """Write the lines that repeat over all counted slices; print the most frequent ones and the next command."""
    repeated = merge_counts(slices, target, sizes)
    arguments = slices[0].arguments
    num_lines = f"{len(repeated.hashes):,} occur in {repeated.num_documents:,} documents or more"
    print(f"merged   {len(slices):,} counted slices")
    print(f"lines    {num_lines}; check the most frequent ones:")
    for line in repeated.shown():
        # a line of the corpus may hold control characters of the terminal
        printable = "".join(character if character.isprintable() else "?" for character in line)
        print(f"         {printable}")
    print(f"written  {target}")
    command = encode_command(arguments, str(target))
    print(f"next     slice {arguments.shard}, and likewise for the others: {command}")


def merge(folders: Sequence[Path], target: Path, as_parts: bool = False) -> tuple[Manifest, list[str]]:
    """Write the rows of ``folders``, in this order, as the token dataset ``target``, which is complete or absent.

    With ``as_parts``, only write where the folders are. Documents are not compared: a document in two datasets is in
    the result twice. Return the manifest, and notes for the user.
    """
    # open the datasets, and check all before anything is written
    check_not_taken(target)
    folders = without_parts(folders)
    for folder in folders:
        check_not_inside(target, folder)
    datasets = open_inputs(folders)
    slices = [open_slice(dataset.folder) for dataset in datasets if is_slice(dataset.folder)]
    if slices:
        manifests = fill_hashes([dataset.manifest for dataset in datasets], slices)
        pairs = zip(datasets, manifests, strict=True)
        datasets = [replace(dataset, manifest=manifest) for dataset, manifest in pairs]
    faults: list[str] = []
    for dataset in datasets:
        faults += changed_tokenizer(dataset.folder, dataset.manifest.tokenizer)
    if faults:
        raise InputError(*faults)

    # write the dataset
    manifest = merge_manifests(datasets)
    with complete_folder(target) as folder:
        copy_folder(datasets[0].folder / "tokenizer", folder / "tokenizer")
        if as_parts:
            write_parts(folder, target, datasets, manifest)
        else:
            write_rows(datasets, manifest, folder)
        hit_files = [dataset.folder / CONTAMINATION_FILE for dataset in datasets]
        hits = b"".join(file.read_bytes() for file in hit_files if file.exists())
        if hits:
            (folder / CONTAMINATION_FILE).write_bytes(hits)
        join_samples([dataset.folder for dataset in datasets], folder)
        write_manifest(folder, manifest)

    # notes for the user
    notes = [
        f"{dataset.folder} has no document index because an older version wrote it, so {target} has none either; "
        "tokenize it again to get one"
        for dataset in datasets
        if not dataset.manifest.has_index
    ]
    num_versions = Counter(chat_format.name for chat_format in manifest.chat_formats)
    notes += [
        f"the parts were read by different versions of the data_format {name}; manifest.json records each version"
        for name, count in num_versions.items()
        if count > 1
    ]
    notes += _settings_that_differ(manifest.parts)
    notes += _sources_in_common(datasets)
    return manifest, notes


def _settings_that_differ(parts: Sequence[MergedPart]) -> Iterator[str]:
    """Yield a line for each setting that differs between the parts, and one if the cleaning differs."""
    settings_by_part = [asdict(part.settings) for part in parts]
    for name in settings_by_part[0]:
        distinct_values = list(dict.fromkeys(json.dumps(settings[name]) for settings in settings_by_part))
        if len(distinct_values) > 1:
            shown = distinct_values[:_MOST_NAMED]
            if len(distinct_values) > _MOST_NAMED:
                shown.append("…")
            yield f"--{name} differs: {', '.join(shown)}; manifest.json records each part's value"
    if len({json.dumps(part.cleaning, sort_keys=True) for part in parts}) > 1:
        yield "the parts were cleaned differently; manifest.json records each part's settings"


@dataclass(frozen=True)
class _FileUse:
    """A token dataset that was made from a file, and the path at which the file was read."""

    dataset_dir: Path
    path: str


def _sources_in_common(datasets: Sequence[MergeInput]) -> Iterator[str]:
    """Yield a line for each token dataset whose files were also read for later datasets."""
    first_uses: dict[str, _FileUse] = {}  # by SHA-256
    # per dataset, its files that later datasets read too, and these datasets; dicts are sets that keep an order
    shared_files: dict[Path, dict[str, None]] = {}
    later_datasets: dict[Path, dict[Path, None]] = {}
    for dataset in datasets:
        if is_slice(dataset.folder):
            continue  # slices share files, not documents
        for source in dataset.manifest.sources:
            for file in source.files:
                first_use = first_uses.setdefault(file.sha256, _FileUse(dataset.folder, file.path))
                if first_use.dataset_dir != dataset.folder:
                    shared_files.setdefault(first_use.dataset_dir, {})[first_use.path] = None
                    later_datasets.setdefault(first_use.dataset_dir, {})[dataset.folder] = None
    for dataset_dir, paths in shared_files.items():
        files = _name_first([*paths])
        verb = "was" if len(paths) == 1 else "were"
        readers = _name_first([*later_datasets[dataset_dir]])
        yield f"{files} of {dataset_dir} {verb} also read for {readers}; documents may occur twice"


def _name_first(values: Sequence[object]) -> str:
    """Return a text with the first value and the number of others."""
    if len(values) == 1:
        return str(values[0])
    return f"{values[0]} and {len(values) - 1:,} more"


if __name__ == "__main__":
    run_program(main)
