"""Find the checkpoints of a run, choose the one to start from, and remove those that are no longer wanted."""

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
"""What is wrong with the content of checkpoints, by their resolved path, as far as that has been looked at."""


def find_checkpoint(path: Path, damages: Damages | None = None) -> Path:
    """Return ``path`` itself where it is a checkpoint, else the newest whole one of the run folder ``path``.

    Raises:
        InputError: there is none, or ``path`` is one that is damaged.
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
        there = "neither a complete checkpoint nor a run folder with one" if path.is_dir() else missing_folder(path)
        raise InputError(f"{path}: {there}; checkpoints are RUN/checkpoints/step-...")
    return newest


def find_whole_checkpoint(path: Path) -> Path:
    """Return what ``find_checkpoint`` does, with the content of its weights checked too; a damaged newest one of a run
    folder is named on standard error.

    Raises:
        InputError: there is none, or ``path`` is one that is damaged.
    """
    damages: dict[Path, str] = {}
    while damage := find_wrong_content(checkpoint := find_checkpoint(path, damages), optimizer=False):
        damages[checkpoint.resolve()] = damage
    if checkpoint != path:
        for line in describe_damaged(path, checkpoint, damages):
            print(f"note: {line}", file=sys.stderr)
    return checkpoint


def choose_checkpoint(
    run: Path, given: str | None, resume: bool, anew: bool, only_reads: bool, damages: Damages | None = None
) -> Path | None:
    """Return the checkpoint that a run into ``run`` starts from, None for the pretrained weights.

    Args:
        run: the run's folder.
        given: the checkpoint or run folder that the user named.
        resume: whether to go on from the newest whole one in ``run`` where none is named.
        anew: whether the run takes weights only and counts from 0.
        only_reads: whether nothing will be written beside what is there.
        damages: what is known to be wrong.

    Raises:
        InputError: where there is no such checkpoint, or the run would write over another's metrics and checkpoints.
    """
    newest = newest_checkpoint(run, damages)
    chosen = find_checkpoint(Path(given), damages) if given else (newest if resume else None)
    if only_reads:
        return chosen
    if newest is None and (damaged := describe_damaged(run, None, damages)):
        raise InputError(*damaged)
    goes_on = chosen is not None and not anew and newest is not None and chosen.resolve() == newest.resolve()
    if newest is not None and not goes_on:
        raise InputError(
            f"--output_dir {run} holds a run up to {newest.name}: --resume true goes on from there; "
            "else give another --output_dir"
        )
    if newest is None and (run / "metrics.csv").exists() and not resume:
        raise InputError(
            f"--output_dir {run} holds a run that has saved nothing yet: --resume true begins it again; "
            "else give another --output_dir"
        )
    return chosen


def newest_checkpoint(run: Path, damages: Damages | None = None) -> Path | None:
    """Return the whole checkpoint of a run folder (or of its ``checkpoints/``) with the highest step."""
    newest_first = sorted(_in(run), key=_step, reverse=True)
    return next((checkpoint for checkpoint in newest_first if _fault(checkpoint, damages or {}) is None), None)


def describe_damaged(run: Path, used: Path | None, damages: Damages | None = None) -> list[str]:
    """Return a line for each damaged checkpoint of a run that is newer than the one that is ``used`` instead."""
    instead = f"{used.name} is used" if used else "no whole one is there: use another checkpoint"
    newer = [
        checkpoint for checkpoint in sorted(_in(run), key=_step) if used is None or _step(checkpoint) > _step(used)
    ]
    faults = [(checkpoint, _fault(checkpoint, damages or {})) for checkpoint in newer]
    return [f"{checkpoint} {fault}; {instead}" for checkpoint, fault in faults if fault]


def wrong_content(checkpoint: Path, fabric: Fabric) -> str | None:
    """Say on all ranks which file of a checkpoint does not hold what was written, None where all do; each rank reads
    its share.
    """
    return first_text(fabric, find_wrong_content(checkpoint, rank=fabric.global_rank, num_ranks=fabric.world_size))


def prune(newest: Path, keep: int) -> None:
    """Remove the checkpoints beside the ``newest`` one but the ``keep`` newest and the one with the lowest validation
    loss.

    Damaged ones neither count nor are touched, and those of later steps are damaged: a run goes on from the newest.
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
    """Rename a checkpoint that is to be removed: at no moment is there half a one under a checkpoint's name."""
    return checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}{_REMOVED}"))


def remove_leftovers(folder: Path) -> None:
    """Remove what killed runs have left among their checkpoints: unfinished ones, and those being removed."""
    for entry in folder.iterdir() if folder.is_dir() else []:
        if is_temporary(entry) or (entry.name.startswith(".") and entry.name.endswith(_REMOVED)):
            shutil.rmtree(entry)


def _in(run: Path) -> list[Path]:
    """All checkpoints of a run folder (or of its ``checkpoints/``), damaged ones too."""
    folder = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    return [entry for entry in folder.iterdir() if _NAME.fullmatch(entry.name)] if folder.is_dir() else []


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _fault(checkpoint: Path, damages: Damages) -> str | None:
    """Say why a checkpoint cannot be used, None where it can."""
    found = read_format(checkpoint)
    if found not in (FORMAT, None):
        return f"is of format {found}, this version reads format {FORMAT}"
    damage = damages.get(checkpoint.resolve()) or find_damage(checkpoint)
    return f"is damaged: {damage}" if damage else None


def _is_checkpoint(path: Path) -> bool:
    """Whether this is meant to be a checkpoint, be it damaged; one may have been renamed."""
    return path.is_dir() and bool(_NAME.fullmatch(path.name) or (path / "trainer.json").is_file())
