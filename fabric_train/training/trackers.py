"""The loggers of a run beside metrics.csv: TensorBoard and Weights & Biases.

metrics.csv is complete up to the checkpoint, so a resumed run trusts it. Steps that a tracker has after the checkpoint
are removed if possible. Steps that it lacks before the checkpoint are logged again.
"""

import mmap
import netrc
import os
import re
import struct
import uuid
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from textwrap import indent

from fabric_train.cli.errors import InputError
from fabric_train.files.regular_file import check_no_link, check_no_links_in, write_atomically
from fabric_train.training.loggers import GuardedLogger, LoggedRun, Logger, Sample, SampleFile
from fabric_train.training.metrics import Metrics, measured, read_metrics
from fabric_train.training.run_log import note


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
        for name, value in measured(metrics).items():
            self._writer.add_scalar(name, value, metrics.step)

    def log_samples(self, samples: Sequence[Sample]) -> None:
        for number, sample in enumerate(samples, 1):
            as_code = indent(f"{sample.prompt}▸{sample.text}", "    ", lambda _: True)  # not read as Markdown
            self._writer.add_text(f"samples/{number}", as_code, sample.step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _cut_events(path: Path, last_step: int) -> None:
    """Truncate an event file before its first event after ``last_step``, or before a record that is damaged or cut off.

    Its records are of tensorboard's ``RecordWriter``: uint64 length, uint32 checksum, content, uint32 checksum.
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
    checkpoint; a resumed run repeats those exactly, so they are right. Offline, each start makes a folder, and ``wandb
    sync`` lets the last one replace the others. So it gets all steps, and the others go to ``RUN/wandb/replaced``.
    """

    def __init__(self, run: LoggedRun) -> None:
        import wandb  # a slow import, needed only here

        folder = run.folder
        past = read_metrics(folder / "metrics.csv", run.last_step)
        past_samples = SampleFile(folder / "samples.jsonl", run.last_step).past
        self._told = folder / "wandb" / "told_up_to"
        for path in (folder / "wandb_run_id", folder / "wandb", self._told):
            check_no_link(path)
        run_id = _wandb_run_id(folder)
        self.mode = wandb_mode()
        earlier_folders = (folder / "wandb").glob(f"offline-run-*-{run_id}") if self.mode == "offline" else ()
        for earlier in earlier_folders:  # to a place that ``wandb sync`` does not read
            (folder / "wandb" / "replaced").mkdir(exist_ok=True)
            earlier.rename(folder / "wandb" / "replaced" / earlier.name)
        self._run = wandb.init(
            project=run.config["project"],
            entity=run.config["entity"],
            dir=str(folder),
            id=run_id,
            resume="allow",
            mode=self.mode,  # type: ignore[arg-type]
            config=run.config,
            settings=wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True),
        )
        self._wandb = wandb
        self._last_step = past[-1].step if past else -1
        for metrics in past:
            if metrics.step >= self._run.starting_step:  # 0 offline, otherwise the first step that the server lacks
                self.log_samples([sample for sample in past_samples if sample.step == metrics.step])
                self.log(metrics)

    def log(self, metrics: Metrics) -> None:
        self._run.log(measured(metrics), step=metrics.step)
        self._last_step = metrics.step

    def log_samples(self, samples: Sequence[Sample]) -> None:
        """Log the samples of a step, whose metrics follow, as a table."""
        if samples:
            rows = [[sample.prompt, sample.text] for sample in samples]
            self._run.log({"samples": self._wandb.Table(columns=["prompt", "text"], data=rows)}, step=samples[0].step)

    def log_model(self, checkpoint: Path) -> None:
        """Upload a checkpoint without its optimizer as an artifact."""
        artifact = self._wandb.Artifact(f"model-{self._run.id}", type="model", metadata={"checkpoint": checkpoint.name})
        for path in sorted(checkpoint.rglob("*")):
            name = path.relative_to(checkpoint)
            if path.is_file() and name.parts[0] != "optimizer":
                artifact.add_file(str(path), name=name.as_posix())
        self._run.log_artifact(artifact)

    def close(self) -> None:
        self._run.finish()
        write_atomically(self._told, f"{self._last_step}\n")


def open_wandb(run: LoggedRun) -> Logger:
    """Open the logger of W&B, unless ``WANDB_MODE`` is disabled."""
    if wandb_mode() == "disabled":
        note("WANDB_MODE=disabled: nothing is logged to Weights & Biases")
        return Logger()
    return WandbLogger(run)


def complete_wandb(run: LoggedRun) -> None:
    """Log to W&B the steps of a finished run that it lacks because the run was killed after its last save."""
    if wandb_mode() == "disabled":
        return
    told = run.folder / "wandb" / "told_up_to"
    past = read_metrics(run.folder / "metrics.csv", run.last_step)
    if past and (not told.is_file() or told.read_bytes().strip() != str(past[-1].step).encode()):
        GuardedLogger("--loggers wandb", partial(WandbLogger, run)).close()


def wandb_mode() -> str:
    """Return online, offline or disabled; offline without a key in the environment or in the user's netrc."""
    if mode := os.environ.get("WANDB_MODE"):
        return mode
    if os.environ.get("WANDB_API_KEY"):
        return "online"
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].split("/")[0]
    with suppress(FileNotFoundError, netrc.NetrcParseError):
        if netrc.netrc().authenticators(host) is not None:
            return "online"
    return "offline"


def _wandb_run_id(folder: Path) -> str:
    """Return the id of the run folder's W&B run; create it on first use. An InputError if its file is damaged."""
    file = folder / "wandb_run_id"
    if not file.is_file():
        write_atomically(file, uuid.uuid4().hex[:8])
    run_id = file.read_text(encoding="utf-8", errors="replace").strip()
    if not re.fullmatch(r"[\w-]{1,64}", run_id, re.ASCII):
        raise InputError(f"{file}: damaged; write the id of the run's W&B run into it, or remove it for a new W&B run")
    return run_id
