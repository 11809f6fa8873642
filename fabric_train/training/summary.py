"""What a run says of itself before it starts and when it has ended."""

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from fabric_train.checkpoint import TrainerState
from fabric_train.model.flops import ModelFlops
from fabric_train.model.hf_model import ModelShape
from fabric_train.preflight.step_plan import Plan
from fabric_train.training.evaluation import perplexity

if TYPE_CHECKING:
    from arguments import TrainArguments
    from fabric_train.training.self_check import SelfCheck


def before(arguments: "TrainArguments", shape: ModelShape, plan: Plan, parallelism: str, start: str) -> Table:
    """The run in short: model, data, devices, steps, learning rate, and where it starts."""
    training = arguments.training
    layers = ", ".join(sorted(kind.__name__ for kind in shape.layer_classes))
    schedule = training.lr_schedule if training.lr_decay else "constant"
    table = _table("Fabric Train")
    name = f"a new {arguments.model.family}" if arguments.model.family else arguments.model.model_name
    table.add_row("model", f"{name}: {shape.num_parameters:,} parameters, layers {layers}")
    table.add_row("start", start)
    table.add_row("data", _data(arguments, plan))
    table.add_row("devices", f"{plan.world_size} × {parallelism}, {arguments.model.precision}")
    shared_by = "devices" if plan.num_data_ranks == plan.world_size else "groups of devices"
    table.add_row(
        "step",
        f"{plan.rows_per_window} rows = {training.micro_batch_size} × {plan.accumulation} × {plan.num_data_ranks} "
        f"(micro-batch × accumulation × {shared_by}), {plan.rows_per_window * plan.tokens_per_row:,} tokens",
    )
    per_epoch = f"; {plan.windows_per_epoch:,} an epoch" if plan.windows_per_epoch else ""
    table.add_row("steps", f"{plan.num_steps:,}{per_epoch}")
    table.add_row(
        "learning rate", f"{schedule}, {training.lr:g} to {training.min_lr:g}, warm-up {training.warmup_steps}"
    )
    table.add_row("output", arguments.save.output_dir)
    return table


def of_meters(flops: ModelFlops, peak_flops: float | None) -> str:
    """Say how mfu is worked out, or that it is not."""
    if peak_flops is None:
        return f"mfu: empty, since this device's peak FLOP/s is not known; a token costs {flops}"
    return f"mfu: ({flops}) × tokens/s / {peak_flops / 1e12:,.1f} TFLOP/s of all devices"


def after(state: TrainerState, seconds: float, num_tokens: int, run: Path, checkpoint: Path) -> Table:
    """What was reached, and the command that comes next."""
    table = _table("Done")
    table.add_row("steps", f"{state.step:,}, epoch {state.epoch + 1}")
    table.add_row(
        "tokens",
        f"{state.num_tokens:,}; {num_tokens / seconds:,.0f} a second over {seconds:,.0f} s with evaluation and saves",
    )
    if state.skipped_steps:
        table.add_row("left out", f"{_counted(state.skipped_steps, 'step')}, whose loss or gradient was not finite")
    if state.train_loss is not None:
        table.add_row("training loss", f"{state.train_loss:.4f}")
    if state.val_loss is not None:
        table.add_row("validation loss", f"{state.val_loss:.4f}, perplexity {perplexity(state.val_loss):.3f}")
    table.add_row("checkpoint", str(checkpoint))
    table.add_row("metrics", str(run / "metrics.csv"))
    table.add_row("next", f"python convert_to_hf.py --checkpoint {checkpoint} --output_dir DIR")
    return table


def of_self_check(check: "SelfCheck") -> Group:
    """The figures of every cut, their differences from the first one's, and the verdict."""
    table = Table("cut", "loss", "gradient norm", "loss differs", "norm differs", title="Self check", box=None)
    table.title_justify, table.title_style, table.pad_edge = "left", "bold", False
    first = check.figures[0]
    for figure in check.figures:
        differences = [f"{difference:.1e}" for difference in figure.differences(first)] if figure is not first else []
        table.add_row(figure.cut, f"{figure.loss:.8g}", f"{figure.grad_norm:.8g}", *differences)
    of_what = (
        f"{len(check.rows)} rows of {check.tokens_per_row} tokens, {check.num_supervised:,} supervised, "
        f"{_counted(check.world_size, 'rank')}, {check.seconds:.0f} s; in {check.precision} the figures may differ by "
        f"{check.tolerance:.1e}"
    )
    agrees = "holds: loss and gradient are the same, every parameter is finite and gets a gradient"
    verdict = Text(agrees, "bold green") if check.holds else Text("\n".join(["fails:", *check.faults]), "bold red")
    return Group(table, Text(of_what, "dim"), verdict)


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' if number > 1 else ''}"


def _data(arguments: "TrainArguments", plan: Plan) -> str:
    rows = f"rows of {plan.tokens_per_row:,} tokens"
    if arguments.data.streaming_dataset:
        return f"stream of {', '.join(arguments.data.streaming_dataset)}, {rows}"
    return f"{arguments.data.train_data_dir}: {plan.num_rows:,} {rows}"


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table
