"""Show a run's progress while it trains: a panel below the log on a terminal, and plain lines elsewhere.

The cursor rests on an empty line above the panel. Drawing erases from the cursor to the end of the screen, and
writes everything below it again, so it does not depend on what the screen shows. A resized terminal may
wrap the old panel in any way, and output of a native library stays.
"""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import wrap

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleRenderable, RenderHook
from rich.control import Control
from rich.file_proxy import FileProxy
from rich.segment import ControlType, Segment, Segments
from rich.style import Style

from fabric_train.cli.errors import program
from fabric_train.cli.output import ago, escape_controls
from fabric_train.distributed.signals import Heartbeat, describe_signal, stop_signals
from fabric_train.training.logger import Logger
from fabric_train.training.metrics import Metrics
from fabric_train.training.run_log import log, progress

_SECONDS_BETWEEN_LINES = 2.0
_POLL_SECONDS = 0.1  # between two looks at the terminal's size and at signals, which are drawn at once
_DRAW_SECONDS = 0.5  # between two drawings of new values
_IDLE_SECONDS = 1.0  # between two drawings without new values: only times change
_MIN_ROWS = 12
_MIN_COLUMNS = 40
"""The fewest columns for the panel; a narrower terminal gets one line instead."""
_MAX_SHARE_OF_ROWS = 2 / 3
_MIN_FACT_LINES = 5  # that are kept for facts if there are many sources
# widths in columns
_CELL_WIDTH = 28
_LABEL_WIDTH = 16
_LOSS_WIDTH = 13
_MAX_NAME_WIDTH = 32
_DIM = Style.parse("dim")
_BOLD = Style.parse("bold")
_GOOD = Style.parse("green")
_BAD = Style.parse("red")
_STOP = Style.parse("bold yellow")
# control sequences of terminals
_ERASE_BELOW = "\r\x1b[J"  # from the start of the line to the end of the screen
_WRAP_OFF = "\x1b[?7l"  # lines are cut at the edge, so that a narrower terminal cannot wrap the panel
_WRAP_ON = "\x1b[?7h"

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
        if metrics.has_evaluation:
            log.info("step %d: %s", metrics.step, _describe_evaluation(metrics))
        if metrics.step == 0:  # an evaluation before the first step
            self._started = time.monotonic()
        self._show(metrics)

    def _seconds_left(self, step: int) -> float:
        """Return the time for the steps after ``step``, at the speed since the start."""
        seconds_per_step = (time.monotonic() - self._started) / max(step - self.first_step, 1)
        return seconds_per_step * (self.num_steps - step)

    def _show(self, metrics: Metrics) -> None:
        now = time.monotonic()
        is_last = metrics.step == self.num_steps
        if metrics.step and (is_last or now - self._shown_at > _SECONDS_BETWEEN_LINES):
            self._shown_at = now
            values = " ".join(_short_values(metrics))
            eta = _format_clock(self._seconds_left(metrics.step))
            log.debug("step %d/%d %s eta %s", metrics.step, self.num_steps, values, eta)


@dataclass(frozen=True)
class Moment:
    """The values that change without new metrics."""

    position: str
    """The position of the main thread, which says what it is doing."""
    now: float
    """The time on the monotonic clock."""
    stop_signal: int = 0
    """The number of the stop signal; 0 if there is none."""


@dataclass(frozen=True)
class StepTime:
    """The step at which something last happened, and the time on the monotonic clock."""

    step: int
    time: float


@dataclass(frozen=True)
class LossChange:
    """The last value of a loss, and the value before it, which is None for the first value."""

    loss: float
    previous: float | None


@dataclass(frozen=True)
class _Fact:
    """A name and its value, which the panel shows in a cell."""

    name: str
    value: str
    style: Style | None = None


@dataclass(frozen=True)
class Panel:
    """The content of the panel, and its lines. Times are on the monotonic clock."""

    title: str
    num_steps: int
    started: float
    metrics: Metrics
    machines: Mapping[int, str] = field(default_factory=dict)
    """The name of each rank's machine."""
    is_unicode: bool = True
    expected_end: float | None = None
    """The time at which the run is expected to end; None before the first step."""
    losses: Mapping[str, LossChange] = field(default_factory=dict)
    """The last losses by column, such as ``train_loss`` and ``val_loss/SOURCE``."""
    last_save: StepTime | None = None
    last_evaluation: StepTime | None = None
    val_reward: float | None = None
    """The reward of the last evaluation; None if it has none."""

    def after(self, metrics: Metrics, now: float, expected_end: float | None) -> "Panel":
        """Return the panel with the metrics of a later step; both times are on the monotonic clock."""
        losses = dict(self.losses)
        columns = {"train_loss": metrics.train_loss, "val_loss": metrics.val_loss} | metrics.by_source
        for column, loss in columns.items():
            is_loss = column.partition("/")[0] in ("train_loss", "val_loss")
            if is_loss and loss is not None:
                previous = self.losses[column].loss if column in self.losses else None
                losses[column] = LossChange(loss, previous)
        last_evaluation = self.last_evaluation
        if metrics.has_evaluation:
            last_evaluation = StepTime(metrics.step, now)
        val_reward = self.val_reward
        if metrics.val_reward is not None:
            val_reward = metrics.val_reward
        return replace(
            self,
            metrics=metrics,
            expected_end=expected_end,
            losses=losses,
            last_evaluation=last_evaluation,
            val_reward=val_reward,
        )

    def lines(self, columns: int, rows: int, moment: Moment) -> list[Line]:
        """Return lines for a terminal of this size; facts that do not fit are left out, the last ones first."""
        width = max(columns - 1, 1)
        stop_lines: list[Line] = [[Segment(line, _STOP)] for line in wrap(_describe_stop(moment), width)]
        if rows < _MIN_ROWS or columns < _MIN_COLUMNS:
            lines = [*stop_lines, self.one_line(width, moment)]
            return lines[: max(rows - 1, 0)]
        fact_lines = _arrange_facts(self._facts(moment), width)
        first_lines = [self._title_line(width), self._bar_line(width, moment)]

        # losses and facts share the other lines; some are kept for facts
        num_lines = int(rows * _MAX_SHARE_OF_ROWS) - len(first_lines) - len(stop_lines)
        num_kept_facts = min(len(fact_lines), _MIN_FACT_LINES)
        loss_lines = self._loss_lines(width, max_lines=num_lines - num_kept_facts)
        fact_lines = fact_lines[: num_lines - len(loss_lines)]
        return [*first_lines, *loss_lines, *fact_lines, *stop_lines]

    def one_line(self, width: int, moment: Moment) -> Line:
        """Return step, time left and as many values as fit."""
        line = f"step {self.metrics.step:,}/{self.num_steps:,} eta {self._time_left(moment)}"
        for value in _short_values(self.metrics):
            longer_line = f"{line} {value}"
            if len(longer_line) > width:
                break
            line = longer_line
        return [Segment(line)]

    def _time_left(self, moment: Moment) -> str:
        if self.expected_end is None:
            return "-:--"
        return _format_clock(self.expected_end - moment.now)

    def _title_line(self, width: int) -> Line:
        """Return a rule with the title and the step; a long title is cut."""
        dash = "─" if self.is_unicode else "-"
        step = self.metrics.step
        share = step / self.num_steps
        step_text = f" step {step:,} of {self.num_steps:,} ({share:.0%}), epoch {self.metrics.epoch} "
        title_width = min(cell_len(self.title) + 2, max(width - len(step_text) - 5, 0))
        title = set_cell_size(f" {self.title} ", title_width)
        num_dashes = width - cell_len(title) - len(step_text) - 3
        return [
            Segment(dash * 2, _DIM),
            Segment(title, _BOLD),
            Segment(dash, _DIM),
            Segment(step_text),
            Segment(dash * num_dashes, _DIM),
        ]

    def _bar_line(self, width: int, moment: Moment) -> Line:
        """Return the bar of the steps, with the time left and the time since the start."""
        times = f" {self._time_left(moment)} left, {_format_clock(moment.now - self.started)} elapsed"
        full, empty = ("█", "░") if self.is_unicode else ("#", "-")
        bar_width = width - len(times)
        num_full = bar_width * self.metrics.step // self.num_steps
        return [Segment(full * num_full, _GOOD), Segment(empty * (bar_width - num_full), _DIM), Segment(times)]

    def _loss_lines(self, width: int, max_lines: int) -> list[Line]:
        """Return the table of the losses by source; sources that do not fit are counted."""
        if not self.losses:
            return []
        sources = dict.fromkeys(column.partition("/")[2] for column in self.losses if "/" in column)
        names = {"": "all"}  # by source
        for source in sources:
            names[source] = escape_controls(source)

        # A line is the header's. If not all fit, another one has their number.
        shown_sources = list(names)
        if len(names) >= max_lines:
            shown_sources = shown_sources[: max(max_lines - 2, 1)]
        longest_name = max(cell_len(name) for name in names.values())
        name_width = min(longest_name, _MAX_NAME_WIDTH, width - 2 * _LOSS_WIDTH)
        name_width = max(name_width, len("loss"))

        header = set_cell_size("loss", name_width) + "train".rjust(_LOSS_WIDTH - 2) + "validation".rjust(_LOSS_WIDTH)
        lines = [[Segment(header, _DIM)]]
        for source in shown_sources:
            line = [Segment(set_cell_size(names[source], name_width))]
            for column in ("train_loss", "val_loss"):
                line += self._loss_cell(f"{column}/{source}" if source else column)
            lines.append(line)
        num_hidden = len(names) - len(shown_sources)
        if num_hidden:
            lines.append([Segment(f"and {num_hidden} more sources", _DIM)])
        return lines

    def _loss_cell(self, column: str) -> Line:
        """Return a loss with an arrow that shows whether it has fallen or risen."""
        if column not in self.losses:
            return [Segment(" " * _LOSS_WIDTH)]
        loss = self.losses[column].loss
        previous = self.losses[column].previous
        down, up, level = "↓↑→" if self.is_unicode else "v^="
        if previous is None:
            arrow = " "
            style = _DIM
        elif loss < previous:
            arrow = down
            style = _GOOD
        elif loss > previous:
            arrow = up
            style = _BAD
        else:
            arrow = level
            style = _DIM
        return [Segment(f"{loss:.4f}".rjust(_LOSS_WIDTH - 2)), Segment(f" {arrow}", style)]

    def _facts(self, moment: Moment) -> list[_Fact]:
        """Return the known facts, the most important ones first."""
        metrics = self.metrics
        slowest_rank = ""
        if metrics.slowest_rank is not None:
            machine = self.machines.get(metrics.slowest_rank, "")
            name = f"{machine} rank {metrics.slowest_rank}".strip()
            slowest_rank = f"{name}, {_format_value(metrics.rank_lag, '+.3f')} s per step"
        facts = [
            _Fact("now", moment.position),
            _Fact("reward", _format_value(metrics.extra.get("train_reward"), ".3f")),
            _Fact("validation reward", _format_value(self.val_reward, ".3f")),
            _Fact("completion tokens", _format_value(metrics.extra.get("train_completion_tokens"), ",.0f")),
            _Fact("tokens/s", _format_value(metrics.tokens_per_second, ",.0f")),
            _Fact("learning rate", _format_value(metrics.learning_rate, ".2e")),
            _Fact("gradient norm", _format_value(metrics.grad_norm, ".3f")),
            _Fact("data wait", _format_value(metrics.data_wait, ".1%")),
            _Fact("sampling", _format_value(metrics.sampling_time, ".3f", " s per step")),
            _Fact("memory", _format_value(metrics.peak_memory_gb, ".2f", " GB")),
            _Fact("skipped steps", _format_value(metrics.skipped_steps, ","), _BAD if metrics.skipped_steps else None),
            _Fact("last save", _describe_age(self.last_save, moment.now)),
            _Fact("last evaluation", _describe_age(self.last_evaluation, moment.now)),
            _Fact("slowest rank", slowest_rank),
            _Fact("accuracy", _format_value(metrics.extra.get("val_accuracy"), ".3f")),
            _Fact("agreement", _format_value(metrics.extra.get("val_agreement"), ".3f")),
            _Fact("mfu", _format_value(metrics.mfu, ".1%")),
            _Fact("step time", _format_value(metrics.step_time, ".3f", " s")),
        ]
        return [fact for fact in facts if fact.value]


class ProgressPanel(ProgressLines, RenderHook):
    """Shows the panel below a console's output. A thread draws it, so that logging does not slow down a step."""

    def __init__(self, title: str, first_step: int, num_steps: int, console: Console, heartbeat: Heartbeat) -> None:
        """Begin to draw; ``console`` prints to a terminal."""
        super().__init__(first_step, num_steps)
        # what is drawn
        self._console = console
        self._heartbeat = heartbeat
        self._panel = Panel(
            title=escape_controls(title),
            num_steps=num_steps,
            started=self._started,
            metrics=Metrics(step=first_step, epoch=0),
            machines=heartbeat.machines,
            is_unicode=console.encoding.startswith("utf"),
        )
        # the thread that draws it
        self._lock = threading.RLock()
        self._is_live = True
        self._ended = threading.Event()
        self._fault: Exception | None = None
        # what the console, standard error and a fork do while it is drawn
        self._stderr = sys.stderr
        if sys.stderr.isatty():
            sys.stderr = FileProxy(console, sys.stderr)  # its lines are printed above the panel
        console.push_render_hook(self)
        program.end_display = self._leave_values
        # not while the thread holds a lock: a data worker would find it held for ever
        os.register_at_fork(before=self._lock.acquire, after_in_parent=self._lock.release, after_in_child=self._forget)
        threading.Thread(target=self._draw_until_end, daemon=True, name="panel").start()

    def log_save(self, checkpoint: Path) -> None:
        step = int(checkpoint.name.rpartition("-")[2])
        self._panel = replace(self._panel, last_save=StepTime(step, time.monotonic()))

    def close(self) -> None:
        self._remove_panel([])
        program.end_display = None

    def _show(self, metrics: Metrics) -> None:
        if self._fault is not None:
            raise self._fault
        now = time.monotonic()
        expected_end = now + self._seconds_left(metrics.step) if metrics.step else None
        self._panel = self._panel.after(metrics, now, expected_end)

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Return a console's output with the panel below it; rich calls this in any thread that prints."""
        if not self._is_live:
            return renderables
        try:
            columns, rows = self._terminal_size()
            lines = self._panel.lines(columns, rows, self._moment())
        except Exception as error:  # noqa: BLE001 - the next ``log`` raises it, and ``GuardedLogger`` reports it
            self._fault = error
            self._is_live = False
            program.end_display = None
            return [_control(_ERASE_BELOW), *renderables]
        segments: list[Segment] = []
        for line in lines:
            segments += [Segment.line(), *line]
        cursor_up = f"\r\x1b[{len(lines)}A" if lines else ""
        return [
            _control(_ERASE_BELOW),
            *renderables,
            _control(_WRAP_OFF),
            Segments(segments),
            _control(cursor_up + _WRAP_ON),
        ]

    def _draw_until_end(self) -> None:
        """Draw the panel when the terminal's size, the stop signal or the values change, and at least once a second."""
        drawn_state = None
        drawn_at = 0.0
        drawn_panel = self._panel
        while not self._ended.wait(_POLL_SECONDS):
            state = (self._terminal_size(), self._moment().stop_signal)
            has_new_values = self._panel is not drawn_panel
            pause = _DRAW_SECONDS if has_new_values else _IDLE_SECONDS
            if state == drawn_state and time.monotonic() - drawn_at < pause:
                continue
            drawn_state = state
            drawn_at = time.monotonic()
            drawn_panel = self._panel
            with self._lock:
                if self._is_live:
                    self._console.print(Control())  # ``process_renderables`` adds the panel

    def _leave_values(self) -> None:
        """Remove the panel from the terminal before an error is printed, and leave the last values in a line."""
        columns, _ = self._terminal_size()
        line = self._panel.one_line(columns - 1, self._moment())
        self._remove_panel([*line, Segment.line()])

    def _remove_panel(self, line: Line) -> None:
        """Remove the panel from the terminal, and print a line in its place."""
        with self._lock:
            if self._ended.is_set():
                return
            self._ended.set()
            self._is_live = False
            sys.stderr = self._stderr
            self._console.pop_render_hook()
            self._console.print(_control(_ERASE_BELOW), Segments(line), end="", soft_wrap=True)

    def _forget(self) -> None:
        """Leave the terminal to the process that forked this one."""
        if not self._ended.is_set():
            self._ended.set()
            self._is_live = False
            sys.stderr = self._stderr
        self._lock.release()

    def _terminal_size(self) -> tuple[int, int]:
        """Return the terminal's current columns and rows; rich would not see a change if COLUMNS is set."""
        try:
            size = os.get_terminal_size(self._console.file.fileno())
        except (OSError, ValueError):  # it has gone
            return 80, 24
        return size.columns or 80, size.lines or 24

    def _moment(self) -> Moment:
        stop_signal = stop_signals.received or self._heartbeat.stop_border.signal
        return Moment(str(self._heartbeat), time.monotonic(), stop_signal)


def open_progress(title: str, first_step: int, num_steps: int, console: Console, heartbeat: Heartbeat) -> Logger:
    """Return the panel if the terminal can show it, and otherwise lines; ``CI`` in the environment asks for lines."""
    if console.is_interactive and os.environ.get("CI", "").lower() in ("", "0", "false"):
        return ProgressPanel(title, first_step, num_steps, console, heartbeat)
    return ProgressLines(first_step, num_steps)


def _control(codes: str) -> Segments:
    """Return control codes for the terminal, which take no columns."""
    return Segments([Segment(codes, None, [(ControlType.CARRIAGE_RETURN,)])])


def _arrange_facts(facts: Sequence[_Fact], width: int) -> list[Line]:
    """Return lines of cells, each with a name and a value; a long value spans several cells, cut after one line."""
    cells_per_line = max(width // _CELL_WIDTH, 1)
    cell_width = width // cells_per_line
    lines: list[Line] = [[]]
    num_free_cells = cells_per_line
    for fact in facts:
        label = set_cell_size(fact.name, max(_LABEL_WIDTH, len(fact.name) + 1))
        text_width = cell_len(label) + cell_len(fact.value) + 1
        num_cells = min(math.ceil(text_width / cell_width), cells_per_line)
        if num_cells > num_free_cells:
            lines.append([])
            num_free_cells = cells_per_line
        value = set_cell_size(fact.value, num_cells * cell_width - len(label))
        lines[-1] += [Segment(label, _DIM), Segment(value, fact.style)]
        num_free_cells -= num_cells
    return lines


def _format_value(value: float | None, format_spec: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{format_spec}}{unit}"


def _describe_age(event: StepTime | None, now: float) -> str:
    if event is None:
        return "none yet"
    return f"step {event.step:,}, {ago(now - event.time)}"


def _describe_stop(moment: Moment) -> str:
    """Return what happens after a stop signal, see ``StopSignals``; "" if there was none."""
    if not moment.stop_signal:
        return ""
    name = "Ctrl-C" if moment.stop_signal == signal.SIGINT else describe_signal(moment.stop_signal)
    return f"{name}: stopping and saving ({moment.position}); again after 2 s: end immediately without saving"


def _describe_evaluation(metrics: Metrics) -> str:
    """Return the figures of an evaluation, and the losses or rewards of sources."""
    if metrics.val_loss is None and metrics.val_reward is not None:
        return _describe_rewards(metrics, metrics.val_reward)
    text = f"validation loss {metrics.val_loss:.4f}"
    if metrics.perplexity is not None:
        text += f", perplexity {metrics.perplexity:.3f}"
    for name in ("accuracy", "cross_entropy", "agreement"):
        value = metrics.extra.get(f"val_{name}")
        if value is not None:
            text += f", {name.replace('_', ' ')} {value:.3f}"
    losses = [text]
    for column, loss in metrics.by_source.items():
        if column.startswith("val_loss/"):
            losses.append(f"{column.removeprefix('val_loss/')} {loss:.4f}")
    return "; ".join(losses)


def _describe_rewards(metrics: Metrics, val_reward: float) -> str:
    """Return the reward of an evaluation with its standard error, the lengths, and the rewards of sources."""
    text = f"validation reward {val_reward:.4f}"
    standard_error = metrics.extra.get("val_stderr_reward")
    if standard_error is not None:
        text += f" ± {standard_error:.4f}"
    num_tokens = metrics.extra.get("val_completion_tokens")
    if num_tokens is not None:
        text += f", length {num_tokens:.0f}"
    rewards = [text]
    for column, reward in metrics.by_source.items():
        if column.startswith("val_reward/"):
            rewards.append(f"{column.removeprefix('val_reward/')} {reward:.4f}")
    return "; ".join(rewards)


def _format_clock(seconds: float) -> str:
    minutes, seconds = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _short_values(metrics: Metrics) -> list[str]:
    """Return the measured values with short names, the most important ones first."""
    values = [
        ("loss", metrics.train_loss, "{:.4f}"),
        ("reward", metrics.extra.get("train_reward"), "{:.3f}"),
        ("length", metrics.extra.get("train_completion_tokens"), "{:.0f}"),
        ("lr", metrics.learning_rate, "{:.2e}"),
        ("grad", metrics.grad_norm, "{:.3f}"),
        ("tok/s", metrics.tokens_per_second, "{:,.0f}"),
        ("mfu", metrics.mfu, "{:.1%}"),
        ("mem", metrics.peak_memory_gb, "{:.2f} GB"),
    ]
    return [f"{name} {form.format(value)}" for name, value, form in values if value is not None]
