"""Find the checkpoints of a run, choose the one to start from, and remove old ones."""

import itertools
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import track

from fabric_train.checkpoint import files
from fabric_train.checkpoint.trainer_json import FORMAT, TrainerJson, find_unreadable, read_format, read_trainer_json
from fabric_train.cli.errors import InputError, missing_folder
from fabric_train.cli.output import open_console
from fabric_train.files.atomic_folder import is_temporary, remove, sync_and_rename

if TYPE_CHECKING:
    from lightning import Fabric

_NAME = re.compile(r"step-[0-9]{8,18}")
_SHORT_NAME = re.compile(r"best|latest|step-[0-9]{1,18}")
Damages = Mapping[Path, str]
"""Known damage to the content of checkpoints, by real path."""
_REMOVED = ".removed"
_REPLACED = ".replaced"


def find_checkpoint(path: Path, damages: Damages | None = None) -> Path:
    """Return the checkpoint that ``path`` means; an InputError if there is none, or it is damaged.

    ``path`` is a checkpoint; a run folder, whose newest undamaged checkpoint is meant; or a name in a run folder (or in
    its ``checkpoints/``) that does not exist as a file or folder: ``RUN/latest``, the same; ``RUN/best``, the undamaged
    one with the lowest validation loss (of the source of ``--best_by``); ``RUN/step-500``, the one of that step.
    """
    run, name = (path.parent, path.name) if is_short_name(path) else (path, "latest")
    if name.startswith("step-"):
        path = next((checkpoint for checkpoint in _in(run) if _step(checkpoint) == _step(path)), path)
    if path.is_dir() and (_NAME.fullmatch(path.name) or (path / "trainer.json").exists()):  # also a damaged one
        fault = find_fault(path, damages)
        if fault:
            raise InputError(f"{path} {fault}; use another checkpoint")
        return path
    if name.startswith("step-"):
        names = [checkpoint.name for checkpoint in _in(run)]
        listed = ", ".join(names if len(names) < 5 else [names[0], "…", *names[-3:]])
        raise InputError(f"{path}: the run has no such checkpoint; it has {listed}")
    found = best_checkpoint(run, damages) if name == "best" else newest_checkpoint(run, damages)
    if found is None:
        damaged = describe_damaged(run, None, damages)
        if damaged:
            raise InputError(*damaged)
        if name == "best" and _in(run):
            raise InputError(f"{path}: no checkpoint of the run has a validation loss; use {run / 'latest'}")
        reason = "neither a complete checkpoint nor a run folder with one" if run.is_dir() else missing_folder(path)
        raise InputError(
            f"{path}: {reason}; checkpoints are RUN/checkpoints/step-... (docs/reference/errors.md#no-checkpoint)"
        )
    return found


def branch_point(given: str) -> Path:
    """Return the path of the checkpoint that ``--branch`` means, for ``find_checkpoint``."""
    run, step = split_branch(given)
    if not _in(run):
        reason = "no run with a checkpoint" if run.is_dir() else missing_folder(run)
        raise InputError(f"--branch {given}: {run}: {reason}; give the folder of a run")
    return run / (f"step-{step}" if step.isdigit() else step)


def split_branch(given: str) -> tuple[Path, str]:
    """Return run and step, or best or latest, of ``RUN@500``, ``RUN/step-500`` or a checkpoint's folder."""
    run, at, step = given.rpartition("@")
    if at and _SHORT_NAME.fullmatch(f"step-{step}" if step.isdigit() else step):
        return Path(run), step
    path = Path(given)
    folder = path.parent.parent if path.parent.name == "checkpoints" else path.parent
    return folder, path.name.removeprefix("step-").lstrip("0")


def saved_checkpoints(run: Path) -> dict[int, Path]:
    """Return the checkpoints of a run by step, the oldest first; damaged ones too."""
    return {_step(checkpoint): checkpoint for checkpoint in _in(run)}


def is_short_name(path: Path) -> bool:
    """Whether a path is no file or folder, but a name for a checkpoint of the run folder above it."""
    return not os.path.lexists(path) and bool(_SHORT_NAME.fullmatch(path.name)) and bool(_in(path.parent))


def means_checkpoint(path: Path) -> bool:
    """Whether a path is a checkpoint with its optimizer, a run with checkpoints, or a name for one of these."""
    is_checkpoint = (path / "trainer.json").exists() and (path / "optimizer").is_dir()
    is_run = not (path / "config.json").is_file() and bool(_in(path))
    return is_checkpoint or is_run or is_short_name(path)


def means_all(path: Path) -> bool:
    """Whether a path is no file or folder, but ``RUN/all``: every checkpoint of the run folder above it."""
    return not os.path.lexists(path) and path.name == "all" and bool(_in(path.parent))


def describe_choice(path: Path, used: Path) -> str | None:
    """Return a line that says which checkpoint ``path`` means; None if it is that checkpoint itself."""
    if os.path.realpath(path) == os.path.realpath(used):
        return None
    name = path.name if is_short_name(path) else "latest"
    kinds = {
        "best": f"the checkpoint with the {_best_in_words(used)} {deciding_loss(used)}",
        "latest": "the newest complete checkpoint",
    }
    return f"{path}: {kinds.get(name, 'the checkpoint of that step')}, {used.name}, is used"


def deciding_loss(checkpoint: Path) -> str:
    """Return the name of the loss that says which checkpoint of its run is the best."""
    saved = read_trainer_json(checkpoint)
    source = saved.best_by
    evaluation = saved.state.evaluation
    if evaluation and source.partition("/")[0] in evaluation.whole.further:
        return f"validation's {source}"
    return "validation loss" if source == "all" else f"validation loss of {source}"


def _best_in_words(checkpoint: Path) -> str:
    saved = read_trainer_json(checkpoint)
    return "highest" if saved.state.evaluation and saved.state.evaluation.sign_of(saved.best_by) < 0 else "lowest"


def find_whole_checkpoint(path: Path) -> Path:
    """Find a checkpoint with ``find_checkpoint`` and check its weights; print notes on damaged ones before it."""
    damages: dict[Path, str] = {}
    while damage := files.find_wrong_content(checkpoint := find_checkpoint(path, damages), optimizer=False):
        damages[_real(checkpoint)] = damage
    if note := describe_choice(path, checkpoint):
        for line in (*describe_damaged(checkpoint.parent, checkpoint, damages), note):
            print(f"note: {line}", file=sys.stderr)
    return checkpoint


def whole_checkpoints(run: Path) -> Iterator[Path]:
    """Yield the undamaged checkpoints of a run, weights checked, the newest first; print a note on each other one."""
    for checkpoint in reversed(_in(run)):
        fault = find_fault(checkpoint)
        if fault is None and (damage := files.find_wrong_content(checkpoint, optimizer=False)):
            fault = f"is damaged: {damage}"
        if fault is None:
            yield checkpoint
        else:
            print(f"note: {checkpoint} {fault}; it is left out", file=sys.stderr)


def checkpoints_of_all(path: Path) -> tuple[list[Path], list[Path]]:
    """Return the undamaged checkpoints that ``RUN/all`` means, the oldest first, and the damaged ones."""
    saved = _in(path.parent)
    shown: dict[str, Any] = {"console": open_console(stderr=True), "transient": True}
    whole = list(track(whole_checkpoints(path.parent), "checking the checkpoints", len(saved), **shown))[::-1]
    if not whole:
        raise InputError(f"{path}: the run has no undamaged checkpoint; use another run")
    return whole, [checkpoint for checkpoint in saved if checkpoint not in whole]


def choose_checkpoint(
    run: Path, given: str | None, *, resume: bool, weights_only: bool, read_only: bool, damages: Damages | None = None
) -> Path | None:
    """Return the checkpoint that a run starts from, or None for the pretrained weights.

    ``given`` is the value of ``--checkpoint``. If it is None, ``resume`` takes the newest undamaged checkpoint in the
    folder ``run``. With ``weights_only``, the run starts at step 0. ``read_only``: it writes neither metrics nor
    checkpoints. An InputError if there is none, or the run would overwrite another run's metrics and checkpoints.
    """
    newest = newest_checkpoint(run, damages)
    chosen = find_checkpoint(Path(given), damages) if given else (newest if resume else None)
    if read_only:
        return chosen
    if newest is None and (damaged := describe_damaged(run, None, damages)):
        raise InputError(*damaged)
    continues = chosen is not None and not weights_only and newest is not None and _real(chosen) == _real(newest)
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


def newest_checkpoint(run: Path, damages: Damages | None = None, before: float = math.inf) -> Path | None:
    """Return the undamaged checkpoint of a run with the highest step lower than ``before``, or None."""
    return _first_whole((each for each in reversed(_in(run)) if _step(each) < before), damages)


def checkpoint_from(run: Path, step: int) -> Path | None:
    """Return the undamaged checkpoint of a run with the lowest step that is not below ``step``, or None."""
    return _first_whole(each for each in _in(run) if _step(each) >= step)


def best_checkpoint(run: Path, damages: Damages | None = None) -> Path | None:
    """Return the undamaged checkpoint of a run with the lowest validation loss, or None if none has one."""
    return _first_whole(_sort_by_loss(_read_all(_in(run))), damages)


def _first_whole(checkpoints: Iterable[Path], damages: Damages | None = None) -> Path | None:
    return next((checkpoint for checkpoint in checkpoints if find_fault(checkpoint, damages) is None), None)


def lowest_loss(run: Path, source: str, last_step: int) -> float:
    """Return the lowest ``cost_of`` a source, or "all", in undamaged checkpoints up to a step, else infinity."""
    saved = _read_all(other for other in _in(run) if _step(other) <= last_step)
    losses = _comparable_losses(saved, source)
    best = _first_whole(sorted(losses, key=lambda checkpoint: losses[checkpoint]))  # to check all would take long
    return losses[best] if best else math.inf


def describe_damaged(run: Path, used: Path | None, damages: Damages | None = None) -> list[str]:
    """Return a line for each damaged checkpoint of a run that would have been used instead of ``used``."""
    instead = f"{used.name} is used" if used else "there is no undamaged one; use another checkpoint"
    return [
        f"{checkpoint} {fault}; {instead}"
        for checkpoint in _in(run)
        if used is None or _step(checkpoint) > _step(used) or _real(checkpoint) in (damages or {})
        if (fault := find_fault(checkpoint, damages))
    ]


def wrong_content(checkpoint: Path, fabric: "Fabric") -> str | None:
    """Return on all ranks which file does not have the written content, or None. All call it; each reads its share."""
    from fabric_train.distributed.ranks import first_text

    return first_text(
        fabric, files.find_wrong_content(checkpoint, rank=fabric.global_rank, num_ranks=fabric.world_size)
    )


def _in(run: Path) -> list[Path]:
    """Return all checkpoints of a run folder (or of its ``checkpoints/``) by step, damaged ones too."""
    folder = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    entries = folder.iterdir() if folder.is_dir() else ()
    return sorted((entry for entry in entries if _NAME.fullmatch(entry.name)), key=_step)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _read_all(checkpoints: Iterable[Path]) -> dict[Path, TrainerJson]:
    """Return the trainer.json of each checkpoint, without those that cannot be read."""
    read: dict[Path, TrainerJson] = {}
    for checkpoint in checkpoints:
        with suppress(InputError):
            read[checkpoint] = read_trainer_json(checkpoint)
    return read


def _sort_by_loss(saved: Mapping[Path, TrainerJson]) -> list[Path]:
    """Return checkpoints with a finite loss, of the source that the newest one names, the lowest first.

    ``saved`` are by step.
    """
    source = list(saved.values())[-1].best_by if saved else "all"
    losses = _comparable_losses(saved, source)
    return sorted(losses, key=lambda checkpoint: losses[checkpoint])


def _comparable_losses(saved: Mapping[Path, TrainerJson], source: str) -> dict[Path, float]:
    """Return the finite ``cost_of`` a source in each, of those evaluated on the rows of the last evaluation."""
    evaluations = [one.state.evaluation for one in saved.values() if one.state.evaluation]
    losses = {
        checkpoint: one.state.cost_of(source)
        for checkpoint, one in saved.items()
        if one.state.evaluation is None or one.state.evaluation.is_comparable(evaluations[-1])
    }
    return {checkpoint: loss for checkpoint, loss in losses.items() if loss is not None and math.isfinite(loss)}


def _real(path: Path) -> Path:
    """Return a path without links; unlike ``Path.resolve``, also if they form a circle."""
    return Path(os.path.realpath(path))


def find_fault(checkpoint: Path, damages: Damages | None = None) -> str | None:
    """Return why a checkpoint cannot be used, or None."""
    found = read_format(checkpoint)
    if found not in (FORMAT, None):
        return f"has format {found}, but this version reads format {FORMAT}"
    damage = (damages or {}).get(_real(checkpoint)) or files.find_damage(checkpoint) or find_unreadable(checkpoint)
    return f"is damaged: {damage}" if damage else None


def prune(newest: Path, keep: int | None, whole: set[Path]) -> None:
    """Remove all checkpoints except the ``keep`` newest (None: all) and the one with the lowest validation loss.

    ``newest`` was just saved, and stays. Interim checkpoints are not among the ``keep`` newest. Damaged ones are
    neither counted nor removed; checkpoints of later steps are damaged, since a run continues from the newest undamaged
    one. A check takes long. So only those are checked on which the choice depends, and kept ones once: ``whole`` are
    known to be undamaged, and others are added to them.
    """
    saved = _read_all(each for each in _in(newest.parent) if _step(each) <= _step(newest))
    lasting = [each for each in reversed(saved) if not saved[each].interim]
    whole.add(newest)
    if keep is not None:
        lasting = list(itertools.islice((each for each in lasting if each in whole or not find_fault(each)), keep))
        whole.update(lasting)
    stay = {newest, *lasting}
    if not (removed := [each for each in saved if each not in stay]):
        return
    best = _first_whole(_sort_by_loss(saved))
    for checkpoint in removed:
        if checkpoint != best and not find_fault(checkpoint):
            remove(_set_aside(checkpoint, _REMOVED))


def replace_checkpoint(temporary: Path, target: Path) -> None:
    """Rename ``temporary`` to ``target``, and remove the checkpoint of this name; see ``remove_leftovers``."""
    replaced = _set_aside(target, _REPLACED) if os.path.lexists(target) else None
    sync_and_rename(temporary, target, synced=".safetensors")  # each rank has synced its own
    if replaced:
        remove(replaced)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed runs left of unfinished and removed checkpoints; one not yet replaced gets its name back."""
    for entry in folder.iterdir() if folder.is_dir() else []:
        name = entry.name.removeprefix(".").removesuffix(_REPLACED)
        if entry.name == f".{name}{_REPLACED}" and not os.path.lexists(folder / name):
            entry.rename(folder / name)
        elif is_temporary(entry) or (entry.name.startswith(".") and entry.name.endswith((_REMOVED, _REPLACED))):
            remove(entry)


def _set_aside(checkpoint: Path, mark: str) -> Path:
    """Rename a checkpoint before its removal, so that no partial one ever has a checkpoint's name."""
    return checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}{mark}"))
