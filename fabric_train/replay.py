# PYTHON_ARGCOMPLETE_OK
"""Train steps of a run again and compare them: ``python -m fabric_train.replay RUN --steps 120:125 [--devices N]``.

Like training, it starts the other ranks itself, or runs under torchrun. It writes nothing into the run.
"""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fabric_train.cli.output import keep_streams_writable
from fabric_train.distributed.signals import stop_signals

if __name__ == "__main__":
    keep_streams_writable()
    stop_signals.listen()  # before the other imports

from fabric_train.arguments import DeviceArguments, TrainArguments, parse
from fabric_train.cli.argument_types import POSITIONAL, PositiveInt, range_of_steps
from fabric_train.cli.errors import FAILURE, InputError, missing_folder, program, run_program
from fabric_train.cli.parser import parse_arguments
from fabric_train.run_folder.config_file import CONFIG, read_config
from fabric_train.training.run_log import note, progress, quiet_libraries, show, start_log

if TYPE_CHECKING:
    from fabric_train.training.replay_comparison import Replay, ReplayComparison


@dataclass(frozen=True)
class ReplayArguments:
    """Train steps of a run again and compare the results; exit with code 0, or 1 if something differs

    PROGRAM runs/1 --steps 120:125
    PROGRAM runs/1 --steps 120:125 --devices 1
    PROGRAM runs/1 --steps 120:125 --devices 1 --accelerator cpu
    """

    run: str = field(metadata=POSITIONAL)
    """Run folder: the --output_dir of training. A checkpoint such as RUN/best selects its run."""
    steps: str
    """Steps FIRST:LAST of the run's metrics.csv, such as 120:125. The steps between the last checkpoint before FIRST
    and FIRST are trained too.
    """
    devices: int | str | None = None
    """Number of devices on each machine, or their indices (0,2,3); default: as in the run."""
    num_nodes: PositiveInt | None = None
    """Number of machines; default: as in the run."""
    accelerator: Literal["auto", "cpu", "cuda", "gpu"] | None = None
    """Device type; default: as in the run."""
    extensions: list[str] | None = None
    """Python modules that register the run's objective or optimizer. Modules named in the run's config.yaml are not
    imported automatically, because the run folder may come from someone else.
    """

    @property
    def first_and_last(self) -> tuple[int, int] | None:
        """First and last step, both included; None if they are not valid."""
        return range_of_steps(self.steps)

    def faults(self) -> list[str]:
        """Return steps and devices that are not valid."""
        faults = []
        if self.first_and_last is None:
            faults.append(f"--steps: expected a first and a last step such as 120:125, got {self.steps!r}")
        if self.devices is not None:
            faults += DeviceArguments(devices=self.devices).faults()
        return faults


def main(argv: list[str] | None = None) -> None:
    """Train the steps again, print what agrees and what differs; exit with 1 if something differs."""
    stop_signals.listen()
    program.memory_advice = "give more --devices"
    start_log()
    arguments = parse(ReplayArguments, argv)
    from fabric_train.run_folder.run_folder import find_run_dir  # slow: numpy and pydantic, which help does not need

    run_dir = find_run_dir(Path(arguments.run))
    train_arguments = _read_config(run_dir, arguments.extensions or [])
    os.environ.setdefault("PJRT_SELECT_DEFAULT_DEVICE", "0")  # as in training
    progress.info("importing torch and transformers")

    from fabric_train.preflight.prepare_replay import prepare_replay
    from fabric_train.training.replay_comparison import ReplayComparison

    quiet_libraries()
    progress.info("checking run, data and model")
    devices_of_run = train_arguments.device
    devices_of_replay = replace(
        devices_of_run,
        devices=arguments.devices or devices_of_run.devices,
        num_nodes=arguments.num_nodes or devices_of_run.num_nodes,
        accelerator=arguments.accelerator or devices_of_run.accelerator,
    )
    assert arguments.first_and_last is not None  # parsing has refused it

    with tempfile.TemporaryDirectory(prefix="fabric-train-replay-") as temporary:
        # Compare what needs no training: arguments, data and rows.
        replay = prepare_replay(run_dir, arguments.first_and_last, train_arguments, devices_of_replay, Path(temporary))
        if replay.faults:
            _report(ReplayComparison(replay, steps=[]))  # which ends the program
        for line in replay.other_versions:
            note(f"the version differs from the run's: {line}")

        _report(_train_again(replay))


def _train_again(replay: "Replay") -> "ReplayComparison":
    """Train the steps of the replay on all ranks, and compare them with the steps of the run."""
    # slow to import
    from fabric_train.checkpoint import wrong_content
    from fabric_train.distributed.cluster_environment import destroy_process_group
    from fabric_train.distributed.signals import Heartbeat, StepPhase
    from fabric_train.distributed.strategy import build_fabric, device_name, use_threads_of
    from fabric_train.distributed.watchdog import watch_ranks
    from fabric_train.training.repeat_steps import repeat_steps
    from fabric_train.training.replay_comparison import compare

    run = replay.run  # prepared for the devices of the replay
    devices = run.arguments.device
    progress.info("connecting the ranks")
    fabric = build_fabric(run.arguments, run.model.layer_classes)
    heartbeat = Heartbeat()
    with watch_ranks(fabric, heartbeat, devices.rank_timeout, devices.num_nodes):
        progress.info("checking the checkpoint")
        checkpoint = run.start.checkpoint
        damage = wrong_content(checkpoint, fabric) if checkpoint else None
        if damage:
            raise InputError(f"{checkpoint} is damaged: {damage}; replay steps after another checkpoint")
        if fabric.device.type == "cpu":
            # The number of threads affects the last digits of a result, and may differ from the run's: fabric run gives
            # each rank more threads than Fabric's own start does.
            first_layout = replay.run_layouts[0]
            use_threads_of(first_layout.device)
        steps = repeat_steps(fabric, run, replay.last_step, heartbeat)
        heartbeat.enter(StepPhase.ENDING)
        stop_signals.ignore()
        destroy_process_group(fabric)
    return compare(replay.on(device_name(fabric.device)), steps)


def _report(comparison: "ReplayComparison") -> None:
    """Print the result; exit with ``FAILURE`` if something differs."""
    show(comparison.describe())
    if not comparison.holds:
        raise SystemExit(FAILURE)


def _read_config(run_dir: Path, extensions: Sequence[str]) -> TrainArguments:
    """Read the arguments of a run, and import only ``extensions`` for the run's registered parts."""
    config = run_dir / CONFIG
    if not config.is_file():
        reason = "not a run folder (no config.yaml)" if run_dir.is_dir() else missing_folder(run_dir)
        raise InputError(f"{run_dir}: {reason}; give a run folder, the --output_dir of training")
    run_extensions = read_config(run_dir).get("extensions") or []
    missing = [name for name in run_extensions if name not in extensions]
    if missing:
        raise InputError(
            f"{config}: the run used code from {', '.join(missing)}, which replay only imports if you name it; give "
            f"--extensions {' '.join(run_extensions)}"
        )
    options = ["--config", str(config)]
    if extensions:
        options += ["--extensions", *extensions]
    return parse_arguments(TrainArguments, options)


if __name__ == "__main__":
    run_program(main)
