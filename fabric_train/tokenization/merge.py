# PYTHON_ARGCOMPLETE_OK
"""Merge token datasets, or slices, into one:  python -m fabric_train.tokenization.merge DIR DIR ... --output_dir OUT"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from arguments import MergeArguments, parse
from fabric_train.cli.errors import InputError, run_program
from fabric_train.cli.output import open_console
from fabric_train.files.atomic_folder import check_not_inside, check_not_taken, complete_folder
from fabric_train.files.safe_paths import copy_folder
from fabric_train.files.typed_json import read_json
from fabric_train.tokenization.all_slices import open_slices
from fabric_train.tokenization.cleaning import contamination
from fabric_train.tokenization.cleaning.dropped_sample import join_samples
from fabric_train.tokenization.counted_slices import merge_counts
from fabric_train.tokenization.manifest import Manifest, MergedPart, changed_tokenizer, write_manifest
from fabric_train.tokenization.merged_manifest import MergeInput, merge_manifests, open_inputs
from fabric_train.tokenization.merged_slices import merge_slices
from fabric_train.tokenization.next_commands import encode_command
from fabric_train.tokenization.packing.document_index import join_indexes, open_index
from fabric_train.tokenization.packing.token_folder import Split, read_arrow
from fabric_train.tokenization.slice_folder import Slice, is_slice


def main(argv: list[str] | None = None) -> None:
    """Merge the token datasets of the command line and print a summary.

    Raises:
        InputError: the token datasets cannot be merged; nothing has been written.
    """
    arguments = parse(MergeArguments, argv)
    folders, target = [Path(name).expanduser() for name in arguments.dataset_dirs], Path(arguments.output_dir)
    are_slices = any(is_slice(folder) for folder in folders)
    if not are_slices and len(folders) < 2:
        raise InputError("--dataset_dirs: give two token datasets or more")
    slices = open_slices(folders, target) if are_slices else []
    if slices and slices[0].arguments.counts_lines:
        _merge_counts(slices, target)
        return
    manifest, notes = merge_slices(slices, target) if slices else merge(folders, target)
    console = open_console()
    merged = f"{len(folders):,} slices" if are_slices else ", ".join(part.name for part in manifest.parts)
    rows = ", ".join(f"{split.rows:,} rows of {name}" for name, split in manifest.ledger.splits.items())
    lines = [f"merged   {merged}", *(f"note     {note}" for note in notes)]
    lines += [f"warning  {loss}" for loss in manifest.losses()] if are_slices else []
    for line in (*lines, f"written  {target}: {rows}"):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _merge_counts(slices: Sequence[Slice], target: Path) -> None:
    """Write the lines that repeat in all counted slices, and print some of them and what follows."""
    lines, given = merge_counts(slices, target), slices[0].arguments
    print(
        f"merged   {len(slices):,} counted slices",
        f"lines    {len(lines.hashes):,} are in {lines.num_documents:,} documents or more; look at the most frequent:",
        *("         " + "".join(one if one.isprintable() else "?" for one in line) for line in lines.shown()),
        f"written  {target}",
        f"next     slice {given.shard}, and the others likewise: {encode_command(given, str(target))}",
        sep="\n",
    )


def merge(folders: Sequence[Path], target: Path) -> tuple[Manifest, list[str]]:
    """Write the rows of the token datasets ``folders``, in this order, as the token dataset ``target``.

    ``target`` is complete or absent. Documents are not compared: one that is in two of the datasets comes twice.

    Returns:
        The manifest, and notes for the user: settings that differ, and files that several datasets were made from.

    Raises:
        InputError: one line for each dataset that cannot be read, or whose tokenizer, row length, chat template or
            columns differ from those of the first.
    """
    check_not_taken(target)
    for folder in folders:
        check_not_inside(target, folder)
    merged = open_inputs(folders)
    faults = [fault for one in merged for fault in changed_tokenizer(one.folder, one.manifest.tokenizer)]
    if faults:
        raise InputError(*faults)
    first, manifest = merged[0], merge_manifests(merged)
    without_index = [dataset.folder for dataset in merged if not dataset.manifest.has_index]
    num_bytes = sum(
        file.stat().st_size for dataset in merged for split in dataset.splits.values() for file in split.files
    )
    with complete_folder(target) as folder, _progress(num_bytes) as advance:
        copy_folder(first.folder / "tokenizer", folder / "tokenizer")
        for name in manifest.ledger.splits:
            (folder / name).mkdir()
            _join([dataset.splits[name] for dataset in merged if name in dataset.splits], folder / name, advance)
            if manifest.has_index:
                _join_indexes(merged, name, folder / name)
        _write_json(folder / "dataset_dict.json", {"splits": list(manifest.ledger.splits)})
        _join_lists([dataset.folder for dataset in merged], folder, contamination.FILE_NAME)
        join_samples([dataset.folder for dataset in merged], folder)
        write_manifest(folder, manifest)
    notes = [
        f"{folder} has no document index, because an older version wrote it, so {target} has none; tokenize it again "
        "to have one"
        for folder in without_index
    ]
    return manifest, [*notes, *_settings_that_differ(manifest.parts), *_sources_in_common(merged)]


def _join(splits: Sequence[Split], folder: Path, advance: Callable[[int], None]) -> None:
    """Copy the files of the splits into ``folder`` in order; if one split has labels, the others get them too."""
    template = next((split for split in splits if "labels" in split.schema.names), splits[0])
    files = [(file, split.schema.names == template.schema.names) for split in splits for file in split.files]
    names = [f"data-{index:05d}-of-{len(files):05d}.arrow" for index in range(len(files))]
    for name, (file, is_whole) in zip(names, files, strict=True):
        if is_whole:
            shutil.copyfile(file, folder / name)
        else:
            _copy_with_labels(file, folder / name, template.schema)
        advance(file.stat().st_size)
    info = read_json(template.files[0].parent / "dataset_info.json", dict, "tokenize again")
    _write_json(folder / "dataset_info.json", {"features": info["features"]})
    states = [read_json(split.files[0].parent / "state.json", dict, "tokenize again") for split in splits]
    fingerprints = " ".join(str(state["_fingerprint"]) for state in states)
    digest = hashlib.sha256(fingerprints.encode(errors="replace")).hexdigest()
    listed = {"_data_files": [{"filename": name} for name in names], "_fingerprint": digest[:16]}
    _write_json(folder / "state.json", {**states[0], **listed})


def _copy_with_labels(file: Path, target: Path, schema: pa.Schema) -> None:
    """Copy a file without ``labels`` and add them: all its tokens are supervised."""
    with pa.OSFile(str(target), "wb") as opened, pa.ipc.new_stream(opened, schema) as writer:
        for batch in read_arrow(file):
            columns = [batch.column("input_ids" if name == "labels" else name) for name in schema.names]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))


def _join_indexes(merged: Sequence[MergeInput], split: str, folder: Path) -> None:
    """Join the document indexes of a split; the files of each dataset follow those of the datasets before it."""
    num_files = [sum(source.num_files for source in dataset.manifest.sources) for dataset in merged]
    first_files = np.cumsum([0, *num_files]).tolist()
    opened = [
        (index, first)
        for dataset, first in zip(merged, first_files, strict=False)
        if (index := open_index(dataset.folder, dataset.manifest, split)) is not None
    ]
    join_indexes(folder, [index for index, _ in opened], [first for _, first in opened])


def _join_lists(folders: Sequence[Path], target: Path, name: str) -> None:
    """Write the lines of the files ``name`` of all folders in order; no file if none of them has one."""
    lists = [(folder / name).read_bytes() for folder in folders if (folder / name).exists()]
    if lists:
        (target / name).write_bytes(b"".join(lists))


def _settings_that_differ(parts: Sequence[MergedPart]) -> Iterator[str]:
    settings = [asdict(part.settings) for part in parts]
    for name in settings[0]:
        values = list(dict.fromkeys(json.dumps(given[name]) for given in settings))
        if len(values) > 1:
            yield f"--{name} differs: {', '.join(values)}; manifest.json keeps that of each part"
    if len({json.dumps(part.cleaning, sort_keys=True) for part in parts}) > 1:
        yield "the parts were cleaned differently; manifest.json has the settings of each part"


def _sources_in_common(merged: Sequence[MergeInput]) -> Iterator[str]:
    found: dict[str, tuple[Path, str]] = {}
    for dataset in merged:
        for source in dataset.manifest.sources:
            for file in source.files:
                folder, path = found.setdefault(file.sha256, (dataset.folder, file.path))
                if folder != dataset.folder:
                    yield f"{path} of {folder} was also read for {dataset.folder}: its documents may come twice"


def _write_json(file: Path, content: dict) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _progress(num_bytes: int) -> Iterator[Callable[[int], None]]:
    console = open_console(stderr=True)
    columns = (TextColumn("copying"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=num_bytes)
        yield lambda copied: progress.advance(task, copied)


if __name__ == "__main__":
    run_program(main)
