"""List the token datasets and sources that have shares of their own, and the rows that an epoch takes of each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fabric_train.cli.errors import InputError
from fabric_train.cli.shares import Shares, split_name
from fabric_train.data.mixture import rows_of_shares, rows_of_token_shares
from fabric_train.data.source_rows import find_source_rows
from fabric_train.data.token_dataset import TokenDataset


@dataclass(frozen=True)
class ListedSource:
    """What has a share of its own: a token dataset, a source of it, or the other sources of it.

    ``slices`` are its rows: the number of the token dataset, and a range of its rows. ``others`` names the sources of a
    folder that has some sources with shares of their own, and these others together.
    """

    folder: str
    source: str | None
    slices: tuple[tuple[int, range], ...]
    others: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name in ``--shares``."""
        return self.folder if self.source is None else f"{self.folder}:{self.source}"

    @property
    def num_rows(self) -> int:
        """Its number of rows."""
        return sum(len(rows) for _, rows in self.slices)


def list_sources(
    parts: Sequence[TokenDataset], folders: Sequence[str], shares: Sequence[Shares]
) -> Iterator[ListedSource]:
    """Yield each token dataset, or its sources that some shares name and then its other sources together.

    Raises:
        InputError: a name is none of a token dataset or a source, or the rows of a source are not known.
    """
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


def rows_of(shares: Shares, sources: Sequence[ListedSource], folders: Sequence[str]) -> tuple[int, ...]:
    """Return the rows that an epoch takes of each listed source.

    Args:
        shares: the share of a folder counts for those of its sources that have none of their own.
        sources: that rows are taken of.
        folders: of ``--train_data_dir``.

    Raises:
        InputError: one has no share, all have 0, or one above 0 is less than one row.
    """
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
        # the share of a folder is that of the sources without one of their own, together
        together = [
            other.num_rows
            for other, place in zip(sources, places, strict=True)
            if place[0] == folder and (place[1] is None or place not in by_place)
        ]
        part = source.num_rows / sum(together) if shares.of_tokens and len(together) > 1 else 1
        yield by_place[folder, None] * part
