"""Choose what an ``auto`` stands for: compiled or not, how much is computed again, tiles along the row or not."""

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
from fabric_train.model.parallelize import TILE_SIZE
from fabric_train.preflight.memory_forecast import make_request
from fabric_train.preflight.memory_layout import why_no_tiles
from fabric_train.preflight.memory_plan import change_to_tiles
from fabric_train.training.prepared_run import PreparedRun

_USABLE_SHARE = 0.9
"""Of a device's memory. The rest is for what the plan does not know, such as gaps between the allocator's blocks."""
_CHOICES: list[dict[str, Any]] = [
    {"activation_checkpointing": "none"},
    *({"activation_checkpointing": "selective", "activation_memory_budget": tenths / 10} for tenths in range(9, 0, -1)),
    {"activation_checkpointing": "full"},
]
"""What ``--activation_checkpointing auto`` chooses from; each takes less memory than the one before."""

# On an H200 (docs/performance.md, "Measured on a GPU"), the first compiled step took 7 s more and each later one a
# fifth less; without compiling, MFU was 46 %. Evaluation and rows of several documents are compiled again, and not
# every host is that fast.
_SECONDS_TO_COMPILE = 30.0
_SHARE_SAVED = 0.15
_UTILIZATION = 0.45
_PEAK_OF_A100 = 312e12  # FLOP/s, taken for a GPU whose peak is not known


def resolve_automatic(run: PreparedRun) -> PreparedRun:
    """Return the run with ``auto`` replaced in its arguments, and a note on each choice.

    Nothing is recomputed or compiled without a GPU, or for evaluation alone, and there is no note.
    """
    fsdp, evaluation = run.arguments.fsdp, run.arguments.evaluation
    is_trivial = run.devices.accelerator != "cuda" or evaluation.eval_only
    if fsdp.compile == "auto":
        run = _with(run, compile=False) if is_trivial or evaluation.self_check else _choose_compile(run)
    if fsdp.activation_checkpointing == "auto":  # compiled layers keep less
        run = _with(run, activation_checkpointing="none") if is_trivial else _choose_checkpointing(run)
    if fsdp.mlp_tile_size == "auto":
        run = _with(run, mlp_tile_size="none") if is_trivial else _choose_tiles(run)
    elif fsdp.mlp_tile_size != "none" and (obstacle := why_no_tiles(run.model)):
        run = _with(run, f"--mlp_tile_size {fsdp.mlp_tile_size}: none, since {obstacle}", mlp_tile_size="none")
    return run


def _choose_checkpointing(run: PreparedRun) -> PreparedRun:
    """Take the least recomputation with which the plan fits into the memory of a device."""
    usable = round(_USABLE_SHARE * make_request(run).device_memory)

    @cache
    def needed(choice: int) -> int:
        return make_request(_with(run, **_CHOICES[choice])).forecast().device_bytes

    try:
        choice = 0
        if needed(0) > usable:  # the last one is taken if nothing fits
            choice = 1 + bisect_left(range(1, len(_CHOICES) - 1), True, key=lambda each: needed(each) <= usable)
        reason = f"which needs {show_size(needed(choice))} of the {show_size(usable)} that a run may take of a device"
        more = f"; none would need {show_size(needed(0))}" if choice else ""
    except RuntimeError:
        reason = "the memory of the model's activations cannot be computed"
        return _with(run, f"--activation_checkpointing auto: none, since {reason}", activation_checkpointing="none")
    options = _CHOICES[choice]
    chosen = " --activation_memory_budget ".join(map(str, options.values()))
    return _with(run, f"--activation_checkpointing auto: {chosen}, {reason}{more}", **options)


def _choose_tiles(run: PreparedRun) -> PreparedRun:
    """Take tiles if all layers are recomputed and the run would still not fit."""
    fsdp, request, whole = run.arguments.fsdp, make_request(run), _with(run, mlp_tile_size="none")
    usable = round(_USABLE_SHARE * request.device_memory)
    is_compiled = fsdp.compile is True and run.given.fsdp.compile != "auto"
    if fsdp.activation_checkpointing != "full" or is_compiled or not (change := change_to_tiles(request)):
        return whole
    try:
        without = request.forecast().device_bytes
        if without <= usable:
            return whole
        needed = make_request(_with(run, **change)).forecast().device_bytes
    except RuntimeError:
        return whole
    text = f"--mlp_tile_size auto: {TILE_SIZE} without compiling, which needs {show_size(needed)} of the "
    text += f"{show_size(usable)} that a run may take of a device; none would need {show_size(without)}"
    return _with(run, text, **change)


def _choose_compile(run: PreparedRun) -> PreparedRun:
    fsdp = run.arguments.fsdp
    if run.arguments.model.float8:
        return _with(run, "--compile auto: true, since float8 needs it", compile=True)
    if isinstance(fsdp.mlp_tile_size, int):
        return _with(run, f"--compile auto: false, since --mlp_tile_size {fsdp.mlp_tile_size} is given", compile=False)
    if obstacle := why_not_compiled(fsdp, run.devices.parallelism):
        return _with(run, f"--compile auto: false, since fsdp cannot with {obstacle}, but fsdp2 can", compile=False)
    missing = missing_compiler() or (None if importlib.util.find_spec("triton") else "package triton")
    if missing and not run.arguments.planning.plans_for_others:
        return _with(run, f"--compile auto: false, since there is no {missing}", compile=False)
    seconds = _seconds_of_training(run)
    pays = _SHARE_SAVED * seconds > _SECONDS_TO_COMPILE
    reason = f"the run takes about {_show_time(seconds)} and compiling about {_show_time(_SECONDS_TO_COMPILE)}"
    return _with(run, f"--compile auto: {str(pays).lower()}, since {reason}", compile=pays)


def _seconds_of_training(run: PreparedRun) -> float:
    """Estimate how long the run's steps take without compiling, also those before a resume: nothing changes by it."""
    plan, precision = run.plan, run.arguments.model.precision
    name = "" if run.arguments.planning.plans_for_others else torch.cuda.get_device_name()
    peak = peak_flops(name, compute_dtype(precision)) or _PEAK_OF_A100
    flops_of_step = run.model.flops.of([plan.tokens_per_row]) * plan.rows_per_window / plan.world_size
    return plan.num_steps * flops_of_step / (peak * _UTILIZATION)


def _show_time(seconds: float) -> str:
    return f"{seconds / 3600:,.1f} hours" if seconds >= 3600 else f"{seconds / 60:,.1f} minutes"


def _with(run: PreparedRun, note: str | None = None, **options: Any) -> PreparedRun:
    arguments = replace(run.arguments, fsdp=replace(run.arguments.fsdp, **options))
    return replace(run, arguments=arguments, notes=(*run.notes, *([note] if note else [])))
