"""Remove old checkpoints, and what killed saves have left."""

import os
from pathlib import Path

from fabric_train.checkpoint.discovery import find_fault, saved_checkpoints, sort_by_loss
from fabric_train.checkpoint.trainer_json import read_trainer_json
from fabric_train.files.atomic_folder import is_temporary, remove, sync_and_rename

_REMOVED, _REPLACED = ".removed", ".replaced"


def prune(newest: Path, keep: int | None) -> None:
    """Remove all checkpoints except the ``keep`` newest (None: all) and the one with the lowest validation loss.

    ``newest`` is the checkpoint that was just saved, and stays. Interim checkpoints are not among the ``keep`` newest.
    Damaged checkpoints are neither counted nor removed. Those of later steps are damaged, because a run continues from
    the newest undamaged one.
    """
    saved = [*saved_checkpoints(newest.parent).values()]
    checkpoints = [other for other in saved[: saved.index(newest) + 1] if not find_fault(other, {})]
    lasting = [checkpoint for checkpoint in checkpoints if not read_trainer_json(checkpoint).interim]
    stay = {newest, *sort_by_loss(checkpoints)[:1], *(lasting if keep is None else lasting[-keep:])}
    for checkpoint in checkpoints:
        if checkpoint not in stay:
            remove(_set_aside(checkpoint, _REMOVED))


def replace_checkpoint(temporary: Path, target: Path) -> None:
    """Rename ``temporary`` to ``target``, and remove the checkpoint that has this name, if there is one.

    After a kill in between, ``remove_leftovers`` gives the old one its name back.
    """
    replaced = _set_aside(target, _REPLACED) if os.path.lexists(target) else None
    sync_and_rename(temporary, target)
    if replaced:
        remove(replaced)


def remove_leftovers(folder: Path) -> None:
    """Remove the unfinished, half-removed and replaced checkpoints of killed runs.

    One that was to be replaced, and was not, gets its name back.
    """
    for entry in folder.iterdir() if folder.is_dir() else []:
        name = entry.name.removeprefix(".").removesuffix(_REPLACED)
        if entry.name == f".{name}{_REPLACED}" and not os.path.lexists(folder / name):
            entry.rename(folder / name)
        elif is_temporary(entry) or (entry.name.startswith(".") and entry.name.endswith((_REMOVED, _REPLACED))):
            remove(entry)


def _set_aside(checkpoint: Path, mark: str) -> Path:
    """Rename a checkpoint before its removal, so that no partial one ever has a checkpoint's name."""
    return checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}{mark}"))
