"""Store the completions of a step on disk, RUN/rollouts/step-000012/, and read them.

Each rank writes one parquet file, with one row for each completion; rank 0 adds ``manifest.json`` and gives the
folder its name. A folder with this name is complete.
"""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import xxhash
from pyarrow import parquet

from fabric_train.cli.errors import InputError, RunError, first_line, note
from fabric_train.files.atomic_folder import sync_and_rename, temporary_for, this_process
from fabric_train.files.regular_file import write_atomically
from fabric_train.files.typed_json import read_json
from fabric_train.rollouts.sampler import FinishReason

if TYPE_CHECKING:
    from lightning import Fabric

ROLLOUTS = "rollouts"
"""The folder of a run with the completions of its steps."""
MANIFEST = "manifest.json"
_ADVICE = "remove the folder to sample these completions again"
_COLUMNS = {
    "group": pa.int32(),
    "prompt_id": pa.string(),
    "source": pa.int32(),
    "text": pa.string(),
    "prompt_token_ids": pa.list_(pa.int32()),
    "token_ids": pa.list_(pa.int32()),
    "log_probabilities": pa.list_(pa.float32()),
    "finish_reason": pa.string(),
    "reward": pa.float64(),
    "advantage": pa.float64(),
    "lacks_variance": pa.bool_(),
    "rewards": pa.list_(pa.float64()),
    "reward_error": pa.string(),
}


@dataclass(frozen=True)
class StoredCompletion:
    """A completion of a prompt, with its rewards."""

    group: int
    """The index of the prompt in the step."""
    prompt_id: str
    source: int
    """The index of the prompt's source."""
    text: str
    """The text of the completion, for readers; training uses the tokens."""
    prompt_token_ids: np.ndarray
    """int32 [prompt tokens]."""
    token_ids: np.ndarray
    """The sampled tokens, int32 [T], with the token that ended the completion, if one did."""
    log_probabilities: np.ndarray
    """Of the sampled tokens, at the temperature of sampling, fp32 [T]."""
    finish_reason: FinishReason
    reward: float
    """The weighted sum of the rewards."""
    advantage: float
    lacks_variance: bool
    """Whether all completions of the prompt have the same reward."""
    rewards: np.ndarray
    """Each reward, without its weight, fp64 [R]."""
    reward_error: str | None
    """Why a reward function gave no reward, which then counts as 0; None if all did."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the prompt and the completion."""
        return len(self.prompt_token_ids) + len(self.token_ids)


@dataclass(frozen=True)
class RolloutManifest:
    """What ``manifest.json`` says of a step's completions."""

    step: int
    policy: str
    """The hash of what decides the completions, see ``RolloutPlan.hash_policy``."""
    reward_names: tuple[str, ...]
    source_names: tuple[str, ...]
    sampler: str
    num_ranks: int
    """The number of ranks, each of which has written a file."""
    sampling_seconds: float
    """The time for the completions, on the slowest rank."""
    reward_seconds: float
    """The time for the rewards, on the slowest rank."""
    sha256: tuple[str, ...]
    """The SHA-256 of each rank's file."""
    update_seconds: float = 0.0
    """The time until the sampler had the weights, on the slowest rank."""
    num_replaced: int = 0
    """The number of prompts that were replaced, because all their completions had the same reward."""
    num_reward_errors: int = 0
    """The number of completions for which a reward failed, those of replaced prompts included."""

    def hash_after(self, history: str) -> str:
        """Return the hash of the completions up to this step, from ``history``, the hash of those before it."""
        return xxhash.xxh3_128_hexdigest("".join([history, *self.sha256]).encode())


@dataclass(frozen=True)
class StoredRollouts:
    """The completions of a step, in the order of groups."""

    manifest: RolloutManifest
    completions: tuple[StoredCompletion, ...]


class RolloutStore:
    """The completions of a run's steps. All ranks call its methods together, unless they say otherwise."""

    def __init__(self, run_folder: Path, fabric: "Fabric", keep: int | None) -> None:
        """Open the store.

        Args:
            run_folder: The folder of the run.
            fabric: The run's Fabric.
            keep: How many of the newest steps are kept; None keeps all.
        """
        self.folder = run_folder / ROLLOUTS
        self._run_folder = run_folder
        self._fabric = fabric
        self._keep = keep
        # all ranks write into a folder with the name of rank 0's process in it
        self._process_name: str = fabric.broadcast(this_process())
        if fabric.is_global_zero:
            for leftover in self.folder.glob(".step-*"):
                shutil.rmtree(leftover, ignore_errors=True)

    def path(self, step: int) -> Path:
        """Return the folder of a step, which need not exist."""
        return step_folder(self._run_folder, step)

    def keep_if_usable(self, step: int, policy: str) -> bool:
        """Return whether a step's completions are stored and were sampled from the same policy; remove any others.

        Others are those of a run whose arguments were changed since, and damaged ones, which a note names.
        """
        folder = self.path(step)
        is_usable = False

        def check_and_remove() -> None:
            nonlocal is_usable
            if not folder.is_dir():
                return
            try:
                manifest = read_manifest(folder)
                for _ in read_tables(folder, manifest, ("group",)):
                    pass  # the files are whole
                is_usable = manifest.policy == policy
            except (InputError, RunError) as error:
                damage, _, _ = first_line(error).partition(";")
                note(f"step {step} samples its completions again: {damage}")
            if is_usable:
                self._remove_old(step)  # the steps before it, which a run that was killed may have left
            else:
                shutil.rmtree(folder)

        self._run_together(check_and_remove, runs=self._fabric.is_global_zero)
        return bool(self._fabric.broadcast(is_usable))

    def write(self, completions: Sequence[StoredCompletion], manifest: RolloutManifest) -> None:
        """Write the completions of this rank; the manifest is that of rank 0, which lacks the hashes.

        Raises:
            RunError: A rank cannot write; it is raised on all ranks.
        """
        target = self.path(manifest.step)
        temporary = temporary_for(target, self._process_name)
        is_first = self._fabric.is_global_zero

        def write_part() -> None:
            file = temporary / _file_name(self._fabric.global_rank)
            parquet.write_table(_to_table(completions), file, compression="zstd")

        def complete_folder() -> None:
            hashes = tuple(_hash_file(temporary / _file_name(rank)) for rank in range(self._fabric.world_size))
            write_atomically(temporary / MANIFEST, _to_json(dataclasses.replace(manifest, sha256=hashes)))
            sync_and_rename(temporary, target)
            self._remove_old(manifest.step)

        self._run_together(lambda: temporary.mkdir(parents=True, exist_ok=True), runs=is_first)
        self._run_together(write_part, runs=True)
        self._run_together(complete_folder, runs=is_first)

    def _run_together(self, action: Callable[[], object], *, runs: bool) -> None:
        """Run an action on the ranks with ``runs``; if it fails on one, raise a RunError on all."""
        from fabric_train.distributed.ranks import run_together  # slow, and readers do without it

        def describe(error: OSError) -> str:
            return f"{self.folder}: {first_line(error)}; make room, or make the folder writable, and resume"

        run_together(self._fabric, action, runs=runs, describe=describe)

    def _remove_old(self, step: int) -> None:
        """Remove the oldest of the steps up to ``step``, so that ``keep`` of them are left."""
        if self._keep is None:
            return
        stored_steps = [stored_step for stored_step in list_steps(self._run_folder) if stored_step <= step]
        for old_step in stored_steps[: -self._keep]:
            shutil.rmtree(self.path(old_step), ignore_errors=True)


def read_rollouts(folder: Path) -> StoredRollouts:
    """Read the completions of a step.

    Raises:
        RunError: A file is missing or has changed since it was written.
    """
    manifest = read_manifest(folder)
    completions: list[StoredCompletion] = []
    for table in read_tables(folder, manifest):
        completions += _from_table(table)
    completions.sort(key=lambda completion: completion.group)  # stable: completions of a group stay in order
    return StoredRollouts(manifest, tuple(completions))


def read_tables(
    folder: Path, manifest: RolloutManifest, columns: Sequence[str] = tuple(_COLUMNS)
) -> Iterator[pa.Table]:
    """Yield the completions of each rank as a table with the ``_COLUMNS``, or with some of them.

    Raises:
        RunError: A file is missing or has changed since it was written.
    """
    for rank, sha256 in enumerate(manifest.sha256):
        file = folder / _file_name(rank)
        if not file.is_file() or _hash_file(file) != sha256:
            raise RunError(f"{file} is missing or has changed since it was written; {_ADVICE}")
        yield parquet.read_table(file, columns=list(columns))


def read_manifest(folder: Path) -> RolloutManifest:
    """Read the manifest of a step's completions; an InputError if it is damaged."""
    return read_json(folder / MANIFEST, RolloutManifest, _ADVICE)


def list_steps(run_folder: Path) -> list[int]:
    """Return the steps of a run whose completions are stored, ascending."""
    steps = []
    for path in (run_folder / ROLLOUTS).glob("step-*"):
        number = path.name.removeprefix("step-")
        if number.isdecimal():
            steps.append(int(number))
    return sorted(steps)


def step_folder(run_folder: Path, step: int) -> Path:
    """Return the folder of a step's completions, which need not exist."""
    return run_folder / ROLLOUTS / f"step-{step:06d}"


def _to_json(manifest: RolloutManifest) -> str:
    return json.dumps(dataclasses.asdict(manifest), indent=2) + "\n"


def _file_name(rank: int) -> str:
    return f"rank-{rank:05d}.parquet"


def _hash_file(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _to_table(completions: Sequence[StoredCompletion]) -> pa.Table:
    """Return completions as a table with the ``_COLUMNS``."""
    columns: dict[str, Any] = {}
    for name, column_type in _COLUMNS.items():
        values = [getattr(completion, name) for completion in completions]
        columns[name] = pa.array(values, column_type)
    return pa.table(columns)


def _from_table(table: pa.Table) -> list[StoredCompletion]:
    """Return the completions in a table with the ``_COLUMNS``."""
    columns: dict[str, list[Any]] = {}
    for name, column_type in _COLUMNS.items():
        values = table.column(name)
        if pa.types.is_list(column_type):
            columns[name] = [row.values.to_numpy(zero_copy_only=False) for row in values]
        else:
            columns[name] = values.to_pylist()
    completions = []
    for index in range(table.num_rows):
        completions.append(StoredCompletion(**{name: values[index] for name, values in columns.items()}))
    return completions
