"""Save the checkpoints of a run: written by all ranks under a temporary name, while the run goes on; named by rank 0
once every rank has written its part; then those are removed that are no longer wanted.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning import Fabric

from fabric_train.checkpoint.checksums import join_parts
from fabric_train.checkpoint.discovery import prune, remove_leftovers, set_aside
from fabric_train.checkpoint.file_layout import Write, full_writes, sharded_writes
from fabric_train.checkpoint.local_tensors import Held, held_optimizer, held_weights, whole_rows
from fabric_train.checkpoint.trainer_state import FORMAT, Description, TrainerState
from fabric_train.checkpoint.writer import Background, Staging, Writing
from fabric_train.cli.errors import RunError, describe_failure, describe_os_error
from fabric_train.distributed.collectives import first_text, gather_over_data_ranks
from fabric_train.files.atomic_folder import sync_and_rename, temporary_for, this_process

if TYPE_CHECKING:
    from fabric_train.distributed.collectives import StepSync


class SaveError(RunError):
    """A checkpoint could not be written. Those before it are as they were, and nothing is left of it."""


@dataclass(frozen=True)
class _Saving:
    """The save under way. ``is_written`` says that all ranks have written, and rank 0 is giving it its name."""

    target: Path
    temporary: Path
    num_bytes: int
    writing: Writing
    is_written: bool = False


class Checkpoints:
    """Writes the checkpoints of one run. All ranks call it together, but for what is said to be of one rank."""

    def __init__(
        self,
        folder: Path,
        fabric: Fabric,
        model: Any,
        optimizer: Any,
        description: Description,
        keep: int | None,
        asynchronous: bool,
        saved: Callable[[Path], None],
    ) -> None:
        """Remove what killed runs have left in ``folder``.

        Args:
            folder: of the run's checkpoints, used by this run alone.
            fabric: that model and optimizer are set up with.
            model: as Fabric gives it.
            optimizer: as Fabric gives it.
            description: what every checkpoint says of the run.
            keep: how many of the newest stay, beside the best by validation loss; None keeps all.
            asynchronous: whether the run goes on while a checkpoint is written.
            saved: called on every rank for each checkpoint that is complete.
        """
        self.folder, self._keep, self._saved = folder, keep, saved
        self._fabric, self._model, self._optimizer = fabric, model, optimizer
        self._description = description
        self._staging = Staging(fabric.device) if asynchronous else None
        self._saving: _Saving | None = None
        self._task: Background | None = None
        if fabric.is_global_zero:
            remove_leftovers(folder)
        self._writer = fabric.broadcast(this_process())

    def path(self, state: TrainerState) -> Path:
        """Return where the checkpoint of this state lies, or will."""
        return self.folder / f"step-{state.step:08d}"

    @property
    def is_writing(self) -> bool:
        """Whether this rank still has to do with the save under way."""
        return self._task is not None and self._task.is_running

    @property
    def has_failed(self) -> bool:
        """Whether this rank's part in the save under way has failed."""
        return self._task is not None and self._task.error is not None

    def save(self, state: TrainerState, cursors: np.ndarray | None = None, waits: bool = False) -> Path:
        """Begin to write a checkpoint, after the end of one that is still being written.

        Where saves are synchronous, or with ``waits``, it is complete when this returns. Otherwise the model may change
        once ``wait_until_copied`` has returned, and ``at_border`` completes it. Then the newest stay, and the best by
        validation loss. ``cursors`` are those of the last window, see ``stream.StreamBatch``.

        Returns:
            where it will lie.

        Raises:
            SaveError: this or the save before could not be written; on all ranks.
        """
        self.finish()
        target = self.path(state)
        temporary = temporary_for(target, self._writer)
        tensors = {
            "model": held_weights(self._model),
            "optimizer": held_optimizer(self._model, self._optimizer.optimizer),
        }
        writes = [write for part, held in tensors.items() for write in self._writes(part, held)]
        texts = self._texts(state, cursors)
        staging = None if waits else self._staging
        writing = Writing(
            temporary, self._fabric.global_rank, writes, staging, lambda folder: self._describe(folder, texts)
        )
        num_bytes = sum(tensor.shape.numel() * tensor.dtype.itemsize for held in tensors.values() for tensor in held)
        saving = _Saving(target, temporary, num_bytes, writing)
        self._refuse_full_disk(saving)
        self._saving, self._task = saving, Background(writing.run)
        if staging is None:
            self.finish()
        return target

    def wait_until_copied(self) -> None:
        """Wait until the model and the optimizer may change; of one rank. It is short where the step before was not."""
        if self._saving is not None:
            self._saving.writing.wait_until_copied()

    def at_border(self, border: "StepSync") -> None:
        """Bring the save under way forward, at a border of steps at which the ranks have told each other of it.

        Raises:
            SaveError: it has failed on a rank; on all ranks.
        """
        if self._saving is None or (border.is_saving and not border.save_failed):
            return
        if border.save_failed:
            self._saving.writing.abandon()
            self._agree()
        self._advance()

    def finish(self) -> None:
        """Wait until no save is under way any more.

        Raises:
            SaveError: it has failed on a rank; on all ranks.
        """
        while self._saving is not None:
            self._agree()
            self._advance()

    def close(self) -> None:
        """Give up what is not finished, as a run does that ends otherwise than well; of one rank."""
        if self._saving is not None:
            self._saving.writing.abandon()
        if self._task is not None:
            self._task.wait()
        if self._saving is not None and self._fabric.is_global_zero:
            shutil.rmtree(self._saving.temporary, ignore_errors=True)
        self._saving = None

    def _agree(self) -> None:
        """Wait for this rank's part in the save; raise on all ranks where it has failed on one."""
        saving, task = self._saving, self._task
        assert saving is not None
        assert task is not None
        task.wait()
        error = task.error
        if error is not None:
            error_text = describe_os_error(error) if isinstance(error, OSError) else describe_failure(error)
        reason = first_text(self._fabric, error_text if error is not None else None)
        if reason is None:
            return
        if self._fabric.is_global_zero:
            shutil.rmtree(saving.temporary, ignore_errors=True)
        self._saving = None
        raise SaveError(first_text(self._fabric, self._line(saving, reason)))

    def _refuse_full_disk(self, saving: _Saving) -> None:
        """Raise on all ranks where rank 0 sees that the disk is too small: before it is full for everybody."""
        line = None
        if self._fabric.is_global_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
            if free_bytes(self.folder) < saving.num_bytes:
                line = self._line(saving, "the disk is too full for it; make room on it")
        line = first_text(self._fabric, line)
        if line is not None:
            raise SaveError(line)

    def _line(self, saving: _Saving, reason: str) -> str:
        """Say why a save failed, what it needs and what there is."""
        needed, free = saving.num_bytes / 1e9, free_bytes(self.folder) / 1e9
        return (
            f"{saving.target} could not be saved: {reason}; it needs {needed:.3g} GB, {free:.3g} GB are free there; "
            "those before it are whole: --resume true goes on from the newest"
        )

    def _advance(self) -> None:
        """Take the save's next step, now that all ranks have taken the last one."""
        saving = self._saving
        assert saving is not None
        if not saving.is_written:
            self._saving = _Saving(saving.target, saving.temporary, saving.num_bytes, saving.writing, is_written=True)
            if self._fabric.is_global_zero:
                self._task = Background(lambda: self._complete(saving))
            return
        self._saving = None
        self._saved(saving.target)

    def _complete(self, saving: _Saving) -> None:
        """Give the checkpoint its name, then prune; on rank 0."""
        join_parts(saving.temporary)
        damaged = set_aside(saving.target) if saving.target.exists() else None  # else this run had gone on from it
        sync_and_rename(saving.temporary, saving.target)
        if damaged:
            shutil.rmtree(damaged)
        if self._keep is not None:
            prune(saving.target, self._keep)

    def _writes(self, part: str, tensors: list[Held]) -> list[Write]:
        if self._description.state_dict_type == "sharded":
            return sharded_writes(part, whole_rows(tensors), self._fabric.global_rank)
        return full_writes(part, tensors, self._fabric.global_rank)

    def _texts(self, state: TrainerState, cursors: np.ndarray | None) -> dict[str, str]:
        """Return the content of the files that say where the run stands."""
        description = asdict(self._description)
        del description["attachments"]
        scaler = self._fabric.strategy.precision.state_dict()
        content = {"format": FORMAT, **asdict(state), **description, "grad_scaler": scaler}
        texts = {"trainer.json": json.dumps(content, indent=2) + "\n"}
        if cursors is not None:
            gathered = gather_over_data_ranks(self._fabric, torch.from_numpy(cursors).to(self._fabric.device))
            in_order = sorted(gathered.reshape(-1, cursors.shape[1]).tolist())
            texts["stream.json"] = json.dumps({"cursors": [cursor for _, *cursor in in_order]}) + "\n"
        return texts

    def _describe(self, folder: Path, texts: dict[str, str]) -> None:
        """Write everything but tensors."""
        model = self._model.module
        model.config.save_pretrained(folder)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(folder)
        for source in self._description.attachments:
            for file in source.rglob("*") if source.is_dir() else [source]:
                if file.is_file():
                    copy = folder / file.relative_to(source.parent)
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, copy)  # with the user's umask, whatever the original's mode
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")


def free_bytes(folder: Path) -> int:
    """Return how many bytes this user may still write to the disk of a folder."""
    disk = os.statvfs(folder)
    return disk.f_frsize * (disk.f_bfree if os.geteuid() == 0 else disk.f_bavail)
