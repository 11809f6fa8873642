"""List the parts of a mixture that have a share each, and compute how many of their rows an epoch takes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from fabric_train.cli.errors import InputError
from fabric_train.cli.shares import Shares, split_name
from fabric_train.data.mixture import rows_of_shares, rows_of_token_shares
from fabric_train.data.token_dataset import TokenDataset
from fabric_train.token_dataset.document_search import rows_of_sources
from fabric_train.token_dataset.joined_split import JoinedSplit


@dataclass(frozen=True)
class SplitRange:
    """Consecutive rows of one of several splits."""

    split: int
    """The index of the split."""
    rows: range


@dataclass(frozen=True)
class ListedSource:
    """A part of a mixture with one share: a token dataset, one of its sources, or all its sources that have no share,
    together.
    """

    folder: str
    source: str | None
    """The name of the source; None for a token dataset, or for its sources without a share."""
    ranges: tuple[SplitRange, ...]
    """The rows in the train splits of the token datasets."""
    remaining_sources: tuple[str, ...] = ()
    """The names of the token dataset's sources that have no share and are listed together."""

    @property
    def name(self) -> str:
        """The folder, or ``FOLDER:SOURCE``."""
        return self.folder if self.source is None else f"{self.folder}:{self.source}"

    @property
    def num_rows(self) -> int:
        return sum(len(split_range.rows) for split_range in self.ranges)


def list_sources(
    token_datasets: Sequence[TokenDataset], folders: Sequence[str], all_shares: list[Shares]
) -> Iterator[ListedSource]:
    """Yield each token dataset; if some shares name its sources, yield each of these and then the others together.

    Args:
        token_datasets: One for each of ``folders``.
        folders: The values of ``--train_data_dir``.
        all_shares: The shares of the command line and of all phases.

    Raises:
        InputError: a source that has a share does not exist, or its rows are not known.
    """
    named_sources = _sources_with_shares(folders, all_shares)
    for index, (token_dataset, folder) in enumerate(zip(token_datasets, folders, strict=True)):
        if not named_sources[index]:
            all_rows = SplitRange(index, range(len(token_dataset.train)))
            yield ListedSource(folder, source=None, ranges=(all_rows,))
            continue

        ranges_by_source = find_source_rows(token_dataset)
        for source, option in named_sources[index].items():
            if source not in ranges_by_source:
                names = ", ".join(ranges_by_source)
                raise InputError(f"{option}: {folder} has no rows from a source {source}; it has {names}")
            ranges = tuple(SplitRange(index, rows) for rows in ranges_by_source.pop(source))
            yield ListedSource(folder, source, ranges)
        if ranges_by_source:
            remaining_rows = list(chain.from_iterable(ranges_by_source.values()))
            remaining_rows.sort(key=lambda rows: rows.start)
            ranges = tuple(SplitRange(index, rows) for rows in remaining_rows)
            yield ListedSource(folder, source=None, ranges=ranges, remaining_sources=tuple(ranges_by_source))


def _sources_with_shares(folders: Sequence[str], all_shares: list[Shares]) -> list[dict[str, str]]:
    """Return for each folder the sources that have a share, each with the argument that names it first."""
    options_by_source: list[dict[str, str]] = [{} for _ in folders]
    for shares in all_shares:
        for name in shares.by_name() or ():
            folder_index, source = split_name(name, folders, shares.option)
            if source is not None:
                options_by_source[folder_index].setdefault(source, shares.option)
    return options_by_source


def find_source_rows(dataset: TokenDataset) -> dict[str, list[range]]:
    """Return the rows of the train split that each source has, as ranges in their order; see ``rows_of_sources``.

    With ``--packing concat``, a source's last row may also have the beginning of the next source.

    Raises:
        InputError: the dataset has no document index, or its sources were mixed with ``--weights``.
    """
    index = dataset.train.index
    if dataset.manifest is None or index is None:
        raise InputError(
            f"{dataset.folder} has no document index, so the rows of its sources are unknown; tokenize again with "
            "fabric-train tokenize"
        )
    split = dataset.train.split
    if isinstance(split, JoinedSplit):
        ranges_by_source = split.source_rows()
    else:
        ranges_by_source = rows_of_sources(index, dataset.manifest)
    if ranges_by_source is None:
        raise InputError(
            f"{dataset.folder} was tokenized with --weights, which mixes sources within rows; tokenize again without "
            "--weights"
        )
    return ranges_by_source


def rows_per_epoch(shares: Shares, sources: Sequence[ListedSource], folders: Sequence[str]) -> tuple[int, ...]:
    """Return how many rows of each source an epoch takes.

    Raises:
        InputError: a source has no share, all shares are 0, or a share is too small for a single row.
    """
    share_of_source = _resolve_shares(shares, sources, folders)
    if not any(share_of_source):
        raise InputError(f"{shares.option}: nothing is left to train on; give a number above 0")
    num_rows = [source.num_rows for source in sources]
    if shares.counts_tokens:
        rows = rows_of_token_shares(num_rows, share_of_source)
    else:
        rows = rows_of_shares(num_rows, share_of_source)

    faults = []
    for source, share, num_taken in zip(sources, share_of_source, rows, strict=True):
        if share and not num_taken:
            faults.append(
                f"{shares.option} reads none of the {source.num_rows:,} rows of {source.name} in an epoch; give "
                f"{source.name} a larger share, or leave it out"
            )
    if faults:
        raise InputError(*faults)
    return tuple(rows)


def _resolve_shares(shares: Shares, sources: Sequence[ListedSource], folders: Sequence[str]) -> list[float]:
    """Return the share of each part; a folder's share applies to all its sources that have no share, together."""
    # shares by folder and name of the source; the share of a folder has the name None
    given_shares: dict[tuple[int, str | None], float] = {}
    for name, share in _shares_by_name(shares, folders).items():
        given_shares[split_name(name, folders, shares.option)] = share

    # the sources without a share of their own, which share that of their folder
    missing = []
    num_rows_together = dict.fromkeys(range(len(folders)), 0)
    for source in sources:
        folder_index = folders.index(source.folder)
        if source.source is not None and (folder_index, source.source) in given_shares:
            continue
        num_rows_together[folder_index] += source.num_rows
        if (folder_index, None) not in given_shares:
            names = f"{', '.join(source.remaining_sources)} of {source.folder}"
            missing.append(names if source.remaining_sources else source.name)
    if missing:
        raise InputError(
            f"{shares.option} has no number for {'; '.join(missing)}; give one for each, or 0 to leave it out"
        )

    resolved = []
    for source in sources:
        folder_index = folders.index(source.folder)
        if source.source is not None and (folder_index, source.source) in given_shares:
            resolved.append(given_shares[folder_index, source.source])
            continue
        folder_share = given_shares[folder_index, None]
        # a share of tokens is divided among the sources that it is for; a share of rows holds for each of them
        if shares.counts_tokens and num_rows_together[folder_index]:
            folder_share *= source.num_rows / num_rows_together[folder_index]
        resolved.append(folder_share)
    return resolved


def _shares_by_name(shares: Shares, folders: Sequence[str]) -> dict[str, float]:
    """Return the shares by folder or source; numbers without names belong to the folders in order, by default 1."""
    by_name = shares.by_name()
    if by_name is not None:
        return by_name
    if shares.values is None:
        return dict.fromkeys(folders, 1.0)
    numbers = [float(str(share)) for share in shares.values]
    if len(numbers) != len(folders):
        raise InputError(
            f"{shares.option}: {len(numbers)} numbers for {len(folders)} folders of --train_data_dir; give one "
            "number for each"
        )
    return dict(zip(folders, numbers, strict=True))
