"""Report the failures of rewards, which differ between ranks, in the same way on all ranks."""

from collections.abc import Sequence
from typing import Literal

import torch
from lightning import Fabric

from fabric_train.cli.errors import RunError, note
from fabric_train.distributed.ranks import first_text, gather_over_ranks
from fabric_train.distributed.signals import StopBorder
from fabric_train.rollouts.rewards import RewardTable


class RewardErrors:
    """The failures of a run's rewards. All ranks call its methods together."""

    def __init__(self, fabric: Fabric, stop_border: StopBorder, on_error: Literal["zero", "stop"]) -> None:
        self._fabric = fabric
        self._stop_border = stop_border
        self._on_error = on_error
        self._warned_names: set[str] = set()
        self._count_on_rank = 0

    def report(self, names: Sequence[str], table: RewardTable) -> None:
        """Count the failures of a call, and print the first failure of each reward in the run.

        Args:
            names: The names of the rewards.
            table: The rewards of this rank's completions, of which there may be none.

        Raises:
            RunError: A reward failed on some rank, and ``on_error`` is ``stop``; it is raised on all ranks.
            RunStopped: The call was interrupted on some rank, because the ranks stop; it is raised on all ranks.
        """
        if not names:  # nothing can fail
            return
        # Other ranks may have finished their calls before the signal came.
        is_interrupted = torch.tensor(int(table.is_interrupted))
        if gather_over_ranks(self._fabric, is_interrupted).any():
            self._stop_border.stop()
        self._count_on_rank += table.num_errors
        for name, error_on_rank in zip(names, table.first_errors, strict=True):
            error = first_text(self._fabric, error_on_rank)
            if error is None:
                continue
            if self._on_error == "stop":
                raise RunError(f"{error}; correct the reward, or give --on_reward_error zero")
            if name not in self._warned_names:
                self._warned_names.add(name)
                note(f"{error}; a reward that fails counts as 0, and later failures are only counted")

    def take_count(self) -> int:
        """Return for how many completions of all ranks a reward has failed since the last call."""
        count = gather_over_ranks(self._fabric, torch.tensor(self._count_on_rank)).sum()
        self._count_on_rank = 0
        return int(count)
