"""Run a prepared run: train, or only evaluate or self-check, and report how it ended."""

import gc
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning import Fabric
from rich.console import Console

from fabric_train import checkpoint as checkpoints
from fabric_train.checkpoint import TokenLoss, TrainerState
from fabric_train.checkpoint.manager import CheckpointManager
from fabric_train.cli.errors import FAILURE, STOPPED, InputError, RunError, first_line
from fabric_train.cli.parser import to_yaml
from fabric_train.data.streaming import Stream
from fabric_train.data.token_mixture import TokenMixture, unpredicted_tokens
from fabric_train.distributed.memory import reuse_freed_memory
from fabric_train.distributed.precision import compute_dtype
from fabric_train.distributed.sharded_parameters import release_parameters
from fabric_train.distributed.signals import Heartbeat, StepPhase, stop_signals
from fabric_train.files.regular_file import check_no_link, check_no_links_in, write_atomically
from fabric_train.pages.markdown import WrittenPage
from fabric_train.training import summary
from fabric_train.training.build_run import build_loop, build_outputs, build_validation, set_up_model, set_up_optimizer
from fabric_train.training.evaluation import Validation
from fabric_train.training.isolation_check import check_isolation
from fabric_train.training.loggers import Logger, Outputs
from fabric_train.training.loop import End, Loop, manual_collection
from fabric_train.training.metrics import Metrics
from fabric_train.training.objective import Objective, objective_of
from fabric_train.training.prepared_run import PreparedRun
from fabric_train.training.reference import compare_with_reference
from fabric_train.training.run_log import log, progress, show, warn, write_log
from fabric_train.training.self_check import check_cuts

ReportWriter = Callable[[Path], WrittenPage | None]
"""Writes the report of a run folder; None if none is wanted."""


def execute(
    fabric: Fabric, run: PreparedRun, heartbeat: Heartbeat, console: Console, write_report: ReportWriter
) -> int:
    """Build the model and train, evaluate or self-check; return the exit code. All ranks call this together.

    ``write_report`` writes the report of a run folder, on rank 0 at the end of training.
    """
    evaluation = run.arguments.evaluation
    run, objective = compare_with_reference(fabric, run, heartbeat), objective_of(run.arguments)
    if not evaluation.only_reads:
        return _train(run, partial(_build, fabric, objective, heartbeat, console), write_report)
    model, decayed = _set_up_model(fabric, run)
    if evaluation.self_check:
        optimizer = set_up_optimizer(fabric, model, decayed, run)
        if fabric.is_global_zero:
            _write_run_folder(run)
        return _self_check(fabric, model, optimizer, objective, run)
    validation = build_validation(fabric, model, run, objective, heartbeat)
    assert validation is not None  # the step plan refuses a dataset without validation rows
    if fabric.is_global_zero:
        _write_run_folder(run)
    return _evaluate(fabric, run, validation, heartbeat)


def _build(
    fabric: Fabric,
    objective: Objective,
    heartbeat: Heartbeat,
    console: Console,
    run: PreparedRun,
    outputs: Outputs | None = None,
) -> Loop:
    """Build the loop of a run; without ``outputs`` it begins in this process, and its loggers too."""
    model, decayed = _set_up_model(fabric, run)
    validation = build_validation(fabric, model, run, objective, heartbeat)
    optimizer = set_up_optimizer(fabric, model, decayed, run)
    # the first files: input that cannot be used has left none
    if fabric.is_global_zero:
        _write_run_folder(run)
    with _failing_while_it_runs():
        if outputs is None:
            write_log(run.folder / "run.log")  # with the lines so far
            progress.info("opening the loggers")
            outputs = build_outputs(fabric, run, objective, console, heartbeat)
        return build_loop(fabric, model, optimizer, objective, run, heartbeat, validation, outputs)


@contextmanager
def _failing_while_it_runs() -> Iterator[None]:
    """Turn wrong input that is found after the run has written files, such as a damaged row, into a failure."""
    try:
        yield
    except InputError as error:
        raise RunError("; ".join(error.faults)) from error


def _set_up_model(fabric: Fabric, run: PreparedRun) -> tuple[Any, set[str]]:
    model, decayed = set_up_model(fabric, run)
    if fabric.device.type == "cpu":
        reuse_freed_memory()  # from here on, so that what loading has freed is returned to the system
    longest_row = run.model.longest_row
    if run.data.isolates and longest_row is not None:
        check_isolation(fabric, model, run.model.source, longest_row, compute_dtype(run.arguments.model.precision))
    return model, decayed


def _write_run_folder(run: PreparedRun) -> None:
    run.folder.mkdir(parents=True, exist_ok=True)
    if not run.arguments.evaluation.only_reads:
        write_atomically(run.folder / "config.yaml", to_yaml(run.user_arguments))
    if isinstance(run.data, Stream):
        check_no_links_in(run.data.tokenizer_folder)
        run.data.save_tokenizer()
    elif isinstance(run.data, TokenMixture) and not run.arguments.evaluation.only_reads:
        run.data.write_manifest()


def _train(run: PreparedRun, build: Callable[..., Loop], write_report: ReportWriter) -> int:
    loop = build(run)
    with _failing_while_it_runs():
        return _train_to_the_end(loop, build, write_report)


def _train_to_the_end(loop: Loop, build: Callable[..., Loop], write_report: ReportWriter) -> int:
    """Train, also the phases that follow with other parts or data, write the report, and return the exit code."""
    run = loop.run
    outputs = loop.outputs
    started = time.monotonic()
    report: list[str] = []
    try:
        stop_signals.defer()
        end = _train_present_parts(loop)
        while _goes_on(loop, end):
            assert end.checkpoint is not None
            loop.stepper.heartbeat.enter(StepPhase.LOADING, step=end.state.step + 1)
            release_parameters(loop.stepper.model)
            del loop
            gc.collect()  # the model and the optimizer, before others are made
            run = run.continued_from(end.checkpoint, end.state)
            log.info(summary.describe_border(run))
            loop = build(run, outputs)
            end = _train_present_parts(loop)
        loop.stepper.heartbeat.enter(StepPhase.ENDING)
        if end.checkpoint:
            outputs.saved(end.checkpoint, is_last=True)
        seconds = time.monotonic() - started
        if not end.stopped_by and run.arguments.logging.report and loop.stepper.fabric.is_global_zero:
            report = _report(loop, write_report)
    finally:
        outputs.close()
    if end.stopped_by:
        log.info(summary.describe_stop(end, run.plan.num_steps))
        return STOPPED
    assert end.checkpoint is not None  # the last step is saved
    if run.early_stopping and run.early_stopping.ends(end.state):
        log.info(run.early_stopping.describe(end.state))
    if loop.stepper.fabric.is_global_zero:
        show(summary.describe_end(end.state, seconds, run, end.checkpoint))
        for line in report:
            log.info("%s", line)
        if displaced := summary.warn_of_displacement(end.state):
            warn(displaced)
    return 0


def _goes_on(loop: Loop, end: End) -> bool:
    """Whether the run goes on with other parts or data."""
    run = loop.run
    is_over = end.stopped_by or (run.early_stopping is not None and run.early_stopping.ends(end.state))
    return not is_over and end.state.step == loop.num_steps < run.plan.num_steps


def _train_present_parts(loop: Loop) -> End:
    """Train to the end of the run, or until other parts of the model train or other data come."""
    log.info(summary.describe_mfu(loop.stepper.flops, loop.peak_flops))
    progress.info("%s%s", loop.stepper.heartbeat, ", compiling" if loop.run.arguments.fsdp.compile is True else "")
    try:
        with manual_collection():
            return loop.train()
    finally:
        loop.checkpoints.close()


def _report(loop: Loop, write_report: ReportWriter) -> list[str]:
    """Write and log the report, and return the lines to print about it. Whatever fails, the run does not."""
    folder = loop.run.folder
    loop.stepper.heartbeat.take_time()  # the other ranks wait
    try:
        written = write_report(folder)
        if written is None:
            return []
        loop.outputs.log_report(written.page, written.markdown.read_text(encoding="utf-8"))
    except Exception as error:  # noqa: BLE001 - a folder, a disk, a library, a bug
        warn(f"no report: {first_line(error)}; later: fabric-train report {folder}")
        return []
    return written.lines


def _evaluate(fabric: Fabric, run: PreparedRun, validation: Validation, heartbeat: Heartbeat) -> int:
    """Write ``RUN/evaluation.json`` and print the result; metrics.csv stays unchanged."""
    path = run.folder / "evaluation.json"
    check_no_link(path)
    progress.info("%s", heartbeat)
    evaluation = validation.evaluate()
    assert evaluation is not None  # a signal ends the process here, since nothing is to be saved
    if fabric.is_global_zero:
        whole = evaluation.whole
        sources = evaluation.sources
        step = checkpoints.read_trainer_json(run.start.checkpoint).state.step if run.start.checkpoint else 0
        content = {"model": run.model.source, "step": step, **_figures(whole)}
        _write_json(path, content | {"sources": {name: _figures(loss) for name, loss in sources.items()}})
        if len(sources) > 1:
            show(summary.describe_evaluation(evaluation))
        result = f"validation loss {whole.loss:.4f}"
        shown = {name: whole.figures().get(name) for name in ("perplexity", "accuracy")}
        result += "".join(f", {name} {value:.3f}" for name, value in shown.items() if value is not None)
        log.info(f"{result} over {whole.num_tokens:,} {whole.unit}s → {path}")
        data = run.data.held_out if isinstance(run.data, Stream) else run.data
        reason = unpredicted_tokens(data.parts, whole.num_tokens) if data and not whole.of_pairs else ""
        if reason and run.arguments.evaluation.eval_iters is None:
            log.info(reason)
    return 0


def _figures(loss: TokenLoss) -> dict[str, float | None]:
    if loss.of_pairs:
        return loss.figures() | {"num_pairs": loss.num_tokens}
    if loss.has_own_unit:
        return loss.figures() | {"loss_sum": loss.nats, "num_tokens": loss.num_tokens}
    return loss.figures() | {"nats": loss.nats, "num_tokens": loss.num_tokens, "num_bytes": loss.num_bytes}


def _self_check(fabric: Fabric, model: Any, optimizer: Any, objective: Objective, run: PreparedRun) -> int:
    """Write ``RUN/self_check.json`` and print the figures; return ``FAILURE`` if they differ."""
    assert not isinstance(run.data, Stream)  # preflight refuses it
    path = run.folder / "self_check.json"
    check_no_link(path)
    progress.info("self check")
    rows = run.plan.window_order(run.arguments.data.seed).rows_of(1).tolist()
    precision = run.arguments.model.precision
    micro_batch_size = run.arguments.training.micro_batch_size
    check = check_cuts(fabric, model, optimizer, objective, run.data.train, rows, micro_batch_size, precision)
    if fabric.is_global_zero:
        _write_json(path, asdict(check))
        show(summary.describe_self_check(check))
        log.info("written %s", path)
    return 0 if check.holds else FAILURE


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(content, indent=2) + "\n")


class NoCheckpoints(CheckpointManager):
    """Checkpoints of a run that only repeats steps: none is written."""

    def save(self, state: TrainerState, *_: Any, **__: Any) -> Path:
        """Return the path that the checkpoint would have."""
        return self.path(state)


def repeat_steps(fabric: Fabric, run: PreparedRun, last_step: int, heartbeat: Heartbeat) -> list[Metrics]:
    """Train to ``last_step`` in a temporary folder of this rank, and return each step's metrics. All ranks call it."""
    run = compare_with_reference(fabric, run, heartbeat)
    model, decayed = _set_up_model(fabric, run)
    if isinstance(run.data, Stream):
        run.data.tokenizer.save(run.data.tokenizer_folder)
    optimizer = set_up_optimizer(fabric, model, decayed, run)
    recorder = _Recorder(last_step)
    outputs = Outputs([recorder], "none")
    objective = objective_of(run.arguments)
    loop = build_loop(fabric, model, optimizer, objective, run, heartbeat, None, outputs, NoCheckpoints)
    progress.info("%s", heartbeat)
    with manual_collection():
        replace(loop, num_steps=last_step).train()
    return recorder.steps


class _Recorder(Logger):
    """Keeps the metrics of each step, and shows its loss."""

    def __init__(self, last_step: int) -> None:
        self._last_step = last_step
        self.steps = list[Metrics]()

    def log(self, metrics: Metrics) -> None:
        progress.info("")
        loss = "none" if metrics.train_loss is None else f"{metrics.train_loss:.6f}"
        log.info("step %d of %d: loss %s", metrics.step, self._last_step, loss)
        self.steps.append(metrics)
