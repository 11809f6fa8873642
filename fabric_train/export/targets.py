"""Choose what ``convert_to_hf.py`` exports: checkpoints, each into its own folder, or the average of some."""

import os
from itertools import islice
from pathlib import Path

from fabric_train.checkpoint import find_whole_checkpoint, saved_checkpoints, whole_checkpoints
from fabric_train.cli.errors import InputError
from fabric_train.export.average import AveragePart, check_one_model
from fabric_train.export.source import ExportSource
from fabric_train.files.atomic_folder import check_not_taken


def plan_targets(paths: list[Path], output_dir: Path) -> dict[Path, ExportSource]:
    """Return what to export for each folder to write: ``output_dir`` for one, its subfolders for several.

    Raises:
        InputError: ``output_dir`` is taken, a path has no checkpoint, or two checkpoints have the same name.
    """
    check_not_taken(output_dir)
    faults: list[str] = []
    targets: dict[Path, ExportSource] = {}
    for path in paths:
        try:
            checkpoint = find_whole_checkpoint(path)
        except InputError as error:
            faults += error.faults
            continue
        target = output_dir if len(paths) == 1 else output_dir / checkpoint.name
        if target in targets:
            other = targets[target].checkpoint
            faults.append(f"{other} and {checkpoint} have the same name: convert them one at a time")
        targets[target] = ExportSource(checkpoint)
    if faults:
        raise InputError(*faults)
    return targets


def plan_average(paths: list[Path], output_dir: Path, average: str, decay: float) -> dict[Path, ExportSource]:
    """Return the average that ``--average`` asks for, to be written as ``output_dir``.

    Args:
        paths: a run, or checkpoints as :func:`find_checkpoint` reads them, the oldest first.
        output_dir: the folder to write.
        average: last:K for the K newest checkpoints of the run, or all.
        decay: weight of each checkpoint, relative to the next.

    Raises:
        InputError: ``output_dir`` is taken, a path has no checkpoint, there are too few, or they are not of one model.
    """
    check_not_taken(output_dir)
    count = int(average.partition(":")[2] or 0)  # 0: all
    is_run = len(paths) == 1 and bool(saved_checkpoints(paths[0]))
    if count and not is_run:
        raise InputError(f"--average {average} needs a single --checkpoint, a run; --average all averages a list")
    if is_run:
        checkpoints = list(islice(whole_checkpoints(paths[0]), count or None))[::-1]
    else:
        checkpoints = [find_whole_checkpoint(path) for path in paths]
    needed = count or 2
    if len({os.path.realpath(checkpoint) for checkpoint in checkpoints}) < max(len(checkpoints), needed):
        raise InputError(
            f"--average {average} needs {needed} different checkpoints: "
            f"{', '.join(map(str, checkpoints)) or 'none'}; give others or a lower number"
        )
    check_one_model(checkpoints)
    ages = reversed(range(len(checkpoints)))
    parts = [AveragePart(checkpoint, decay**age) for checkpoint, age in zip(checkpoints, ages, strict=True)]
    return {output_dir: ExportSource(checkpoints[-1], tuple(parts))}
