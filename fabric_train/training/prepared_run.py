"""What preflight hands to training: a run that is checked and not started."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from fabric_train.checkpoint import BranchPoint, DataOrder, StreamOrder, TrainerState
from fabric_train.data.mixture import Mixture
from fabric_train.data.step_sampler import WindowOrder
from fabric_train.data.streaming import Stream
from fabric_train.data.token_dataset import TokenDataset
from fabric_train.data.token_mixture import TokenMixture
from fabric_train.model.hf_model import ModelShape

if TYPE_CHECKING:
    from arguments import TrainArguments


TrainingData: TypeAlias = TokenDataset | TokenMixture | Stream


@dataclass(frozen=True)
class DevicePlan:
    """The processes of a run: ``accelerator`` is cuda, cpu or tpu, ``parallelism`` fsdp, fsdp2, ddp, single or xla."""

    accelerator: str
    world_size: int
    parallelism: str


@dataclass(frozen=True)
class StartingPoint:
    """What a run starts from.

    ``checkpoint`` is None for pretrained and for random weights. ``state`` is at step 0 unless the run resumes.
    ``schedule_steps`` is the length of the learning-rate schedule that a resumed run keeps although it now has another
    number of steps; None if the schedule is as long as the run. ``lineage`` are the branch points of the run so far;
    ``branches`` says that it branches off now, at the last of them.
    """

    checkpoint: Path | None
    state: TrainerState
    schedule_steps: int | None = None
    lineage: tuple[BranchPoint, ...] = ()
    branches: bool = False

    @property
    def resumes(self) -> bool:
        """Whether optimizer state and data order continue those of the checkpoint."""
        return self.checkpoint is not None and self.state.step > 0


@dataclass(frozen=True)
class StepPlan:
    """The counts of a run. A window is the rows that one optimizer step consumes over all ranks.

    ``num_rows``, of an epoch, and ``windows_per_epoch`` are None for a stream, whose length is unknown. ``mixture`` is
    None for a stream and for one token dataset without shares. The first window of the data is that of the step after
    ``data_starts_after``, which is 0 except in a branch with other data. ``notes`` are lines that the user should read
    before the run starts.
    """

    num_rows: int | None
    world_size: int
    num_data_ranks: int
    micro_batch_size: int
    accumulation: int
    rows_per_window: int
    windows_per_epoch: int | None
    num_steps: int
    tokens_per_row: int
    mixture: Mixture | None = None
    notes: tuple[str, ...] = ()
    data_starts_after: int = 0

    def window_order(self, seed: int, rank: int = 0) -> WindowOrder:
        """Return which rows of a token dataset a data rank takes at every step."""
        assert self.num_rows is not None  # a stream has an order of its own
        return WindowOrder(
            self.num_rows,
            self.rows_per_window,
            self.micro_batch_size,
            self.num_data_ranks,
            rank,
            seed,
            self.mixture,
        )


@dataclass(frozen=True)
class PreparedRun:
    """A run that one process has checked as far as it can.

    ``given`` are the arguments of the user, and in ``arguments`` some that are "auto" are replaced by what is chosen.
    ``versions`` are those of the packages that compute.
    """

    given: "TrainArguments"
    arguments: "TrainArguments"
    folder: Path
    devices: DevicePlan
    start: StartingPoint
    data: TrainingData
    model: ModelShape
    plan: StepPlan
    order: DataOrder | StreamOrder
    versions: dict[str, str]
    notes: tuple[str, ...]

    @property
    def schedule_steps(self) -> int:
        """Number of steps of the learning-rate schedule; after them the rate stays."""
        return self.start.schedule_steps or self.plan.num_steps
