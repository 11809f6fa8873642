"""Find the checkpoints of a run, choose the one to start from, and remove old ones."""

import itertools
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import track

from fabric_train.checkpoint import files
from fabric_train.checkpoint.losses import name_loss
from fabric_train.checkpoint.trainer_json import FORMAT, TrainerJson, find_unreadable, read_format, read_trainer_json
from fabric_train.cli.errors import InputError, missing_folder
from fabric_train.cli.output import open_console
from fabric_train.files.atomic_folder import is_temporary, remove, sync_and_rename
from fabric_train.model.model_folder import check_model_folder

if TYPE_CHECKING:
    from lightning import Fabric

_NAME = re.compile(r"step-[0-9]{8,18}")
_SHORT_NAME = re.compile(r"best|latest|step-[0-9]{1,18}")
Damages = Mapping[Path, str]
"""Damage to the content of checkpoints that is already known, by real path."""
_REMOVED = ".removed"
_REPLACED = ".replaced"
_MAX_LISTED = 4  # checkpoints in an error


def find_checkpoint(path: Path, damages: Damages | None = None) -> Path:
    """Return the checkpoint that a path means.

    ``path`` is one of:

    - a checkpoint,
    - a run folder: its newest undamaged checkpoint,
    - a short name in a run folder (or in its ``checkpoints/``), if no file or folder has this name: ``RUN/latest``, the
      newest undamaged checkpoint; ``RUN/best``, the undamaged one with the lowest validation loss or the
      highest reward (of the source in ``--best_by``); ``RUN/step-500``, the one of that step.

    Args:
        path: See above.
        damages: Damage that is already known.

    Raises:
        InputError: there is no such checkpoint, or it is damaged.
    """
    run = path
    name = "latest"
    if is_short_name(path):
        run = path.parent
        name = path.name

    # the checkpoint of a step
    if name.startswith("step-"):
        checkpoints = saved_checkpoints(run)
        step = _step_of(path)
        if step not in checkpoints:
            names = [checkpoint.name for checkpoint in checkpoints.values()]
            if len(names) > _MAX_LISTED:
                names = [names[0], "…", *names[-3:]]
            raise InputError(f"{path}: the run does not have this checkpoint; it has {', '.join(names)}")
        _check_usable(checkpoints[step], damages)
        return checkpoints[step]

    # a single checkpoint; a damaged one may have nothing of it but the name of its folder
    has_checkpoint_name = _NAME.fullmatch(path.name) is not None
    if path.is_dir() and (has_checkpoint_name or (path / "trainer.json").exists()):
        _check_usable(path, damages)
        return path

    # the best or the newest checkpoint of a run
    checkpoint = best_checkpoint(run, damages) if name == "best" else newest_checkpoint(run, damages)
    if checkpoint is not None:
        return checkpoint
    damaged_lines = describe_damaged(run, used=None, damages=damages)
    if damaged_lines:
        raise InputError(*damaged_lines)
    if name == "best" and _list_checkpoints(run):
        raise InputError(f"{path}: no checkpoint of the run has a validation loss or reward; use {run / 'latest'}")
    reason = "neither a complete checkpoint nor a run folder that has one" if run.is_dir() else missing_folder(path)
    raise InputError(
        f"{path}: {reason}; checkpoints are RUN/checkpoints/step-... (docs/reference/errors.md#no-checkpoint)"
    )


def check_exists(path: Path) -> None:
    """Raise an InputError if no file, folder or checkpoint of a run has this name; without importing torch."""
    if not (os.path.lexists(path) or is_short_name(path) or means_all(path)):
        find_checkpoint(path)  # says where checkpoints are


def check_model_exists(name: str) -> None:
    """Raise an InputError if a name is no folder or checkpoint and cannot be a hub name; without importing torch."""
    path = Path(name)
    if not (os.path.lexists(path) or is_short_name(path)):
        check_model_folder(name)


def _check_usable(checkpoint: Path, damages: Damages | None) -> None:
    """Raise an InputError if a checkpoint that the user names cannot be used."""
    fault = find_fault(checkpoint, damages)
    if fault:
        raise InputError(f"{checkpoint} {fault}; use another checkpoint")


def branch_point(branch: str) -> Path:
    """Return the path of the checkpoint that ``--branch`` means, for :func:`find_checkpoint`."""
    run, step = split_branch(branch)
    if not _list_checkpoints(run):
        reason = "no run with a checkpoint" if run.is_dir() else missing_folder(run)
        raise InputError(f"--branch {branch}: {run}: {reason}; give the folder of a run")
    name = f"step-{step}" if step.isdigit() else step
    return run / name


def split_branch(branch: str) -> tuple[Path, str]:
    """Split the value of ``--branch``: ``RUN@500``, ``RUN/step-500`` or the folder of a checkpoint.

    Returns:
        The run's folder, and the step without leading zeros, "best" or "latest".
    """
    # RUN@500, RUN@best; an @ may also be part of a folder's name
    run, at, step = branch.rpartition("@")
    name = f"step-{step}" if step.isdigit() else step
    if at and _SHORT_NAME.fullmatch(name):
        return Path(run), step
    path = Path(branch)
    folder = path.parent
    if folder.name == "checkpoints":
        folder = folder.parent
    return folder, path.name.removeprefix("step-").lstrip("0")


def saved_checkpoints(run: Path) -> dict[int, Path]:
    """Return the checkpoints of a run by step, the oldest first, including damaged ones."""
    return {_step_of(checkpoint): checkpoint for checkpoint in _list_checkpoints(run)}


def is_short_name(path: Path) -> bool:
    """Return whether a path does not exist, and names a checkpoint of the run folder above it."""
    if os.path.lexists(path) or not _SHORT_NAME.fullmatch(path.name):
        return False
    return bool(_list_checkpoints(path.parent))


def means_checkpoint(path: Path) -> bool:
    """Return whether a path is a checkpoint with its optimizer, a run with checkpoints, or a short name for one."""
    is_checkpoint = (path / "trainer.json").exists() and (path / "optimizer").is_dir()
    is_run = not (path / "config.json").is_file() and bool(_list_checkpoints(path))
    return is_checkpoint or is_run or is_short_name(path)


def means_all(path: Path) -> bool:
    """Return whether a path does not exist, and is ``RUN/all``: every checkpoint of the run folder above it."""
    return not os.path.lexists(path) and path.name == "all" and bool(_list_checkpoints(path.parent))


def describe_choice(path: Path, checkpoint: Path) -> str | None:
    """Return a line that says which checkpoint ``path`` means; None if ``path`` is the checkpoint itself."""
    if os.path.realpath(path) == os.path.realpath(checkpoint):
        return None
    name = path.name if is_short_name(path) else "latest"
    if name == "best":
        saved = read_trainer_json(checkpoint)
        kind = f"the checkpoint with the {_direction_of_best(saved)} {deciding_loss(saved)}"
    elif name == "latest":
        kind = "the newest complete checkpoint"
    else:
        kind = "the checkpoint of that step"
    return f"{path}: using {kind}, {checkpoint.name}"


def deciding_loss(saved: TrainerJson) -> str:
    """Return the name of the loss or reward that decides which checkpoint of a run is the best."""
    return name_loss(saved.best_by, saved.state.evaluation)


def _direction_of_best(saved: TrainerJson) -> str:
    """Return "highest" if a higher value of the deciding figure is better, and otherwise "lowest"."""
    evaluation = saved.state.evaluation
    is_higher_better = evaluation is not None and evaluation.sign_of(saved.best_by) < 0
    return "highest" if is_higher_better else "lowest"


def find_whole_checkpoint(path: Path) -> Path:
    """Find a checkpoint as :func:`find_checkpoint` does, and check its weights; print notes on skipped ones."""
    # checking all weights takes long: check the checkpoint that is chosen, and choose again if it is damaged
    damages: dict[Path, str] = {}
    checkpoint = find_checkpoint(path)
    damage = files.find_wrong_content(checkpoint, optimizer=False)
    while damage:
        damages[_real_path(checkpoint)] = damage
        checkpoint = find_checkpoint(path, damages)
        damage = files.find_wrong_content(checkpoint, optimizer=False)
    choice = describe_choice(path, checkpoint)
    if choice:
        for line in (*describe_damaged(checkpoint.parent, checkpoint, damages), choice):
            print(f"note: {line}", file=sys.stderr)
    return checkpoint


def whole_checkpoints(run: Path) -> Iterator[Path]:
    """Yield the checkpoints of a run with undamaged content, the newest first; print a note on each damaged one."""
    for checkpoint in reversed(_list_checkpoints(run)):
        fault = find_fault(checkpoint)
        if fault is None:
            damage = files.find_wrong_content(checkpoint, optimizer=False)
            fault = f"is damaged: {damage}" if damage else None
        if fault is None:
            yield checkpoint
        else:
            print(f"note: {checkpoint} {fault}; it is skipped", file=sys.stderr)


def checkpoints_of_all(path: Path) -> tuple[list[Path], list[Path]]:
    """Return the undamaged checkpoints that ``RUN/all`` means, the oldest first, and the damaged ones."""
    run = path.parent
    checkpoints = _list_checkpoints(run)
    progress = track(
        whole_checkpoints(run),
        "checking the checkpoints",
        len(checkpoints),
        console=open_console(stderr=True),
        transient=True,
    )
    undamaged = sorted(progress, key=_step_of)
    if not undamaged:
        raise InputError(f"{path}: the run has no intact checkpoint; use another run")
    damaged = [checkpoint for checkpoint in checkpoints if checkpoint not in undamaged]
    return undamaged, damaged


def choose_checkpoint(
    run: Path,
    name: str | None,
    *,
    resume: bool,
    weights_only: bool,
    read_only: bool,
    damages: Damages | None = None,
) -> Path | None:
    """Return the checkpoint that a run starts from, or None for the pretrained weights.

    Args:
        run: The run's folder, ``--output_dir``.
        name: The value of ``--checkpoint``, for :func:`find_checkpoint`.
        resume: Without ``name``, take the newest undamaged checkpoint in ``run``.
        weights_only: The run takes only weights from the checkpoint, and starts at step 0.
        read_only: The run writes neither metrics nor checkpoints.
        damages: Damage that is already known.

    Raises:
        InputError: there is no such checkpoint, or the run would overwrite another run's metrics and checkpoints.
    """
    newest = newest_checkpoint(run, damages)
    checkpoint = newest if resume else None
    if name:
        checkpoint = find_checkpoint(Path(name), damages)
    if read_only:
        return checkpoint

    # the folder must be new, or the run must continue the one in it
    if newest is None:
        damaged_lines = describe_damaged(run, used=None, damages=damages)
        if damaged_lines:
            raise InputError(*damaged_lines)
        if (run / "metrics.csv").exists() and not resume:
            raise InputError(
                f"--output_dir {run} already has a run, which has not saved a checkpoint; give --resume true to "
                "start it again, or another --output_dir"
            )
        return checkpoint
    starts_at_newest = checkpoint is not None and _real_path(checkpoint) == _real_path(newest)
    if weights_only or not starts_at_newest:
        raise InputError(
            f"--output_dir {run} already has a run up to {newest.name}; give --resume true to continue it, or "
            "another --output_dir"
        )
    return checkpoint


def newest_checkpoint(run: Path, damages: Damages | None = None, *, before_step: float = math.inf) -> Path | None:
    """Return the undamaged checkpoint of a run with the highest step lower than ``before_step``, or None."""
    newest_first = reversed(_list_checkpoints(run))
    return _first_undamaged((path for path in newest_first if _step_of(path) < before_step), damages)


def checkpoint_from(run: Path, step: int) -> Path | None:
    """Return the undamaged checkpoint of a run with the lowest step that is not below ``step``, or None."""
    return _first_undamaged(path for path in _list_checkpoints(run) if _step_of(path) >= step)


def best_checkpoint(run: Path, damages: Damages | None = None) -> Path | None:
    """Return the undamaged checkpoint of a run with the lowest validation loss, or None if none has one."""
    saved = read_best(run, damages)
    return saved.checkpoint if saved else None


def read_best(run: Path, damages: Damages | None = None) -> TrainerJson | None:
    """Return the trainer.json of :func:`best_checkpoint`."""
    saved_by_path = _read_saved(_list_checkpoints(run))
    checkpoint = _first_undamaged(_sort_by_loss(saved_by_path), damages)
    return saved_by_path[checkpoint] if checkpoint else None


def _first_undamaged(checkpoints: Iterable[Path], damages: Damages | None = None) -> Path | None:
    return next((path for path in checkpoints if find_fault(path, damages) is None), None)


def lowest_loss(run: Path, source: str, last_step: int) -> float:
    """Return the lowest ``cost_of`` a source (or "all") in undamaged checkpoints up to a step; infinity without any."""
    saved_by_path = _read_saved(path for path in _list_checkpoints(run) if _step_of(path) <= last_step)
    losses = _comparable_losses(saved_by_path, source)
    # checking a checkpoint takes long: begin with the lowest loss
    best = _first_undamaged(sorted(losses, key=lambda checkpoint: losses[checkpoint]))
    return losses[best] if best else math.inf


def describe_damaged(run: Path, used: Path | None, damages: Damages | None = None) -> list[str]:
    """Return a line for each damaged checkpoint of a run that would have been used instead of ``used``."""
    remedy = f"using {used.name} instead" if used else "the run has no intact checkpoint; use another checkpoint"
    lines = []
    for checkpoint in _list_checkpoints(run):
        is_known_damage = _real_path(checkpoint) in (damages or {})
        is_skipped = used is None or _step_of(checkpoint) > _step_of(used) or is_known_damage
        fault = find_fault(checkpoint, damages) if is_skipped else None
        if fault:
            lines.append(f"{checkpoint} {fault}; {remedy}")
    return lines


def wrong_content(checkpoint: Path, fabric: "Fabric") -> str | None:
    """Return on all ranks which file's content differs from what was written, or None.

    Every rank must call this, and reads its share.
    """
    from fabric_train.distributed.ranks import first_text

    fault = files.find_wrong_content(checkpoint, rank=fabric.global_rank, num_ranks=fabric.world_size)
    return first_text(fabric, fault)


def _list_checkpoints(run: Path) -> list[Path]:
    """Return all checkpoints of a run folder (or of its ``checkpoints/``) by step, including damaged ones."""
    # ``run`` may be the folder of the checkpoints itself
    folder = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    if not folder.is_dir():
        return []
    return sorted((entry for entry in folder.iterdir() if _NAME.fullmatch(entry.name)), key=_step_of)


def _step_of(checkpoint: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(checkpoint.name.removeprefix("step-"))


def _read_saved(checkpoints: Iterable[Path]) -> dict[Path, TrainerJson]:
    """Return each trainer.json that can be read, by checkpoint."""
    saved_by_path: dict[Path, TrainerJson] = {}
    for checkpoint in checkpoints:
        with suppress(InputError):
            saved_by_path[checkpoint] = read_trainer_json(checkpoint)
    return saved_by_path


def _sort_by_loss(saved_by_path: Mapping[Path, TrainerJson]) -> list[Path]:
    """Return the checkpoints with a finite loss, the lowest first; the newest checkpoint names the deciding source.

    ``saved_by_path`` is in ascending order of steps.
    """
    if not saved_by_path:
        return []
    newest = list(saved_by_path.values())[-1]  # --best_by may have changed since earlier ones
    losses = _comparable_losses(saved_by_path, newest.best_by)
    return sorted(losses, key=lambda checkpoint: losses[checkpoint])


def _comparable_losses(saved_by_path: Mapping[Path, TrainerJson], source: str) -> dict[Path, float]:
    """Return the finite ``cost_of`` a source in each checkpoint that was evaluated on the rows of the last evaluation.

    ``saved_by_path`` is in ascending order of steps. A checkpoint without an evaluation can only have the loss of
    "all".
    """
    evaluations = [saved.state.evaluation for saved in saved_by_path.values() if saved.state.evaluation]
    losses = {}
    for checkpoint, saved in saved_by_path.items():
        evaluation = saved.state.evaluation
        if evaluation is not None and not evaluation.is_comparable(evaluations[-1]):
            continue  # other validation rows
        loss = saved.state.cost_of(source)
        if loss is not None and math.isfinite(loss):
            losses[checkpoint] = loss
    return losses


def _real_path(path: Path) -> Path:
    """Return a path without links; unlike ``Path.resolve``, it does not fail if links form a circle."""
    return Path(os.path.realpath(path))


def find_fault(checkpoint: Path, damages: Damages | None = None) -> str | None:
    """Return why a checkpoint cannot be used, or None."""
    # the format first: a checkpoint of another version is not damaged
    file_format = read_format(checkpoint)
    if file_format not in (FORMAT, None):
        return f"has format {file_format}, but this version reads format {FORMAT}"
    damage = (damages or {}).get(_real_path(checkpoint))
    if not damage:
        damage = files.find_damage(checkpoint) or find_unreadable(checkpoint)
    return f"is damaged: {damage}" if damage else None


def prune(newest: Path, keep: int | None, undamaged: set[Path]) -> None:
    """Remove all checkpoints except the ``keep`` newest ones and the one with the lowest validation loss.

    Interim checkpoints do not count among the ``keep`` newest. Damaged ones are neither counted nor removed, and this
    includes all with a later step than ``newest``, since a run continues from the newest undamaged one. A check takes
    long, so a checkpoint is checked only if the choice depends on it, and a kept one only once.

    Args:
        newest: The checkpoint that was just saved; it stays.
        keep: How many checkpoints are kept; None keeps all that are not interim.
        undamaged: Checkpoints known to be undamaged; each checkpoint that is checked and kept is added.
    """
    saved_by_path = _read_saved(path for path in _list_checkpoints(newest.parent) if _step_of(path) <= _step_of(newest))
    undamaged.add(newest)

    # the newest ones that are not interim
    lasting = [path for path in reversed(saved_by_path) if not saved_by_path[path].interim]
    if keep is not None:
        undamaged_lasting = (path for path in lasting if path in undamaged or not find_fault(path))
        lasting = list(itertools.islice(undamaged_lasting, keep))
        undamaged.update(lasting)

    # all others except the best
    superfluous = [path for path in saved_by_path if path != newest and path not in lasting]
    if not superfluous:
        return
    best = _first_undamaged(_sort_by_loss(saved_by_path))
    for checkpoint in superfluous:
        if checkpoint != best and not find_fault(checkpoint):
            remove(_set_aside(checkpoint, _REMOVED))


def replace_checkpoint(temporary: Path, target: Path) -> None:
    """Rename ``temporary`` to ``target``, and remove the checkpoint of this name; see :func:`remove_leftovers`."""
    # the old one is set aside first: a folder cannot take the name of one that is not empty
    replaced = _set_aside(target, _REPLACED) if os.path.lexists(target) else None
    sync_and_rename(temporary, target, synced=".safetensors")  # each rank has synced these files itself
    if replaced:
        remove(replaced)


def remove_leftovers(folder: Path) -> None:
    """Remove unfinished and removed checkpoints that killed runs have left.

    If a checkpoint was set aside and its replacement was never completed, it gets its name back.
    """
    if not folder.is_dir():
        return
    for entry in folder.iterdir():
        is_hidden = entry.name.startswith(".")
        is_removed = is_hidden and entry.name.endswith(_REMOVED)
        is_replaced = is_hidden and entry.name.endswith(_REPLACED)
        former_path = folder / entry.name.removeprefix(".").removesuffix(_REPLACED)
        if is_replaced and not os.path.lexists(former_path):
            entry.rename(former_path)
        elif is_replaced or is_removed or is_temporary(entry):
            remove(entry)


def _set_aside(checkpoint: Path, suffix: str) -> Path:
    """Rename a checkpoint before its removal, so that no partial one ever has a checkpoint's name."""
    return checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}{suffix}"))
