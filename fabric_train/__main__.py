# PYTHON_ARGCOMPLETE_OK
"""Train: token dataset and model → checkpoints. ``fabric run fabric_train …`` or ``python -m fabric_train …``.

Parse, check everything that needs no process group, launch, build the run on every rank, train. Slow imports come
after parsing: help and wrong arguments are shown at once.
"""

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

# ``fabric run`` puts this package's folder first on the path, where its modules would shadow others of the same name.
# ``python -m`` puts the current folder first, where a user may have a file arguments.py. The project's own comes first
_PACKAGE = Path(__file__).resolve().parent
sys.path[:] = [str(_PACKAGE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != _PACKAGE)]

from fabric_train.cli.output import keep_streams_writable  # noqa: E402
from fabric_train.distributed.signals import stop_signals  # noqa: E402

if __name__ == "__main__":
    keep_streams_writable()
    stop_signals.listen()  # before the other imports

from arguments import TrainArguments, parse  # noqa: E402
from fabric_train.cli.errors import run_program, set_memory_advice  # noqa: E402
from fabric_train.cli.launcher import global_rank  # noqa: E402
from fabric_train.cli.parser import flatten  # noqa: E402
from fabric_train.files.atomic_folder import check_not_held, hold_lock  # noqa: E402
from fabric_train.training.run_log import log, note, progress, quiet_libraries, show, start_log  # noqa: E402

if TYPE_CHECKING:
    from rich.console import Console

    from fabric_train.pages.page import WrittenPage
    from fabric_train.training.prepared_run import PreparedRun


def main(argv: list[str] | None = None) -> None:
    """Train; with ``--eval_only`` evaluate, with ``--plan`` print what the run would take."""
    stop_signals.listen()
    set_memory_advice(
        "use a smaller --micro_batch_size or --max_length, --activation_checkpointing full, or more devices"
    )
    console = start_log()
    arguments = parse(TrainArguments, argv)
    os.environ.setdefault("PJRT_SELECT_DEFAULT_DEVICE", "0")  # without a TPU, torch-xla would just take the CPU
    progress.info("importing torch and transformers")

    from fabric_train.distributed.strategy import note_on_unused_gpus
    from fabric_train.preflight.memory_plan import check_memory, print_plan
    from fabric_train.preflight.prepare import prepare
    from fabric_train.training import summary

    quiet_libraries()
    progress.info("checking data and model")
    writes = global_rank() == 0 and not arguments.evaluation.only_reads
    folder = Path(arguments.save.output_dir)  # one run at a time writes into it
    taken = f"--output_dir {folder}: another run is writing into it"
    lock = folder / ".lock", taken, "wait for it, stop it, or give another --output_dir"
    if writes and not arguments.planning.checks:  # the checked run may begin when the other run has ended
        check_not_held(*lock)
    run = prepare(arguments)
    if arguments.planning.checks:
        for line in run.notes:
            note(line)
        log.info("arguments, files and data are in order: %d steps", run.plan.num_steps)
        return
    if arguments.planning.plan:
        print_plan(run)
        return
    show(summary.describe_start(run))
    idle = note_on_unused_gpus(arguments.device.devices, run.devices.accelerator)
    for line in (*run.notes, *([idle] if idle else [])):
        note(line)
    if (run.start.state.step >= run.plan.num_steps or run.ends_early) and not run.start.state.unlogged:
        _report_nothing_left(run)
        return
    if not arguments.evaluation.only_reads:
        check_memory(run)
    with hold_lock(*lock) if writes else nullcontext():
        code = _launch(run, console)
    if code:
        raise SystemExit(code)


def _launch(run: "PreparedRun", console: "Console") -> int:
    """Connect the ranks and execute the run on all of them; return the exit code."""
    from fabric_train.distributed.cluster_environment import destroy_process_group
    from fabric_train.distributed.signals import Heartbeat, StepPhase
    from fabric_train.distributed.strategy import build_fabric
    from fabric_train.distributed.watchdog import watch_ranks
    from fabric_train.preflight.prepare import check_content
    from fabric_train.training.run import execute

    progress.info("connecting the ranks")
    fabric, heartbeat, device = build_fabric(run.given, run.model.layer_classes), Heartbeat(), run.given.device
    with watch_ranks(fabric, heartbeat, device.rank_timeout, device.num_nodes):
        progress.info("checking the checkpoint")
        code = execute(fabric, check_content(fabric, run, note), heartbeat, console, write_run_report)
        heartbeat.enter(StepPhase.ENDING)
        stop_signals.ignore()
        destroy_process_group(fabric)
    return code


def write_run_report(folder: Path) -> "WrittenPage":
    """Write RUN/report.html and report.md."""
    from fabric_train.report.run_files import open_runs
    from fabric_train.report.write import PAGE, write_report

    return write_report(open_runs([str(folder)]), folder / PAGE)


def _report_nothing_left(run: "PreparedRun") -> None:
    from fabric_train.training.loggers import LoggedRun
    from fabric_train.training.trackers import complete_trackers

    log.info("step %d of %d: nothing is left to train", run.start.state.step, run.plan.num_steps)
    if run.early_stopping and run.ends_early:
        log.info(run.early_stopping.describe(run.start.state))
    if global_rank() == 0:
        given = run.arguments.logging.opened_loggers
        complete_trackers(given, LoggedRun(run.folder, run.start.state.step, flatten(run.arguments)))


if __name__ == "__main__":
    run_program(main)
