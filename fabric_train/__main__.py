"""``fabric run fabric_train --devices N …`` (or ``python -m fabric_train …``): token dataset and model → checkpoints.

What can be refused is refused before any process group exists; then every rank builds the same run and enters the loop.
"""

import json
import logging
import sys
import time
import warnings
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

# ``fabric run`` puts this package's own folder first on the path, where its modules would shadow others of their name
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]

from fabric_train.distributed.signals import STOPPED, describe, stop_signals  # noqa: E402

if __name__ == "__main__":
    stop_signals.listen()  # before the imports that follow, which take seconds

from lightning import Fabric  # noqa: E402
from rich.console import Console  # noqa: E402

from arguments import TrainArguments, parse  # noqa: E402
from fabric_train import checkpoint as checkpoints  # noqa: E402
from fabric_train.cli.errors import FAILURE, InputError, first_line, run_program  # noqa: E402
from fabric_train.cli.launcher import global_rank  # noqa: E402
from fabric_train.cli.parser import flatten, to_yaml  # noqa: E402
from fabric_train.data.streaming import Stream  # noqa: E402
from fabric_train.data.token_dataset import TokenDataset  # noqa: E402
from fabric_train.distributed.devices import resolve_accelerator, unused_gpus  # noqa: E402
from fabric_train.distributed.heartbeat import Phase, Progress  # noqa: E402
from fabric_train.distributed.host_memory import keep_freed_memory  # noqa: E402
from fabric_train.distributed.rendezvous import leave_process_group  # noqa: E402
from fabric_train.distributed.strategy import build_fabric  # noqa: E402
from fabric_train.distributed.watchdog import watch_ranks  # noqa: E402
from fabric_train.files.atomic_folder import write_at_once  # noqa: E402
from fabric_train.files.lock import hold_lock, refuse_if_held  # noqa: E402
from fabric_train.files.sizes import parse_size  # noqa: E402
from fabric_train.model.attention import refuse_leaking  # noqa: E402
from fabric_train.preflight.memory.fitting import faults_of, faults_without_trace  # noqa: E402
from fabric_train.preflight.memory.forecast import Wanted  # noqa: E402
from fabric_train.preflight.memory.plan_tables import report  # noqa: E402
from fabric_train.preflight.memory.resources import device_memory, machine_memory  # noqa: E402
from fabric_train.preflight.prepare import Prepared, prepare, window_order  # noqa: E402
from fabric_train.training import summary  # noqa: E402
from fabric_train.training.build_run import (  # noqa: E402
    Validate,
    build_outputs,
    build_run,
    build_validation,
    set_up_model,
    set_up_optimizer,
)
from fabric_train.training.evaluation import Evaluation  # noqa: E402
from fabric_train.training.gc_control import collected_by_hand  # noqa: E402
from fabric_train.training.loggers import tell_wandb_the_rest  # noqa: E402
from fabric_train.training.loop import train  # noqa: E402
from fabric_train.training.self_check import check_cuts  # noqa: E402


def main(argv: list[str] | None = None) -> None:
    """Train, or evaluate with ``--eval_only``.

    Raises:
        InputError: for whatever the user can mend.
        SystemExit: ``STOPPED``, where a signal has stopped the run.
    """
    stop_signals.listen()
    _quiet()
    console = Console(quiet=global_rank() != 0)
    arguments = parse(TrainArguments, argv)
    writes = global_rank() == 0 and not arguments.evaluation.only_reads
    lock = _lock(Path(arguments.save.output_dir))
    if writes:
        refuse_if_held(*lock)
    prepared = prepare(arguments)
    if arguments.planning.plan:
        _plan(prepared, console)
        return
    plan = prepared.plan
    start = (
        f"{prepared.checkpoint}, step {prepared.state.step}"
        if prepared.checkpoint
        else f"{'random' if prepared.shape.is_new else 'the pretrained'} weights, step 0"
    )
    console.print(summary.before(arguments, prepared.shape, plan, prepared.parallelism, start))
    idle = unused_gpus(arguments.device.devices, resolve_accelerator(arguments.device.accelerator))
    for note in (*prepared.notes, *([idle] if idle else [])):
        _note(console, note)
    if prepared.state.step >= plan.num_steps and not prepared.state.unlogged:
        console.print(f"step {prepared.state.step} of {plan.num_steps}: nothing is left to train")
        if "wandb" in arguments.logging.loggers and global_rank() == 0:
            given = arguments.logging
            tell_wandb_the_rest(prepared.folder, prepared.state.step, given.project, given.entity, flatten(arguments))
        return

    if not arguments.evaluation.only_reads:
        _refuse_what_does_not_fit(prepared)
    with hold_lock(*lock) if writes else nullcontext():
        fabric = build_fabric(arguments, prepared.shape.layer_classes)
        progress = Progress()
        with watch_ranks(fabric, progress, arguments.device.rank_timeout, arguments.device.num_nodes):
            code = _run(fabric, _checked(fabric, prepared, console), progress, console)
            progress.at(Phase.ENDING)
            stop_signals.ignore()
            leave_process_group(fabric)
    if code:
        raise SystemExit(code)


def _plan(prepared: Prepared, console: Console) -> None:
    """Print what the run will take.

    Raises:
        InputError: it does not fit, or the model cannot be traced.
    """
    wanted, given = _wanted(prepared), prepared.arguments.planning
    try:
        forecast = wanted.forecast()
    except RuntimeError as error:
        reason = f"its activations cannot be traced ({first_line(error).rstrip('.')})"
        raise InputError(f"--plan true: {prepared.shape.source}: {reason}; leave --plan out") from error
    lines = [float(size) if (size := parse_size(line or "")) else None for line in (given.interconnect, given.network)]
    console.print(report(forecast, prepared.plan, wanted.num_checkpoints(), wanted.device_memory, *lines))
    for note in prepared.notes:
        _note(console, note)
    faults = faults_of(wanted, forecast)
    if faults:
        raise InputError(*faults)
    console.print("it fits", style="bold green")


def _refuse_what_does_not_fit(prepared: Prepared) -> None:
    """Raise InputError where the run is seen at once to end for lack of memory or disk."""
    faults = faults_without_trace(_wanted(prepared))
    if faults:
        raise InputError(*faults)


def _wanted(prepared: Prepared) -> Wanted:
    arguments, on_gpu = prepared.arguments, prepared.accelerator == "cuda"
    given = parse_size(arguments.planning.device_memory or "")
    of_rank = machine_memory() // (prepared.plan.world_size // arguments.device.num_nodes)
    return Wanted(
        arguments=arguments,
        shape=prepared.shape,
        plan=prepared.plan,
        parallelism=prepared.parallelism,
        isolates=prepared.data.isolates,
        on_gpu=on_gpu,
        device_memory=given or (device_memory() if on_gpu else None) or of_rank,
        is_elsewhere=arguments.planning.plans_for_others,
    )


def _lock(folder: Path) -> tuple[Path, str, str]:
    """Return the arguments of what sees to it that one run at a time writes into a folder."""
    taken = f"--output_dir {folder}: another run is writing into it"
    return folder / ".lock", taken, "wait for it, stop it, or give another --output_dir"


def _checked(fabric: Fabric, prepared: Prepared, console: Console) -> Prepared:
    """Return the run from a checkpoint whose content has been checked by all ranks: the one before, where the newest is
    damaged.

    Raises:
        InputError: the checkpoint that the user has named is damaged, or there is no other.
    """
    damages: dict[Path, str] = {}
    while prepared.checkpoint and (damage := checkpoints.wrong_content(prepared.checkpoint, fabric)):
        damages[prepared.checkpoint.resolve()] = damage
        prepared = prepare(prepared.arguments, damages)
        for note in prepared.notes:
            _note(console, note)
    return prepared


def _run(fabric: Fabric, prepared: Prepared, progress: Progress, console: Console) -> int:
    """Build what the loop drives and train, or evaluate or check alone; return the exit code."""
    arguments = prepared.arguments
    model, decayed = set_up_model(fabric, prepared, partial(_note, console))
    if fabric.device.type == "cpu":
        keep_freed_memory()  # from here on: what loading has freed goes back
    if prepared.data.isolates:
        refuse_leaking(fabric, model, prepared.shape.source)
    if fabric.is_global_zero:
        prepared.folder.mkdir(parents=True, exist_ok=True)
        if not arguments.evaluation.only_reads:
            write_at_once(prepared.folder / "config.yaml", to_yaml(arguments))
        if isinstance(prepared.data, Stream):
            prepared.data.tokenizer.save(prepared.data.tokenizer_folder)
    validate = build_validation(fabric, model, prepared, progress)
    if arguments.evaluation.eval_only:
        evaluation = validate() if validate else None
        assert evaluation is not None  # the plan has refused a dataset without validation rows
        _report(evaluation, prepared, fabric, console)
        return 0
    optimizer = set_up_optimizer(fabric, model, decayed, prepared)
    if arguments.evaluation.self_check:
        return _self_check(fabric, model, optimizer, prepared, console)
    is_stopped = _train(fabric, model, optimizer, validate, prepared, progress, console)
    return STOPPED if is_stopped else 0


def _self_check(fabric: Fabric, model: Any, optimizer: Any, prepared: Prepared, console: Console) -> int:
    assert isinstance(prepared.data, TokenDataset)  # streams have been refused
    arguments, order = prepared.arguments, window_order(prepared.data, prepared.plan, prepared.arguments)
    rows = order.rows_in(epoch=0, window=0).tolist()
    precision, micro_batch_size = arguments.model.precision, arguments.training.micro_batch_size
    check = check_cuts(fabric, model, optimizer, prepared.data.train, rows, micro_batch_size, precision)
    if fabric.is_global_zero:
        path = prepared.folder / "self_check.json"
        path.write_text(json.dumps(asdict(check), indent=2) + "\n", encoding="utf-8")
        console.print(summary.of_self_check(check))
        console.print(f"written {path}", highlight=False, soft_wrap=True)
    return 0 if check.holds else FAILURE


def _note(console: Console, note: str) -> None:
    console.print(f"note: {note}", style="yellow", highlight=False, soft_wrap=True)


def _train(
    fabric: Fabric,
    model: Any,
    optimizer: Any,
    validate: Validate | None,
    prepared: Prepared,
    progress: Progress,
    console: Console,
) -> bool:
    """Train and say how it ended; return whether a signal has stopped it."""
    outputs = build_outputs(fabric, prepared, console)

    def warn(line: str) -> None:
        console.print(f"warning: {line}", style="yellow", highlight=False, soft_wrap=True)

    def saved(path: Path) -> None:
        console.print(f"saved {path}", highlight=False, soft_wrap=True)
        outputs.saved(path)

    run = build_run(fabric, model, optimizer, validate, prepared, progress, outputs, warn, saved)
    console.print(summary.of_meters(run.flops, run.peak_flops), style="dim", highlight=False, soft_wrap=True)
    started = time.monotonic()
    try:
        stop_signals.save_first()
        with collected_by_hand():
            end = train(run, prepared.arguments, prepared.state)
        newest = run.checkpoints.path(end.state)
        outputs.ended(newest)
    finally:
        run.checkpoints.close()
        outputs.close()
    if end.stopped_by:
        where = f"after step {end.state.step} of {run.num_steps}, saved in {newest}"
        line = f"stopped by {describe(end.stopped_by)} {where}: go on with --resume true"
        console.print(line, highlight=False, soft_wrap=True)
        return True
    seconds = time.monotonic() - started
    trained = end.state.num_tokens - prepared.state.num_tokens
    console.print(summary.after(end.state, seconds, trained, prepared.folder, newest))
    return False


def _report(evaluation: Evaluation, prepared: Prepared, fabric: Fabric, console: Console) -> None:
    """Print the evaluation and write it to ``RUN/evaluation.json``; a run's metrics.csv stays as it is."""
    if fabric.is_global_zero:
        content = {
            "model": prepared.shape.source,
            "step": checkpoints.read_trainer_state(prepared.checkpoint).step if prepared.checkpoint else 0,
            **asdict(evaluation),
            "perplexity": evaluation.perplexity,
        }
        path = prepared.folder / "evaluation.json"
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        result = f"validation loss {evaluation.loss:.4f}, perplexity {evaluation.perplexity:.3f}"
        console.print(f"{result} over {evaluation.num_tokens:,} tokens → {path}", highlight=False, soft_wrap=True)


def _quiet() -> None:
    """Drop what the libraries say on every rank about things that are as they should be."""
    for name in ("lightning.fabric", "lightning.pytorch", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*FSDP.state_dict_type.*")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.*")
    warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed.*")


if __name__ == "__main__":
    run_program(main)
