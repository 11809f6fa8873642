"""``fabric run fabric_train --devices N …`` (or ``python -m fabric_train …``): token dataset and model → checkpoints.

What can be refused is refused before any process group exists; then every rank builds the same run and enters the loop.
"""

import json
import logging
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

# ``fabric run`` puts this package's own folder first on the path, where its modules would shadow others of their name
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]

from fabric_train.ranks.signals import STOPPED, describe, stop_signals  # noqa: E402

if __name__ == "__main__":
    stop_signals.listen()  # before the imports that follow, which take seconds

from lightning import Fabric  # noqa: E402
from rich.console import Console  # noqa: E402

from arguments import TrainArguments, parse  # noqa: E402
from fabric_train import checkpoint as checkpoints  # noqa: E402
from fabric_train import parallel, summary  # noqa: E402
from fabric_train.attention import refuse_leaking  # noqa: E402
from fabric_train.batches import (  # noqa: E402
    TokenDataset,
    TrainBatches,
    WindowSource,
    validation_batches,
)
from fabric_train.budget.fitting import faults_of, faults_without_trace  # noqa: E402
from fabric_train.budget.forecast import Wanted  # noqa: E402
from fabric_train.budget.report import report  # noqa: E402
from fabric_train.budget.resources import device_memory, machine_memory  # noqa: E402
from fabric_train.command_line import flatten, to_yaml  # noqa: E402
from fabric_train.compilation import MOST_SHAPES  # noqa: E402
from fabric_train.complete_folder import write_at_once  # noqa: E402
from fabric_train.data_ranks import data_ranks  # noqa: E402
from fabric_train.errors import FAILURE, InputError, first_line, run_program  # noqa: E402
from fabric_train.from_scratch import open_new  # noqa: E402
from fabric_train.garbage import collected_by_hand  # noqa: E402
from fabric_train.host_memory import keep_freed_memory  # noqa: E402
from fabric_train.launch import global_rank  # noqa: E402
from fabric_train.loading import Unread, open_checkpoint, open_pretrained  # noqa: E402
from fabric_train.lock import hold_lock, refuse_if_held  # noqa: E402
from fabric_train.loop import Run, train  # noqa: E402
from fabric_train.optimizer import build_optimizer, decayed_names  # noqa: E402
from fabric_train.own_part import flat_cuts  # noqa: E402
from fabric_train.preparation import PACKAGES, Prepared, prepare, window_order  # noqa: E402
from fabric_train.profiling import ProfiledWindows  # noqa: E402
from fabric_train.ranks.progress import Phase, Progress  # noqa: E402
from fabric_train.ranks.step_border import Border, agree  # noqa: E402
from fabric_train.ranks.watchdog import watch_ranks  # noqa: E402
from fabric_train.self_check import check_cuts  # noqa: E402
from fabric_train.sizes import parse_size  # noqa: E402
from fabric_train.step_guard import StepGuard  # noqa: E402
from fabric_train.stream import LaneOrder, Stream, StreamBatches  # noqa: E402
from fabric_train.telemetry import ProgressLine  # noqa: E402
from fabric_train.trackers import Outputs, open_loggers, tell_wandb_the_rest  # noqa: E402
from fabric_train.untrained_tokens import note_on_end_of_turn  # noqa: E402
from fabric_train.validation import Evaluation, evaluate  # noqa: E402


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
    idle = parallel.unused_gpus(arguments.device.devices, parallel.resolve_accelerator(arguments.device.accelerator))
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
        fabric = parallel.build_fabric(arguments, prepared.shape.layer_classes)
        progress = Progress()
        with watch_ranks(fabric, progress, arguments.device.rank_timeout, arguments.device.num_nodes):
            code = _run(fabric, _checked(fabric, prepared, console), progress, console)
            progress.at(Phase.ENDING)
            stop_signals.ignore()
            parallel.leave_process_group(fabric)
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
    model, decayed = _set_up_model(fabric, prepared, console)
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
    validate = _validation(fabric, model, prepared, progress)
    if arguments.evaluation.eval_only:
        evaluation = validate() if validate else None
        assert evaluation is not None  # the plan has refused a dataset without validation rows
        _report(evaluation, prepared, fabric, console)
        return 0
    fused = arguments.model.precision != "16-mixed"
    named = parallel.named_parameters(model)
    cuts = flat_cuts(model)
    optimizer = fabric.setup_optimizers(
        build_optimizer(named, decayed, arguments.training, fused, arguments.data.seed, cuts)
    )
    if arguments.evaluation.self_check:
        return _self_check(fabric, model, optimizer, prepared, console)
    if prepared.checkpoint and prepared.state.step:
        checkpoints.restore_optimizer(prepared.checkpoint, fabric, model, optimizer)
    is_stopped = _train(fabric, model, optimizer, validate, prepared, progress, console)
    return STOPPED if is_stopped else 0


def _set_up_model(fabric: Fabric, prepared: Prepared, console: Console) -> tuple[Any, set[str]]:
    """Return the model with its weights, and the names of its parameters with weight decay.

    When it returns, nothing holds the files of the weights, whose pages would count as this process's memory.
    """
    arguments = prepared.arguments
    unread = _open(prepared)
    if fabric.is_global_zero and isinstance(prepared.data, TokenDataset):
        note = note_on_end_of_turn(unread, prepared.data)
        if note:
            _note(console, note)
    decayed = decayed_names(unread.model)
    any_length = arguments.evaluation.self_check or len(_row_lengths(prepared)) > MOST_SHAPES
    model = parallel.setup_model(
        fabric, unread.model, prepared.shape.layer_classes, arguments, unread.weights, any_length
    )
    return model, decayed


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


def _open(prepared: Prepared) -> Unread:
    dtype = parallel.weights_dtype(prepared.arguments.model.precision)
    if prepared.checkpoint:
        return open_checkpoint(prepared.shape, prepared.checkpoint, dtype)
    if prepared.shape.is_new:
        return open_new(prepared.shape, dtype, prepared.arguments.data.seed)
    return open_pretrained(prepared.shape, dtype)


def _row_lengths(prepared: Prepared) -> set[int]:
    """The different numbers of tokens in the rows that the model will see."""
    data = prepared.data
    trained = {data.max_length} if isinstance(data, Stream) else data.train.lengths()
    return trained | (data.validation.lengths() if data.validation else set())


def _validation(
    fabric: Fabric, model: Any, prepared: Prepared, progress: Progress
) -> Callable[[], Evaluation | None] | None:
    """Return what evaluates the model on this rank's share of the validation split, or None where a signal came."""
    rows, limits = prepared.data.validation, prepared.arguments.evaluation
    if rows is None:
        return None
    ranks = data_ranks(fabric)
    batches = validation_batches(
        rows,
        limits.eval_batch_size,
        ranks.size,
        ranks.rank,
        limits.eval_iters,
        prepared.arguments.data.num_workers,
    )

    def is_left(batch: int) -> bool:
        progress.at(Phase.VALIDATION, batch)
        return agree(fabric, Border(stops=stop_signals.received)).stops > 0

    return lambda: evaluate(fabric, model, batches, is_left=is_left)


def _description(prepared: Prepared) -> checkpoints.Description:
    arguments = prepared.arguments
    return checkpoints.Description(
        state_dict_type=arguments.fsdp.state_dict_type,
        weights_dtype=str(parallel.weights_dtype(arguments.model.precision)).removeprefix("torch."),
        data=prepared.order,
        arguments=flatten(arguments) | {"gradient_accumulation_steps": prepared.plan.accumulation},
        versions={name: version(name) for name in PACKAGES},
        attachments=prepared.data.attachments,
    )


def _train(
    fabric: Fabric,
    model: Any,
    optimizer: Any,
    validate: Callable[[], Evaluation | None] | None,
    prepared: Prepared,
    progress: Progress,
    console: Console,
) -> bool:
    """Train and say how it ended; return whether a signal has stopped it."""
    plan, state = prepared.plan, prepared.state
    outputs = _outputs(fabric, prepared, console)

    def warn(line: str) -> None:
        console.print(f"warning: {line}", style="yellow", highlight=False, soft_wrap=True)

    def saved(path: Path) -> None:
        console.print(f"saved {path}", highlight=False, soft_wrap=True)
        outputs.saved(path)

    saves = checkpoints.Checkpoints(
        prepared.folder / "checkpoints",
        fabric,
        model,
        optimizer,
        _description(prepared),
        prepared.arguments.save.keep_checkpoints,
        prepared.arguments.save.async_save,
        saved,
    )
    data = prepared.data
    peak_flops = parallel.peak_flops(fabric, prepared.arguments.model.precision)
    console.print(summary.of_meters(prepared.shape.flops, peak_flops), style="dim", highlight=False, soft_wrap=True)
    run = Run(
        fabric=fabric,
        model=model,
        optimizer=optimizer,
        batches=_batches(fabric, prepared),
        num_steps=plan.num_steps,
        start=prepared.checkpoint if state.step else None,
        checkpoints=saves,
        guard=StepGuard(fabric, f"{data.folder / 'train'}" if isinstance(data, TokenDataset) else "the stream", warn),
        evaluate=validate,
        log=outputs.log,
        flush=outputs.flush,
        warn=warn,
        progress=progress,
        flops=prepared.shape.flops,
        peak_flops=peak_flops,
    )
    started = time.monotonic()
    try:
        stop_signals.save_first()
        with collected_by_hand():
            end = train(run, prepared.arguments, state)
        newest = saves.path(end.state)
        outputs.ended(newest)
    finally:
        saves.close()
        outputs.close()
    if end.stopped_by:
        line = (
            f"stopped by {describe(end.stopped_by)} after step {end.state.step} of {plan.num_steps}, saved in {newest}"
        )
        console.print(f"{line}: go on with --resume true", highlight=False, soft_wrap=True)
        return True
    seconds = time.monotonic() - started
    trained = end.state.num_tokens - state.num_tokens
    console.print(summary.after(end.state, seconds, trained, prepared.folder, newest))
    return False


def _outputs(fabric: Fabric, prepared: Prepared, console: Console) -> Outputs:
    """Return where the metrics go: on rank 0 the progress line and the loggers, elsewhere nowhere."""
    given, state = prepared.arguments.logging, prepared.state
    if not fabric.is_global_zero:
        return Outputs([], given.log_model)
    logged = state.step - bool(state.unlogged)
    config = flatten(prepared.arguments)
    loggers = open_loggers(given.loggers, prepared.folder, logged, given.project, given.entity, config)
    return Outputs([*loggers, ProgressLine(state.step, prepared.plan.num_steps, console)], given.log_model)


def _batches(fabric: Fabric, prepared: Prepared) -> WindowSource:
    """Return where this rank's windows come from, some of them traced."""
    given, on_gpu = prepared.arguments.logging, fabric.device.type == "cuda"
    batches = _untraced_batches(fabric, prepared)
    if given.profiled_steps is None or (given.profile_ranks == "first" and fabric.global_rank):
        return batches
    folder = prepared.folder / "profile"
    return ProfiledWindows(batches, *given.profiled_steps, folder, fabric.global_rank, on_gpu=on_gpu)


def _untraced_batches(fabric: Fabric, prepared: Prepared) -> WindowSource:
    arguments, plan, data = prepared.arguments, prepared.plan, prepared.data
    num_workers, pins, ranks = arguments.data.num_workers, fabric.device.type == "cuda", data_ranks(fabric)
    if isinstance(data, TokenDataset):
        order = window_order(data, plan, arguments, ranks.rank)
        return TrainBatches(data.train, order, num_workers, pin_memory=pins)
    fabric.barrier()  # rank 0 has written the tokenizer
    return StreamBatches(
        read=data.texts.read,
        encode=data.open_encoder(),
        max_length=data.max_length,
        isolates=data.isolates,
        order=LaneOrder(plan.rows_per_window, arguments.training.micro_batch_size, ranks.size, ranks.rank),
        stands=checkpoints.read_stands(prepared.checkpoint) if prepared.checkpoint and prepared.state.step else None,
        num_workers=num_workers,
        pin_memory=pins,
    )


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
