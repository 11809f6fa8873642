"""Shares of token datasets and of sources inside them, as they are given: by position or by name."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fabric_train.cli.errors import InputError

GivenShares = Sequence[float] | Sequence[str] | Sequence[dict[str, Any]]
"""Numbers, one for each folder; or names with numbers, as NAME=NUMBER or as mappings."""


@dataclass(frozen=True)
class Shares:
    """How much an epoch takes of token datasets and sources.

    Args:
        option: where they are given, for messages.
        given: see :data:`GivenShares`; None takes all rows once.
        of_tokens: whether they are shares of the tokens, see ``rows_of_token_shares``, and not of rows.
    """

    option: str
    given: GivenShares | None
    of_tokens: bool = False

    def by_name(self) -> dict[str, float] | None:
        """Return the shares by name; None if they are numbers alone.

        Raises:
            InputError: one has no name, no number, or comes twice.
        """
        if self.given is None or not any(isinstance(one, str | dict) for one in self.given):
            return None
        named: dict[str, float] = {}
        for one in self.given:
            for name, number in one.items() if isinstance(one, dict) else [str(one).rpartition("=")[::2]]:
                share = _number(number)
                if share is None or not name:
                    raise InputError(
                        f"{self.option}: expected numbers above 0, one for each folder, or NAME=NUMBER such as "
                        f"data/va=0.5; got {list(self.given)}"
                    )
                if name in named:
                    raise InputError(f"{self.option}: {name} is given twice")
                named[name] = share
        return named


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if 0 <= number <= 1e9 and math.isfinite(number) and not isinstance(value, bool) else None


def split_name(name: str, folders: Sequence[str], option: str) -> tuple[int, str | None]:
    """Return the number of the folder that a name of ``--shares`` means, and the source in it if it names one.

    Raises:
        InputError: it is neither FOLDER nor FOLDER:SOURCE.
    """
    paths = [os.path.normpath(folder) for folder in folders]
    if os.path.normpath(name) in paths:
        return paths.index(os.path.normpath(name)), None
    heads = [name[:place] for place, sign in enumerate(name) if sign == ":"]
    for head in reversed(heads):
        if os.path.normpath(head) in paths:
            return paths.index(os.path.normpath(head)), name[len(head) + 1 :]
    raise InputError(f"{option}: {name} is neither a folder of --train_data_dir nor FOLDER:SOURCE of one")
