"""Find the checkpoints of a run, choose the one to start from, and remove those that are no longer wanted."""

import re
import shutil
from pathlib import Path

from fabric_train.checkpoint.state import read_trainer_state
from fabric_train.errors import InputError, absent_folder


def find_checkpoint(path: Path) -> Path:
    """Return ``path`` itself where it is a checkpoint, else the newest of the run folder ``path``.

    Raises:
        InputError: where there is none.
    """
    if is_complete(path):
        return path
    newest = newest_checkpoint(path)
    if newest is None:
        there = "neither a complete checkpoint nor a run folder with one" if path.is_dir() else absent_folder(path)
        raise InputError(f"{path}: {there}; checkpoints are RUN/checkpoints/step-...")
    return newest


def choose_checkpoint(run: Path, given: str | None, resume: bool, anew: bool, only_reads: bool) -> Path | None:
    """Return the checkpoint that a run into ``run`` starts from, None for the pretrained weights.

    Args:
        run: the run's folder.
        given: the checkpoint or run folder that the user named.
        resume: whether to go on from the newest in ``run`` where none is named.
        anew: whether the run takes weights only and counts from 0.
        only_reads: whether nothing will be written beside what is there.

    Raises:
        InputError: where there is no such checkpoint, or the run would write over another's metrics and checkpoints.
    """
    newest = newest_checkpoint(run)
    chosen = find_checkpoint(Path(given)) if given else (newest if resume else None)
    if only_reads:
        return chosen
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


def newest_checkpoint(run: Path) -> Path | None:
    """Return the complete checkpoint of a run folder (or of its ``checkpoints/``) with the highest step."""
    folder = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    return max(_complete_in(folder), default=None, key=lambda checkpoint: checkpoint.name)


def is_complete(folder: Path) -> bool:
    """Whether this is a checkpoint with all its parts; one in the making has another name and no trainer.json."""
    weights = (folder / "model.safetensors", folder / "model")
    return (folder / "trainer.json").is_file() and (folder / "optimizer").is_dir() and any(w.exists() for w in weights)


def prune(folder: Path, keep: int) -> None:
    """Remove all checkpoints of a folder but the ``keep`` newest and the one with the lowest validation loss."""
    checkpoints = sorted(_complete_in(folder), key=lambda checkpoint: checkpoint.name)
    losses = {checkpoint: read_trainer_state(checkpoint).val_loss for checkpoint in checkpoints}
    evaluated = {checkpoint: loss for checkpoint, loss in losses.items() if loss is not None}
    best = min(evaluated, key=lambda checkpoint: evaluated[checkpoint]) if evaluated else None
    for checkpoint in checkpoints[:-keep]:
        if checkpoint != best:
            doomed = checkpoint.with_name(f".{checkpoint.name}.removed")
            checkpoint.rename(doomed)  # at no moment is there half a checkpoint under a checkpoint's name
            shutil.rmtree(doomed)


def _complete_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [entry for entry in folder.iterdir() if re.fullmatch(r"step-\d{8,}", entry.name) and is_complete(entry)]
