"""Read a run folder strictly: each file when it is first used, and an error if it is damaged or missing."""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fabric_train.checkpoint import TrainerJson, read_trainer_json, run_of, saved_checkpoints
from fabric_train.checkpoint.trainer_json import describe_unreadable
from fabric_train.cli.errors import InputError, missing_folder
from fabric_train.run_folder.config_file import CONFIG, read_config
from fabric_train.run_folder.log_lines import LogLine, read_log
from fabric_train.run_folder.metrics_tail import METRICS
from fabric_train.training.early_stopping import parse_early_stopping
from fabric_train.training.logger import Sample
from fabric_train.training.metrics_table import MetricsTable, read_lineage
from fabric_train.training.run_times import RunTimes, read_times
from fabric_train.training.sample_file import read_samples

_SHORT_NAME = re.compile(r"best|latest|step-[0-9]{1,18}")


@dataclass(frozen=True)
class RunFolder:
    """A run folder.

    Reading a property raises an InputError or an OSError if its file is damaged or missing. A file is read once, so a
    run that still trains needs a new object to see what it has written since.
    """

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def has_config(self) -> bool:
        return (self.folder / CONFIG).is_file()

    @property
    def has_metrics(self) -> bool:
        return (self.folder / METRICS).is_file()

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of config.yaml."""
        return read_config(self.folder)

    @cached_property
    def metrics(self) -> MetricsTable:
        """The rows of metrics.csv, after the rows of the runs that this run branched off, if these still exist."""
        try:
            lineage = self.newest.lineage
        except InputError:  # no readable checkpoint: then only this run's rows
            lineage = ()
        return read_lineage(self.folder, lineage)

    @cached_property
    def checkpoints(self) -> dict[int, Path]:
        """The checkpoint folders by step, the oldest first, including those with a damaged trainer.json."""
        return saved_checkpoints(self.folder)

    @cached_property
    def saved_by_step(self) -> dict[int, TrainerJson]:
        """Each trainer.json that is not damaged, by step, the oldest first."""
        saved_by_step = {}
        for step, checkpoint in self.checkpoints.items():
            with suppress(InputError):
                saved_by_step[step] = read_trainer_json(checkpoint)
        return saved_by_step

    @cached_property
    def newest(self) -> TrainerJson:
        """The newest trainer.json that is not damaged."""
        faults = []
        for checkpoint in reversed(self.checkpoints.values()):  # the newest first; often the only one that is read
            try:
                return read_trainer_json(checkpoint)
            except InputError as error:
                faults.append(f"{checkpoint.name}: {describe_unreadable(checkpoint, error)}")
        raise InputError("; ".join(faults) or f"{self.folder}: no checkpoint yet")

    @property
    def has_ended(self) -> bool:
        """Whether the last checkpoint belongs to the last step, or to the step at which early stopping ended the run.

        False if that checkpoint is damaged: a resumed run writes it again.
        """
        if not self.checkpoints:
            return False
        try:
            newest = read_trainer_json(self.checkpoints[max(self.checkpoints)])
        except InputError:
            return False
        state = newest.state
        if state.step >= newest.num_steps:
            return True
        early_stopping = newest.arguments.get("early_stopping")
        if early_stopping is None:
            return False
        sources = [state.progress.source] if state.progress else []
        return parse_early_stopping(early_stopping, sources).ends(state)

    @cached_property
    def log(self) -> list[LogLine]:
        """The lines of run.log that begin with a time, without the rows of tables."""
        return list(read_log(self.folder))

    @cached_property
    def samples(self) -> list[Sample]:
        """The lines of samples.jsonl; none without the file."""
        return read_samples(self.folder / "samples.jsonl")

    @cached_property
    def times(self) -> RunTimes | None:
        """How the run's time was used; None if an earlier version trained it."""
        return read_times(self.folder)


def find_run_dir(path: Path) -> Path:
    """Return the run folder that a path means: the path itself, or the run of RUN/best or RUN/checkpoints/step-500."""
    is_run = (path / CONFIG).is_file()  # a run folder may itself be named best
    if is_run or not _SHORT_NAME.fullmatch(path.name):
        return path
    return run_of(path)


def find_run_folders(names: Sequence[str]) -> list[Path]:
    """Return the run folders that paths mean, see :func:`find_run_dir`.

    Raises:
        InputError: some paths do not mean a run folder; the error has a line for each.
    """
    folders: list[Path] = []
    faults: list[str] = []
    for name in names:
        folder = find_run_dir(Path(name))
        is_run = any((folder / file).exists() for file in (CONFIG, METRICS, "checkpoints"))
        if not folder.is_dir():
            faults.append(f"{name}: {missing_folder(folder)}; give a run folder, the --output_dir of training")
        elif not is_run:
            faults.append(f"{name}: not a run folder (no config.yaml, metrics.csv or checkpoints)")
        else:
            folders.append(folder)
    if faults:
        raise InputError(*faults)
    return folders
