"""TensorBoard and Weights & Biases: each step once, also after a killed run resumes.

metrics.csv is complete up to the checkpoint, so a resumed run trusts it. Steps that a logger has after the checkpoint
are removed if possible. Steps that it lacks before the checkpoint are logged again. metrics.csv is part of the run's
record: if it cannot be written, the run ends. No other logger can end a run (:class:`Optional`).
"""

import mmap
import netrc
import os
import re
import shlex
import struct
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import indent
from typing import Any

from fabric_train.cli.errors import InputError, describe_os_error, first_line
from fabric_train.files.regular_file import check_no_link, check_no_links_in, write_atomically
from fabric_train.training.evaluation import Sample, SampleFile
from fabric_train.training.loss_curves import PICTURE, LossCurves
from fabric_train.training.metrics import CSVLogger, Logger, Metrics, measured, read_metrics
from fabric_train.training.run_log import note, warn

_WANDB = "--loggers wandb"


class Optional(Logger):
    """A logger without which a run goes on: its first failure is reported in one line, and nothing more is logged.

    Args:
        name: what is logged to, as the report names it.
        open_logger: opens it.
    """

    def __init__(self, name: str, open_logger: Callable[[], Logger]) -> None:
        self._name, self._logger = name, Logger()

        def open_it(_: Logger) -> None:
            self._logger = open_logger()

        self._try(open_it)

    def log(self, metrics: Metrics) -> None:
        """Record one step's metrics."""
        self._try(lambda logger: logger.log(metrics))

    def log_samples(self, samples: Sequence[Sample]) -> None:
        """Record the samples of a step."""
        self._try(lambda logger: logger.log_samples(samples))

    def log_model(self, checkpoint: Path) -> None:
        """Upload a checkpoint."""
        self._try(lambda logger: logger.log_model(checkpoint))

    def flush(self) -> None:
        """Flush it."""
        self._try(lambda logger: logger.flush())

    def close(self) -> None:
        """Close it."""
        self._try(lambda logger: logger.close())

    def _try(self, action: Callable[[Logger], None]) -> None:
        try:
            action(self._logger)
        except Exception as error:  # noqa: BLE001 - a folder, a disk, a network or a server: none may end the run
            self._logger = Logger()
            reason = describe_os_error(error) if isinstance(error, OSError) else first_line(error)
            warn(f"{self._name}: {reason}; the run goes on without it, and metrics.csv has every step")


class TensorBoardLogger(Logger):
    """Event files in ``RUN/tensorboard``."""

    def __init__(self, folder: Path, last_step: int) -> None:
        """Continue after ``last_step``; remove what an interrupted run wrote after it."""
        from torch.utils.tensorboard import SummaryWriter  # a slow import, needed only here

        check_no_links_in(folder)
        for file in folder.glob("events.out.tfevents.*"):
            _cut_events(file, last_step)
        # an open TensorBoard has read the removed steps: purge_step makes it drop them
        self._writer = SummaryWriter(str(folder), purge_step=last_step + 1)

    def log(self, metrics: Metrics) -> None:
        """Write every measured value as a scalar."""
        for name, value in measured(metrics).items():
            self._writer.add_scalar(name, value, metrics.step)

    def log_samples(self, samples: Sequence[Sample]) -> None:
        """Write every sample as a text."""
        for number, sample in enumerate(samples, 1):
            as_code = indent(f"{sample.prompt}▸{sample.text}", "    ", lambda _: True)  # not read as Markdown
            self._writer.add_text(f"samples/{number}", as_code, sample.step)

    def flush(self) -> None:
        """Wait until the events are in their file."""
        self._writer.flush()

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


def _cut_events(path: Path, last_step: int) -> None:
    """Truncate an event file before its first event after ``last_step``, or before a record that is damaged or cut off.

    The file is a sequence of records of tensorboard's ``RecordWriter``: uint64 length, uint32 checksum, content, uint32
    checksum.
    """
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from tensorboard.compat.proto.event_pb2 import Event

    size, end = path.stat().st_size, 0
    if not size:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as records:
        while end + 12 <= size:
            (length,) = struct.unpack_from("<Q", records, end)
            after = end + 12 + length + 4
            if after > size:
                break
            try:
                event = Event.FromString(records[end + 12 : after - 4])
            except DecodeError:  # TensorBoard reads nothing after a damaged record either
                break
            if event.step > last_step:
                break
            end = after
    os.truncate(path, end)


class WandbLogger(Logger):
    """Weights & Biases. Without an account it works offline, in ``RUN/wandb``. It never asks on the terminal.

    A run folder has one W&B run, however often it is resumed. A server keeps the steps that it has after the
    checkpoint: W&B ignores a step that it has, and only some servers can rewind. A resumed run repeats those steps
    exactly, so they are right. Offline, each start makes a folder, and ``wandb sync`` lets the last one replace the
    others. So the last one gets all steps, and the others are moved to ``RUN/wandb/replaced``.
    """

    def __init__(
        self,
        folder: Path,
        project: str,
        entity: str | None,
        config: dict[str, Any],
        past: Sequence[Metrics],
        past_samples: Sequence[Sample] = (),
    ) -> None:
        """``past`` are the metrics of the run so far, ``past_samples`` its samples."""
        import wandb  # a slow import, needed only here

        self._told = folder / "wandb" / "told_up_to"
        for path in (folder / "wandb_run_id", folder / "wandb", self._told):
            check_no_link(path)
        run_id = _wandb_run_id(folder)
        self.mode = _wandb_mode()
        if self.mode == "offline":
            _move_replaced(folder / "wandb", run_id)
        self._run = wandb.init(
            project=project,
            entity=entity,
            dir=str(folder),
            id=run_id,
            resume="allow",
            mode=self.mode,  # type: ignore[arg-type]
            config=config,
            settings=wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True),
        )
        self._wandb = wandb
        self._last_step = past[-1].step if past else -1
        for metrics in past:
            if metrics.step >= self._run.starting_step:  # 0 offline, otherwise the first step that the server lacks
                self.log_samples([sample for sample in past_samples if sample.step == metrics.step])
                self.log(metrics)

    def log(self, metrics: Metrics) -> None:
        """Log every measured value at its step."""
        self._run.log(measured(metrics), step=metrics.step)
        self._last_step = metrics.step

    def log_samples(self, samples: Sequence[Sample]) -> None:
        """Log the samples of a step, whose metrics follow, as a table."""
        if samples:
            rows = [[sample.prompt, sample.text] for sample in samples]
            table = self._wandb.Table(columns=["prompt", "text"], data=rows)
            self._run.log({"samples": table}, step=samples[0].step)

    def log_model(self, checkpoint: Path) -> None:
        """Upload a checkpoint without its optimizer as an artifact."""
        artifact = self._wandb.Artifact(f"model-{self._run.id}", type="model", metadata={"checkpoint": checkpoint.name})
        for path in sorted(checkpoint.rglob("*")):
            name = path.relative_to(checkpoint)
            if path.is_file() and name.parts[0] != "optimizer":
                artifact.add_file(str(path), name=name.as_posix())
        self._run.log_artifact(artifact)

    def close(self) -> None:
        """Wait for uploads."""
        self._run.finish()
        write_atomically(self._told, f"{self._last_step}\n")


class Outputs:
    """All loggers of a run.

    ``log_model`` says which checkpoints are uploaded to W&B: "all", "last" or "none". ``samples`` is the file of the
    samples; None writes none.
    """

    def __init__(self, loggers: Sequence[Logger], log_model: str, samples: SampleFile | None = None) -> None:
        self._loggers, self._log_model, self._samples = loggers, log_model, samples

    def log(self, metrics: Metrics) -> None:
        """Log one step to all."""
        for logger in self._loggers:
            logger.log(metrics)

    def log_samples(self, samples: Sequence[Sample]) -> None:
        """Log the samples of a step, before its metrics."""
        if self._samples:
            self._samples.log(samples)
        for logger in self._loggers:
            logger.log_samples(samples)

    def flush(self) -> None:
        """Flush all."""
        for logger in self._loggers:
            logger.flush()

    def saved(self, checkpoint: Path) -> None:
        """Upload a complete checkpoint if all are uploaded."""
        if self._log_model == "all":
            self._upload(checkpoint)

    def ended(self, checkpoint: Path) -> None:
        """Upload the run's last checkpoint if only that is uploaded."""
        if self._log_model == "last":
            self._upload(checkpoint)

    def close(self) -> None:
        """Close all."""
        for logger in self._loggers:
            logger.close()

    def _upload(self, checkpoint: Path) -> None:
        for logger in self._loggers:
            logger.log_model(checkpoint)


def complete_wandb(folder: Path, last_step: int, project: str, entity: str | None, config: dict[str, Any]) -> None:
    """Log to W&B the steps of a finished run that it lacks because the run was killed after its last save."""
    if _wandb_mode() == "disabled":
        return
    told = folder / "wandb" / "told_up_to"
    past = read_metrics(folder / "metrics.csv", last_step)
    if past and (not told.is_file() or told.read_bytes().strip() != str(past[-1].step).encode()):
        samples = SampleFile(folder / "samples.jsonl", last_step).past
        Optional(_WANDB, lambda: WandbLogger(folder, project, entity, config, past, samples)).close()


def open_loggers(
    names: Sequence[str],
    folder: Path,
    last_step: int,
    project: str,
    entity: str | None,
    config: dict[str, Any],
    source_names: Sequence[str] = (),
    past_samples: Sequence[Sample] = (),
    branched_after: Sequence[int] = (),
) -> list[Logger]:
    """Open metrics.csv, the picture of the losses and the named loggers, to continue after ``last_step``.

    Before step 0, ``last_step`` is -1. ``source_names`` are the sources whose losses are logged, ``past_samples`` the
    samples up to ``last_step``, ``branched_after`` the steps at which the picture shows a branch.

    Raises:
        InputError: metrics.csv is damaged.
    """
    table = folder / "metrics.csv"
    loggers: list[Logger] = [
        CSVLogger(table, last_step, source_names),
        Optional("loss_curves.png", lambda: LossCurves(folder, branched_after)),
    ]
    if "tensorboard" in names:
        loggers.append(Optional("--loggers tensorboard", lambda: TensorBoardLogger(folder / "tensorboard", last_step)))
    if "wandb" in names and _wandb_mode() == "disabled":
        note("WANDB_MODE=disabled: nothing is logged to Weights & Biases")
    elif "wandb" in names:
        past = read_metrics(table, last_step)
        opened = Optional(_WANDB, lambda: WandbLogger(folder, project, entity, config, past, past_samples))
        loggers.append(opened)
    return loggers


def describe_loggers(names: Sequence[str], folder: Path, project: str) -> str:
    """Return where a run's metrics are, with the command that shows or uploads those of each logger."""
    places = [f"{folder / 'metrics.csv'}; after an evaluation, {PICTURE} beside it"]
    if "tensorboard" in names:
        places.append(f"tensorboard --logdir {shlex.quote(str(folder / 'tensorboard'))}")
    if "wandb" in names:
        mode = _wandb_mode()
        offline = f"{shlex.quote(str(folder / 'wandb'))}/offline-run-*"
        where = {"online": f"project {project}", "offline": f"offline; upload with: wandb sync {offline}"}
        places.append(f"Weights & Biases, {where.get(mode, mode)}")
    return "\n".join(places)


def _wandb_mode() -> str:
    """Return online, offline or disabled; without an account it is offline."""
    return os.environ.get("WANDB_MODE") or ("online" if _has_wandb_key() else "offline")


def _wandb_run_id(folder: Path) -> str:
    """Return the id of the run folder's W&B run; create it on first use.

    Raises:
        InputError: the file with the id is damaged.
    """
    file = folder / "wandb_run_id"
    if not file.is_file():
        write_atomically(file, uuid.uuid4().hex[:8])
    run_id = file.read_text(encoding="utf-8", errors="replace").strip()
    if not re.fullmatch(r"[\w-]{1,64}", run_id, re.ASCII):
        raise InputError(f"{file}: damaged; write the id of the run's W&B run into it, or remove it for a new W&B run")
    return run_id


def _move_replaced(folder: Path, run_id: str) -> None:
    """Move a run's earlier offline folders to a place that ``wandb sync`` does not read."""
    for earlier in folder.glob(f"offline-run-*-{run_id}"):
        (folder / "replaced").mkdir(exist_ok=True)
        earlier.rename(folder / "replaced" / earlier.name)


def _has_wandb_key() -> bool:
    """Whether wandb finds a key without asking: in the environment or in the user's netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].split("/")[0]
    try:
        return netrc.netrc().authenticators(host) is not None
    except (FileNotFoundError, netrc.NetrcParseError):
        return False
