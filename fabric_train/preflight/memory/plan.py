"""``--plan``: print what a run will take; and, before every run, check that it does not obviously run out of memory."""

from rich.text import Text

from fabric_train.cli.errors import InputError, first_line
from fabric_train.distributed.resources import device_memory, machine_memory
from fabric_train.files.sizes import parse_size
from fabric_train.preflight.memory.fitting import faults_of, faults_without_trace
from fabric_train.preflight.memory.forecast import RunRequest
from fabric_train.preflight.memory.plan_tables import report
from fabric_train.training.prepared_run import PreparedRun
from fabric_train.training.run_log import note, show
from fabric_train.training.summary import describe_mixture, describe_phases


def print_plan(run: PreparedRun) -> None:
    """Print memory, disk and traffic of a run, traced on fake tensors, and its mixture.

    Raises:
        InputError: the run does not fit, or the model cannot be traced.
    """
    request, given = make_request(run), run.arguments.planning
    try:
        forecast = request.forecast()
    except RuntimeError as error:
        reason = f"its activations cannot be traced ({first_line(error).rstrip('.')})"
        raise InputError(f"--plan true: {run.model.source}: {reason}; leave --plan out") from error
    lines = [float(size) if (size := parse_size(line or "")) else None for line in (given.interconnect, given.network)]
    show(report(forecast, run.plan, request.num_checkpoints(), request.device_memory, *lines))
    for table in (*describe_mixture(run), *describe_phases(run)):
        show(table)
    for line in run.notes:
        note(line)
    faults = faults_of(request, forecast)
    if faults:
        raise InputError(*faults)
    show(Text("it fits", "bold green"))


def check_memory(run: PreparedRun) -> None:
    """Check what needs no tracing: weights, gradients and optimizer in memory, one checkpoint on the disk.

    Raises:
        InputError: the run would certainly end for lack of memory or disk.
    """
    faults = faults_without_trace(make_request(run))
    if faults:
        raise InputError(*faults)


def make_request(run: PreparedRun) -> RunRequest:
    """Return what the forecast of a run needs to know."""
    arguments, on_gpu = run.arguments, run.devices.accelerator == "cuda"
    given = parse_size(arguments.planning.device_memory or "")
    share_of_machine = machine_memory() // (run.plan.world_size // arguments.device.num_nodes)
    return RunRequest(
        arguments=arguments,
        shape=run.model,
        plan=run.plan,
        parallelism=run.devices.parallelism,
        isolates=run.data.isolates,
        on_gpu=on_gpu,
        device_memory=given or (device_memory() if on_gpu else None) or share_of_machine,
        is_elsewhere=arguments.planning.plans_for_others,
        validates=run.data.validation is not None,
    )
