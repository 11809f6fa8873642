"""Save the checkpoints of a run, synchronously or in the background; read the cursors of a stream again.

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
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from lightning import Fabric
from pydantic import Field

from fabric_train.checkpoint.adapter_folder import CONFIG as ADAPTER_CONFIG
from fabric_train.checkpoint.adapter_folder import peft_config
from fabric_train.checkpoint.base_weights import hashed_or_noted
from fabric_train.checkpoint.discovery import lowest_loss, prune, remove_leftovers, replace_checkpoint
from fabric_train.checkpoint.rank_writer import BackgroundTask, RankWriter, Staging, Write, join_parts
from fabric_train.checkpoint.tensors import local_optimizer_state, local_weights, rank_writes
from fabric_train.checkpoint.trainer_json import (
    ADVICE,
    FORMAT,
    Description,
    TrainerState,
    read_trainer_json,
    to_content,
)
from fabric_train.cli.errors import InputError, RunError, describe_failure, describe_os_error
from fabric_train.data.stream_batches import LaneCursor
from fabric_train.distributed.ranks import first_text, gather_over_data_ranks
from fabric_train.files.atomic_folder import remove, temporary_for, this_process
from fabric_train.files.regular_file import read_json
from fabric_train.files.requirements import free_bytes
from fabric_train.model.hf_model import write_generation_config
from fabric_train.model.weight_files import Entry

if TYPE_CHECKING:
    from fabric_train.distributed.ranks import StepSync


@dataclass(frozen=True)
class _StreamJson:
    cursors: list[Annotated[list[int], Field(min_length=8)]]


class SaveError(RunError):
    """A failure to write a checkpoint. Its files are removed, and earlier checkpoints are unchanged."""


@dataclass(frozen=True)
class _PendingSave:
    """A save in progress. ``is_written``: all ranks have written their parts, and rank 0 completes the checkpoint.

    ``sharded`` has the tensors of the sharded parts.
    """

    target: Path
    temporary: Path
    num_bytes: int
    writer: RankWriter
    sharded: dict[str, list[Entry]]
    is_written: bool = False


class CheckpointManager:
    """Writes the checkpoints of one run. All ranks call its methods together, unless they say otherwise."""

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
        after_step: int = 0,
    ) -> None:
        """Set up the manager and remove unfinished checkpoints from ``folder``, which only this run uses.

        ``keep`` newest ones stay, and the best; None keeps all. With ``asynchronous`` training continues while one is
        written. ``saved`` is called on every rank with each complete one. The run starts after ``after_step``.
        """
        self.folder = folder
        self._keep = keep
        self._saved = saved
        self._fabric = fabric
        self._model = model
        self._optimizer = optimizer
        self._description = description
        self._started = time.monotonic()
        self._staging = Staging(fabric.device) if asynchronous else None
        self._pending: _PendingSave | None = None
        self._task: BackgroundTask | None = None
        self._whole = set[Path]()  # kept checkpoints that were checked
        self._best_by = description.arguments.get("best_by", "all")
        lowest = math.inf
        if fabric.is_global_zero:
            remove_leftovers(folder)
            lowest = lowest_loss(folder, self._best_by, after_step)
        self._process, self._lowest_loss = fabric.broadcast((this_process(), lowest))

    def path(self, state: TrainerState) -> Path:
        """Return the path of the checkpoint of a state, which need not exist."""
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
        """Return whether a state's loss, of the source of ``--best_by``, is the best. One rank may ask alone."""
        loss = state.cost_of(self._best_by)
        return loss is not None and loss < self._lowest_before(state)

    def _lowest_before(self, state: TrainerState) -> float:
        """Return the lowest saved cost on the rows of the state's evaluation; infinite if that is the first of them."""
        is_first = state.first_evaluation is not None and state.first_evaluation.step == state.step
        return math.inf if is_first else self._lowest_loss

    def save(
        self,
        state: TrainerState,
        cursors: np.ndarray | Path | None = None,
        waits: bool = False,
        interim: bool = False,
        scheduled: bool = False,
    ) -> Path:
        """Begin to write a checkpoint, after finishing a pending save, and return its path.

        If saves are synchronous, or with ``waits``, the checkpoint is complete when this returns. Otherwise, the model
        may change after ``wait_until_copied``, and ``advance`` completes the checkpoint. Old ones are then removed. A
        SaveError of any save is raised on all ranks. ``cursors`` are the stream's positions after the last window, see
        ``StreamBatch``, or a checkpoint of the same step that has them. For ``interim`` and ``scheduled`` see
        ``TrainerJson``.
        """
        self.finish()
        target = self.path(state)
        temporary = temporary_for(target, self._process)
        tensors = (local_weights(self._model), local_optimizer_state(self._model, self._optimizer.optimizer))
        model = "adapter" if self._description.adapter_base else "model"
        kind = self._description.state_dict_type
        writes: list[Write] = []
        first_rows: dict[str, list[int]] = {}
        sharded: dict[str, list[Entry]] = {}
        for part, of_part in zip((model, "optimizer"), tensors, strict=True):
            of_rank, rows = rank_writes(part, of_part, self._fabric, kind)
            writes += of_rank
            if rows:
                first_rows[part] = rows
                sharded[part] = [(tensor.name, tensor.dtype, tensor.shape) for tensor in of_part]
        if self._fabric.device.type == "xla":  # whose tensors only one thread may use
            writes = [replace(write, data=write.data.cpu()) for write in writes]
        texts = self._texts(state, cursors, {"interim": interim, "scheduled": scheduled})
        staging = None if waits else self._staging
        write_texts = partial(self._write_texts, texts=texts)
        writer = RankWriter(temporary, self._fabric.global_rank, writes, staging, write_texts, first_rows)
        num_bytes = sum(tensor.shape.numel() * tensor.dtype.itemsize for of_part in tensors for tensor in of_part)
        pending = _PendingSave(target, temporary, num_bytes, writer, sharded)
        self._make_folder(pending)
        self._pending = pending
        self._task = BackgroundTask(writer.run, self._fabric.device)
        if (loss := state.cost_of(self._best_by)) is not None:
            self._lowest_loss = min(self._lowest_before(state), loss)
        if staging is None:
            self.finish()
        return target

    def wait_until_copied(self) -> None:
        """Wait until the model and the optimizer may change. One rank may call this alone."""
        if self._pending is not None:
            self._pending.writer.wait_until_copied()

    def advance(self, sync: "StepSync") -> None:
        """Continue the pending save after an exchange of the ranks; a SaveError of any is raised on all of them."""
        if self._pending is None or (sync.is_saving and not sync.save_failed):
            return
        if sync.save_failed:
            self._pending.writer.abandon()
            self._wait_for_tasks()
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
            self._task.wait()
        if self._pending is not None and self._fabric.is_global_zero:
            shutil.rmtree(self._pending.temporary, ignore_errors=True)
        self._pending = None

    def _wait_for_tasks(self) -> None:
        """Wait for every rank's task in the pending save; raise on all ranks if one has failed."""
        pending = self._pending
        task = self._task
        text = None
        assert pending is not None
        assert task is not None
        task.wait()
        if task.error is not None:
            text = describe_os_error(task.error) if isinstance(task.error, OSError) else describe_failure(task.error)
        if (reason := first_text(self._fabric, text)) is None:
            return
        if self._fabric.is_global_zero:
            shutil.rmtree(pending.temporary, ignore_errors=True)
        self._pending = None
        raise SaveError(first_text(self._fabric, self._message(pending, reason)))

    def _make_folder(self, pending: _PendingSave) -> None:
        """Make the temporary folder on rank 0; raise on all ranks if the disk has no room for the checkpoint."""
        message = None
        if self._fabric.is_global_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
            if free_bytes(self.folder) < pending.num_bytes:
                message = self._message(pending, "the disk is too full for it; make room on it")
            else:
                if os.path.lexists(pending.temporary):  # a link there would lead the ranks elsewhere
                    remove(pending.temporary)
                pending.temporary.mkdir()
        message = first_text(self._fabric, message)
        if message is not None:
            raise SaveError(message)

    def _message(self, pending: _PendingSave, reason: str) -> str:
        needed = pending.num_bytes / 1e9
        free = free_bytes(self.folder) / 1e9
        return (
            f"{pending.target} could not be saved: {reason}; it needs {needed:.3g} GB, {free:.3g} GB are free there; "
            "earlier checkpoints are complete: --resume true continues from the newest"
        )

    def _begin_next_stage(self) -> None:
        """Complete the checkpoint on rank 0 after all ranks have written, or end the save after it is complete."""
        pending = self._pending
        assert pending is not None
        if not pending.is_written:
            self._pending = replace(pending, is_written=True)
            if self._fabric.is_global_zero:
                self._task = BackgroundTask(lambda: self._complete(pending), self._fabric.device)
            return
        self._pending = None
        self._saved(pending.target)

    def _complete(self, pending: _PendingSave) -> None:
        join_parts(pending.temporary, pending.sharded)
        # an existing checkpoint of this step is damaged, or a signal came before its evaluation was complete
        replace_checkpoint(pending.temporary, pending.target)
        prune(pending.target, self._keep, self._whole)

    def _texts(self, state: TrainerState, cursors: np.ndarray | Path | None, kind: dict[str, bool]) -> dict[str, str]:
        described = self._description.after(time.monotonic() - self._started)
        if described.adapter_base and self._fabric.is_global_zero:  # which writes it
            described = replace(described, adapter_base=hashed_or_noted(described.adapter_base))
        description = asdict(described)
        del description["attachments"]
        scaler = self._fabric.strategy.precision.state_dict()
        content = {"format": FORMAT, **to_content(state), **description, **kind, "grad_scaler": scaler}
        texts = {"trainer.json": json.dumps(content, indent=2) + "\n"}
        if self._description.adapter_base:
            of_peft = peft_config(self._model, self._description.adapter_base)
            texts[ADAPTER_CONFIG] = json.dumps(of_peft, indent=2) + "\n"
        if isinstance(cursors, Path):
            if (cursors / "stream.json").is_file():
                texts["stream.json"] = (cursors / "stream.json").read_text(encoding="utf-8")
        elif cursors is not None:
            gathered = gather_over_data_ranks(self._fabric, torch.from_numpy(cursors).to(self._fabric.device))
            in_order = sorted(gathered.reshape(-1, cursors.shape[1]).tolist())
            texts["stream.json"] = json.dumps({"cursors": [cursor for _, *cursor in in_order]}) + "\n"
        return texts

    def _write_texts(self, folder: Path, texts: dict[str, str]) -> None:
        model = self._model.module
        model.config.save_pretrained(folder)
        if model.generation_config is not None:
            write_generation_config(folder, model.generation_config)
        for source in self._description.attachments:
            for file in source.rglob("*") if source.is_dir() else [source]:
                if file.is_file():
                    copy = folder / file.relative_to(source.parent)
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, copy)  # permissions by the user's umask, not the original's
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")


def read_cursors(checkpoint: Path) -> list[LaneCursor]:
    """Return the cursors of all lanes of the checkpoint's stream; an InputError if stream.json is damaged."""
    file = checkpoint / "stream.json"
    order = read_trainer_json(checkpoint).stream
    cursors = read_json(file, _StreamJson, ADVICE).cursors
    if order is None or len(cursors) != order.rows_per_window:
        raise InputError(f"{file}: damaged ({len(cursors)} cursors are not one for each row of a step); {ADVICE}")
    if any(number < 0 for cursor in cursors for number in (*cursor[:6], *cursor[8:])):
        raise InputError(f"{file}: damaged (a number below 0); {ADVICE}")
    return [LaneCursor.from_numbers(numbers) for numbers in cursors]
