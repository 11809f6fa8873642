"""Trace some steps for ``--profile``."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from fabric_train.data.step_sampler import Window, WindowSource
from fabric_train.distributed.signals import Heartbeat

_MAX_MEMORY_EVENTS = 200_000  # of the GPU's allocator; older ones are dropped


@dataclass(frozen=True)
class ProfiledWindows:
    """The windows of ``source``; the steps ``first_step`` to ``last_step`` are traced on this rank.

    chrome://tracing and ui.perfetto.dev open the trace, ``steps-10-12-rank-0.json``. On a GPU there is also
    ``steps-10-12-rank-0-memory.html``. The trace is also written if the run ends within these steps.
    """

    source: WindowSource
    first_step: int
    last_step: int
    folder: Path
    rank: int
    on_gpu: bool
    heartbeat: Heartbeat

    def windows(self, after_step: int, last_step: int) -> Iterator[Window]:
        windows = self.source.windows(after_step, last_step)
        for window in windows:
            if self.first_step <= window.step <= self.last_step:
                yield from self._trace(window, windows)
            else:
                yield window

    def _trace(self, window: Window, windows: Iterator[Window]) -> Iterator[Window]:
        """Yield ``window`` and the next ones up to the last traced step; a step runs while its window is yielded."""
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"steps-{window.step}-{self.last_step}-rank-{self.rank}"
        activities = [ProfilerActivity.CPU]
        if self.on_gpu:
            activities.append(ProfilerActivity.CUDA)
            # Without C++ frames: to look up their names takes minutes, in which this rank would give no sign of life.
            torch.cuda.memory._record_memory_history(max_entries=_MAX_MEMORY_EVENTS, stacks="python")
        trace = profile(activities=activities, record_shapes=True, profile_memory=True)
        trace.start()
        try:
            yield window
            step = window.step
            while step < self.last_step:
                next_window = next(windows, None)
                if next_window is None:
                    break
                step = next_window.step
                yield next_window
        finally:
            self.heartbeat.take_time()  # the other ranks may wait while the files are written
            trace.stop()
            trace.export_chrome_trace(str(self.folder / f"{name}.json"))
            if self.on_gpu:
                from torch.cuda._memory_viz import trace_plot

                page = trace_plot(torch.cuda.memory._snapshot())
                (self.folder / f"{name}-memory.html").write_text(page, encoding="utf-8")
                torch.cuda.memory._record_memory_history(enabled=None)
