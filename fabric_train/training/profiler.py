"""``--profile``: trace chosen steps, and on a GPU its memory, into ``RUN/profile``."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from fabric_train.data.step_sampler import Window, WindowSource
from fabric_train.distributed.signals import Heartbeat

_RECORDED_EVENTS = 200_000  # of the GPU's allocator; older ones are dropped


@dataclass(frozen=True)
class ProfiledWindows:
    """The windows of ``source``. Steps ``first`` to ``last`` are traced on this rank.

    chrome://tracing and ui.perfetto.dev open the trace, ``steps-10-12-rank-0.json``. On a GPU there is also
    ``steps-10-12-rank-0-memory.html``. The trace is also written if the run ends within these steps.
    """

    source: WindowSource
    first: int
    last: int
    folder: Path
    rank: int
    on_gpu: bool
    heartbeat: Heartbeat

    def windows(self, after_step: int, last_step: int) -> Iterator[Window]:
        """Yield the windows of the steps ``after_step + 1`` to ``last_step``."""
        windows = self.source.windows(after_step, last_step)
        for window in windows:
            if self.first <= window.step <= self.last:
                yield from self._trace(window, windows)
            else:
                yield window

    def _trace(self, window: Window, windows: Iterator[Window]) -> Iterator[Window]:
        """Yield the windows to trace, ``window`` first."""
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"steps-{window.step}-{self.last}-rank-{self.rank}"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_gpu else [])]
        if self.on_gpu:
            # without C++ frames: to look up their names takes minutes, in which this rank would give no sign
            torch.cuda.memory._record_memory_history(max_entries=_RECORDED_EVENTS, stacks="python")
        trace = profile(activities=activities, record_shapes=True, profile_memory=True)
        trace.start()
        try:
            yield window
            while window.step < self.last:
                following = next(windows, None)
                if following is None:
                    break
                window = following
                yield window
        finally:
            self.heartbeat.take_time()  # the other ranks may wait while the files are written
            trace.stop()
            trace.export_chrome_trace(str(self.folder / f"{name}.json"))
            if self.on_gpu:
                self._write_memory(self.folder / f"{name}-memory.html")

    def _write_memory(self, page: Path) -> None:
        from torch.cuda._memory_viz import trace_plot

        page.write_text(trace_plot(torch.cuda.memory._snapshot()), encoding="utf-8")
        torch.cuda.memory._record_memory_history(enabled=None)


@contextmanager
def manual_collection() -> Iterator[None]:
    """Leave garbage collection to the training loop while the block runs.

    Objects that exist at its start are never scanned again, so that a collection takes milliseconds.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
