"""What a run shows while it trains: a panel below its log on a terminal, and plain lines elsewhere.

The cursor rests on an empty line above the panel. To draw is to erase from the cursor to the end of the screen, and to
write everything below it again, so nothing has to be known of what the screen shows. A terminal that is resized may
wrap the old panel as it likes, and what a native library writes stays.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import wrap

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleRenderable, RenderHook
from rich.control import Control
from rich.file_proxy import FileProxy
from rich.segment import ControlType, Segment, Segments
from rich.style import Style

from fabric_train.cli.errors import set_display
from fabric_train.cli.output import ago, escape_controls
from fabric_train.distributed.signals import Heartbeat, describe_signal, stop_signals
from fabric_train.training.loggers import Logger
from fabric_train.training.metrics import Metrics
from fabric_train.training.run_log import log, progress

_SECONDS_BETWEEN_LINES = 2.0
_LOOK_SECONDS = 0.1  # between two looks at the terminal's size and at signals, which are drawn at once
_DRAW_SECONDS = 0.5  # between two drawings of new values
_IDLE_SECONDS = 1.0  # between two drawings without new values: only times change
_LEAST_ROWS = 12
_LEAST_COLUMNS = 40
"""A smaller terminal gets one line instead of the panel."""
_SHARE_OF_ROWS = 2 / 3
_FEWEST_FACTS = 5  # rows that are kept for facts if there are many sources
# columns
_CELL = 28
_LABEL = 16
_LOSS = 13
_LONGEST_NAME = 32
_DIM, _BOLD, _GOOD, _BAD, _STOP = (Style.parse(name) for name in ("dim", "bold", "green", "red", "bold yellow"))
_ERASE = "\r\x1b[J"  # to the end of the screen
# lines that are longer than the terminal; a narrower one cannot wrap the panel
_CROP = "\x1b[?7l"
_WRAP = "\x1b[?7h"

Line = list[Segment]


class ProgressLines(Logger):
    """Prints a line with the metrics every two seconds, and one for each evaluation."""

    def __init__(self, first_step: int, num_steps: int) -> None:
        self.first_step = first_step
        self.num_steps = num_steps
        self._started = time.monotonic()
        self._shown_at = 0.0

    def log(self, metrics: Metrics) -> None:
        progress.info("")
        if metrics.val_loss is not None:
            log.info("step %d: %s", metrics.step, _describe_evaluation(metrics))
        if metrics.step == 0:  # an evaluation before the first step
            self._started = time.monotonic()
        self._show(metrics)

    def _seconds_left(self, step: int) -> float:
        return (time.monotonic() - self._started) / max(step - self.first_step, 1) * (self.num_steps - step)

    def _show(self, metrics: Metrics) -> None:
        now = time.monotonic()
        is_last = metrics.step == self.num_steps
        if metrics.step and (is_last or now - self._shown_at > _SECONDS_BETWEEN_LINES):
            self._shown_at = now
            values = " ".join(_in_short(metrics))
            left = _clock(self._seconds_left(metrics.step))
            log.debug("step %d/%d %s eta %s", metrics.step, self.num_steps, values, left)


@dataclass(frozen=True)
class Moment:
    """What changes without new metrics: the place of the main thread, the monotonic clock, the stop signal or 0."""

    position: str
    now: float
    stop_signal: int = 0


@dataclass(frozen=True)
class Panel:
    """What the panel shows of a run, and its lines. Times are of the monotonic clock.

    ``losses`` are the last ones by column (``train_loss``, ``val_loss/SOURCE``), each with the value before or None.
    ``saved`` and ``evaluated`` are the last step and its time. ``machines`` has the name of each rank's machine.
    """

    title: str
    num_steps: int
    started: float
    metrics: Metrics
    machines: Mapping[int, str] = field(default_factory=dict)
    is_unicode: bool = True
    ends: float | None = None
    losses: Mapping[str, tuple[float, float | None]] = field(default_factory=dict)
    saved: tuple[int, float] | None = None
    evaluated: tuple[int, float] | None = None

    def after(self, metrics: Metrics, now: float, ends: float | None) -> "Panel":
        """Return the panel with the metrics of a later step; ``ends`` is when the run is expected to end."""
        found = {"train_loss": metrics.train_loss, "val_loss": metrics.val_loss} | metrics.by_source
        losses = {
            name: (loss, self.losses.get(name, (None,))[0])
            for name, loss in found.items()
            if loss is not None and name.partition("/")[0] in ("train_loss", "val_loss")
        }
        evaluated = self.evaluated if metrics.val_loss is None else (metrics.step, now)
        return replace(self, metrics=metrics, ends=ends, losses={**self.losses, **losses}, evaluated=evaluated)

    def lines(self, columns: int, rows: int, moment: Moment) -> list[Line]:
        """Return lines for a terminal of this size; what does not fit is left out, the last facts first."""
        width = max(columns - 1, 1)
        stop: list[Line] = [[Segment(line, _STOP)] for line in wrap(_describe_stop(moment), width)]
        if rows < _LEAST_ROWS or columns < _LEAST_COLUMNS:
            return [*stop, self.one_line(width, moment)][: max(rows - 1, 0)]
        facts = _grid(self._facts(moment), width)
        left = int(rows * _SHARE_OF_ROWS) - 2 - len(stop)
        losses = self._losses(width, left - min(len(facts), _FEWEST_FACTS))
        return [self._rule(width), self._bar(width, moment), *losses, *facts[: left - len(losses)], *stop]

    def one_line(self, width: int, moment: Moment) -> Line:
        """Return step, time left and as many values as fit."""
        line = f"step {self.metrics.step:,}/{self.num_steps:,} eta {self._left(moment)}"
        for value in _in_short(self.metrics):
            if len(f"{line} {value}") > width:
                break
            line = f"{line} {value}"
        return [Segment(line)]

    def _left(self, moment: Moment) -> str:
        return "-:--" if self.ends is None else _clock(self.ends - moment.now)

    def _rule(self, width: int) -> Line:
        dash = "─" if self.is_unicode else "-"
        step = self.metrics.step
        done = f" step {step:,} of {self.num_steps:,} ({step / self.num_steps:.0%}), epoch {self.metrics.epoch} "
        title = set_cell_size(f" {self.title} ", min(cell_len(self.title) + 2, max(width - len(done) - 5, 0)))
        rest = width - cell_len(title) - len(done) - 3
        parts = [(dash * 2, _DIM), (title, _BOLD), (dash, _DIM), (done, None), (dash * rest, _DIM)]
        return [Segment(text, style) for text, style in parts]

    def _bar(self, width: int, moment: Moment) -> Line:
        times = f" {self._left(moment)} left, {_clock(moment.now - self.started)} gone"
        full, empty = ("█", "░") if self.is_unicode else ("#", "-")
        size = width - len(times)
        filled = size * self.metrics.step // self.num_steps
        return [Segment(full * filled, _GOOD), Segment(empty * (size - filled), _DIM), Segment(times)]

    def _losses(self, width: int, rows: int) -> list[Line]:
        """Return the table of the losses by source; sources that do not fit are counted."""
        if not self.losses:
            return []
        sources = list(dict.fromkeys(name.partition("/")[2] for name in self.losses if "/" in name))
        names = {"": "all"} | {source: escape_controls(source) for source in sources}
        shown = list(names) if len(names) < rows else list(names)[: max(rows - 2, 1)]
        size = min(max(cell_len(name) for name in names.values()), _LONGEST_NAME, width - 2 * _LOSS)
        size = max(size, len("loss"))
        lines = [[Segment(set_cell_size("loss", size) + "train".rjust(_LOSS - 2) + "validation".rjust(_LOSS), _DIM)]]
        for source in shown:
            columns = (f"{split}_loss/{source}".removesuffix("/") for split in ("train", "val"))
            losses = [part for name in columns for part in self._loss(name)]
            lines.append([Segment(set_cell_size(names[source], size)), *losses])
        if len(shown) < len(names):
            lines.append([Segment(f"and {len(names) - len(shown)} more sources", _DIM)])
        return lines

    def _loss(self, column: str) -> Line:
        if column not in self.losses:
            return [Segment(" " * _LOSS)]
        loss, before = self.losses[column]
        down, up, same = "↓↑→" if self.is_unicode else "v^="
        change = 0.0 if before is None else loss - before
        arrow, style = (down, _GOOD) if change < 0 else (up, _BAD) if change > 0 else (same, _DIM)
        return [Segment(f"{loss:.4f}".rjust(_LOSS - 2)), Segment(f" {' ' if before is None else arrow}", style)]

    def _facts(self, moment: Moment) -> list[tuple[str, str, Style | None]]:
        """Return names and values, the most important ones first."""
        of = self.metrics
        now = moment.now
        rank = of.slowest_rank
        machine = "" if rank is None else f"{self.machines.get(rank, '')} rank {rank}".strip()
        facts = [
            ("now", moment.position, None),
            ("tokens/s", _shown(of.tokens_per_second, ",.0f"), None),
            ("learning rate", _shown(of.learning_rate, ".2e"), None),
            ("gradient norm", _shown(of.grad_norm, ".3f"), None),
            ("data wait", _shown(of.data_wait, ".1%"), None),
            ("memory", _shown(of.peak_memory_gb, ".2f", " GB"), None),
            ("skipped steps", _shown(of.skipped_steps, ","), _BAD if of.skipped_steps else None),
            ("last save", _step_and_age(self.saved, now), None),
            ("last evaluation", _step_and_age(self.evaluated, now), None),
            ("slowest rank", f"{machine}, {_shown(of.rank_lag, '+.3f')} s a step" if machine else "", None),
            ("accuracy", _shown(of.further.get("val_accuracy"), ".3f"), None),
            ("mfu", _shown(of.mfu, ".1%"), None),
            ("step time", _shown(of.step_time, ".3f", " s"), None),
        ]
        return [fact for fact in facts if fact[1]]


class ProgressPanel(ProgressLines, RenderHook):
    """Shows the panel below what a console prints. A thread draws it, so that to log costs a step nothing."""

    def __init__(self, title: str, first_step: int, num_steps: int, console: Console, heartbeat: Heartbeat) -> None:
        """Begin to draw; ``console`` prints to a terminal."""
        super().__init__(first_step, num_steps)
        self._console = console
        self._heartbeat = heartbeat
        self._panel = Panel(
            escape_controls(title),
            num_steps,
            self._started,
            Metrics(step=first_step, epoch=0),
            heartbeat.machines,
            is_unicode=console.encoding.startswith("utf"),
        )
        self._lock = threading.RLock()
        self._is_live = True
        self._ended = threading.Event()
        self._fault: Exception | None = None
        self._stderr = sys.stderr
        if sys.stderr.isatty():
            sys.stderr = FileProxy(console, sys.stderr)  # its lines are printed above the panel
        console.push_render_hook(self)
        set_display(self._leave_values)
        # not while the thread holds a lock: a data worker would find it held for ever
        os.register_at_fork(before=self._lock.acquire, after_in_parent=self._lock.release, after_in_child=self._forget)
        threading.Thread(target=self._draw_until_end, daemon=True, name="panel").start()

    def log_save(self, checkpoint: Path) -> None:
        step = int(checkpoint.name.rpartition("-")[2])
        self._panel = replace(self._panel, saved=(step, time.monotonic()))

    def close(self) -> None:
        self._leave([])
        set_display(None)

    def _show(self, metrics: Metrics) -> None:
        if self._fault is not None:
            raise self._fault
        now = time.monotonic()
        self._panel = self._panel.after(metrics, now, now + self._seconds_left(metrics.step) if metrics.step else None)

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Return what a console prints, with the panel below it; rich calls it, in any thread that prints."""
        if not self._is_live:
            return renderables
        try:
            lines = self._panel.lines(*self._size(), self._moment())
        except Exception as error:  # noqa: BLE001 - the next ``log`` raises it, and ``GuardedLogger`` reports it
            self._fault = error
            self._is_live = False
            set_display(None)
            return [_control(_ERASE), *renderables]
        below = [segment for line in lines for segment in (Segment.line(), *line)]
        up = f"\r\x1b[{len(lines)}A" if lines else ""
        return [_control(_ERASE), *renderables, _control(_CROP), Segments(below), _control(up + _WRAP)]

    def _draw_until_end(self) -> None:
        drawn = None
        drawn_at = 0.0
        panel = self._panel
        while not self._ended.wait(_LOOK_SECONDS):
            seen = (self._size(), self._moment().stop_signal)
            pause = time.monotonic() - drawn_at
            if seen != drawn or pause >= (_IDLE_SECONDS if panel is self._panel else _DRAW_SECONDS):
                drawn = seen
                drawn_at = time.monotonic()
                panel = self._panel
                with self._lock:
                    if self._is_live:
                        self._console.print(Control())

    def _leave_values(self) -> None:
        """Take the panel off the terminal before an error is printed, and leave the last values in a line."""
        self._leave([*self._panel.one_line(self._size()[0] - 1, self._moment()), Segment.line()])

    def _leave(self, line: Line) -> None:
        with self._lock:
            if self._ended.is_set():
                return
            self._ended.set()
            self._is_live = False
            sys.stderr = self._stderr
            self._console.pop_render_hook()
            self._console.print(_control(_ERASE), Segments(line), end="", soft_wrap=True)

    def _forget(self) -> None:
        """Leave the terminal to the process that has forked this one."""
        if not self._ended.is_set():
            self._ended.set()
            self._is_live = False
            sys.stderr = self._stderr
        self._lock.release()

    def _size(self) -> tuple[int, int]:
        """Return the terminal's columns and rows now; rich would not see a change if COLUMNS is in the environment."""
        try:
            size = os.get_terminal_size(self._console.file.fileno())
        except (OSError, ValueError):  # it has gone
            return 80, 24
        return (size.columns or 80), (size.lines or 24)

    def _moment(self) -> Moment:
        received = stop_signals.received or self._heartbeat.stop_border.signal
        return Moment(str(self._heartbeat), time.monotonic(), received)


def open_progress(title: str, first_step: int, num_steps: int, console: Console, heartbeat: Heartbeat) -> Logger:
    """Return the panel on a terminal that can show it, else the lines; ``CI`` in the environment asks for lines."""
    if console.is_interactive and os.environ.get("CI", "").lower() in ("", "0", "false"):
        return ProgressPanel(title, first_step, num_steps, console, heartbeat)
    return ProgressLines(first_step, num_steps)


def _control(codes: str) -> Segments:
    """Return codes for the terminal that take no columns."""
    return Segments([Segment(codes, None, [(ControlType.CARRIAGE_RETURN,)])])


def _grid(facts: list[tuple[str, str, Style | None]], width: int) -> list[Line]:
    """Return lines of cells with a name and a value each; a long value takes several cells, and is cut after a line."""
    columns = max(width // _CELL, 1)
    cell = width // columns
    lines: list[Line] = [[]]
    free = columns
    for name, value, style in facts:
        label = set_cell_size(name, max(_LABEL, len(name) + 1))
        taken = min(-(-(cell_len(label) + cell_len(value) + 1) // cell), columns)
        if taken > free:
            lines.append([])
            free = columns
        lines[-1] += [Segment(label, _DIM), Segment(set_cell_size(value, taken * cell - len(label)), style)]
        free -= taken
    return lines


def _shown(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"


def _step_and_age(event: tuple[int, float] | None, now: float) -> str:
    if event is None:
        return "none yet"
    return f"step {event[0]:,}, {ago(now - event[1])}"


def _describe_stop(moment: Moment) -> str:
    """Return what happens after a stop signal, see ``StopSignals``; nothing as long as there is none."""
    if not moment.stop_signal:
        return ""
    name = "Ctrl-C" if moment.stop_signal == signal.SIGINT else describe_signal(moment.stop_signal)
    return f"{name}: stopping and saving ({moment.position}); once more, after 2 s, ends at once without saving"


def _describe_evaluation(metrics: Metrics) -> str:
    whole = f"validation loss {metrics.val_loss:.4f}"
    whole += "" if metrics.perplexity is None else f", perplexity {metrics.perplexity:.3f}"
    whole += f", accuracy {metrics.further['val_accuracy']:.3f}" if "val_accuracy" in metrics.further else ""
    pairs = ((column.partition("val_loss/"), loss) for column, loss in metrics.by_source.items())
    return "; ".join([whole, *(f"{name} {loss:.4f}" for (before, found, name), loss in pairs if found and not before)])


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _in_short(metrics: Metrics) -> tuple[str, ...]:
    parts = [
        ("loss", metrics.train_loss, "{:.4f}"),
        ("lr", metrics.learning_rate, "{:.2e}"),
        ("grad", metrics.grad_norm, "{:.3f}"),
        ("tok/s", metrics.tokens_per_second, "{:,.0f}"),
        ("mfu", metrics.mfu, "{:.1%}"),
        ("mem", metrics.peak_memory_gb, "{:.2f} GB"),
    ]
    return tuple(f"{name} {form.format(value)}" for name, value, form in parts if value is not None)
