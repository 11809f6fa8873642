"""Run a prepared run: train, or only evaluate or self-check, and report how it ended."""

import gc
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from lightning import Fabric
from lightning.fabric.wrappers import _FabricModule, _FabricOptimizer
from rich.console import Console

from fabric_train.checkpoint import TokenLoss, read_trainer_json
from fabric_train.cli.errors import FAILURE, STOPPED, InputError, RunError, first_line
from fabric_train.cli.parser import to_yaml
from fabric_train.data.streaming import Stream
from fabric_train.data.token_dataset import TokenDataset
from fabric_train.data.token_mixture import TokenMixture, unpredicted_tokens
from fabric_train.distributed.memory import reuse_freed_memory
from fabric_train.distributed.precision import compute_dtype
from fabric_train.distributed.sharded_parameters import release_parameters
from fabric_train.distributed.signals import Heartbeat, StepPhase, stop_signals
from fabric_train.files.regular_file import check_no_link, check_no_links_in, write_atomically
from fabric_train.pages.markdown import WrittenPage
from fabric_train.rollouts.prompts import Prompts
from fabric_train.training import summary
from fabric_train.training.build_run import build_loop, build_outputs, build_validation, set_up_model, set_up_optimizer
from fabric_train.training.evaluation import Validation
from fabric_train.training.isolation_check import check_isolation
from fabric_train.training.logger import Outputs
from fabric_train.training.loop import End, Loop, manual_collection
from fabric_train.training.objective import Objective, build_objective, connect_objective
from fabric_train.training.prepared_run import PreparedRun
from fabric_train.training.reference import compare_with_reference
from fabric_train.training.run_log import log, progress, show, warn, write_log
from fabric_train.training.self_check import check_splits

ReportWriter = Callable[[Path], WrittenPage | None]
"""A function that writes the report of a run folder; None if no report is wanted."""


def execute(
    fabric: Fabric, run: PreparedRun, heartbeat: Heartbeat, console: Console, write_report: ReportWriter
) -> int:
    """Build the model and train, evaluate or self-check; return the exit code. All ranks call this together.

    ``write_report`` writes the report of a run folder, on rank 0 at the end of training.
    """
    evaluation = run.arguments.evaluation
    run = compare_with_reference(fabric, run, heartbeat)
    objective = build_objective(run.arguments)
    run = connect_objective(objective, fabric, run)
    if not evaluation.only_reads:
        build = partial(_build_loop, fabric, objective, heartbeat, console)
        return _train(run, build, write_report)

    model, decayed_names = set_up_checked_model(fabric, run)
    if evaluation.self_check:
        optimizer = set_up_optimizer(fabric, model, decayed_names, run)
        if fabric.is_global_zero:
            _write_run_folder(run)
        return _self_check(fabric, model, optimizer, objective, run)

    validation = build_validation(fabric, model, run, objective, heartbeat)
    assert validation is not None  # the step plan refuses a dataset without validation rows
    if fabric.is_global_zero:
        _write_run_folder(run)
    return _evaluate(fabric, run, validation, heartbeat)


def _build_loop(
    fabric: Fabric,
    objective: Objective,
    heartbeat: Heartbeat,
    console: Console,
    run: PreparedRun,
    outputs: Outputs | None = None,
) -> Loop:
    """Build the loop of a run; without ``outputs`` the run begins in this process, and its loggers are opened."""
    model, decayed_names = set_up_checked_model(fabric, run)
    validation = build_validation(fabric, model, run, objective, heartbeat)
    optimizer = set_up_optimizer(fabric, model, decayed_names, run)
    # The first files are written here, so that input which cannot be used has left none.
    if fabric.is_global_zero:
        _write_run_folder(run)
    with _input_errors_as_failures():
        if outputs is None:
            write_log(run.folder / "run.log")  # with the lines so far
            progress.info("opening the loggers")
            outputs = build_outputs(fabric, run, objective, console, heartbeat)
        return build_loop(
            fabric, model, optimizer, objective, run, heartbeat=heartbeat, validation=validation, outputs=outputs
        )


@contextmanager
def _input_errors_as_failures() -> Iterator[None]:
    """Turn invalid input that is found after the run has written files, such as a damaged row, into a failure."""
    try:
        yield
    except InputError as error:
        raise RunError("; ".join(error.faults)) from error


def set_up_checked_model(fabric: Fabric, run: PreparedRun) -> tuple[_FabricModule, set[str]]:
    """Set up the model and check that it keeps documents apart if it must; also return the names with weight decay."""
    model, decayed_names = set_up_model(fabric, run)
    if fabric.device.type == "cpu":
        reuse_freed_memory()  # from here on: what loading has freed goes back to the system first
    longest_row = run.model.longest_row
    if run.data.isolates and longest_row is not None:
        dtype = compute_dtype(run.arguments.model.precision)
        check_isolation(fabric, model, run.model.source, longest_row, dtype)
    return model, decayed_names


def _write_run_folder(run: PreparedRun) -> None:
    run.folder.mkdir(parents=True, exist_ok=True)
    if not run.arguments.evaluation.only_reads:
        write_atomically(run.folder / "config.yaml", to_yaml(run.user_arguments))
    if isinstance(run.data, Stream | Prompts):
        check_no_links_in(run.data.tokenizer_folder)
        run.data.save_tokenizer()
    elif isinstance(run.data, TokenMixture) and not run.arguments.evaluation.only_reads:
        run.data.write_manifest()


def _train(run: PreparedRun, build: Callable[..., Loop], write_report: ReportWriter) -> int:
    """Train, including phases with other parts or data, write the report, and return the exit code."""
    # The only reference to the loop, in this function and its callers: the model of a phase is freed with it.
    loop = build(run)
    outputs = loop.outputs
    started = time.monotonic()
    report_lines: list[str] = []
    with _input_errors_as_failures():
        try:
            # From here on a signal does not end the process: the run stops at the next micro-batch and saves.
            stop_signals.defer()
            end = _train_loop(loop)

            # Phases with other parts of the model, or other token datasets: build the model and the optimizer again.
            while _has_next_phase(loop, end):
                assert end.checkpoint is not None
                loop.stepper.heartbeat.enter(StepPhase.LOADING, step=end.state.step + 1)
                release_parameters(loop.stepper.model)
                del loop
                gc.collect()  # frees the model and the optimizer before others are built
                run = run.continued_from(read_trainer_json(end.checkpoint), end.state)
                log.info(summary.describe_border(run))
                loop = build(run, outputs)
                end = _train_loop(loop)

            # The last uploads, and the report.
            loop.stepper.heartbeat.enter(StepPhase.ENDING)
            if end.checkpoint:
                outputs.saved(end.checkpoint, is_last=True)
            seconds = time.monotonic() - started
            is_rank_0 = loop.stepper.fabric.is_global_zero
            if not end.stopped_by and run.arguments.logging.report and is_rank_0:
                report_lines = _write_report(loop, write_report)
        finally:
            outputs.close()

    # What the user reads at the end.
    if end.stopped_by:
        log.info(summary.describe_stop(end, run.plan.num_steps))
        return STOPPED
    assert end.checkpoint is not None  # the last step is saved
    if run.early_stopping and run.early_stopping.ends(end.state):
        log.info(run.early_stopping.describe(end.state))
    if is_rank_0:
        show(summary.describe_end(end.state, seconds, run, end.checkpoint))
        for line in report_lines:
            log.info("%s", line)
        warning = summary.warn_of_displacement(end.state)
        if warning:
            warn(warning)
    return 0


def _has_next_phase(loop: Loop, end: End) -> bool:
    """Return whether the run continues with other parts or data."""
    run = loop.run
    if end.stopped_by:
        return False
    if run.early_stopping is not None and run.early_stopping.ends(end.state):
        return False
    return end.state.step == loop.num_steps < run.plan.num_steps


def _train_loop(loop: Loop) -> End:
    """Train to the end of the run, or until other parts of the model train or other data are read."""
    log.info(summary.describe_mfu(loop.stepper.flops, loop.peak_flops))
    compiles = loop.run.arguments.fsdp.compile is True
    progress.info("%s%s", loop.stepper.heartbeat, ", compiling" if compiles else "")
    try:
        with manual_collection():
            return loop.train()
    finally:
        if loop.validation is not None:
            loop.validation.close()
        loop.checkpoints.close()


def _write_report(loop: Loop, write_report: ReportWriter) -> list[str]:
    """Write and log the report, and return the lines to print about it. A failure does not fail the run."""
    run_dir = loop.run.folder
    loop.stepper.heartbeat.take_time()  # the other ranks wait
    try:
        report = write_report(run_dir)
        if report is None:
            return []
        loop.outputs.log_report(report.page, report.markdown.read_text(encoding="utf-8"))
    except Exception as error:  # noqa: BLE001 - a folder, a disk, a library, a bug
        warn(f"no report: {first_line(error)}; write it later with fabric-train report {run_dir}")
        return []
    return report.lines


def _evaluate(fabric: Fabric, run: PreparedRun, validation: Validation, heartbeat: Heartbeat) -> int:
    """Write ``RUN/evaluation.json`` and print the result; metrics.csv stays unchanged."""
    path = run.folder / "evaluation.json"
    check_no_link(path)
    progress.info("%s", heartbeat)
    evaluation = validation.evaluate()
    assert evaluation is not None  # a signal ends the process here, since nothing is to be saved
    if not fabric.is_global_zero:
        return 0

    # Write the file.
    whole = evaluation.whole
    sources = evaluation.sources
    step = 0
    if run.start.saved:
        step = run.start.saved.state.step
    content = {"model": run.model.source, "step": step, **_loss_figures(whole)}
    content["sources"] = {name: _loss_figures(loss) for name, loss in sources.items()}
    _write_json(path, content)

    # Print the result.
    if len(sources) > 1:
        show(summary.describe_evaluation(evaluation))
    result = f"validation loss {whole.loss:.4f}"
    figures = whole.figures()
    for name in ("perplexity", "accuracy", "cross_entropy", "agreement"):
        value = figures.get(name)
        if value is not None:
            result += f", {name.replace('_', ' ')} {value:.3f}"
    log.info(f"{result} over {whole.num_tokens:,} {whole.unit}s → {path}")

    # Say why fewer tokens are predicted than the split has, if all of it was evaluated.
    data = run.data.held_out if isinstance(run.data, Stream) else run.data
    if data and not whole.of_pairs and run.arguments.evaluation.eval_iters is None:
        reason = unpredicted_tokens(data.parts, whole.num_tokens)
        if reason:
            log.info(reason)
    return 0


def _loss_figures(loss: TokenLoss) -> dict[str, Any]:
    """Return the figures of a loss for evaluation.json."""
    figures: dict[str, Any] = loss.figures()
    if loss.of_pairs:
        return figures | {f"num_{loss.unit}s": loss.num_tokens}
    if loss.has_own_unit:
        return figures | {"loss_sum": loss.nats, "num_tokens": loss.num_tokens}
    return figures | {"nats": loss.nats, "num_tokens": loss.num_tokens, "num_bytes": loss.num_bytes}


def _self_check(
    fabric: Fabric, model: _FabricModule, optimizer: _FabricOptimizer, objective: Objective, run: PreparedRun
) -> int:
    """Write ``RUN/self_check.json`` and print the figures; return ``FAILURE`` if they differ."""
    assert isinstance(run.data, TokenDataset | TokenMixture)  # preflight refuses others
    path = run.folder / "self_check.json"
    check_no_link(path)
    progress.info("self check")
    first_window = run.plan.window_order(run.arguments.data.seed).rows_of(1).tolist()
    precision = run.arguments.model.precision
    micro_batch_size = run.arguments.training.micro_batch_size
    check = check_splits(
        fabric,
        model,
        optimizer,
        objective,
        rows=run.data.train,
        indices=first_window,
        micro_batch_size=micro_batch_size,
        precision=precision,
    )
    if fabric.is_global_zero:
        _write_json(path, asdict(check))
        show(summary.describe_self_check(check))
        log.info("written %s", path)
    return 0 if check.holds else FAILURE


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(content, indent=2) + "\n")
