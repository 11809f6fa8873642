"""Choose the sources and folders of exports, and check beforehand that each can be written."""

import os
import sys
from collections.abc import Collection
from pathlib import Path

import torch

from fabric_train.checkpoint import (
    checkpoints_of_all,
    find_whole_checkpoint,
    means_all,
    read_trainer_json,
    saved_checkpoints,
    whole_checkpoints,
)
from fabric_train.checkpoint.adapter_folder import WEIGHTS, is_adapter
from fabric_train.cli.errors import InputError
from fabric_train.export.average import WeightedCheckpoint, check_one_model
from fabric_train.export.merged_adapter import MergeInto, is_in_4_bits
from fabric_train.export.source import ExportSource
from fabric_train.export.verification import is_verified_export
from fabric_train.files.atomic_folder import check_not_taken
from fabric_train.files.requirements import check_room
from fabric_train.model import hf_model
from fabric_train.model.weight_files import check_weight_files


def plan_targets(
    paths: list[Path], output_dir: Path, dtype: torch.dtype, *, push: bool = False, merges: MergeInto | None = None
) -> tuple[dict[Path, ExportSource], list[str]]:
    """Return the source of each folder to write, and the names of damaged checkpoints in ``RUN/all``.

    The folder is ``output_dir`` for one checkpoint, and otherwise a subfolder for each. A checkpoint whose folder is
    already a verified export is left out with a note; with ``push``, it is returned to be pushed.

    Raises:
        InputError: a checkpoint cannot be exported, two have the same name, or the disk has no room for all.
    """
    is_single = len(paths) == 1 and not means_all(paths[0])
    if is_single and not push:
        check_not_taken(output_dir)
    faults: list[str] = []
    targets: dict[Path, ExportSource] = {}
    finished_targets: list[Path] = []
    damaged_names: list[str] = []
    for path in paths:
        try:
            checkpoints, damaged_checkpoints = _checkpoints_at(path)
            damaged_names += [checkpoint.name for checkpoint in damaged_checkpoints]
            for checkpoint in checkpoints:
                source = ExportSource(checkpoint, merges=_check_merge(checkpoint, merges))
                target = output_dir if is_single else output_dir / checkpoint.name
                if target in targets:
                    same_name = targets[target].checkpoint
                    faults.append(f"{same_name} and {checkpoint} have the same name; convert them one at a time")
                elif _is_finished(target, source, dtype):
                    finished_targets.append(target)
                targets[target] = source
        except InputError as error:
            faults += error.faults
    if faults:
        raise InputError(*faults)

    new_targets = {target: source for target, source in targets.items() if target not in finished_targets}
    _check_room(output_dir, new_targets.values(), dtype)
    if push:
        return targets, damaged_names
    for target in finished_targets:
        print(f"note: {target} is already a verified export of this checkpoint; keeping it", file=sys.stderr)
    return new_targets, damaged_names


def _checkpoints_at(path: Path) -> tuple[list[Path], list[Path]]:
    """Return the checkpoints that a path names, and the damaged ones beside them, which only ``RUN/all`` allows."""
    if means_all(path):
        return checkpoints_of_all(path)
    return [find_whole_checkpoint(path)], []


def _is_finished(target: Path, source: ExportSource, dtype: torch.dtype) -> bool:
    """Return whether ``target`` is a verified export of ``source``.

    Raises:
        InputError: it is not one, and cannot be written; or its files are damaged.
    """
    if is_verified_export(target, source, torch.float32 if source.is_adapter else dtype):
        if not source.is_adapter:
            check_weight_files(target)
        return True
    check_not_taken(target)
    source.check_needs()
    return False


def plan_average(
    paths: list[Path],
    output_dir: Path,
    average: str,
    decay: float,
    dtype: torch.dtype,
    *,
    push: bool = False,
    merges: MergeInto | None = None,
) -> dict[Path, ExportSource]:
    """Return the average that ``--average`` asks for, to be written to ``output_dir``.

    Args:
        paths: A run, or checkpoints as :func:`find_checkpoint` reads them, the oldest first.
        output_dir: The folder to write; with ``push``, it may already be a verified export of this average.
        average: last:K for the K newest checkpoints of the run, without the ones that a signal or a loss saved, or all.
        decay: The weight of each checkpoint, relative to the next.
        dtype: The type of the exported weights.
        push: Whether the export is pushed to the hub.
        merges: The weights that an adapter is merged into.

    Raises:
        InputError: there are too few checkpoints, they do not fit together, or the average cannot be written.
    """
    if not push:
        check_not_taken(output_dir)
    checkpoints = _averaged_checkpoints(paths, average)
    check_one_model(checkpoints)
    averaged = []
    for index, checkpoint in enumerate(checkpoints):
        age = len(checkpoints) - 1 - index  # the newest checkpoint has the weight 1
        averaged.append(WeightedCheckpoint(checkpoint, weight=decay**age))
    source = ExportSource(checkpoints[-1], tuple(averaged), merges=_check_merge(checkpoints[-1], merges))
    if source.is_adapter:
        raise InputError(
            f"--average {average}: averaging an adapter's matrices does not average their product; average full "
            "models with --merge true"
        )
    if not (push and is_verified_export(output_dir, source, dtype)):
        check_not_taken(output_dir)
        source.check_needs()
        _check_room(output_dir, [source], dtype)
    return {output_dir: source}


def _averaged_checkpoints(paths: list[Path], average: str) -> list[Path]:
    """Return the checkpoints to average, the oldest first; see :func:`plan_average`."""
    _, _, count_text = average.partition(":")
    count = int(count_text) if count_text else None  # None: all
    if len(paths) == 1 and means_all(paths[0]):
        paths = [paths[0].parent]
    is_run = len(paths) == 1 and bool(saved_checkpoints(paths[0]))
    if count and not is_run:
        raise InputError(
            f"--average {average} needs a single --checkpoint that is a run; to average a list, use --average all"
        )

    if count:
        # the newest come first, and no more are checked than are needed
        checkpoints: list[Path] = []
        for checkpoint in whole_checkpoints(paths[0]):
            if _is_scheduled(checkpoint):
                checkpoints.insert(0, checkpoint)
            if len(checkpoints) == count:
                break
    elif is_run:
        checkpoints = list(whole_checkpoints(paths[0]))
        checkpoints.reverse()
    else:
        checkpoints = [find_whole_checkpoint(path) for path in paths]

    num_needed = count or 2
    num_different = len({os.path.realpath(checkpoint) for checkpoint in checkpoints})
    if num_different < max(len(checkpoints), num_needed):
        names = ", ".join(map(str, checkpoints)) or "none"
        raise InputError(
            f"--average {average} needs {num_needed} different checkpoints, but got {names}; give other "
            "checkpoints or a lower number"
        )
    return checkpoints


def _is_scheduled(checkpoint: Path) -> bool:
    """Return whether a checkpoint was saved at an interval; print a note if not."""
    is_scheduled = bool(read_trainer_json(checkpoint).scheduled)
    if not is_scheduled:
        print(
            f"note: {checkpoint} was saved for a signal or a loss, not at an interval; it is skipped", file=sys.stderr
        )
    return is_scheduled


def _check_room(output_dir: Path, sources: Collection[ExportSource], dtype: torch.dtype) -> None:
    """Raise an InputError if the disk has no room for the exports of a run's checkpoints, which have equal sizes."""
    if not sources:
        return
    source = next(iter(sources))
    if source.is_adapter:
        num_bytes = (source.checkpoint / WEIGHTS).stat().st_size
    else:
        num_bytes = hf_model.read_shape(str(source.checkpoint)).num_parameters * dtype.itemsize
    description = "the export" if len(sources) == 1 else f"{len(sources)} exports"
    check_room(output_dir, num_bytes * len(sources), description)


def _check_merge(checkpoint: Path, into: MergeInto | None) -> MergeInto | None:
    """Return ``into`` if the checkpoint can be merged into these weights; otherwise raise an InputError."""
    if into and not is_adapter(checkpoint):
        raise InputError(f"--merge true: {checkpoint} is a full model without an adapter; leave out --merge")
    if into == "dequantized" and not is_in_4_bits(checkpoint):
        raise InputError(
            f"--merge_into dequantized: the base of {checkpoint} was not in 4 bits; leave out --merge_into"
        )
    return into
