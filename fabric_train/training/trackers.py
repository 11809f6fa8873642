"""The loggers of a run beside metrics.csv: loss_curves.png, TensorBoard and Weights & Biases.

metrics.csv is complete up to the checkpoint, so a resumed run trusts it. Steps that a tracker has after the checkpoint
are removed if possible. Steps that it lacks before the checkpoint are logged again.
"""

import math
import mmap
import netrc
import os
import re
import struct
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import Any

from fabric_train.cli.errors import InputError
from fabric_train.files.regular_file import check_no_link, check_no_links_in, check_regular_or_absent, write_atomically
from fabric_train.training.loggers import GuardedLogger, LoggedRun, Logger, Sample, SampleFile
from fabric_train.training.metrics import Metrics, measured, read_metrics
from fabric_train.training.run_log import note

_TEXT = "#767676"  # can be read on white and on black; the background is transparent
_BLUE, _ORANGE = "#3d7fc4", "#d9782d"
_COLOURS = ("#2a9d6f", "#a05fb4", "#c8504f", "#8c6d46", "#1f93a8", "#b08a1e")
_SMOOTHED_FROM = 200  # points
_FIGURES = {"val_bits_per_byte": "validation loss\n(bits per byte)", "val_loss": "validation loss"}

Points = list[tuple[int, float]]

PICTURE = "loss_curves.png"
_MAX_SHARE = 0.01  # of the run's time


class LossCurves(Logger):
    """``RUN/loss_curves.png`` after the evaluations, while drawing takes at most 1 % of the time, and at the end."""

    def __init__(self, folder: Path, branched_after: Sequence[int] = ()) -> None:
        """``folder`` is RUN, whose metrics.csv has every row before this logger gets it."""
        self._folder, self._branched_after = folder, branched_after
        self._last_step = -1
        self._is_behind = False
        self._drawn_at, self._seconds = 0.0, 0.0

    def log(self, metrics: Metrics) -> None:
        self._last_step = metrics.step
        self._is_behind |= metrics.val_loss is not None
        if self._is_behind and time.monotonic() - self._drawn_at >= self._seconds / _MAX_SHARE:
            self._draw()

    def close(self) -> None:
        if self._is_behind:
            self._draw()

    def _draw(self) -> None:
        started = time.monotonic()
        picture = self._folder / PICTURE
        temporary = picture.with_name(f".{PICTURE}")
        check_regular_or_absent(picture)
        temporary.unlink(missing_ok=True)  # of a killed run, or a planted link
        rows = read_metrics(self._folder / "metrics.csv", self._last_step)
        draw_loss_curves(rows, temporary, self._folder.name, self._branched_after)
        temporary.replace(picture)
        self._is_behind, self._drawn_at = False, time.monotonic()
        self._seconds = self._drawn_at - started


def draw_loss_curves(rows: Sequence[Metrics], picture: Path, title: str, branched_after: Sequence[int] = ()) -> None:
    """Draw losses, also of sources, and the learning rate of ``rows`` as a PNG; dotted lines mark branches."""
    import matplotlib  # slow

    matplotlib.use("Agg")  # no display is needed
    import matplotlib.pyplot as plt

    figure_of_sources, of_sources = _losses_of_sources(rows)
    rates = _points(rows, "learning_rate")
    heights = [4.0, *([3.0] if of_sources else []), *([1.3] if rates else [])]
    with plt.rc_context({"text.color": _TEXT, "axes.labelcolor": _TEXT, "axes.edgecolor": _TEXT}):
        shape: dict[str, Any] = {"figsize": (8, sum(heights) + 0.6), "height_ratios": heights, "layout": "constrained"}
        figure, panels = plt.subplots(len(heights), dpi=150, sharex=True, squeeze=False, **shape)
        axes = list(panels[:, 0])
        _draw_whole(axes[0], rows)
        for number, (name, points) in enumerate(of_sources.items()):
            style = ("-", "--", ":")[number // 6 % 3]
            _draw_validation(axes[1], points, _COLOURS[number % len(_COLOURS)], name, style)
            axes[1].set_ylabel(_FIGURES[figure_of_sources])
        if rates:
            axes[-1].plot(*zip(*rates, strict=True), color=_TEXT, linewidth=1.5)
            axes[-1].set_ylabel("learning rate")
            axes[-1].set_ylim(bottom=0)
            axes[-1].ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
        for panel in axes:
            _finish(panel, branched_after)
        axes[0].set_title(title, loc="left", weight="bold")
        axes[-1].set_xlabel("optimizer step")
        figure.savefig(picture, transparent=True, metadata={"Software": None})
        plt.close(figure)


def _losses_of_sources(rows: Sequence[Metrics]) -> tuple[str, dict[str, Points]]:
    """Return which figure is known of all sources, and its values for each; none if there are fewer than two."""
    columns = dict.fromkeys(name for row in rows for name in row.by_source)
    found: dict[str, Points] = {}
    for figure in _FIGURES:
        names = [column.partition("/")[2] for column in columns if column.startswith(f"{figure}/")]
        if len(names) > max(1, len(found)):
            found = {name: _points(rows, f"{figure}/{name}") for name in names}
            known = figure
    return (known, found) if found else ("", {})


def _points(rows: Sequence[Metrics], column: str) -> Points:
    """Return step and value of each row that has a finite one in a column."""
    pairs = ((row.step, row.by_source.get(column) if "/" in column else getattr(row, column)) for row in rows)
    return [(step, number) for step, number in pairs if number is not None and math.isfinite(number)]


def _draw_whole(axes: Any, rows: Sequence[Metrics]) -> None:
    train, validation = _points(rows, "train_loss"), _points(rows, "val_loss")
    if train:
        many = len(train) > _SMOOTHED_FROM
        axes.plot(*zip(*train, strict=True), color=_BLUE, linewidth=1, alpha=0.35 if many else 1, label="training")
        if many:
            width = len(train) // 50
            label = f"training, mean of {width} logged steps"
            axes.plot(*zip(*_smooth(train, width), strict=True), color=_BLUE, linewidth=1.5, label=label)
    _draw_validation(axes, validation, _ORANGE, "validation")
    axes.set_ylabel("loss\n(nats)")


def _draw_validation(axes: Any, points: Points, colour: str, label: str, style: str = "-") -> None:
    """Draw a curve with a mark at each evaluation; the legend has its first and last value."""
    if not points:
        return
    first, last = points[0][1], points[-1][1]
    label = f"{label}: {first:.3f} → {last:.3f}" if len(points) > 1 else f"{label}: {last:.3f}"
    marker = "o" if len(points) <= _SMOOTHED_FROM else None
    axes.plot(
        *zip(*points, strict=True), color=colour, linewidth=2, marker=marker, markersize=5, linestyle=style, label=label
    )


def _smooth(points: Points, width: int) -> Points:
    """Return the mean of every ``width`` points that follow each other, at the last one's step."""
    ends = range(width, len(points) + 1)
    total = [0.0]
    for _, value in points:
        total.append(total[-1] + value)
    return [(points[end - 1][0], (total[end] - total[end - width]) / width) for end in ends]


def _finish(axes: Any, branched_after: Sequence[int]) -> None:
    lines = [axes.axvline(step, color=_TEXT, linewidth=1, linestyle=":") for step in branched_after]
    curves, labels = axes.get_legend_handles_labels()
    if curves:
        handles = {**dict(zip(labels, curves, strict=True)), **({"branch": lines[0]} if lines else {})}
        axes.legend(handles.values(), handles, frameon=False, ncols=1 + len(handles) // 8)
    axes.margins(x=0.05, y=0.15)
    axes.grid(color=_TEXT, alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_TEXT)


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
