"""Describe a run in tables: before it starts, at its end, and after a self-check."""

import shlex
from bisect import bisect_left
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from fabric_train import checkpoint as checkpoints
from fabric_train.checkpoint import Evaluation, TokenLoss, TrainerState, perplexity
from fabric_train.cli.argument_types import REWARD, counted
from fabric_train.cli.commands import command_from_here
from fabric_train.cli.errors import InputError
from fabric_train.distributed.signals import describe_signal
from fabric_train.model.flops import ModelFlops
from fabric_train.model.hf_model import ModelShape
from fabric_train.optim.learning_rate import Schedule, decay_form, num_decay_steps
from fabric_train.training.data_tables import describe_mixture, describe_phases, describe_stream
from fabric_train.training.loggers import describe_loggers
from fabric_train.training.objective import Objective, counts_answers, counts_pieces
from fabric_train.training.prepared_run import PreparedRun
from fabric_train.training.run_times import read_times
from fabric_train.training.statistics import accuracy_interval
from fabric_train.training.step_plan import StepPlan
from fabric_train.training.tables import facts_table, figures_table

if TYPE_CHECKING:
    from fabric_train.training.loop import End
    from fabric_train.training.self_check import SelfCheck


DISPLACED_NATS = 0.1
"""The fall of the chosen answers' log-probability per token that gives a warning: a tenth of each token's
probability."""
_PAIR_FIGURES = ["loss", "accuracy", "margin", "reward_chosen", "reward_rejected", "sft_loss"]


def describe_start(run: PreparedRun) -> Group:
    """Return a summary of the run: model, data, devices, steps, learning rate, what it starts from, and its mixture."""
    arguments = run.arguments
    plan = run.plan
    model = run.model
    table = facts_table("Fabric Train")

    # model
    name = f"a new {arguments.model.family}" if arguments.model.family else arguments.model.model_name
    trained = "" if model.num_trained == model.num_parameters else f", {model.num_trained:,} trained"
    layers = ", ".join(sorted(layer_class.__name__ for layer_class in model.layer_classes))
    table.add_row("model", f"{name}: {model.num_parameters:,} parameters{trained}, layers {layers}")
    for description, modules in describe_parts(run.model, changes=run.models.change):
        table.add_row(description, modules)

    # start and data
    table.add_row("start", _describe_start_weights(run))
    table.add_row("data", _describe_data(run))
    for next_run in run.successive_runs[1:]:
        first_step = next_run.plan.data_starts_after + 1
        table.add_row(f"from step {first_step:,}", _describe_reading(next_run))

    # devices, steps and learning rate
    table.add_row("devices", f"{plan.world_size} × {run.devices.parallelism}, {arguments.model.precision}")
    table.add_row("step", _describe_step(plan))
    steps = f"{plan.num_steps:,}"
    if plan.windows_per_epoch and not arguments.data.phases:
        steps += f"; {plan.windows_per_epoch:,} per epoch"
    table.add_row("steps", steps)
    table.add_row("learning rate", _describe_learning_rate(run.schedules.run_schedule, plan.num_steps))
    rates = arguments.training.rates_of_parts
    if rates:
        table.add_row("rates by part", ", ".join(f"{pattern} {rate:g}" for pattern, rate in rates.items()))
    # outputs, and tables of the sources
    table.add_row("output", arguments.save.output_dir)
    if not arguments.evaluation.only_reads:
        table.add_row("metrics", _describe_metrics(run))

    data_tables: list[Table] = []
    for successive_run in run.successive_runs:
        data_tables += describe_mixture(successive_run)
        data_tables += describe_phases(successive_run)
    return Group(table, *data_tables, *describe_stream(run.data))


def describe_parts(model: ModelShape, *, changes: bool) -> list[tuple[str, str]]:
    """Return the modules that train and those that are frozen as rows of a table; none if all train.

    ``changes`` says that phases change the parts.
    """
    if not model.frozen:
        return []
    hint = " (at first; see the phases)" if changes else ""
    return [(f"trained{hint}", model.describe_trained()), ("frozen", model.describe_frozen())]


def describe_border(run: PreparedRun) -> str:
    """Return what a run reads or trains from its next step on, after the border between two phases."""
    step = run.start.state.step
    if step == run.plan.data_starts_after:
        return f"from step {step + 1} on: {_describe_reading(run)}"
    return f"from step {step + 1} on: training {run.model.describe_trained()}"


def describe_mfu(flops: ModelFlops, peak_flops: float | None) -> str:
    """Return how the MFU is computed, or why it is not."""
    if peak_flops is None:
        return f"mfu: not computed, because this device's peak FLOP/s is unknown; a token takes {flops}"
    return f"mfu: ({flops}) × tokens/s / {peak_flops / 1e12:,.1f} TFLOP/s of all devices"


def describe_end(state: TrainerState, seconds: float, run: PreparedRun, checkpoint: Path) -> Group:
    """Return the results of a run after ``seconds`` of training, evaluation and saves, and the next command.

    It reads the validation loss of each checkpoint.
    """
    table = facts_table("Done")

    # steps and time
    num_tokens = state.num_tokens - run.start.state.num_tokens
    table.add_row("steps", f"{state.step:,}, the last one in {_describe_epoch(state, run.plan)}")
    table.add_row(
        "tokens",
        f"{state.num_tokens:,}; {num_tokens / seconds:,.0f} per second over {seconds:,.0f} s, including evaluation "
        "and saves",
    )
    times = _describe_times(run.folder)
    if times:
        table.add_row("goodput", times)
    if state.skipped_steps:
        table.add_row("left out", f"{counted(state.skipped_steps, 'step')} with a loss or gradient that was not finite")
    if state.steps_without_targets:
        num_steps = counted(state.steps_without_targets, "step")
        table.add_row("not taken", f"{num_steps} with nothing to predict")

    # losses
    if state.train_loss is not None:
        table.add_row("training loss", f"{state.train_loss:.4f}")
    if state.val_loss is not None:
        loss = f"{state.val_loss:.4f}"
        if state.evaluation is None or state.evaluation.whole.is_likelihood:
            loss += f", perplexity {perplexity(state.val_loss):.3f}"
        table.add_row("validation loss", loss)
    if state.evaluation is not None and state.evaluation.whole.of_completions:
        table.add_row("validation reward", _describe_reward(state.evaluation.whole))
    accuracies = _describe_accuracies(state)
    if accuracies:
        table.add_row("pair accuracy", accuracies)

    # checkpoints, and what comes next
    table.add_row("checkpoint", str(checkpoint))
    best = checkpoints.read_best(run.folder)
    if best:
        best_loss = best.state.loss_of(best.best_by)
        loss_name = checkpoints.deciding_loss(best)
        table.add_row("best checkpoint", f"{best.checkpoint}, {loss_name} {best_loss:.4f}")
    table.add_row("metrics", _describe_metrics(run))
    convert = command_from_here("convert")
    table.add_row("next", f"{convert} --checkpoint {shlex.quote(str(checkpoint))} --output_dir DIR")

    loss_tables = []
    if state.evaluation:
        loss_tables.append(describe_evaluation(state.evaluation, state.first_evaluation))
    mixture_tables = describe_mixture(run, state.rows_of_sources)
    return Group(table, *loss_tables, *mixture_tables, *describe_stream(run.data, checkpoint))


def _describe_reward(evaluated: TokenLoss) -> str:
    """Return the mean reward of the completions of held-out prompts, with its standard error."""
    text = f"{evaluated.further[REWARD]:.4f}"
    standard_error = evaluated.further.get(f"stderr_{REWARD}")
    if standard_error is not None:
        text += f" ± {standard_error:.4f}"
    return f"{text}, over {counted(evaluated.num_tokens, 'completion')}"


def _describe_times(run_dir: Path) -> str | None:
    """Return how a run's time was used over all of its starts, or why this is not known; None if it was not written."""
    try:
        times = read_times(run_dir)
    except (InputError, OSError) as error:
        return f"unknown: {error}"
    return times.describe() if times else None


def describe_step_without_targets(step: int, objective: Objective) -> str:
    """Return the note on the first step of a run in which the objective counts nothing."""
    lacking = "no supervised token"
    if counts_answers(objective):
        lacking = "no unpaired answer"
    elif counts_pieces(objective):
        lacking = "no preference pair"
    return (
        f"step {step}: its rows have {lacking}, so the optimizer takes no step and the loss is empty; the summary at "
        "the end of the run counts such steps"
    )


def describe_evaluation(evaluation: Evaluation, first_evaluation: Evaluation | None = None) -> Table:
    """Return the table of the figures of each source, such as loss, perplexity and bits per byte.

    The figures of a ``first_evaluation`` at another step are shown next to them.
    """
    if first_evaluation and first_evaluation.step == evaluation.step:
        first_evaluation = None
    figures = [figure for figure in evaluation.whole.figures() if figure not in _figures_left_out(evaluation)]
    if "accuracy" in evaluation.whole.further:
        figures = _PAIR_FIGURES

    # Beside each figure stands its value in the first evaluation.
    columns = []
    for figure in figures:
        name = figure.replace("_", " ")
        if first_evaluation:
            columns.append(f"{name} at step {first_evaluation.step:,}")
        columns.append(name)
    table = figures_table("Validation", columns)
    if first_evaluation and first_evaluation.follows_other_rows:
        step = first_evaluation.step
        lacking = "different rows were evaluated; their losses are not comparable"
        if evaluation.whole.of_completions:
            lacking = "other prompts or rewards were evaluated; their figures are not comparable"
        table.caption = f"before step {step:,}, {lacking}"

    for name, first_loss, loss in checkpoints.compare_evaluations(first_evaluation or evaluation, evaluation):
        cells = []
        for figure in figures:
            if first_evaluation:
                cells.append(_format_figure(first_loss, figure))
            cells.append(_format_figure(loss, figure))
        table.add_row(name, *cells)
    return table


def _figures_left_out(evaluation: Evaluation) -> set[str]:
    """Return the figures of completions that would make the table too wide; metrics.csv has them."""
    if not evaluation.whole.of_completions:
        return set()
    standard_errors = {figure for figure in evaluation.whole.further if figure.startswith("stderr_")}
    return {*standard_errors, "failed_rewards"}


def _format_figure(loss: TokenLoss | None, figure: str) -> str:
    if loss is None:
        return ""
    value = loss.figures().get(figure)
    return "" if value is None else f"{value:.4f}"


def _describe_accuracies(state: TrainerState) -> str | None:
    """Return the pair accuracies of the first and the last evaluation, with their intervals."""
    evaluation = state.evaluation
    first_evaluation = state.first_evaluation
    if evaluation is None or not evaluation.whole.of_pairs or "accuracy" not in evaluation.whole.further:
        return None
    accuracies = _describe_accuracy(evaluation.whole)
    if first_evaluation and first_evaluation.step != evaluation.step:
        accuracies = f"{_describe_accuracy(first_evaluation.whole)} → {accuracies}"
    return f"{accuracies}, over {evaluation.whole.num_tokens:,} pairs"


def _describe_accuracy(pair_loss: TokenLoss) -> str:
    """Return the pair accuracy of an evaluation with its interval and the share of ties."""
    accuracy = pair_loss.further["accuracy"] or 0.0
    ties = pair_loss.further["ties"] or 0.0
    interval = accuracy_interval(accuracy, ties, pair_loss.num_tokens)
    if interval is None:
        return f"{accuracy:.1%}"
    low, high = interval
    tied = f", {ties:.1%} ties" if ties else ""
    return f"{accuracy:.1%} ({low:.1%} to {high:.1%}{tied})"


def warn_of_displacement(state: TrainerState) -> str | None:
    """Return a warning if the chosen answers have become much less likely (arXiv:2410.08847), and otherwise None.

    The loss of a pair can fall although both answers become less likely, and other answers more likely.
    """
    evaluation = state.evaluation
    first_evaluation = state.first_evaluation
    if evaluation is None or first_evaluation is None or not evaluation.whole.of_pairs:
        return None
    first_sft_loss = first_evaluation.whole.further.get("sft_loss")
    sft_loss = evaluation.whole.further.get("sft_loss")
    if first_sft_loss is None or sft_loss is None:
        return None
    rise = sft_loss - first_sft_loss
    if rise <= DISPLACED_NATS:
        return None
    return (
        f"the log-probability of the chosen answers fell by {rise:.3f} nats per token since step "
        f"{first_evaluation.step}, more than {DISPLACED_NATS}: probability moves to other answers (likelihood "
        "displacement); to prevent this, use a larger --dpo_beta, a smaller --lr or --sft_weight 0.2"
    )


def describe_stop(end: "End", num_steps: int) -> str:
    """Return the line for a run that a signal stopped: after which step, and where the step is saved."""
    cause = describe_signal(end.stopped_by)
    if end.checkpoint is None:
        return f"stopped by {cause} before the first step, with nothing to save; start the run again"
    return (
        f"stopped by {cause} after step {end.state.step} of {num_steps}, saved in {end.checkpoint}; "
        "continue with --resume true"
    )


def describe_self_check(check: "SelfCheck") -> Group:
    """Return the figures of every split of the window, their differences from the first, and the result."""
    columns = ["cut", "loss", "gradient norm", "loss differs", "norm differs"]
    table = figures_table("Self check", figures=[], texts=columns)
    reference = check.figures[0]
    for result in check.figures:
        cells = [result.cut, f"{result.loss:.8g}", f"{result.grad_norm:.8g}"]
        if result is not reference:
            cells += [f"{difference:.1e}" for difference in result.differences(reference)]
        table.add_row(*cells)
    description = (
        f"{len(check.rows)} rows of {check.tokens_per_row} tokens, {check.num_supervised:,} supervised, "
        f"{counted(check.world_size, 'rank')}, {check.seconds:.0f} s; in {check.precision}, values may differ by "
        f"{check.tolerance:.1e}"
    )
    if check.holds:
        agreement = "passed: loss and gradient agree, and every parameter is finite and gets a gradient"
        verdict = Text(agreement, "bold green")
    else:
        verdict = Text("\n".join(["failed:", *check.faults]), "bold red")
    return Group(table, Text(description, "dim"), verdict)


def _describe_learning_rate(run_schedule: Schedule, num_steps_of_run: int) -> str:
    """Return the schedule of a run, its highest and lowest rate, and its length if that differs from the run's."""
    arguments = run_schedule.arguments
    schedule = arguments.lr_schedule if arguments.lr_decay else "constant"
    num_steps = run_schedule.num_steps
    text = f"{schedule}, {arguments.lr:g}"
    if schedule == "wsd":
        decay_steps = num_decay_steps(num_steps, arguments)
        stable_steps = num_steps - decay_steps
        text += f" up to step {stable_steps:,}, then {decay_form(arguments)} over {counted(decay_steps, 'step')}"
    if schedule != "constant":
        text += f" to {arguments.min_lr:g} one step after the last"
        if num_steps != num_steps_of_run:
            text += f" of its {num_steps:,} steps"
            if num_steps < num_steps_of_run:
                last_rate = run_schedule.rate(num_steps)
                text += f", but stays at {last_rate:g} from step {num_steps:,} on"
    return f"{text}, warm-up {arguments.warmup_steps}"


def _describe_metrics(run: PreparedRun) -> str:
    arguments = run.arguments.logging
    return describe_loggers(arguments.opened_loggers, run.folder, arguments.project)


def _describe_epoch(state: TrainerState, plan: StepPlan) -> str:
    """Return the epoch of the last step, or with phases, which each begin a new epoch, the phase."""
    mixture = plan.mixture
    if mixture is None or not plan.phases:
        return f"epoch {state.epoch} (counted from 0, as in metrics.csv)"
    # the step before each phase: as many phases have begun as these are below the state's step; at step 0, the first
    steps_before = [plan.data_starts_after + start for start in mixture.phases_start_after]
    phase = max(bisect_left(steps_before, state.step), 1)
    return f"phase {phase} of {len(steps_before)}"


def _describe_step(plan: StepPlan) -> str:
    """Return the rows of a step and how they are split, or the prompts and completions that they are sampled from."""
    rank_noun = "devices" if plan.num_data_ranks == plan.world_size else "groups of devices"
    if plan.completions_per_prompt is not None:
        return (
            f"{plan.rows_per_window} prompts × {plan.completions_per_prompt} completions, packed into rows of up to "
            f"{plan.tokens_per_row:,} tokens; {plan.micro_batch_size} rows at a time on each of {plan.num_data_ranks} "
            f"{rank_noun}"
        )
    return (
        f"{plan.rows_per_window} rows = {plan.micro_batch_size} × {plan.accumulation} × {plan.num_data_ranks} "
        f"(micro-batch × accumulation × {rank_noun}), {plan.rows_per_window * plan.tokens_per_row:,} tokens"
    )


def _describe_start_weights(run: PreparedRun) -> str:
    """Return the checkpoint or the weights that a run starts from, and the step."""
    if run.start.checkpoint:
        kind = "branch of " if run.start.branches else ""
        return f"{kind}{run.start.checkpoint}, step {run.start.state.step}"
    weights = "random" if run.model.is_new else "pretrained"
    return f"{weights} weights, step 0"


def _describe_data(run: PreparedRun) -> str:
    """Return the token datasets or the stream of a run, and the number and length of its rows."""
    arguments = run.arguments.data
    rows = f"rows of {run.plan.tokens_per_row:,} tokens"
    if arguments.streaming_dataset:
        shuffled = f", shuffled among {arguments.shuffle_buffer:,} documents" if arguments.shuffle_buffer else ""
        return f"stream of {', '.join(arguments.streaming_dataset)}{shuffled}, {rows}"
    if arguments.prompts:
        return f"{', '.join(arguments.prompts)}: {run.plan.num_rows:,} prompts"
    folders = ", ".join(arguments.data_dirs)
    if run.plan.mixture and arguments.phases:
        return f"{folders}: {sum(run.plan.mixture.num_rows):,} {rows}"
    epoch = " per epoch" if arguments.mixes else ""
    return f"{folders}: {run.plan.num_rows:,} {rows}{epoch}"


def _describe_reading(run: PreparedRun) -> str:
    return f"{_describe_data(run)}; {run.plan.rows_per_window} per step"
