"""Find the checkpoints of a run, choose the one to start from, and remove old ones."""

import math
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from lightning import Fabric

from fabric_train.checkpoint.checksums import find_damage, find_wrong_content
from fabric_train.checkpoint.trainer_state import FORMAT, read_format, read_trainer_state
from fabric_train.cli.errors import InputError, missing_folder
from fabric_train.distributed.collectives import first_text
from fabric_train.files.atomic_folder import is_temporary

_NAME = re.compile(r"step-\d{8,}")
_REMOVED = ".removed"

Damages = Mapping[Path, str]
"""Known damage to the content of checkpoints, by resolved path."""


def find_checkpoint(path: Path, damages: Damages | None = None) -> Path:
    """Return ``path`` if it is a checkpoint, else the newest undamaged checkpoint of the run folder ``path``.

    Raises:
        InputError: There is none, or the checkpoint ``path`` is damaged.
    """
    if _is_checkpoint(path):
        fault = _fault(path, damages or {})
        if fault:
            raise InputError(f"{path} {fault}; use another checkpoint")
        return path
    newest = newest_checkpoint(path, damages)
    if newest is None:
        damaged = describe_damaged(path, None, damages)
        if damaged:
            raise InputError(*damaged)
        reason = "neither a complete checkpoint nor a run folder with one" if path.is_dir() else missing_folder(path)
        raise InputError(f"{path}: {reason}; checkpoints are RUN/checkpoints/step-...")
    return newest


def find_whole_checkpoint(path: Path) -> Path:
    """Find a checkpoint as ``find_checkpoint`` does, and check the content of its weights too.

    Print a note on standard error for each newer, damaged checkpoint of the run folder.

    Raises:
        InputError: There is none, or the checkpoint ``path`` is damaged.
    """
    damages: dict[Path, str] = {}
    while damage := find_wrong_content(checkpoint := find_checkpoint(path, damages), optimizer=False):
        damages[checkpoint.resolve()] = damage
    if checkpoint != path:
        for line in describe_damaged(path, checkpoint, damages):
            print(f"note: {line}", file=sys.stderr)
    return checkpoint


def choose_checkpoint(
    run: Path,
    given: str | None,
    *,
    resume: bool,
    weights_only: bool,
    read_only: bool,
    damages: Damages | None = None,
) -> Path | None:
    """Return the checkpoint that a run starts from, or None for the pretrained weights.

    Args:
        run: The run's folder.
        given: The checkpoint or run folder of ``--checkpoint``, if any.
        resume: Whether to start from the newest undamaged checkpoint in ``run`` if ``given`` is None.
        weights_only: Whether the run takes only the weights and starts at step 0.
        read_only: Whether the run writes neither metrics nor checkpoints.
        damages: Known damage.

    Raises:
        InputError: There is no such checkpoint, or the run would overwrite another run's metrics and checkpoints.
    """
    newest = newest_checkpoint(run, damages)
    chosen = find_checkpoint(Path(given), damages) if given else (newest if resume else None)
    if read_only:
        return chosen
    if newest is None and (damaged := describe_damaged(run, None, damages)):
        raise InputError(*damaged)
    continues = chosen is not None and not weights_only and newest is not None and chosen.resolve() == newest.resolve()
    if newest is not None and not continues:
        raise InputError(
            f"--output_dir {run} has a run up to {newest.name}; --resume true continues it, "
            "else give another --output_dir"
        )
    if newest is None and (run / "metrics.csv").exists() and not resume:
        raise InputError(
            f"--output_dir {run} has a run that has not saved a checkpoint; --resume true starts it again, "
            "else give another --output_dir"
        )
    return chosen


def newest_checkpoint(run: Path, damages: Damages | None = None) -> Path | None:
    """Return the undamaged checkpoint of a run folder (or of its ``checkpoints/``) with the highest step, or None."""
    newest_first = sorted(_in(run), key=_step, reverse=True)
    return next((checkpoint for checkpoint in newest_first if _fault(checkpoint, damages or {}) is None), None)


def describe_damaged(run: Path, used: Path | None, damages: Damages | None = None) -> list[str]:
    """Return a line for each damaged checkpoint of a run that is newer than ``used``, the one that is used instead."""
    instead = f"{used.name} is used" if used else "there is no undamaged one; use another checkpoint"
    newer = [
        checkpoint for checkpoint in sorted(_in(run), key=_step) if used is None or _step(checkpoint) > _step(used)
    ]
    faults = [(checkpoint, _fault(checkpoint, damages or {})) for checkpoint in newer]
    return [f"{checkpoint} {fault}; {instead}" for checkpoint, fault in faults if fault]


def wrong_content(checkpoint: Path, fabric: Fabric) -> str | None:
    """Return on all ranks which file of a checkpoint does not have the written content, or None.

    All ranks call it together, and each reads its share.
    """
    return first_text(fabric, find_wrong_content(checkpoint, rank=fabric.global_rank, num_ranks=fabric.world_size))


def prune(newest: Path, keep: int) -> None:
    """Remove all checkpoints except the ``keep`` newest and the one with the lowest validation loss.

    ``newest`` is the checkpoint that was just saved. Damaged checkpoints are neither counted nor removed. Those of
    later steps are damaged, because a run continues from the newest undamaged one.
    """
    checkpoints = [other for other in _in(newest.parent) if _step(other) <= _step(newest) and not find_damage(other)]
    checkpoints.sort(key=_step)
    losses = {checkpoint: read_trainer_state(checkpoint).val_loss for checkpoint in checkpoints}
    evaluated = {checkpoint: loss for checkpoint, loss in losses.items() if loss is not None and math.isfinite(loss)}
    best = min(evaluated, key=lambda checkpoint: evaluated[checkpoint]) if evaluated else None
    for checkpoint in checkpoints[:-keep]:
        if checkpoint != best:
            shutil.rmtree(set_aside(checkpoint))


def set_aside(checkpoint: Path) -> Path:
    """Rename a checkpoint before its removal, so that no partial one ever has a checkpoint's name."""
    return checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}{_REMOVED}"))


def remove_leftovers(folder: Path) -> None:
    """Remove the unfinished and half-removed checkpoints of killed runs."""
    for entry in folder.iterdir() if folder.is_dir() else []:
        if is_temporary(entry) or (entry.name.startswith(".") and entry.name.endswith(_REMOVED)):
            shutil.rmtree(entry)


def _in(run: Path) -> list[Path]:
    """Return all checkpoints of a run folder (or of its ``checkpoints/``), damaged ones too."""
    folder = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    return [entry for entry in folder.iterdir() if _NAME.fullmatch(entry.name)] if folder.is_dir() else []


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _fault(checkpoint: Path, damages: Damages) -> str | None:
    """Return why a checkpoint cannot be used, or None."""
    found = read_format(checkpoint)
    if found not in (FORMAT, None):
        return f"has format {found}, but this version reads format {FORMAT}"
    damage = damages.get(checkpoint.resolve()) or find_damage(checkpoint)
    return f"is damaged: {damage}" if damage else None


def _is_checkpoint(path: Path) -> bool:
    """Return whether a path is a checkpoint, which may be damaged or renamed."""
    return path.is_dir() and bool(_NAME.fullmatch(path.name) or (path / "trainer.json").is_file())
