"""Replace ``auto`` in the arguments of a run by values that fit and save time.

It decides whether to compile, how much to recompute, and whether to compute in tiles along the row.
"""

import importlib.util
from bisect import bisect_left
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from fabric_train.cli.argument_types import show_size
from fabric_train.distributed.decoder_layers import missing_compiler
from fabric_train.distributed.precision import compute_dtype
from fabric_train.distributed.strategy import why_not_compiled
from fabric_train.model.flops import peak_flops
from fabric_train.model.row_tiles import TILE_SIZE
from fabric_train.preflight.memory_activations import TraceError
from fabric_train.preflight.memory_changes import change_to_tiles
from fabric_train.preflight.memory_forecast import make_request
from fabric_train.preflight.memory_layout import why_no_tiles
from fabric_train.training.prepared_run import PreparedRun

_USABLE_SHARE = 0.9
"""The share of a device's memory to use; the rest is for what the plan cannot know, such as gaps of the allocator."""
_CHOICES: list[dict[str, Any]] = [
    {"activation_checkpointing": "none"},
    *({"activation_checkpointing": "selective", "activation_memory_budget": tenths / 10} for tenths in range(9, 0, -1)),
    {"activation_checkpointing": "full"},
]
"""The choices of ``--activation_checkpointing auto``; each takes less memory than the one before."""

# On an H200 (docs/contributing/measurements.md, "One GPU"), the first compiled step took 7 s more and each later one a
# fifth less; without compiling, MFU was 46 %. Evaluation and rows of several documents are compiled again, and not
# every host is that fast.
_SECONDS_TO_COMPILE = 30.0
_SHARE_SAVED = 0.15
_UTILIZATION = 0.45
_A100_PEAK_FLOPS = 312e12  # FLOP/s, taken for a GPU whose peak is not known


def resolve_automatic(run: PreparedRun) -> PreparedRun:
    """Return the run with ``auto`` replaced in its arguments, and a note on each choice.

    Without a GPU, or for evaluation alone, nothing is recomputed or compiled, and there is no note.
    """
    fsdp = run.arguments.fsdp
    evaluation = run.arguments.evaluation
    is_trivial = run.devices.accelerator != "cuda" or evaluation.eval_only
    # in this order: compiled layers keep less, and tiles are the last resort if everything is recomputed
    if fsdp.compile == "auto":
        if is_trivial or evaluation.self_check:
            run = _with_options(run, compile=False)
        else:
            run = _choose_compile(run)
    if fsdp.activation_checkpointing == "auto":
        run = _with_options(run, activation_checkpointing="none") if is_trivial else _choose_checkpointing(run)
    if fsdp.mlp_tile_size == "auto":
        run = _with_options(run, mlp_tile_size="none") if is_trivial else _choose_tiles(run)
    elif fsdp.mlp_tile_size != "none":
        obstacle = why_no_tiles(run.model)
        if obstacle:
            run = _with_options(
                run, f"--mlp_tile_size {fsdp.mlp_tile_size}: none, since {obstacle}", mlp_tile_size="none"
            )
    return run


def _choose_checkpointing(run: PreparedRun) -> PreparedRun:
    """Choose the least recomputation with which the plan fits into a device's memory."""
    usable_bytes = round(_USABLE_SHARE * make_request(run).device_memory)

    @cache
    def needed_bytes(choice: int) -> int:
        return make_request(_with_options(run, **_CHOICES[choice])).forecast().device_bytes

    def fits(choice: int) -> bool:
        return needed_bytes(choice) <= usable_bytes

    try:
        choice = 0
        if not fits(choice):
            # each choice needs less than the one before: a bisection finds the first that fits, or takes the last one
            candidates = range(1, len(_CHOICES) - 1)
            num_too_large = bisect_left(candidates, x=True, key=fits)
            choice = 1 + num_too_large
        reason = (
            f"which needs {show_size(needed_bytes(choice))} of the {show_size(usable_bytes)} that a run may use on a "
            "device"
        )
        if choice:
            reason += f"; none would need {show_size(needed_bytes(0))}"
    except TraceError as error:
        reason = f"the memory of the model's activations cannot be computed ({error})"
        return _with_options(
            run, f"--activation_checkpointing auto: none, since {reason}", activation_checkpointing="none"
        )
    options = _CHOICES[choice]
    chosen = options["activation_checkpointing"]
    if "activation_memory_budget" in options:
        chosen += f" --activation_memory_budget {options['activation_memory_budget']}"
    return _with_options(run, f"--activation_checkpointing auto: {chosen}, {reason}", **options)


def _choose_tiles(run: PreparedRun) -> PreparedRun:
    """Choose tiles if all layers are recomputed, the run still does not fit, and tiles take less memory."""
    fsdp = run.arguments.fsdp
    request = make_request(run)
    without_tiles = _with_options(run, mlp_tile_size="none")
    usable_bytes = round(_USABLE_SHARE * request.device_memory)
    is_compiled = fsdp.compile is True and run.user_arguments.fsdp.compile != "auto"
    if fsdp.activation_checkpointing != "full" or is_compiled:
        return without_tiles
    change = change_to_tiles(request)
    if not change:
        return without_tiles
    try:
        bytes_without = request.forecast().device_bytes
        if bytes_without <= usable_bytes:
            return without_tiles
        needed_bytes = make_request(_with_options(run, **change)).forecast().device_bytes
    except TraceError:
        return without_tiles
    # no more tokens than a tile are not cut, and a layer that is not compiled takes more memory
    if needed_bytes >= bytes_without:
        return without_tiles
    text = f"--mlp_tile_size auto: {TILE_SIZE} without compiling, which needs {show_size(needed_bytes)} of the "
    text += f"{show_size(usable_bytes)} that a run may use on a device; none would need {show_size(bytes_without)}"
    return _with_options(run, text, **change)


def _choose_compile(run: PreparedRun) -> PreparedRun:
    """Compile if this is possible and saves more time than it takes."""
    fsdp = run.arguments.fsdp
    if run.arguments.model.float8:
        return _with_options(run, "--compile auto: true, since float8 needs it", compile=True)
    if isinstance(fsdp.mlp_tile_size, int):
        return _with_options(
            run,
            f"--compile auto: false, since --mlp_tile_size {fsdp.mlp_tile_size} does not work with it",
            compile=False,
        )
    obstacle = why_not_compiled(fsdp, run.devices.parallelism)
    if obstacle:
        return _with_options(
            run, f"--compile auto: false, since fsdp cannot compile layers with {obstacle}; fsdp2 can", compile=False
        )
    missing = missing_compiler()
    if not missing and not importlib.util.find_spec("triton"):
        missing = "triton package"
    if missing and not run.arguments.planning.plans_for_others:
        return _with_options(run, f"--compile auto: false, since this machine has no {missing}", compile=False)
    seconds = _seconds_of_training(run)
    pays = _SHARE_SAVED * seconds > _SECONDS_TO_COMPILE
    reason = f"the run takes about {_show_time(seconds)} and compiling takes about {_show_time(_SECONDS_TO_COMPILE)}"
    return _with_options(run, f"--compile auto: {str(pays).lower()}, since {reason}", compile=pays)


def _seconds_of_training(run: PreparedRun) -> float:
    """Estimate how long all steps of the run take without compiling, so that a resume does not change the choice."""
    plan = run.plan
    device_name = "" if run.arguments.planning.plans_for_others else torch.cuda.get_device_name()
    flops_per_second = peak_flops(device_name, compute_dtype(run.arguments.model.precision))
    if not flops_per_second:
        flops_per_second = _A100_PEAK_FLOPS
    flops_per_row = run.model.flops.count([plan.tokens_per_row])
    flops_of_step = flops_per_row * plan.most_rows_per_step / plan.world_size  # of each device
    return plan.num_steps * flops_of_step / (flops_per_second * _UTILIZATION)


def _show_time(seconds: float) -> str:
    return f"{seconds / 3600:,.1f} hours" if seconds >= 3600 else f"{seconds / 60:,.1f} minutes"


def _with_options(run: PreparedRun, note: str | None = None, **options: Any) -> PreparedRun:
    """Return the run with changed FSDP arguments, and a note on them."""
    arguments = replace(run.arguments, fsdp=replace(run.arguments.fsdp, **options))
    notes = run.notes if note is None else (*run.notes, note)
    return replace(run, arguments=arguments, notes=notes)
