"""Reconstruct from checkpoints which rows each step of a run read, and each step of the runs that it branched off."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, PositiveInt

from fabric_train.checkpoint import (
    BranchPoint,
    TrainerJson,
    data_starts_after,
    find_checkpoint,
    read_trainer_json,
    run_of,
)
from fabric_train.cli.errors import InputError
from fabric_train.cli.shares import Shares, split_name
from fabric_train.data.data_order import KEYED, SHUFFLED, DataOrder, StreamOrder
from fabric_train.data.joined_rows import JoinedRows
from fabric_train.data.mixture import Mixture
from fabric_train.data.step_sampler import WindowOrder, rank_at
from fabric_train.data.token_dataset import TokenDataset, open_dataset
from fabric_train.data.token_mixture import TokenMixture, open_mixture
from fabric_train.preflight.steps import order_of_mixture
from fabric_train.run_folder.run_folder import RunFolder
from fabric_train.token_dataset.manifest import read_manifest


class _SavedArguments(BaseModel):
    """The arguments of a run that decide which rank reads which row."""

    micro_batch_size: PositiveInt
    gradient_accumulation_steps: PositiveInt
    tensor_parallel_size: PositiveInt = 1
    context_parallel_size: PositiveInt = 1
    train_data_dir: str | list[str] | None = None
    weights_only: bool = False
    checkpoint: str | None = None

    @property
    def group_size(self) -> int:
        """The number of ranks that read the same rows."""
        return self.tensor_parallel_size * self.context_parallel_size


class _SavedRun(BaseModel):
    """The content of a trainer.json that this module reads in addition to the fields of ``TrainerJson``."""

    arguments: _SavedArguments
    mixture_sources: list[str] = []


@dataclass(frozen=True)
class Ranks:
    """The ranks that took a step: ``num_data_ranks`` groups of ``group_size`` ranks that read the same rows."""

    num_data_ranks: int
    group_size: int
    micro_batch_size: int

    @property
    def num_ranks(self) -> int:
        return self.num_data_ranks * self.group_size

    def at(self, position: int) -> range:
        """Return the ranks that read the row at a position of the window."""
        data_rank = rank_at(position, self.micro_batch_size, self.num_data_ranks)
        first_rank = data_rank * self.group_size
        return range(first_rank, first_rank + self.group_size)


@dataclass(frozen=True)
class RunSegment:
    """Consecutive steps of one run, which is the traced run or a run that it branched off."""

    run: RunFolder
    first_step: int
    last_step: float
    """Infinite if the end of the run is not known."""
    data_starts_after: int
    """The step after which the data order begins."""
    order_saved_in: TrainerJson | None
    """The trainer.json of a checkpoint that records the data order; None if the run no longer has a checkpoint and
    the next segment reads different data."""

    def checkpoints(self) -> dict[int, Path]:
        """Return the segment's checkpoints by step, including damaged ones."""
        checkpoints = self.run.checkpoints
        return {step: path for step, path in checkpoints.items() if self.first_step <= step <= self.last_step}

    def saved_of(self, step: int) -> TrainerJson:
        """Return the first readable trainer.json that was saved at a step or later, or else ``order_saved_in``."""
        for checkpoint_step, saved in self.run.saved_by_step.items():
            if step <= checkpoint_step <= self.last_step:
                return saved
        assert self.order_saved_in is not None
        return self.order_saved_in


@dataclass(frozen=True)
class RunData:
    """The token datasets of a segment, and the order in which its steps read their rows."""

    datasets: TokenDataset | TokenMixture
    order: WindowOrder

    def locate(self, row: int) -> tuple[TokenDataset, int]:
        """Return the token dataset of a row of the data order, and the row's index in its train split."""
        if isinstance(self.datasets, TokenDataset):
            return self.datasets, row
        dataset_index, dataset_row = self.datasets.train.locate(row)
        return self.datasets.parts[dataset_index], dataset_row

    def row_at(self, folder: str, dataset_row: int) -> int | None:
        """Return the row of the data order for a row of a token dataset's train split, the inverse of :meth:`locate`.

        None if the data order does not have the row.
        """
        folders = [str(dataset.folder) for dataset in self.datasets.parts]
        if folder not in folders:
            return None
        rows = self.datasets.train
        if isinstance(rows, JoinedRows):
            return rows.row_at(folders.index(folder), dataset_row)
        return dataset_row


class RunHistory:
    """The steps of a run, beginning with the first step of the first run in its lineage."""

    def __init__(self, path: Path, data_dirs: Sequence[str] | None = None) -> None:
        """Read the history from the checkpoints.

        Args:
            path: A run or one of its checkpoints, see ``find_checkpoint``.
            data_dirs: The run's token datasets, if they are no longer where it read them.
        """
        checkpoint = find_checkpoint(path)
        # the newest one: phases that had not begun at an earlier checkpoint may have changed since
        run = RunFolder(run_of(checkpoint))
        self.newest = list(run.saved_by_step.values())[-1] if run.saved_by_step else read_trainer_json(checkpoint)
        self.checkpoint = self.newest.checkpoint
        self._data_dirs = data_dirs
        self._data_by_segment: dict[int, RunData] = {}  # by first step
        self.segments = tuple(_read_segments(run, self.newest))
        last_segment = self.segments[-1]
        self.num_done = max(self.newest.state.step, *last_segment.checkpoints())
        num_planned = 0 if math.isinf(last_segment.last_step) else int(last_segment.last_step)
        self.num_planned = max(self.num_done, num_planned)

    def notes(self) -> list[str]:
        """Return a note for each checkpoint from whose weights a run started, because the history ends there."""
        start_checkpoints: dict[str | None, None] = {}  # in order, each once
        runs = {segment.run.folder: segment.run for segment in self.segments}
        for run in runs.values():
            for saved in run.saved_by_step.values():
                arguments = saved.parse_content(_SavedRun).arguments
                if arguments.weights_only:
                    start_checkpoints[arguments.checkpoint] = None
        notes = []
        for start_checkpoint in start_checkpoints:
            notes.append(
                f"a run began with the weights of {start_checkpoint}; the steps before that checkpoint are not searched"
            )
        return notes

    def segment_of(self, step: int) -> RunSegment:
        """Return the segment with a step; raise an InputError if the run ends before the step."""
        if step > self.num_planned:
            raise InputError(f"--step {step}: the run of {self.checkpoint} ends at step {self.num_planned}")
        return next(segment for segment in reversed(self.segments) if step >= segment.first_step)

    def ranks_of(self, step: int) -> tuple[Ranks, Path]:
        """Return the ranks that took a step, and the checkpoint that records them.

        This is the newest checkpoint, which lists the sessions. Checkpoints of earlier versions have no sessions, or no
        arguments in them. For these it is the first checkpoint at the step or later.
        """
        saved = self.segment_of(step).saved_of(step)
        session = self.newest.session_of(step)
        if session is None or not session.arguments:
            return _count_ranks(saved, _token_order(saved)), saved.checkpoint
        arguments = _SavedArguments.model_validate(session.arguments)
        ranks = Ranks(
            num_data_ranks=session.num_devices // arguments.group_size,
            group_size=arguments.group_size,
            micro_batch_size=arguments.micro_batch_size,
        )
        return ranks, self.checkpoint

    def data_of(self, segment: RunSegment) -> RunData:
        """Return the token datasets of a segment and their order, opened on the first call."""
        if segment.first_step not in self._data_by_segment:
            self._data_by_segment[segment.first_step] = self._open_data(segment)
        return self._data_by_segment[segment.first_step]

    def _open_data(self, segment: RunSegment) -> RunData:
        """Open the token datasets of a segment, and check that its steps read their rows in the computed order."""
        saved = segment.order_saved_in
        if saved is None:
            raise InputError(
                f"{segment.run.folder}: the run that trained steps {segment.first_step} to {segment.last_step:g} no "
                "longer has a checkpoint, and later steps read different data; restore one of its checkpoints"
            )
        order = _token_order(saved)
        has_data_of_last_segment = segment.data_starts_after == self.segments[-1].data_starts_after
        datasets = _open_datasets(saved, order, self._data_dirs if has_data_of_last_segment else None)
        window_order = _build_window_order(order, datasets, _count_ranks(saved, order), segment.data_starts_after)

        # the hash of all rows up to the checkpoint shows whether this version computes the same order
        state = saved.state
        if state.rows_hash != window_order.rows_hash(state.step - segment.data_starts_after):
            raise InputError(
                f"{saved.checkpoint}: up to step {state.step}, its run read different rows than this version "
                "computes; use the versions of fabric_train and numpy that saved it"
            )
        return RunData(datasets, window_order)


def _read_segments(run: RunFolder, saved: TrainerJson) -> list[RunSegment]:
    """Return the segments of a run and of the runs that it branched off, in the order of their steps."""
    lineage = saved.lineage

    # the run itself
    segments = [
        RunSegment(
            run=run,
            first_step=lineage[-1].step + 1 if lineage else 1,
            last_step=saved.num_steps,
            data_starts_after=data_starts_after(lineage),
            order_saved_in=saved,
        )
    ]

    # the steps up to each branch point, the last one first
    for index in reversed(range(len(lineage))):
        branch = lineage[index]
        earlier_branches = lineage[:index]
        step_before_data = data_starts_after(earlier_branches)
        trunk = RunFolder(Path(branch.run))
        later_segment = segments[0]
        segment = RunSegment(
            run=trunk,
            first_step=earlier_branches[-1].step + 1 if earlier_branches else 1,
            last_step=branch.step,
            data_starts_after=step_before_data,
            order_saved_in=_find_saved_order(trunk, branch, step_before_data, later_segment),
        )
        segments.insert(0, segment)
    return segments


def _find_saved_order(
    trunk: RunFolder, branch: BranchPoint, step_before_data: int, later_segment: RunSegment
) -> TrainerJson | None:
    """Find a checkpoint that records the data order in which ``trunk`` trained up to ``branch``.

    Return its trainer.json, or None if there is no such checkpoint any more.

    Args:
        trunk: The run that was branched off.
        branch: The branch point.
        step_before_data: The step after which that data order begins.
        later_segment: The steps that the branching run took after the branch point.
    """
    # the checkpoint from which the branch started, if it is still there
    if branch.step in trunk.saved_by_step:
        return trunk.saved_by_step[branch.step]

    # a branch that continued with the same data has the same order in its own checkpoints
    if branch.continues_data and later_segment.order_saved_in is not None:
        return later_segment.order_saved_in

    # the newest checkpoint of the trunk with data that begin after ``step_before_data``
    for saved in reversed(trunk.saved_by_step.values()):
        if data_starts_after(saved.lineage) == step_before_data:
            return saved
    return None


def _token_order(saved: TrainerJson) -> DataOrder:
    """Return the data order of a run that read token datasets; an InputError for another run."""
    order = saved.data
    if saved.samples_rows:
        raise InputError(
            f"{saved.checkpoint}: its run trained on completions of --prompts; fabric-train rollouts shows those of "
            "each step"
        )
    if isinstance(order, StreamOrder):
        raise InputError(
            f"{saved.checkpoint}: its run read --streaming_dataset, whose rows depend on the texts and cannot be "
            "computed from a step; to trace future runs, tokenize the texts with fabric-train tokenize"
        )
    return order


def _count_ranks(saved: TrainerJson, order: DataOrder) -> Ranks:
    """Compute the number of ranks from the number of rows that a window has and each rank reads."""
    arguments = saved.parse_content(_SavedRun).arguments
    rows_per_data_rank = arguments.micro_batch_size * arguments.gradient_accumulation_steps
    return Ranks(
        num_data_ranks=max(1, order.rows_per_window // rows_per_data_rank),
        group_size=arguments.group_size,
        micro_batch_size=arguments.micro_batch_size,
    )


def _open_datasets(
    saved: TrainerJson, order: DataOrder, data_dirs: Sequence[str] | None
) -> TokenDataset | TokenMixture:
    """Open the token datasets that a run read, and check that they have not changed.

    Args:
        saved: The trainer.json of a checkpoint of the run.
        order: Its data order.
        data_dirs: The folders of the token datasets, if they are no longer where the run read them.
    """
    checkpoint = saved.checkpoint
    # the folders
    saved_run = saved.parse_content(_SavedRun)
    saved_dirs = saved_run.arguments.train_data_dir or []
    if isinstance(saved_dirs, str):
        saved_dirs = [saved_dirs]
    folders = list(data_dirs or saved_dirs)
    for folder in folders:
        if not Path(folder).is_dir():
            raise InputError(
                f"{folder}: no such folder, but the run of {checkpoint} read a token dataset there; start this "
                "program in the folder where the run was started, or give its token datasets with --train_data_dir"
            )
    if not folders or len(folders) != len(saved_dirs):
        raise InputError(
            f"--train_data_dir: the run of {checkpoint} read {', '.join(saved_dirs)}; give the same number of folders"
        )

    # one token dataset, or a mixture
    datasets: TokenDataset | TokenMixture
    if order.version != Mixture.VERSION:
        datasets = open_dataset(folders[0])
    else:
        option = "mixture_sources of trainer.json"
        shares = []
        for name in saved_run.mixture_sources:  # none: each whole token dataset is a source
            folder_index, source = split_name(name, saved_dirs, option)
            folder = folders[folder_index]
            shares.append({folder if source is None else f"{folder}:{source}": 1.0})
        datasets = open_mixture(
            folders, Shares(option, shares or None), isolate_documents=True, manifest_folder=checkpoint
        )

    # are they the same?
    if datasets.fingerprint != order.fingerprint:
        manifest = read_manifest(checkpoint)
        saved_fingerprints = {part.manifest_sha256 for part in manifest.parts} if manifest else set()
        changed_datasets = [dataset for dataset in datasets.parts if dataset.fingerprint not in saved_fingerprints]
        changed_folders = ", ".join(str(dataset.folder) for dataset in changed_datasets or datasets.parts)
        raise InputError(
            f"{changed_folders}: manifest.json differs from the token dataset that the run of {checkpoint} read; "
            "give its token datasets, in the same order, with --train_data_dir"
        )
    return datasets


def _build_window_order(
    order: DataOrder, data: TokenDataset | TokenMixture, ranks: Ranks, step_before_data: int
) -> WindowOrder:
    """Return the rows of each step as the run has computed them; its data order begins after ``step_before_data``."""
    if order.version not in (SHUFFLED, Mixture.VERSION, KEYED):
        raise InputError(f"the run's data order has version {order.version}, which this version does not support")
    mixture_order = None
    if isinstance(data, TokenMixture) and order.rows_per_epoch is not None:
        mixture_order = order_of_mixture(
            data,
            order.rows_per_epoch,
            order.rows_per_window,
            seed=order.seed,
            phases=order.phases,
            data_starts_after=step_before_data,
        )
    return WindowOrder(
        num_rows=order.num_rows,
        rows_per_window=order.rows_per_window,
        micro_batch_size=ranks.micro_batch_size,
        world_size=ranks.num_data_ranks,
        rank=0,  # only rows of all ranks are asked for
        seed=order.seed,
        mixture=mixture_order,
        version=order.version,
    )
