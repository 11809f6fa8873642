"""Parse ``--shares``: how much of each token dataset and source an epoch reads."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fabric_train.cli.errors import InputError

GivenShares = Sequence[float] | Sequence[str] | Sequence[dict[str, Any]]
"""Shares: a number for each folder, or names with numbers, as NAME=NUMBER or as mappings."""


@dataclass(frozen=True)
class Shares:
    """The share of each token dataset and source that an epoch reads."""

    option: str
    """The argument that sets them, such as ``--shares``, for messages."""
    values: GivenShares | None
    """None reads every row once."""
    counts_tokens: bool = False
    """Whether they are shares of the tokens (see ``rows_of_token_shares``), not of the rows."""

    def by_name(self) -> dict[str, float] | None:
        """Return the shares by FOLDER or FOLDER:SOURCE; None if the user gave only numbers.

        Raises:
            InputError: a share has no name or no valid number, or a name is given twice.
        """
        if self.values is None or not any(isinstance(item, str | dict) for item in self.values):
            return None
        shares: dict[str, float] = {}
        for name, share in named_numbers(self.values):
            if share is None or not name:
                raise InputError(
                    f"{self.option}: expected numbers above 0, one for each folder, or NAME=NUMBER such as "
                    f"data/va=0.5; got {list(self.values)}"
                )
            if name in shares:
                raise InputError(f"{self.option}: {name} is given twice")
            shares[name] = share
        return shares


def named_numbers(items: Sequence[Any]) -> Iterator[tuple[str, float | None]]:
    """Yield the name and the number of each text NAME=NUMBER and each entry of a dict.

    The number is None if the text is not a number from 0 to 1e9, the name empty if there is no =.
    """
    for item in items:
        if isinstance(item, dict):
            for name, value in item.items():
                yield name, _convert_to_share(value)
        else:
            name, _, text = str(item).rpartition("=")
            yield name, _convert_to_share(text)


def _convert_to_share(value: Any) -> float | None:
    """Return a number from 0 to 1e9; None for anything else, including true and false."""
    if isinstance(value, bool):
        return None
    try:
        share = float(value)
    except (TypeError, ValueError):
        return None
    return share if 0 <= share <= 1e9 else None  # NaN fails the comparison


def split_name(name: str, folders: Sequence[str], option: str) -> tuple[int, str | None]:
    """Return the index of the folder that FOLDER or FOLDER:SOURCE of ``--shares`` means, and the source or None.

    The names of folders and sources may contain colons: the longest folder that is in ``folders`` is taken.
    """
    paths = [os.path.normpath(folder) for folder in folders]
    if os.path.normpath(name) in paths:
        return paths.index(os.path.normpath(name)), None
    colon = name.rfind(":")
    while colon >= 0:
        folder_path = os.path.normpath(name[:colon])
        if folder_path in paths:
            return paths.index(folder_path), name[colon + 1 :]
        colon = name.rfind(":", 0, colon)
    raise InputError(f"{option}: {name} is neither a folder in --train_data_dir nor a source of one (FOLDER:SOURCE)")
