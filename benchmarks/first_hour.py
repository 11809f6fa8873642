"""The first hour with a GPU: environment, tests, parity and resume, then speed and memory beside plan and peers."""

from pathlib import Path

from benchmarks.first_hour_parts import (
    TOLERANCES,
    compare_resumed,
    compare_strategies,
    measure_environment,
    run_tests,
    train_ours,
    train_peer,
)
from benchmarks.gpu import ACCUMULATION, MIDDLE, ROWS, SMALL, STEPS, WARM_UP_STEPS
from benchmarks.report import Machine
from benchmarks.timed_parts import Measurement, Part, run_parts
from fabric_train.sample_data import real_data

NAME = "gpu-first-hour"
WORK = real_data.CACHE / "first_hour"
PARTS = (
    Part("environment", 2, measure_environment),
    Part("tests", 8, run_tests),
    Part("parity", 10, compare_strategies),
    Part("resume", 8, compare_resumed),
    Part(f"{SMALL}, fabric_train", 5, train_ours(SMALL)),
    Part(f"{SMALL}, transformers", 3, train_peer(SMALL, "transformers")),
    Part(f"{SMALL}, trl", 3, train_peer(SMALL, "trl")),
    Part(f"{MIDDLE}, fabric_train", 8, train_ours(MIDDLE)),
    Part(f"{MIDDLE}, transformers", 6, train_peer(MIDDLE, "transformers")),
    Part(f"{MIDDLE}, trl", 6, train_peer(MIDDLE, "trl")),
)
SETTINGS = {
    "tolerances of the losses": TOLERANCES,
    "rows of a micro-batch": ROWS,
    "accumulation": ACCUMULATION,
    "steps": STEPS,
    "warm_up_steps": WARM_UP_STEPS,
}


def run_first_hour(sizes: str, work: Path, machine: Machine, commit: str | None) -> Path:
    """Run the parts of the first hour; see ``run_parts``."""
    return run_parts(Measurement(NAME, "First hour", PARTS, SETTINGS), sizes, work, machine, commit)
