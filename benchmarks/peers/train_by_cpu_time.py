"""Run ``fabric_train`` like ``train_without_saving``, with the CPU time of its process in place of the clock.

The times of steps in metrics.csv are then CPU times, which other processes on the machine hardly change.
"""

import time
from contextlib import ExitStack
from types import SimpleNamespace
from unittest.mock import patch

from benchmarks.peers.train_without_saving import main as train
from fabric_train.cli.errors import run_program
from fabric_train.rollouts import windows
from fabric_train.training import loop, stopwatch

TIMED_MODULES = (loop, stopwatch, windows)
"""The modules that time the steps and their parts."""
_CLOCK = SimpleNamespace(perf_counter=time.process_time, monotonic=time.process_time)


def main() -> None:
    """Train with the arguments on the command line."""
    with ExitStack() as patches:
        for module in TIMED_MODULES:
            patches.enter_context(patch.object(module, "time", _CLOCK))
        train()


if __name__ == "__main__":
    run_program(main)
