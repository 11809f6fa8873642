"""Open several token datasets, or sources of them, as one: rows of one after rows of another, read in shares."""

import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from pathlib import Path

import numpy as np

from fabric_train.cli.argument_types import Shares, split_name
from fabric_train.cli.errors import InputError
from fabric_train.data.mixture import rows_of_shares, rows_of_token_shares
from fabric_train.data.token_dataset import IndexedRows, RowPieces, StoredRow, TokenDataset, open_dataset
from fabric_train.files.regular_file import check_no_link
from fabric_train.tokenization.manifest import FILE_NAME, Manifest, write_manifest
from fabric_train.tokenization.merge import merge_manifests, open_inputs
from fabric_train.tokenization.packing.document_index import rows_of_sources
from fabric_train.tokenization.packing.token_folder import JoinedSplit


@dataclass(frozen=True)
class ListedSource:
    """What has a share of its own: a token dataset, a source of it, or the ``others`` of a folder, together.

    ``slices`` are its rows: the number of the token dataset, and a range of its rows.
    """

    folder: str
    source: str | None
    slices: tuple[tuple[int, range], ...]
    others: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.folder if self.source is None else f"{self.folder}:{self.source}"

    @property
    def num_rows(self) -> int:
        return sum(len(rows) for _, rows in self.slices)


def list_sources(parts: Sequence[TokenDataset], folders: Sequence[str], shares: list[Shares]) -> Iterator[ListedSource]:
    """Yield each token dataset, or its sources that some shares name and then its other sources together."""
    named: list[list[str]] = [[] for _ in folders]
    options: dict[tuple[int, str], str] = {}
    for one in shares:
        for name in one.by_name() or ():
            folder, source = split_name(name, folders, one.option)
            if source is not None and source not in named[folder]:
                named[folder].append(source)
                options[folder, source] = one.option
    for number, (part, path) in enumerate(zip(parts, folders, strict=True)):
        if not named[number]:
            yield ListedSource(path, None, ((number, range(len(part.train))),))
            continue
        rows = find_source_rows(part)
        for source in named[number]:
            if source not in rows:
                has = ", ".join(rows)
                raise InputError(f"{options[number, source]}: {path} has no rows of a source {source}; it has {has}")
            yield ListedSource(path, source, tuple((number, each) for each in rows.pop(source)))
        if rows:
            others = sorted((each for ranges in rows.values() for each in ranges), key=lambda each: each.start)
            yield ListedSource(path, None, tuple((number, each) for each in others), tuple(rows))


def find_source_rows(dataset: TokenDataset) -> dict[str, list[range]]:
    """Return the rows of the train split that each source has, as ranges in their order; see ``rows_of_sources``.

    In a dataset of ``--packing concat`` a source's last row has the beginning of the next one, too. An InputError if
    the dataset has no document index, or its sources were mixed with ``--weights``.
    """
    index = dataset.train.index
    if dataset.manifest is None or index is None:
        raise InputError(
            f"{dataset.folder} has no document index, so the rows of its sources are not known; tokenize again with "
            "tokenize_dataset.py"
        )
    split = dataset.train.split
    rows = split.source_rows() if isinstance(split, JoinedSplit) else rows_of_sources(index, dataset.manifest)
    if rows is None:
        raise InputError(
            f"{dataset.folder} was tokenized with --weights, which mixes the sources in its rows; tokenize again "
            "without --weights"
        )
    return rows


def rows_of(shares: Shares, sources: Sequence[ListedSource], folders: Sequence[str]) -> tuple[int, ...]:
    """Return an epoch's rows of each source; a folder's share is for its sources without one of their own."""
    given = list(_shares_of(shares, sources, folders))
    if not any(given):
        raise InputError(f"{shares.option}: nothing is left to train on; give a number above 0")
    num_rows = [source.num_rows for source in sources]
    rows = (rows_of_token_shares if shares.of_tokens else rows_of_shares)(num_rows, given)
    faults = [
        f"{shares.option} takes no row of {source.name} in an epoch, which has {source.num_rows:,}; give it more, or "
        "leave it out"
        for source, share, taken in zip(sources, given, rows, strict=True)
        if share and not taken
    ]
    if faults:
        raise InputError(*faults)
    return tuple(rows)


def _shares_of(shares: Shares, sources: Sequence[ListedSource], folders: Sequence[str]) -> Iterator[float]:
    named = shares.by_name()
    if named is None:
        numbers = [1.0] * len(folders) if shares.given is None else [float(str(one)) for one in shares.given]
        if len(numbers) != len(folders):
            raise InputError(
                f"{shares.option}: {len(numbers)} numbers for {len(folders)} folders of --train_data_dir; give one each"
            )
        named = dict(zip(folders, numbers, strict=True))
    by_place = {split_name(name, folders, shares.option): share for name, share in named.items()}
    places = [(folders.index(source.folder), source.source) for source in sources]
    missing = [
        f"{', '.join(source.others)} of {source.folder}" if source.others else source.name
        for source, (folder, name) in zip(sources, places, strict=True)
        if (folder, name) not in by_place and (folder, None) not in by_place
    ]
    if missing:
        raise InputError(f"{shares.option} has no number for {'; '.join(missing)}: give each one, 0 to leave it out")
    for source, (folder, name) in zip(sources, places, strict=True):
        if (folder, name) in by_place and name is not None:
            yield by_place[folder, name]
            continue
        # a folder's share is for its sources without one of their own, together
        together = [
            other.num_rows
            for other, place in zip(sources, places, strict=True)
            if place[0] == folder and (place[1] is None or place not in by_place)
        ]
        part = source.num_rows / sum(together) if shares.of_tokens and len(together) > 1 else 1
        yield by_place[folder, None] * part


class JoinedRows(IndexedRows):
    """The rows of several splits, one after the other, or slices of these: number of a split, range of rows."""

    def __init__(self, parts: Sequence[IndexedRows], slices: Sequence[tuple[int, range]] | None = None) -> None:
        self._parts = tuple(parts)
        self._slices = tuple(slices or ((number, range(len(part))) for number, part in enumerate(parts)))
        self._starts = np.array([0, *accumulate(len(rows) for _, rows in self._slices)])
        self.isolates = parts[0].isolates
        self.source_names = tuple(dict.fromkeys(name for part in parts for name in part.source_names))
        self._sources = [np.array([self.source_names.index(name) for name in part.source_names]) for part in parts]

    def __len__(self) -> int:
        return int(self._starts[-1])

    def longest(self) -> int:
        return max(part.longest() for part in self._parts)

    def lengths(self) -> set[int]:
        return set[int]().union(*(part.lengths() for part in self._parts))

    def place(self, row: int) -> tuple[int, int]:
        """Return the number of the split that has a row, and the row's number in it."""
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        part, rows = self._slices[number]
        return part, rows[row - int(self._starts[number])]

    def row_at(self, part: int, number: int) -> int:
        """Return the row that a split has at a number: the inverse of ``place``."""
        with_it = (place for place, (own, rows) in enumerate(self._slices) if own == part and number in rows)
        place = next(with_it)
        return int(self._starts[place]) + self._slices[place][1].index(number)

    def read(self, indices: Sequence[int]) -> list[StoredRow]:
        found: dict[int, StoredRow] = {}
        for part, numbers, rows in self._by_part(indices):
            found |= zip(numbers, self._parts[part].read(rows), strict=True)
        return [found[number] for number in range(len(indices))]

    def pieces(self, indices: Sequence[int]) -> RowPieces:
        parts = []
        for part, numbers, rows in self._by_part(indices):
            found = self._parts[part].pieces(rows)
            sources = self._sources[part][found.sources]
            parts.append(replace(found, rows=np.array(numbers)[found.rows], sources=sources))
        joined = {
            field.name: np.concatenate(values)
            for field in fields(RowPieces)
            if (values := [getattr(part, field.name) for part in parts])[0] is not None  # of all parts, or of none
        }
        in_order = np.argsort(joined["rows"], kind="stable")
        return RowPieces(**{name: values[in_order] for name, values in joined.items()})

    def main_sources(self) -> np.ndarray:
        of_parts = [of[part.main_sources()] for of, part in zip(self._sources, self._parts, strict=True)]
        return np.concatenate([of_parts[part][rows.start : rows.stop] for part, rows in self._slices])

    def _by_part(self, indices: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """Yield the number of each split that has some of the rows, their places in ``indices``, and in the split."""
        by_part: dict[int, list[tuple[int, int]]] = {}
        for number, index in enumerate(indices):
            part, row = self.place(index)
            by_part.setdefault(part, []).append((number, row))
        for part, wanted in by_part.items():
            numbers, rows = zip(*wanted, strict=True)
            yield part, numbers, rows


@dataclass(frozen=True)
class TokenMixture:
    """Several token datasets of one tokenizer and one row length, or one with a share of it in an epoch.

    ``train`` has the rows of the ``sources`` one after the other, and an epoch takes ``rows_per_epoch`` of each, unless
    a phase takes others. ``manifest_folder`` is where the run keeps ``manifest``, which describes all of them.
    """

    parts: tuple[TokenDataset, ...]
    sources: tuple[ListedSource, ...]
    rows_per_epoch: tuple[int, ...]
    train: JoinedRows
    validation: JoinedRows | None
    manifest: Manifest
    manifest_folder: Path

    def rows_of(self, shares: Shares) -> tuple[int, ...]:
        return rows_of(shares, self.sources, list(dict.fromkeys(source.folder for source in self.sources)))

    @property
    def isolates(self) -> bool:
        return self.train.isolates

    @property
    def has_pairs(self) -> bool:
        """Whether the documents are preference pairs; the parts have all of them, or none."""
        return self.parts[0].has_pairs

    @property
    def source_names(self) -> tuple[str, ...]:
        """The sources of the documents, see ``TokenDataset.source_names``; one that several parts have is one."""
        return self.train.source_names

    def tokens_of(self, listed: ListedSource) -> dict[str, int]:
        """Return how many tokens in rows each source of documents has in ``listed``, one of ``sources``."""
        wanted = listed.others if listed.source is None else (listed.source,)
        tokens: dict[str, int] = {}
        for part in dict.fromkeys(number for number, _ in listed.slices):
            manifest = self.parts[part].manifest
            train = manifest.ledger.splits["train"].sources if manifest else {}
            for name, counted in train.items():
                if name in wanted or not wanted:
                    tokens[name] = tokens.get(name, 0) + counted.tokens_in_rows
        return tokens

    @property
    def name(self) -> str:
        return ", ".join(str(part.folder) for part in self.parts)

    @functools.cached_property
    def fingerprint(self) -> str:
        """The SHA-256 of the fingerprints of the token datasets, in their order."""
        return hashlib.sha256("\n".join(part.fingerprint for part in self.parts).encode()).hexdigest()

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self.manifest.tokenizer.stop_token_ids

    @property
    def attachments(self) -> tuple[Path, ...]:
        """The files and folders that each checkpoint copies, so that it can be exported and used on its own."""
        return self.manifest_folder / FILE_NAME, self.parts[0].folder / "tokenizer"

    def write_manifest(self) -> None:
        check_no_link(self.manifest_folder / FILE_NAME)
        write_manifest(self.manifest_folder, self.manifest)

    def row_name(self, row: int) -> str:
        """Return a row's token dataset and its number there, for messages."""
        part, number = self.train.place(row)
        return f"{self.parts[part].folder / 'train'}:{number}"


def open_mixture(
    folders: Sequence[str], shares: Shares, isolate_documents: bool, manifest_folder: Path, later: Sequence[Shares] = ()
) -> TokenMixture:
    """Open the token datasets of ``--train_data_dir``; ``later`` are the shares of the phases of the run."""
    parts = tuple(open_dataset(folder, isolate_documents) for folder in folders)
    by_folder = {part.folder: part for part in parts}
    manifest = merge_manifests(open_inputs(list(by_folder), lambda folder: by_folder[folder].manifest))
    sources = tuple(list_sources(parts, folders, [shares, *later]))
    held_out = [part.validation for part in parts if part.validation]
    return TokenMixture(
        parts=parts,
        sources=sources,
        rows_per_epoch=rows_of(shares, sources, folders),
        train=JoinedRows([part.train for part in parts], [rows for source in sources for rows in source.slices]),
        validation=JoinedRows(held_out) if held_out else None,
        manifest=manifest,
        manifest_folder=manifest_folder,
    )


def unpredicted_tokens(parts: Sequence[TokenDataset], num_predicted: int) -> str:
    """Return why an evaluation predicts fewer tokens than the manifests count; "" if it does not or is not known."""
    held_out = [part for part in parts if part.validation]
    ledgers = [part.manifest.ledger.splits.get("validation") if part.manifest else None for part in held_out]
    num_supervised = sum(ledger.tokens_supervised for ledger in ledgers if ledger)
    if not all(ledgers) or num_supervised <= num_predicted:
        return ""
    return (
        f"{num_supervised:,} tokens of validation are supervised; {num_supervised - num_predicted:,} of them begin a "
        "row or a document, so there is nothing to predict them from"
    )
