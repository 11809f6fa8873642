# PYTHON_ARGCOMPLETE_OK
"""Train: token dataset and model → checkpoints. ``fabric run fabric_train …`` or ``python -m fabric_train …``.

Parse, check everything that needs no process group, launch, build the run on every rank, train. Slow imports come
after parsing: help and wrong arguments are shown at once.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, TYPE_CHECKING

# ``fabric run`` puts this package's folder first on the path, where its modules would shadow others of the same name,
# and this package would not be found
if __name__ == "__main__":
    _PACKAGE = Path(__file__).resolve().parent
    for _index, _entry in enumerate(sys.path):
        if Path(_entry).resolve() == _PACKAGE:
            sys.path[_index] = str(_PACKAGE.parent)

from fabric_train.cli.output import keep_streams_writable
from fabric_train.distributed.signals import stop_signals

if __name__ == "__main__":
    keep_streams_writable()
    stop_signals.listen()  # before the other imports

from fabric_train.arguments import TrainArguments, parse
from fabric_train.cli.commands import project_first
from fabric_train.cli.errors import (
    INPUT_ERROR,
    STOPPED,
    InputError,
    RunError,
    program,
    run_program,
)
from fabric_train.cli.launcher import as_launcher, global_rank
from fabric_train.cli.parser import flatten, to_yaml
from fabric_train.files.atomic_folder import check_not_held, hold_lock
from fabric_train.training.run_log import log, note, progress, quiet_libraries, show, start_log

if TYPE_CHECKING:
    from rich.console import Console

    from fabric_train.pages.markdown import WrittenPage
    from fabric_train.training.prepared_run import PreparedRun


def check_before_launch(argv: list[str], environment: Mapping[str, str]) -> bool:
    """Do the checks that a rank with these words and variables does before it imports torch.

    Returns:
        Whether the command only plans a run.

    Raises:
        InputError: the arguments are wrong, or they name wrong folders or files.
    """
    arguments = parse(TrainArguments, argv, environment)

    from fabric_train.preflight.paths import check_paths  # slow: numpy and pydantic, which help does not need

    check_paths(arguments)
    return bool(arguments.planning.plan)


def main(argv: list[str] | None = None) -> None:
    """Train. With ``--eval_only``, evaluate; with ``--plan``, print the memory and disk that the run would need."""
    stop_signals.listen()
    console = start_log()
    code = run_training(parse(TrainArguments, argv), console)
    if code:
        raise SystemExit(code)


def run_training(arguments: TrainArguments, console: "Console") -> int:
    """Check, launch and train on every rank; return the exit code: 0, ``FAILURE`` of a self-check, or ``STOPPED``.

    Raises:
        InputError: the arguments, the data and the model do not fit together; nothing is written.
        RunError: the training fails.
    """
    started = time.monotonic()
    program.memory_advice = (
        "use a smaller --micro_batch_size or --max_length, --activation_checkpointing full, or more devices"
    )
    os.environ.setdefault("PJRT_SELECT_DEFAULT_DEVICE", "0")  # without a TPU, torch-xla would just take the CPU

    from fabric_train.preflight.paths import check_paths  # slow

    check_paths(arguments)
    progress.info("importing torch and transformers")

    from fabric_train.distributed.strategy import note_on_unused_gpus
    from fabric_train.preflight.memory_forecast import check_memory
    from fabric_train.preflight.memory_plan import print_plan
    from fabric_train.preflight.prepare import prepare
    from fabric_train.training import summary
    from fabric_train.training.rank_extensions import note_on_unused_parts

    # Check the run. One run at a time writes into a folder.
    quiet_libraries()
    progress.info("checking data and model")
    writes = global_rank() == 0 and not arguments.evaluation.only_reads
    run_dir = Path(arguments.save.output_dir)
    lock = run_dir / ".lock"
    lock_fault = f"--output_dir {run_dir}: another run is writing to it"
    lock_fix = "wait for it, stop it, or give another --output_dir"
    if writes and not arguments.planning.checks:  # the checked run may begin when the other run has ended
        check_not_held(lock, lock_fault, lock_fix)
    run = prepare(arguments)

    # Only check or plan it.
    if arguments.planning.checks:
        for line in run.notes:
            note(line)
        log.info("arguments, files and data are valid: %d steps", run.plan.num_steps)
        return 0
    if arguments.planning.plan:
        print_plan(run)
        return 0
    # Say what it is.
    show(summary.describe_start(run))
    gpu_note = note_on_unused_gpus(arguments.device.devices, run.devices.accelerator)
    parts_note = note_on_unused_parts(arguments)
    for text in (*run.notes, gpu_note, parts_note):
        if text:
            note(text)

    # Train, unless the run has ended already.
    state = run.start.state
    has_ended = state.step >= run.plan.num_steps or run.ends_early
    if has_ended and not state.unlogged:
        _report_nothing_left(run)
        return 0
    if not arguments.evaluation.only_reads:
        check_memory(run)
    run_lock = hold_lock(lock, lock_fault, lock_fix) if writes else nullcontext()
    with run_lock:
        return _launch(run, console, started)


def _launch(run: "PreparedRun", console: "Console", started: float) -> int:
    """Connect the ranks and execute the run on all of them; return the exit code.

    ``started`` is the ``time.monotonic()`` at which the program began.
    """
    from fabric_train.distributed.cluster_environment import destroy_process_group
    from fabric_train.distributed.signals import Heartbeat, StepPhase
    from fabric_train.distributed.strategy import build_fabric
    from fabric_train.distributed.watchdog import watch_ranks
    from fabric_train.preflight.prepare import check_content
    from fabric_train.training.run import execute

    progress.info("connecting the ranks")
    heartbeat = Heartbeat(started)
    device = run.user_arguments.device
    fabric = build_fabric(run.user_arguments, run.model.layer_classes)
    with watch_ranks(fabric, heartbeat, device.rank_timeout, device.num_nodes):
        # All ranks are there from here on: each checks its share of the checkpoint.
        progress.info("checking the checkpoint")
        checked_run = check_content(fabric, run, note)
        code = execute(fabric, checked_run, heartbeat, console, write_run_report)
        # Everything is saved: a signal must not end a rank while the others wait for it.
        heartbeat.enter(StepPhase.ENDING)
        stop_signals.ignore()
        destroy_process_group(fabric)
    return code


def run_ranks(arguments: TrainArguments, import_folders: Sequence[str] = ()) -> int:
    """Run ``python -m fabric_train``, which starts the other ranks; print its lines, and return its exit code.

    Signals to this process are passed on.

    Args:
        arguments: The arguments of the run.
        import_folders: Where the ranks find the modules of ``--extensions``.

    Raises:
        InputError: A rank has refused the arguments or the input; it has the lines that the rank printed.
        RunError: A rank has failed; it has the lines that the rank printed.
    """
    errors: list[str] = []
    with TemporaryDirectory() as folder, as_launcher():
        config = Path(folder, "config.yaml")
        config.write_text(to_yaml(arguments), encoding="utf-8")
        environment = {**os.environ, **project_first()}
        environment["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"], *import_folders])
        ranks = subprocess.Popen(
            [sys.executable, "-m", "fabric_train", "--config", str(config)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that Ctrl-C does not reach them twice
        )
        # Both pipes are read at the same time: a full one would stop the ranks.
        stderr_reader = threading.Thread(target=_pass_errors, args=(ranks.stderr, errors), daemon=True)
        stderr_reader.start()
        code = _print_until_end(ranks, stderr_reader)
    if code == INPUT_ERROR:
        raise InputError(*errors)
    if code not in (0, STOPPED):
        raise RunError("; ".join(errors) or f"the ranks ended with exit code {code}")
    return code


def _print_until_end(ranks: subprocess.Popen[str], stderr_reader: threading.Thread) -> int:
    """Print the lines of the ranks, and return their exit code; end the ranks if this process has an error."""
    assert ranks.stdout is not None
    while True:
        try:
            for line in ranks.stdout:
                print(line, end="", flush=True)
            code = ranks.wait()
            stderr_reader.join()
            return code
        except KeyboardInterrupt:  # the ranks save and end: go on with their lines until then
            ranks.send_signal(signal.SIGINT)
        except BaseException:
            ranks.terminate()
            raise


def _pass_errors(lines: IO[str], errors: list[str]) -> None:
    """Collect the errors among the lines, and print the others."""
    for line in lines:
        if line.startswith("error: "):
            errors.append(line.removeprefix("error: ").rstrip("\n"))
        else:
            print(line, end="", file=sys.stderr, flush=True)


def write_run_report(folder: Path) -> "WrittenPage":
    """Write RUN/report.html and report.md."""
    from fabric_train.report.reported_run import open_runs
    from fabric_train.report.write import PAGE, write_report

    return write_report(open_runs([str(folder)]), folder / PAGE)


def _report_nothing_left(run: "PreparedRun") -> None:
    """Report that a run has already ended, and log to its trackers the steps that they lack."""
    from fabric_train.training.logger import LoggedRun
    from fabric_train.training.trackers import complete_trackers

    log.info("step %d of %d: nothing left to train", run.start.state.step, run.plan.num_steps)
    if run.early_stopping and run.ends_early:
        log.info(run.early_stopping.describe(run.start.state))
    if global_rank() == 0:
        logged_run = LoggedRun(run.folder, run.start.state.step, flatten(run.arguments))
        complete_trackers(run.arguments.logging.opened_loggers, logged_run)


if __name__ == "__main__":
    run_program(main)
