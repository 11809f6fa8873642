"""Save the checkpoints of a run, synchronously or in the background.

All ranks write into a folder with a temporary name. When all have written their parts, rank 0 gives the folder its
final name and removes old checkpoints.
"""

import json
import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning import Fabric

from fabric_train.checkpoint.adapter_folder import CONFIG as ADAPTER_CONFIG
from fabric_train.checkpoint.adapter_folder import peft_config
from fabric_train.checkpoint.base_weights import hashed_or_noted
from fabric_train.checkpoint.discovery import lowest_loss, prune, remove_leftovers, replace_checkpoint
from fabric_train.checkpoint.rank_writer import BackgroundTask, RankWriter, Staging, Write, join_rank_hashes
from fabric_train.checkpoint.tensors import local_optimizer_state, local_weights, rank_writes
from fabric_train.checkpoint.trainer_json import (
    FORMAT,
    Description,
    TrainerState,
    to_content,
)
from fabric_train.cli.errors import RunError, describe_failure, describe_os_error
from fabric_train.distributed.ranks import first_text, gather_over_data_ranks
from fabric_train.files.atomic_folder import remove, temporary_for, this_process
from fabric_train.files.requirements import free_bytes
from fabric_train.model.generation_settings import write_generation_config
from fabric_train.model.shard_index import Entry

if TYPE_CHECKING:
    from fabric_train.distributed.ranks import StepSync


class SaveError(RunError):
    """A failure to write a checkpoint. Its files are removed, and earlier checkpoints are unchanged."""


@dataclass(frozen=True)
class _PendingSave:
    """A save in progress."""

    target: Path
    """The folder of the complete checkpoint."""
    temporary: Path
    """The folder that all ranks write into."""
    num_bytes: int
    """The bytes of the tensors of all ranks."""
    writer: RankWriter
    sharded: dict[str, list[Entry]]
    """The tensors in each part of the checkpoint that is sharded."""
    is_written: bool = False
    """Whether all ranks have written their parts, and rank 0 is completing the checkpoint."""


class CheckpointManager:
    """Write the checkpoints of one run. All ranks call its methods together, unless they say otherwise."""

    def __init__(
        self,
        folder: Path,
        *,
        fabric: Fabric,
        model: Any,
        optimizer: Any,
        description: Description,
        keep: int | None,
        asynchronous: bool,
        on_saved: Callable[[Path], None],
        after_step: int = 0,
    ) -> None:
        """Set up the manager, and remove unfinished checkpoints from ``folder``.

        Args:
            folder: The folder for checkpoints, which only this run uses.
            fabric: The run's Fabric.
            model: The model that Fabric has set up.
            optimizer: Its optimizer, which Fabric has set up.
            description: The description of the run that is written to each checkpoint.
            keep: How many of the newest checkpoints are kept in addition to the best one; None keeps all.
            asynchronous: Whether training continues while a checkpoint is written.
            on_saved: Called on every rank with each complete checkpoint.
            after_step: The step after which the run starts.
        """
        self.folder = folder
        self._keep = keep
        self._on_saved = on_saved
        self._fabric = fabric
        self._model = model
        self._optimizer = optimizer
        self._description = description
        self._started = time.monotonic()
        self._staging = Staging(fabric.device) if asynchronous else None
        self._pending: _PendingSave | None = None
        self._task: BackgroundTask | None = None
        self._undamaged = set[Path]()  # kept checkpoints that were checked
        self._best_by = description.arguments.get("best_by", "all")
        lowest = math.inf
        if fabric.is_global_zero:
            remove_leftovers(folder)
            lowest = lowest_loss(folder, self._best_by, after_step)
        # all ranks write into a folder with the name of rank 0's process in it
        self._process_name, self._lowest_loss = fabric.broadcast((this_process(), lowest))

    def path(self, state: TrainerState) -> Path:
        """Return the path of a state's checkpoint, which need not exist."""
        return self.folder / f"step-{state.step:08d}"

    @property
    def is_writing(self) -> bool:
        """Whether this rank's task in the pending save is running."""
        return self._task is not None and self._task.is_running

    @property
    def has_failed(self) -> bool:
        """Whether this rank's task in the pending save has failed."""
        return self._task is not None and self._task.error is not None

    def is_best(self, state: TrainerState) -> bool:
        """Return whether a state's loss, of the source in ``--best_by``, is the best so far. One rank may call this."""
        loss = state.cost_of(self._best_by)
        return loss is not None and loss < self._lowest_before(state)

    def _lowest_before(self, state: TrainerState) -> float:
        """Return the lowest saved cost on the rows that the state evaluated; infinite for the first evaluation."""
        is_first_evaluation = state.first_evaluation is not None and state.first_evaluation.step == state.step
        return math.inf if is_first_evaluation else self._lowest_loss

    def save(
        self,
        state: TrainerState,
        cursors: np.ndarray | Path | None = None,
        *,
        waits: bool = False,
        interim: bool = False,
        scheduled: bool = False,
    ) -> Path:
        """Begin to write a checkpoint, after finishing a pending save.

        After an asynchronous save begins, the model may change after :meth:`wait_until_copied`. :meth:`advance`
        completes the checkpoint. Then old ones are removed.

        Args:
            state: Counters and losses of the run.
            cursors: The stream's positions after the last window, see ``StreamBatch``, or a checkpoint of the same step
                that has them.
            waits: Return only when the checkpoint is complete, even if saves are asynchronous.
            interim: See ``TrainerJson``.
            scheduled: See ``TrainerJson``.

        Returns:
            The path of the checkpoint.

        Raises:
            SaveError: this save or the pending one has failed on some rank; it is raised on all ranks.
        """
        self.finish()
        target = self.path(state)
        temporary = temporary_for(target, self._process_name)

        # which bytes this rank writes into which file
        weights = local_weights(self._model)
        optimizer_state = local_optimizer_state(self._model, self._optimizer.optimizer)
        writes: list[Write] = []
        first_rows: dict[str, list[int]] = {}
        sharded: dict[str, list[Entry]] = {}
        weights_part = "adapter" if self._description.adapter_base else "model"
        for part, tensors in ((weights_part, weights), ("optimizer", optimizer_state)):
            part_writes, rows = rank_writes(part, tensors, self._fabric, self._description.state_dict_type)
            writes += part_writes
            if rows:
                first_rows[part] = rows
                sharded[part] = [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]
        if self._fabric.device.type == "xla":  # only the main thread may use its tensors
            writes = [replace(write, data=write.data.cpu()) for write in writes]
        num_bytes = 0
        for tensor in (*weights, *optimizer_state):
            num_bytes += tensor.shape.numel() * tensor.dtype.itemsize

        # start the writer in a thread
        texts = self._make_texts(state, cursors, interim=interim, scheduled=scheduled)
        staging = None if waits else self._staging
        writer = RankWriter(
            folder=temporary,
            rank=self._fabric.global_rank,
            writes=writes,
            staging=staging,
            write_texts=partial(self._write_texts, texts=texts),
            first_rows=first_rows,
        )
        pending = _PendingSave(target=target, temporary=temporary, num_bytes=num_bytes, writer=writer, sharded=sharded)
        self._make_folder(pending)
        self._pending = pending
        self._task = BackgroundTask(writer.run, self._fabric.device)

        loss = state.cost_of(self._best_by)
        if loss is not None:
            self._lowest_loss = min(self._lowest_before(state), loss)
        if staging is None:
            self.finish()
        return target

    def wait_until_copied(self) -> None:
        """Wait until the model and the optimizer may change. One rank may call this alone."""
        if self._pending is not None:
            self._pending.writer.wait_until_copied()

    def advance(self, sync: "StepSync") -> None:
        """Continue the pending save after the ranks have exchanged their flags.

        Raises:
            SaveError: the task of some rank has failed; it is raised on all ranks.
        """
        if self._pending is None:
            return
        if sync.save_failed:
            self._pending.writer.abandon()
            self._wait_for_tasks()  # raises the error
        elif sync.is_saving:  # some rank has not finished its part
            return
        self._begin_next_stage()

    def finish(self) -> None:
        """Wait until the pending save is complete; a SaveError of any rank is raised on all ranks."""
        while self._pending is not None:
            self._wait_for_tasks()
            self._begin_next_stage()

    def close(self) -> None:
        """Abandon the pending save, after a run has failed. One rank may call this alone."""
        if self._pending is not None:
            self._pending.writer.abandon()
        if self._task is not None:
            self._task.wait()  # before its folder is removed
        if self._pending is not None and self._fabric.is_global_zero:
            shutil.rmtree(self._pending.temporary, ignore_errors=True)
        self._pending = None

    def _wait_for_tasks(self) -> None:
        """Wait for every rank's task in the pending save; raise a SaveError on all ranks if one has failed."""
        pending = self._pending
        task = self._task
        assert pending is not None
        assert task is not None
        task.wait()
        reason = None
        if isinstance(task.error, OSError):
            reason = describe_os_error(task.error)
        elif task.error is not None:
            reason = describe_failure(task.error)
        # a collective: it returns when the tasks of all ranks have ended
        reason = first_text(self._fabric, reason)
        if reason is None:
            return
        if self._fabric.is_global_zero:
            shutil.rmtree(pending.temporary, ignore_errors=True)
        self._pending = None
        # all ranks raise rank 0's message: each may see other free space
        raise SaveError(first_text(self._fabric, self._describe_failure(pending, reason)))

    def _make_folder(self, pending: _PendingSave) -> None:
        """Make the temporary folder on rank 0; raise on all ranks if the disk has no room for the checkpoint."""
        message = None
        if self._fabric.is_global_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
            if free_bytes(self.folder) < pending.num_bytes:
                message = self._describe_failure(pending, "the disk is too full; free some space")
            else:
                if os.path.lexists(pending.temporary):  # a link of this name would lead the ranks elsewhere
                    remove(pending.temporary)
                pending.temporary.mkdir()
        message = first_text(self._fabric, message)
        if message is not None:
            raise SaveError(message)

    def _describe_failure(self, pending: _PendingSave, reason: str) -> str:
        """Return the error of a failed save."""
        needed_gb = pending.num_bytes / 1e9
        free_gb = free_bytes(self.folder) / 1e9
        return (
            f"{pending.target} could not be saved: {reason}; the checkpoint needs {needed_gb:.3g} GB, and its disk has "
            f"{free_gb:.3g} GB left; earlier checkpoints are complete, so --resume true continues from the newest"
        )

    def _begin_next_stage(self) -> None:
        """Complete the checkpoint on rank 0 after all ranks have written, or end the save after it is complete."""
        pending = self._pending
        assert pending is not None

        # all ranks have written: rank 0 gives the checkpoint its name
        if not pending.is_written:
            self._pending = replace(pending, is_written=True)
            if self._fabric.is_global_zero:
                self._task = BackgroundTask(lambda: self._complete(pending), self._fabric.device)
            return

        # rank 0 has done so
        self._pending = None
        self._on_saved(pending.target)

    def _complete(self, pending: _PendingSave) -> None:
        """Give the checkpoint its final name, and remove old ones. Rank 0 calls this, in a thread."""
        join_rank_hashes(pending.temporary, pending.sharded)
        # a checkpoint of this step exists if it is damaged, or if a signal came before its evaluation was complete
        replace_checkpoint(pending.temporary, pending.target)
        prune(pending.target, self._keep, self._undamaged)

    def _make_texts(
        self, state: TrainerState, cursors: np.ndarray | Path | None, *, interim: bool, scheduled: bool
    ) -> dict[str, str]:
        """Return the contents of the checkpoint's text files by name. All ranks call this; rank 0 writes the files."""
        # trainer.json
        description = self._description.with_session_seconds(time.monotonic() - self._started)
        if description.adapter_base and self._fabric.is_global_zero:  # may wait for the hash
            description = replace(description, adapter_base=hashed_or_noted(description.adapter_base))
        described = asdict(description)
        del described["attachments"]
        content = {
            "format": FORMAT,
            **to_content(state),
            **described,
            "interim": interim,
            "scheduled": scheduled,
            "grad_scaler": self._fabric.strategy.precision.state_dict(),
        }
        texts = {"trainer.json": json.dumps(content, indent=2) + "\n"}

        # adapter_config.json
        if self._description.adapter_base:
            config = peft_config(self._model, self._description.adapter_base)
            texts[ADAPTER_CONFIG] = json.dumps(config, indent=2) + "\n"

        # stream.json
        if isinstance(cursors, Path):
            if (cursors / "stream.json").is_file():
                texts["stream.json"] = (cursors / "stream.json").read_text(encoding="utf-8")
        elif cursors is not None:
            local_cursors = torch.from_numpy(cursors).to(self._fabric.device)  # [lanes, 1 + numbers]
            all_cursors = gather_over_data_ranks(self._fabric, local_cursors).reshape(-1, cursors.shape[1])
            # a cursor begins with the index of its lane, which only serves to sort them
            sorted_cursors = [numbers for _, *numbers in sorted(all_cursors.tolist())]
            texts["stream.json"] = json.dumps({"cursors": sorted_cursors}) + "\n"
        return texts

    def _write_texts(self, folder: Path, texts: dict[str, str]) -> None:
        """Write all files without tensors. Rank 0 calls this, in a thread."""
        model = self._model.module
        model.config.save_pretrained(folder)
        if model.generation_config is not None:
            write_generation_config(folder, model.generation_config)
        for attachment in self._description.attachments:
            files = attachment.rglob("*") if attachment.is_dir() else [attachment]
            for file in files:
                if file.is_file():
                    copy = folder / file.relative_to(attachment.parent)
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, copy)  # permissions by the user's umask, not the original's
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
