"""Describe the steps of a run: their number, the rows of a window, and phases that train other rows or parts."""

from dataclasses import dataclass

from fabric_train.checkpoint import PhaseParts
from fabric_train.data.data_order import SHUFFLED
from fabric_train.data.mixture_order import MixtureOrder
from fabric_train.data.step_sampler import WindowOrder
from fabric_train.model.trained_parts import TrainedParts


@dataclass(frozen=True)
class RunPhase:
    """A phase of ``--phases``, without its learning rates, which are in ``PreparedRun.schedules``."""

    first_step: int
    last_step: int
    rows_per_epoch: tuple[int, ...]
    """The number of rows of each source in an epoch."""
    parts: TrainedParts | None = None
    """The parts of the model that train; None if they stay the same."""


@dataclass(frozen=True)
class StepPlan:
    """The counts of a run. A window is the rows that one optimizer step consumes over all ranks."""

    num_rows: int | None
    """The number of rows in an epoch, with phases in an epoch of the first phase; None for a stream."""
    world_size: int
    num_data_ranks: int
    micro_batch_size: int
    accumulation: int
    rows_per_window: int
    windows_per_epoch: int | None
    """The number of windows in an epoch, of the same phase as ``num_rows``; None for a stream."""
    num_steps: int
    tokens_per_row: int
    mixture: MixtureOrder | None = None
    """The order of the mixture; None for a stream, and for one token dataset without shares."""
    phases: tuple[RunPhase, ...] = ()
    notes: tuple[str, ...] = ()
    """Lines that the user should read before the run starts."""
    data_starts_after: int = 0
    """The step after which the data order begins: 0, except in a branch or a phase with other data."""
    data_ends_after: int | None = None
    """The last step before a phase with other data; None if there is none."""
    order_version: int = SHUFFLED
    """The version of the order, see ``DataOrder.version``."""
    completions_per_prompt: int | None = None
    """The number of completions that are sampled for each row of the data, a prompt; None if rows are not sampled."""

    @property
    def most_rows_per_step(self) -> int:
        """The most rows that a step trains on: each completion of a prompt may take a row."""
        return self.rows_per_window * (self.completions_per_prompt or 1)

    @property
    def last_step(self) -> int:
        """The last step that reads these data."""
        if self.data_ends_after is None:
            return self.num_steps
        return self.data_ends_after

    def epoch_ends(self) -> set[int]:
        """Return the steps that end an epoch or a phase; empty for a stream."""
        if self.mixture:
            num_windows = self.last_step - self.data_starts_after
            return {self.data_starts_after + window for window in self.mixture.epoch_ends(num_windows)}
        if not self.windows_per_epoch:
            return set()
        first_end = self.data_starts_after + self.windows_per_epoch
        return set(range(first_end, self.num_steps + 1, self.windows_per_epoch))

    def window_order(self, seed: int, rank: int = 0) -> WindowOrder:
        """Return which rows of a token dataset a data rank takes at every step."""
        assert self.num_rows is not None  # a stream has an order of its own
        return WindowOrder(
            num_rows=self.num_rows,
            rows_per_window=self.rows_per_window,
            micro_batch_size=self.micro_batch_size,
            world_size=self.num_data_ranks,
            rank=rank,
            seed=seed,
            mixture=self.mixture,
            version=self.order_version,
        )

    @property
    def phase_parts(self) -> tuple[PhaseParts, ...]:
        """The parts that train in the phases, as trainer.json has them."""
        phase_parts = []
        for phase in self.phases:
            if phase.parts:
                phase_parts.append(PhaseParts(phase.first_step, phase.last_step, phase.parts.train_only))
        return tuple(phase_parts)
