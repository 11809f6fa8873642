"""The progress of training on rank 0: a bar on a terminal, otherwise a line every few seconds."""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions
from rich.live import Live
from rich.text import Text

from fabric_train.cli.errors import set_display
from fabric_train.training.metrics import Logger, Metrics
from fabric_train.training.run_log import log, progress

_SECONDS_BETWEEN_LINES = 2.0
_SECONDS_BETWEEN_DRAWINGS = 0.1
_BAR_WIDTH = 10


class ProgressLine(Logger):
    """Shows step, time left, loss, learning rate, gradient norm, tokens/s and memory."""

    def __init__(self, first_step: int, num_steps: int, console: Console) -> None:
        self._first_step, self._num_steps = first_step, num_steps
        self._started, self._shown_at = time.monotonic(), 0.0
        self._bar: Live | None = None
        if console.is_interactive:
            # without a thread that redraws it, nothing draws the bar after an error message
            bar = _Bar(first_step, num_steps, "-:--", ())
            self._bar = Live(bar, console=console, auto_refresh=False, redirect_stderr=sys.stderr.isatty())
            self._bar.start(refresh=True)
            set_display(self._bar.stop)

    def log(self, metrics: Metrics) -> None:
        """Show the step."""
        progress.info("")
        if metrics.val_loss is not None:
            whole = f"validation loss {metrics.val_loss:.4f}, perplexity {metrics.perplexity:.3f}"
            log.info("step %d: %s%s", metrics.step, whole, _of_sources(metrics))
        now, is_last = time.monotonic(), metrics.step == self._num_steps
        if metrics.step == 0:  # an evaluation before the first step
            self._started = now
            return
        pace = (now - self._started) / max(metrics.step - self._first_step, 1)
        eta, values = _clock(pace * (self._num_steps - metrics.step)), _in_short(metrics)
        pause = _SECONDS_BETWEEN_DRAWINGS if self._bar else _SECONDS_BETWEEN_LINES
        is_due = now - self._shown_at > pause or is_last
        if is_due:
            self._shown_at = now
        if self._bar is None and is_due:
            log.debug("step %d/%d %s eta %s", metrics.step, self._num_steps, " ".join(values), eta)
        elif self._bar is not None and self._bar.is_started:
            self._bar.update(_Bar(metrics.step, self._num_steps, eta, values), refresh=is_due)

    def close(self) -> None:
        """Stop the bar where it is."""
        if self._bar is not None:
            self._bar.stop()
            set_display(None)


@dataclass(frozen=True)
class _Bar:
    """A line that fits the terminal: the values that do not fit are left out, the last ones first."""

    step: int
    num_steps: int
    eta: str
    values: tuple[str, ...]

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Yield the line, which leaves the terminal's last column free."""
        filled = _BAR_WIDTH * self.step // self.num_steps
        bar = "#" * filled + "-" * (_BAR_WIDTH - filled)
        counts = f"{self.step:,}/{self.num_steps:,} eta {self.eta}"
        line = f"train [{bar}] {counts}"
        if len(line) >= options.max_width:
            line = counts
        for value in self.values:
            if len(f"{line} {value}") >= options.max_width:
                break
            line = f"{line} {value}"
        yield Text(line, no_wrap=True, overflow="crop")


def _of_sources(metrics: Metrics) -> str:
    """Return the validation loss of each source, if there are several."""
    losses = {
        name: loss
        for column, loss in metrics.by_source.items()
        for of, _, name in [column.partition("/")]
        if of == "val_loss"
    }
    return "".join(f"; {name} {loss:.4f}" for name, loss in losses.items())


def _clock(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds."""
    minutes, seconds = divmod(round(seconds), 60)
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
