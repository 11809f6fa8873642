"""Put together from checkpoints which rows every step of a run read, those before the runs branched off included."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, PositiveInt

from fabric_train.checkpoint import data_starts_after, find_checkpoint, read_trainer_json, run_of, saved_checkpoints
from fabric_train.checkpoint.trainer_json import find_unreadable
from fabric_train.cli.argument_types import Shares, split_name
from fabric_train.cli.errors import InputError
from fabric_train.data.data_order import KEYED, SHUFFLED, DataOrder, StreamOrder
from fabric_train.data.joined_rows import JoinedRows
from fabric_train.data.mixture import Mixture
from fabric_train.data.step_sampler import WindowOrder, rank_at
from fabric_train.data.token_dataset import TokenDataset, open_dataset
from fabric_train.data.token_mixture import TokenMixture, open_mixture
from fabric_train.files.regular_file import read_json
from fabric_train.preflight.steps import order_of_mixture
from fabric_train.token_dataset.manifest import read_manifest


class _Arguments(BaseModel):
    micro_batch_size: PositiveInt
    gradient_accumulation_steps: PositiveInt
    tensor_parallel_size: PositiveInt = 1
    context_parallel_size: PositiveInt = 1
    train_data_dir: str | list[str] | None = None
    weights_only: bool = False
    checkpoint: str | None = None

    @property
    def ranks_of_rows(self) -> int:
        return self.tensor_parallel_size * self.context_parallel_size


class _Saved(BaseModel):
    arguments: _Arguments
    mixture_sources: list[str] = []


@dataclass(frozen=True)
class Ranks:
    """The ranks that took a step: ``num_data_ranks`` groups of ``group_size`` ranks that read the same rows."""

    num_data_ranks: int
    group_size: int
    micro_batch_size: int

    @property
    def number(self) -> int:
        return self.num_data_ranks * self.group_size

    def at(self, position: int) -> range:
        """Return the ranks that read the row at a position of the window."""
        first = rank_at(position, self.micro_batch_size, self.num_data_ranks) * self.group_size
        return range(first, first + self.group_size)


@dataclass(frozen=True)
class Stretch:
    """Steps of a run, or of a run that it branched off."""

    run: Path
    first: int
    last: float  # infinite if the end of the run is not known
    starts_after: int  # the step at which the data order begins
    described_by: Path | None  # a checkpoint with the data order; None if the run is gone and it was another one

    def checkpoints(self) -> dict[int, Path]:
        return {step: path for step, path in saved_checkpoints(self.run).items() if self.first <= step <= self.last}

    def checkpoint_of(self, step: int) -> Path:
        """Return the first checkpoint that has a step, else the last one before."""
        later = [path for number, path in _readable(self.run).items() if step <= number <= self.last]
        assert self.described_by is not None
        return later[0] if later else self.described_by


@dataclass(frozen=True)
class RunData:
    """The token datasets of a stretch, and the steps that read their rows."""

    datasets: TokenDataset | TokenMixture
    order: WindowOrder

    def place(self, row: int) -> tuple[TokenDataset, int]:
        """Return the token dataset of a row, and the row's number in its train split."""
        if isinstance(self.datasets, TokenDataset):
            return self.datasets, row
        part, number = self.datasets.train.locate(row)
        return self.datasets.parts[part], number

    def row_at(self, folder: str, number: int) -> int | None:
        """Return the row with a number in a token dataset's train split, None if no step reads it: undo ``place``."""
        parts = [str(part.folder) for part in self.datasets.parts]
        if folder not in parts:
            return None
        rows = self.datasets.train
        return rows.row_at(parts.index(folder), number) if isinstance(rows, JoinedRows) else number


class RunHistory:
    """The steps of the run or checkpoint ``given``, from the first step of the first run that it branched off.

    ``data_dirs`` are the run's token datasets, if they are no longer where it read them.
    """

    def __init__(self, given: Path, data_dirs: Sequence[str] | None = None) -> None:
        found = find_checkpoint(given)
        # phases that had not begun at a checkpoint may have changed since
        self.checkpoint = (list(_readable(run_of(found)).values()) or [found])[-1]
        self._data_dirs = data_dirs
        self.stretches = tuple(_stretches(self.checkpoint))
        self.num_done = max(read_trainer_json(self.checkpoint).state.step, *self.stretches[-1].checkpoints())
        end = self.stretches[-1].last
        self.num_planned = max(self.num_done, 0 if math.isinf(end) else int(end))

    def notes(self) -> list[str]:
        folders = dict.fromkeys(stretch.run for stretch in self.stretches)
        given = [_read_saved(path).arguments for folder in folders for path in _readable(folder).values()]
        taken = dict.fromkeys(one.checkpoint for one in given if one.weights_only)
        return [f"a run began with the weights of {path}, whose own steps are not searched" for path in taken]

    def stretch_of(self, step: int) -> Stretch:
        """Return the stretch with a step; raise an InputError if the run ends before it."""
        if step > self.num_planned:
            raise InputError(f"--step {step}: the run of {self.checkpoint} ends at step {self.num_planned}")
        return next(stretch for stretch in reversed(self.stretches) if step >= stretch.first)

    def ranks_of(self, step: int) -> tuple[Ranks, Path]:
        """Return the ranks that took a step, and the checkpoint that says so: the newest one with its sessions.

        Earlier versions did not list sessions, or not how they split a step; then it is the first that has the step.
        """
        checkpoint = self.stretch_of(step).checkpoint_of(step)
        session = read_trainer_json(self.checkpoint).session_of(step)
        if session is None or not session.arguments:
            return _ranks(checkpoint, _token_order(checkpoint)), checkpoint
        given = _Arguments.model_validate(session.arguments)
        group_size = given.ranks_of_rows
        return Ranks(session.num_devices // group_size, group_size, given.micro_batch_size), self.checkpoint

    @functools.lru_cache(maxsize=8)  # noqa: B019 - a program has one history
    def data_of(self, stretch: Stretch) -> RunData:
        """Open the token datasets of a stretch, and check that its steps read them."""
        checkpoint = stretch.described_by
        if checkpoint is None:
            raise InputError(
                f"{stretch.run}: the run of the steps {stretch.first} to {stretch.last:g} has no checkpoint any more, "
                "and the steps after it read other data; put one of its checkpoints back"
            )
        order = _token_order(checkpoint)
        own = self._data_dirs if stretch.starts_after == self.stretches[-1].starts_after else None
        datasets = _open(checkpoint, order, own)
        window_order = _window_order(order, datasets, _ranks(checkpoint, order), stretch.starts_after)
        state = read_trainer_json(checkpoint).state
        if state.rows_hash != window_order.rows_hash(state.step - stretch.starts_after):
            raise InputError(
                f"{checkpoint}: up to step {state.step} its run took other rows than this version computes; "
                "use the version of fabric_train and numpy that saved it"
            )
        return RunData(datasets, window_order)


def _stretches(checkpoint: Path) -> list[Stretch]:
    saved = read_trainer_json(checkpoint)
    lineage = saved.lineage
    last = saved.num_steps
    first = lineage[-1].step + 1 if lineage else 1
    stretches = [Stretch(run_of(checkpoint), first, last, data_starts_after(lineage), checkpoint)]
    for number in reversed(range(len(lineage))):
        branch = lineage[number]
        before = lineage[:number]
        readable = _readable(Path(branch.run))
        following = stretches[0].described_by if branch.continues_data else None
        first = before[-1].step + 1 if before else 1
        starts_after = data_starts_after(before)
        with_its_data = (
            path
            for path in reversed(readable.values())
            if data_starts_after(read_trainer_json(path).lineage) == starts_after
        )
        describes = readable.get(branch.step) or following or next(with_its_data, None)
        stretches.insert(0, Stretch(Path(branch.run), first, branch.step, starts_after, describes))
    return stretches


def _readable(run: Path) -> dict[int, Path]:
    """Return the checkpoints of a run whose description is not damaged, by step, the oldest first."""
    return {step: path for step, path in saved_checkpoints(run).items() if find_unreadable(path) is None}


def _token_order(checkpoint: Path) -> DataOrder:
    order = read_trainer_json(checkpoint).data
    if isinstance(order, StreamOrder):
        raise InputError(
            f"{checkpoint}: its run read --streaming_dataset, whose rows depend on the texts and cannot be computed "
            "from a step; tokenize the texts with fabric-train tokenize for runs that can be traced"
        )
    return order


def _read_saved(checkpoint: Path) -> _Saved:
    return read_json(checkpoint / "trainer.json", _Saved, "use another checkpoint")


def _ranks(checkpoint: Path, order: DataOrder) -> Ranks:
    """Count the ranks from the rows of a window, which all of them read together."""
    given = _read_saved(checkpoint).arguments
    of_one = given.micro_batch_size * given.gradient_accumulation_steps
    return Ranks(max(1, order.rows_per_window // of_one), given.ranks_of_rows, given.micro_batch_size)


def _open(checkpoint: Path, order: DataOrder, data_dirs: Sequence[str] | None) -> TokenDataset | TokenMixture:
    saved = _read_saved(checkpoint)
    given = saved.arguments.train_data_dir or []
    there = [given] if isinstance(given, str) else given
    folders = list(data_dirs or there)
    for folder in folders:
        if not Path(folder).is_dir():
            raise InputError(
                f"{folder}: no such folder, where the run of {checkpoint} read a token dataset; start this program "
                "where the run was started, or give its token datasets with --train_data_dir"
            )
    if not folders or len(folders) != len(there):
        raise InputError(f"--train_data_dir: the run of {checkpoint} read {', '.join(there)}; give as many folders")
    datasets: TokenDataset | TokenMixture
    if order.version != Mixture.VERSION:
        datasets = open_dataset(folders[0])
    else:
        option = "mixture_sources of trainer.json"
        named = [split_name(name, there, option) for name in saved.mixture_sources]  # none: whole token datasets
        given_shares = [{folders[part] if own is None else f"{folders[part]}:{own}": 1.0} for part, own in named]
        shares = Shares(option, given_shares or None)
        datasets = open_mixture(folders, shares, isolate_documents=True, manifest_folder=checkpoint)
    if datasets.fingerprint != order.fingerprint:
        manifest = read_manifest(checkpoint)
        known = {part.manifest_sha256 for part in manifest.parts} if manifest else set()
        others = [part for part in datasets.parts if part.fingerprint not in known] or datasets.parts
        shown = ", ".join(str(part.folder) for part in others)
        raise InputError(
            f"{shown}: not what the run of {checkpoint} read, manifest.json "
            "differs; give its token datasets, in the same order, with --train_data_dir"
        )
    return datasets


def _window_order(order: DataOrder, data: TokenDataset | TokenMixture, ranks: Ranks, starts_after: int) -> WindowOrder:
    if order.version not in (SHUFFLED, Mixture.VERSION, KEYED):
        raise InputError(f"the order of the run has version {order.version}, which this version does not compute")
    mixture = None
    if isinstance(data, TokenMixture) and order.rows_per_epoch is not None:
        window = (order.rows_per_window, order.seed)
        mixture = order_of_mixture(data, order.rows_per_epoch, *window, order.phases, starts_after)
    sizes = (order.num_rows, order.rows_per_window, ranks.micro_batch_size, ranks.num_data_ranks)
    return WindowOrder(*sizes, 0, order.seed, mixture, order.version)
