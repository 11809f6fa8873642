"""The tables that a run prints: what it is before it starts, what it reached, and the figures of a self-check."""

import shlex
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from fabric_train import checkpoint as checkpoints
from fabric_train.checkpoint import Evaluation, TokenLoss, TrainerState, perplexity
from fabric_train.checkpoint.manager import read_cursors
from fabric_train.cli.argument_types import counted
from fabric_train.cli.errors import InputError
from fabric_train.cli.fabric_command import command_from_here
from fabric_train.data.streaming import Stream
from fabric_train.data.token_mixture import TokenMixture
from fabric_train.distributed.signals import describe_signal
from fabric_train.model.flops import ModelFlops
from fabric_train.optim.optimizer import decay_form, num_decay_steps
from fabric_train.training.loggers import describe_loggers
from fabric_train.training.objective import Objective, counts_pieces
from fabric_train.training.prepared_run import PreparedRun
from fabric_train.training.run_times import read_times
from fabric_train.training.statistics import accuracy_interval

if TYPE_CHECKING:
    from fabric_train.training.loop import End
    from fabric_train.training.self_check import SelfCheck


DISPLACED_NATS = 0.1
"""A fall of the chosen answers' log-probability per token that is warned of: a tenth of each token's probability."""
_OF_PAIRS = ("loss", "accuracy", "margin", "reward_chosen", "reward_rejected", "sft_loss")


def describe_start(run: PreparedRun) -> Group:
    """Return the run in short: model, data, devices, steps, learning rate, what it starts from, and its mixture."""
    arguments = run.arguments
    plan = run.plan
    layers = ", ".join(sorted(kind.__name__ for kind in run.model.layer_classes))
    table = facts_table("Fabric Train")
    name = f"a new {arguments.model.family}" if arguments.model.family else arguments.model.model_name
    trained = "" if run.model.num_trained == run.model.num_parameters else f", {run.model.num_trained:,} train"
    table.add_row("model", f"{name}: {run.model.num_parameters:,} parameters{trained}, layers {layers}")
    for what, text in describe_parts(run):
        table.add_row(what, text)
    table.add_row("start", _start(run))
    table.add_row("data", _data(run))
    for later in run.stretches[1:]:
        table.add_row(f"from step {later.plan.data_starts_after + 1:,}", _reads(later))
    table.add_row("devices", f"{plan.world_size} × {run.devices.parallelism}, {arguments.model.precision}")
    shared_by = "devices" if plan.num_data_ranks == plan.world_size else "groups of devices"
    table.add_row(
        "step",
        f"{plan.rows_per_window} rows = {plan.micro_batch_size} × {plan.accumulation} × {plan.num_data_ranks} "
        f"(micro-batch × accumulation × {shared_by}), {plan.rows_per_window * plan.tokens_per_row:,} tokens",
    )
    per_epoch = f"; {plan.windows_per_epoch:,} an epoch" if plan.windows_per_epoch and not arguments.data.phases else ""
    table.add_row("steps", f"{plan.num_steps:,}{per_epoch}")
    table.add_row("learning rate", _learning_rate(run))
    if rates := arguments.training.rates_of_parts:
        table.add_row("rates of parts", ", ".join(f"{pattern} {rate:g}" for pattern, rate in rates.items()))
    table.add_row("output", arguments.save.output_dir)
    if not arguments.evaluation.only_reads:
        table.add_row("metrics", _metrics(run))
    of_data = [one for part in run.stretches for one in (*describe_mixture(part), *describe_phases(part))]
    return Group(table, *of_data, *describe_stream(run))


def describe_parts(run: PreparedRun) -> list[tuple[str, str]]:
    """Return the modules that train and those that are frozen as rows of a table; none if all train."""
    if not run.model.frozen:
        return []
    later = " (at first, see the phases)" if run.models else ""
    return [(f"trained{later}", run.model.describe_trained()), ("frozen", run.model.describe_frozen())]


def describe_border(run: PreparedRun) -> str:
    """Return what a run reads or trains from its next step on, after a border."""
    step = run.start.state.step
    if step == run.plan.data_starts_after:
        return f"from step {step + 1} on {_reads(run)}"
    return f"from step {step + 1} on {run.model.describe_trained()} train"


def describe_mfu(flops: ModelFlops, peak_flops: float | None) -> str:
    """Return how mfu is computed, or why it is not."""
    if peak_flops is None:
        return f"mfu: empty, since this device's peak FLOP/s is not known; a token costs {flops}"
    return f"mfu: ({flops}) × tokens/s / {peak_flops / 1e12:,.1f} TFLOP/s of all devices"


def describe_end(state: TrainerState, seconds: float, run: PreparedRun, checkpoint: Path) -> Group:
    """Return what a run reached in ``seconds`` of training, evaluation and saves, and the command that comes next.

    It reads the validation loss of each checkpoint.
    """
    table = facts_table("Done")
    num_tokens = state.num_tokens - run.start.state.num_tokens
    table.add_row("steps", f"{state.step:,}, the last one in {_epoch(state, run)}")
    table.add_row(
        "tokens",
        f"{state.num_tokens:,}; {num_tokens / seconds:,.0f} a second over {seconds:,.0f} s with evaluation and saves",
    )
    if times := _times(run):
        table.add_row("goodput", times)
    if state.skipped_steps:
        table.add_row("left out", f"{counted(state.skipped_steps, 'step')}, whose loss or gradient was not finite")
    if state.steps_without_targets:
        without = counted(state.steps_without_targets, "step")
        table.add_row("not taken", f"{without}, whose rows had nothing to predict")
    if state.train_loss is not None:
        table.add_row("training loss", f"{state.train_loss:.4f}")
    if state.val_loss is not None:
        is_likelihood = state.evaluation is None or state.evaluation.whole.is_likelihood
        shown = f", perplexity {perplexity(state.val_loss):.3f}" if is_likelihood else ""
        table.add_row("validation loss", f"{state.val_loss:.4f}{shown}")
    if accuracy := _accuracies(state):
        table.add_row("pair accuracy", accuracy)
    table.add_row("checkpoint", str(checkpoint))
    if best := checkpoints.best_checkpoint(run.folder):
        saved = checkpoints.read_trainer_json(best)
        loss = saved.state.loss_of(saved.best_by)
        table.add_row("best checkpoint", f"{best}, {checkpoints.deciding_loss(best)} {loss:.4f}")
    table.add_row("metrics", _metrics(run))
    table.add_row(
        "next", f"{command_from_here('convert')} --checkpoint {shlex.quote(str(checkpoint))} --output_dir DIR"
    )
    losses = [describe_evaluation(state.evaluation, state.first_evaluation)] if state.evaluation else []
    return Group(table, *losses, *describe_mixture(run, state.rows_of_sources), *describe_stream(run, checkpoint))


def _times(run: PreparedRun) -> str | None:
    """Return where the time of a run went, over all of its starts, or why that is not known; None if not written."""
    try:
        times = read_times(run.folder)
    except (InputError, OSError) as error:
        return f"not known: {error}"
    return times.describe() if times else None


def describe_step_without_targets(step: int, objective: Objective) -> str:
    """Return the note on the first step of a run in which the objective counts nothing."""
    lacking = "no preference pair" if counts_pieces(objective) else "no supervised token"
    return (
        f"step {step}: its rows have {lacking}, so the optimizer takes no step and the loss is empty; later such steps "
        "are counted, and the end of the run has their number"
    )


def describe_evaluation(now: Evaluation, first: Evaluation | None = None) -> Table:
    """Return the table of the figures of each source, such as loss, perplexity and bits per byte, also at the first."""
    first = first if first and first.step != now.step else None
    figures = [*_OF_PAIRS] if "accuracy" in now.whole.further else list(now.whole.figures())
    names = [figure.replace("_", " ") for figure in figures]
    there = [f"{name} at step {first.step:,}" for name in names] if first else []
    columns = [name for pair in zip(there, names, strict=True) for name in pair] if first else names
    table = _source_table("Validation", columns)
    if first and first.follows_other_rows:
        table.caption = f"before step {first.step:,} other rows were evaluated, whose losses cannot be compared"
    for name, before, after in checkpoints.compare_evaluations(first or now, now):
        pairs = zip(_cells(before, figures), _cells(after, figures), strict=True)
        table.add_row(name, *(cell for pair in pairs for cell in (pair if first else pair[1:])))
    return table


def _cells(loss: TokenLoss | None, figures: list[str]) -> list[str]:
    values = [loss.figures().get(figure) if loss else None for figure in figures]
    return ["" if value is None else f"{value:.4f}" for value in values]


def _accuracies(state: TrainerState) -> str | None:
    """Return the pair accuracy of the first and of the last evaluation, each with its interval."""
    now = state.evaluation
    first = state.first_evaluation
    if now is None or not now.whole.of_pairs or "accuracy" not in now.whole.further:
        return None
    before = f"{_accuracy(first.whole)} → " if first and first.step != now.step else ""
    return f"{before}{_accuracy(now.whole)}, over {now.whole.num_tokens:,} pairs"


def _accuracy(whole: TokenLoss) -> str:
    accuracy = whole.further["accuracy"] or 0.0
    ties = whole.further["ties"] or 0.0
    interval = accuracy_interval(accuracy, ties, whole.num_tokens)
    tied = f", {ties:.1%} ties" if ties else ""
    shown = f" ({interval[0]:.1%} to {interval[1]:.1%}{tied})" if interval else ""
    return f"{accuracy:.1%}{shown}"


def warn_of_displacement(state: TrainerState) -> str | None:
    """Return a warning if the chosen answers have become much less likely; None if not (arXiv:2410.08847).

    The loss of a pair can fall although both answers become less likely, and others more likely.
    """
    now = state.evaluation
    first = state.first_evaluation
    if now is None or first is None or not now.whole.of_pairs:
        return None
    before, after = (evaluation.whole.further.get("sft_loss") for evaluation in (first, now))
    if before is None or after is None or after - before <= DISPLACED_NATS:
        return None
    return (
        f"the log-probability of the chosen answers fell by {after - before:.3f} nats per token since step "
        f"{first.step}, more than {DISPLACED_NATS}: their likelihood moves to other answers (likelihood displacement); "
        "a larger --dpo_beta, a smaller --lr or --sft_weight 0.2 keeps it"
    )


def describe_mixture(run: PreparedRun, seen: list[int] | None = None) -> list[Table]:
    """Return the table of a mixture's sources, none without a mixture; ``seen`` are the rows of each that were read."""
    plan = run.plan
    if plan.mixture is None or not isinstance(run.data, TokenMixture):
        return []
    planned = plan.mixture.rows_until(plan.last_step - plan.data_starts_after)
    columns = ["tokens", "share", "epochs", "tokens of the run", *(["tokens seen"] if seen else [])]
    table = _source_table(f"Mixture{run.steps_in_words}", columns)
    totals = [planned, *([seen] if seen else [])]
    rows = zip((source.name for source in run.data.sources), plan.mixture.num_rows, *totals, strict=True)
    for name, num_rows, *counts in rows:
        # what was planned, or at the end what was seen
        read = counts[-1]
        total = sum(totals[-1])
        share = f"{read / max(total, 1):.2%}"
        epochs = f"{read / num_rows:.2f}"
        tokens = [f"{count * plan.tokens_per_row:,}" for count in (num_rows, *counts)]
        table.add_row(name, tokens[0], share, epochs, *tokens[1:])
    sums = [f"{sum(counts) * plan.tokens_per_row:,}" for counts in (plan.mixture.num_rows, *totals)]
    table.add_row("all", sums[0], "", "", *sums[1:])
    return [table]


def describe_phases(run: PreparedRun) -> list[Table]:
    """Return the table of a run's phases: steps, learning rate, and share and tokens of each source."""
    plan = run.plan
    if plan.mixture is None or not isinstance(run.data, TokenMixture) or not plan.phases:
        return []
    trains = ["train"] if run.models else []
    texts = ["steps", "learning rate", *trains, "source"]
    table = _source_table(f"Phases{run.steps_in_words}", ["share", "tokens"], texts)
    begun = [plan.data_starts_after + start for start in plan.mixture.starts_after]
    for start, end in zip(begun, [*begun[1:], plan.last_step], strict=True):
        until = (plan.mixture.rows_until(step - plan.data_starts_after) for step in (start, end))
        rows = [after - before for before, after in zip(*until, strict=True)]
        read = [(source.name, count) for source, count in zip(run.data.sources, rows, strict=True) if count]
        cells = [f"{start + 1:,}–{end:,}", _rates(run, start + 1, end)]
        cells += [run.model_at(start + 1).describe_trained()] * len(trains)
        for name, count in read:
            table.add_row(*cells, name, f"{count / sum(rows):.2%}", f"{count * plan.tokens_per_row:,}")
            cells = [""] * len(cells)
    return [table]


def describe_stream(run: PreparedRun, checkpoint: Path | None = None) -> list[Table]:
    """Return the table of a stream's sources, with the tokens read up to a checkpoint; none without shares."""
    data = run.data
    if not isinstance(data, Stream) or (len(data.source_names) == 1 and data.documents.shares is None):
        return []
    cursors = read_cursors(checkpoint) if checkpoint else []
    counts = [sum(of_source) for of_source in zip(*(cursor.tokens_read for cursor in cursors), strict=True)]
    table = _source_table("Stream", ["size", "share", *(["tokens read", "of all"] if counts else [])])
    for number, name in enumerate(data.source_names):
        size, shares = data.documents.describe_source(name)
        read = [f"{counts[number]:,}", f"{counts[number] / sum(counts):.2%}"] if counts else []
        table.add_row(name, size, shares, *read)
    return [table]


def describe_stop(end: "End", num_steps: int) -> str:
    """Return the line for a run that a signal stopped: after which step, and where that is saved."""
    cause = describe_signal(end.stopped_by)
    if end.checkpoint is None:
        return f"stopped by {cause} before the first step was taken, with nothing to save; start it again"
    where = f"after step {end.state.step} of {num_steps}, saved in {end.checkpoint}"
    return f"stopped by {cause} {where}; continue with --resume true"


def describe_self_check(check: "SelfCheck") -> Group:
    """Return the figures of every split of the window, their differences from the first, and the result."""
    table = _source_table("Self check", [], ["cut", "loss", "gradient norm", "loss differs", "norm differs"])
    first = check.figures[0]
    for figure in check.figures:
        differences = [f"{difference:.1e}" for difference in figure.differences(first)] if figure is not first else []
        table.add_row(figure.cut, f"{figure.loss:.8g}", f"{figure.grad_norm:.8g}", *differences)
    of_what = (
        f"{len(check.rows)} rows of {check.tokens_per_row} tokens, {check.num_supervised:,} supervised, "
        f"{counted(check.world_size, 'rank')}, {check.seconds:.0f} s; in {check.precision} the figures may differ by "
        f"{check.tolerance:.1e}"
    )
    agrees = "holds: loss and gradient are the same, every parameter is finite and gets a gradient"
    verdict = Text(agrees, "bold green") if check.holds else Text("\n".join(["fails:", *check.faults]), "bold red")
    return Group(table, Text(of_what, "dim"), verdict)


def _learning_rate(run: PreparedRun) -> str:
    training = run.arguments.training
    num_steps = run.schedule_steps
    schedule = training.lr_schedule if training.lr_decay else "constant"
    rises = f"{schedule}, {training.lr:g}"
    falls = "" if schedule == "constant" else f" to {training.min_lr:g} one step after the last"
    if schedule != "constant" and num_steps != run.plan.num_steps:
        falls += f" of its {num_steps:,} steps"
        if num_steps < run.plan.num_steps:
            falls += f", but stays at {run.schedules.of_run.rate(num_steps):g} from step {num_steps:,} on"
    if schedule == "wsd":
        decay = num_decay_steps(num_steps, training)
        rises += f" up to step {num_steps - decay:,}, then {decay_form(training)} over {counted(decay, 'step')}"
    return f"{rises}{falls}, warm-up {training.warmup_steps}"


def _rates(run: PreparedRun, first_step: int, last_step: int) -> str:
    schedule = run.schedules.at(first_step)
    name = schedule.arguments.lr_schedule if schedule.arguments.lr_decay else "constant"
    begins, ends = (f"{schedule.rate(step):.3g}" for step in (first_step, last_step))
    return f"{name}, {begins}" + (f" to {ends}" if ends != begins else "")


def _metrics(run: PreparedRun) -> str:
    given = run.arguments.logging
    return describe_loggers(given.opened_loggers, run.folder, given.project)


def _epoch(state: TrainerState, run: PreparedRun) -> str:
    """Return the epoch of the last step; of phases, which each begin a new epoch, the phase."""
    mixture = run.plan.mixture
    if mixture is None or not run.plan.phases:
        return f"epoch {state.epoch} (counted from 0, as in metrics.csv)"
    begun = [run.plan.data_starts_after + start for start in mixture.starts_after]
    return f"phase {max(bisect_left(begun, state.step), 1)} of {len(begun)}"


def _start(run: PreparedRun) -> str:
    if run.start.checkpoint:
        kind = "branch of " if run.start.branches else ""
        return f"{kind}{run.start.checkpoint}, step {run.start.state.step}"
    return f"{'random' if run.model.is_new else 'the pretrained'} weights, step 0"


def _data(run: PreparedRun) -> str:
    given = run.arguments.data
    rows = f"rows of {run.plan.tokens_per_row:,} tokens"
    if given.streaming_dataset:
        shuffled = f", shuffled among {given.shuffle_buffer:,} documents" if given.shuffle_buffer else ""
        return f"stream of {', '.join(given.streaming_dataset)}{shuffled}, {rows}"
    if run.plan.mixture and given.phases:
        return f"{', '.join(given.data_dirs)}: {sum(run.plan.mixture.num_rows):,} {rows}"
    return f"{', '.join(given.data_dirs)}: {run.plan.num_rows:,} {rows}{' an epoch' if given.mixes else ''}"


def _reads(run: PreparedRun) -> str:
    return f"{_data(run)}; {run.plan.rows_per_window} in a step"


def _source_table(title: str, numbers: list[str], texts: Sequence[str] = ("source",)) -> Table:
    table = Table(*texts, title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in numbers:
        table.add_column(column, justify="right")
    return table


def facts_table(title: str) -> Table:
    """Return an empty table of names and what they stand for."""
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table
