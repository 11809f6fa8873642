"""Translate the steps of a run: batches, epochs, learning rate, schedule, optimizer and seed."""

import functools
import math
from typing import Any

from fabric_train.cli.errors import InputError
from fabric_train.translate.run_length import RunLength
from fabric_train.translate.translation import Translation

_DEFAULTS: dict[str, dict[str, Any]] = {
    "axolotl": {
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "number_epochs": 1,
        "lr_schedule": "cosine",
        "weight_decay": 0.0,
        "beta2": 0.999,
        "seed": 42,
    },
    "trl": {
        "micro_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "number_epochs": 3,
        "lr_schedule": "linear",
        "weight_decay": 0.0,
        "beta2": 0.999,
        "seed": 42,
    },
    "llama-factory": {
        "micro_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "number_epochs": 3,
        "lr": 5e-5,
        "lr_schedule": "linear",
        "weight_decay": 0.0,
        "beta2": 0.999,
        "seed": 42,
    },
    "torchtune": {
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "number_epochs": 1,
        "grad_clip": 0.0,
        "lr_schedule": "constant",
        "beta2": 0.999,
    },
}
_EPOCHS = ("num_epochs", "num_train_epochs", "epochs")
_MAX_STEPS = ("max_steps", "num_steps")
_MANY_EPOCHS = 1000
_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "cosine_warmup_with_min_lr": "cosine",
    "cosine_with_restarts": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "warmup_stable_decay": "wsd",
    "get_cosine_schedule_with_warmup": "cosine",
}
_ADAMW = (
    *("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_hf", "adamw_apex_fused", "adamw_torch_npu_fused"),
    *("AdamW", "optimi_adamw"),
)
_ADAMW_IN_FP32 = ("paged_adamw_32bit", "paged_adamw", "PagedAdamW32bit", "PagedAdamW", "AdamW32bit")
_ADAMW_IN_8_BITS = (
    *("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit", "PagedAdamW8bit", "AdamW8bit"),
)


def translate_optimization(translation: Translation, objective: str, devices: int | None) -> None:
    """Translate the size and the number of steps, and the optimizer."""
    _translate_batch(translation, devices)
    _translate_length(translation)
    _translate_rate(translation, objective)
    _translate_schedule(translation)
    _translate_warmup(translation)
    _translate_optimizer(translation)
    file = translation.file
    max_norm = translation.number("max_grad_norm", "clip_grad_norm")
    if max_norm is not None:
        grad_clip = max(max_norm, 0.0)  # 0 turns clipping off here
        translation.set_training("grad_clip", grad_clip, *file.names("max_grad_norm", "clip_grad_norm"))
    seed_names = file.names("seed", "data_seed")
    if seed_names:
        translation.set_training("seed", file.get(*seed_names), *seed_names)
    for argument, value in _DEFAULTS[file.program].items():
        translation.set_default(argument, value)


def _translate_batch(translation: Translation, devices: int | None) -> None:
    """Translate the batch on a device and the accumulation; if the number of devices is known, the rows of a step."""
    file = translation.file
    batch_names = ["micro_batch_size", "per_device_train_batch_size"]
    if file.program == "torchtune":
        batch_names = ["batch_size"]
    elif file.program == "axolotl" and file.names("batch_size"):
        translation.leave_out("micro_batch_size × gradient_accumulation_steps × devices decides it", "batch_size")
    micro_batch = translation.whole_number(*batch_names)
    if micro_batch is not None:
        translation.set_training("micro_batch_size", micro_batch, *file.names(*batch_names))
    accumulation = translation.whole_number("gradient_accumulation_steps")
    if accumulation is not None:
        translation.set_training("gradient_accumulation_steps", accumulation, "gradient_accumulation_steps")
    defaults = _DEFAULTS[file.program]
    translation.set_default("micro_batch_size", defaults["micro_batch_size"])
    translation.set_default("gradient_accumulation_steps", defaults["gradient_accumulation_steps"])
    if devices is not None:
        rows = rows_per_step(translation, devices)
        words = f"micro_batch_size × gradient_accumulation_steps × {devices} devices"
        translation.set_training("total_batch_size", rows, comment=words)


def rows_per_step(translation: Translation, devices: int) -> int:
    """Return the rows of an optimizer step over all devices.

    The devices of a tensor- or context-parallel group read the same rows.
    """
    settings = translation.training
    group_size = 1
    for argument in ("tensor_parallel_size", "context_parallel_size"):
        if argument in settings:
            group_size *= settings[argument].value
    if devices % group_size:
        raise InputError(f"--devices {devices}: not a multiple of the {group_size} devices that compute a row together")
    micro_batch: int = settings["micro_batch_size"].value
    accumulation: int = settings["gradient_accumulation_steps"].value
    num_groups = devices // group_size
    return micro_batch * accumulation * num_groups


def _translate_length(translation: Translation) -> None:
    """Translate the number of epochs, which may be a fraction, and the largest number of steps."""
    file = translation.file
    epochs = translation.number(*_EPOCHS)
    epoch_names = file.names(*_EPOCHS)
    if epochs is not None and epochs <= 0:
        raise InputError(f"{file.path}: {epoch_names[0]}: expected a number above 0, got {epochs:g}")

    max_step = _read_max_step(translation)
    if max_step is not None:
        # The other programs repeat epochs until that step; here both numbers are limits.
        comment = "max_step ends the run regardless of the epochs"
        translation.set_training("number_epochs", _MANY_EPOCHS, *epoch_names, comment=comment)
        translation.set_training("max_step", max_step, *file.names(*_MAX_STEPS))
    elif epochs is not None:
        num_epochs = math.ceil(epochs)
        is_fraction = num_epochs != epochs
        comment = f"{epochs:g} there" if is_fraction else ""
        translation.set_training("number_epochs", num_epochs, *epoch_names, comment=comment)
        if is_fraction:  # a step ends the last epoch
            formula = f"ceil({epochs:g} × ceil(rows / rows of a step))"
            translation.set_training_by_length("max_step", formula, lambda length: length.steps, *epoch_names)

    if file.program == "torchtune" and file.get("max_steps_per_epoch") is not None:
        steps_per_epoch = translation.whole_number("max_steps_per_epoch") or 1
        torchtune_max_step = steps_per_epoch * math.ceil(epochs or 1)
        comment = "max_steps_per_epoch × epochs; there, each epoch begins with other rows"
        translation.set_training("max_step", torchtune_max_step, "max_steps_per_epoch", comment=comment)


def _read_max_step(translation: Translation) -> int | None:
    """Return the number of steps; None if it is missing, 0 or -1, and the epochs decide."""
    if not translation.file.names(*_MAX_STEPS):
        return None
    steps = translation.whole_number(*_MAX_STEPS)
    if steps is None or steps <= 0:
        translation.ignore(*_MAX_STEPS)
        return None
    return steps


def _translate_rate(translation: Translation, objective: str) -> None:
    file = translation.file
    rate = translation.number("learning_rate", "optimizer.lr")
    if rate is not None:
        translation.set_training("lr", rate, *file.names("learning_rate", "optimizer.lr"))
    elif file.program == "trl":
        translation.set_default("lr", 2e-5 if objective == "sft" else 1e-6)
    elif file.program == "torchtune":
        raise InputError(f"{file.path}: it does not give the learning rate; set optimizer.lr")
    elif file.program == "axolotl":
        raise InputError(f"{file.path}: it does not give the learning rate; set learning_rate")
    decay = translation.number("weight_decay", "optimizer.weight_decay")
    if decay is not None:
        translation.set_training("weight_decay", decay, *file.names("weight_decay", "optimizer.weight_decay"))
    elif file.program == "torchtune":
        translation.set_default("weight_decay", 0.01)


def _translate_schedule(translation: Translation) -> None:
    """Translate the schedule, its lowest learning rate and the decay of warmup_stable_decay."""
    file = translation.file
    names = file.names("lr_scheduler", "lr_scheduler_type", "lr_scheduler._component_")
    schedule = str(file.get(*names) or "").rpartition(".")[2].lower()  # torchtune's has the path of its module
    options = _schedule_options(translation)
    power = translation.as_number("lr_scheduler_kwargs", options.get("power", 1.0))
    # the number of cycles with which a cosine falls once and does not rise again, which is also its default
    cycles_of_fall = 1.0 if schedule == "cosine_with_restarts" else 0.5
    num_cycles = translation.as_number("lr_scheduler_kwargs", options.get("num_cycles", cycles_of_fall))

    our_schedule = _SCHEDULES.get(schedule)
    if our_schedule == "cosine" and num_cycles != cycles_of_fall:
        our_schedule = None  # the cosine rises again, which ours does not
    if schedule == "polynomial" and power == 1.0:
        our_schedule = "linear"
        options.setdefault("lr_end", 1e-7)  # the default of transformers

    if our_schedule is not None:
        translation.set_training("lr_schedule", our_schedule, *names)
    elif schedule:
        translation.leave_out("lr_schedule is cosine, linear, constant, step, exponential or wsd; cosine here", *names)
        translation.notes.append(f"{names[0]}: {file.get(*names)}: there is no such schedule; using cosine")
        translation.set_default("lr_schedule", "cosine")
    _translate_lowest_rate(translation, options)
    if schedule == "warmup_stable_decay":
        _translate_decay(translation, options)


def _schedule_options(translation: Translation) -> dict[str, Any]:
    """Return the arguments of the schedule, such as min_lr_rate."""
    file = translation.file
    options = file.get("lr_scheduler_kwargs", "lr_scheduler_args")
    if options is not None:
        if not isinstance(options, dict):
            raise InputError(f"{file.path}: lr_scheduler_kwargs: expected names with values")
        return dict(options)

    # torchtune's are settings of their own
    translation.ignore("lr_scheduler.num_cycles")
    prefix = "lr_scheduler."
    options = {}
    for name, value in file.settings.items():
        if name.startswith(prefix) and value is not None:
            options[name.removeprefix(prefix)] = value
    return options


def _translate_lowest_rate(translation: Translation, options: dict[str, Any]) -> None:
    """Translate where the schedule ends: a learning rate, or its ratio to the highest one."""
    file = translation.file
    max_lr = translation.number("learning_rate", "optimizer.lr")
    if max_lr is None:
        default = translation.training.get("lr")
        max_lr = default.value if default else _DEFAULTS[file.program].get("lr", 2e-5)
    ratio = options.get("min_lr_rate", options.get("min_lr_ratio", file.get("cosine_min_lr_ratio")))
    min_lr = options.get("min_lr", options.get("lr_end", file.get("min_lr")))
    origins = file.names("lr_scheduler_kwargs", "lr_scheduler_args", "cosine_min_lr_ratio", "min_lr")
    if ratio is not None:
        ratio = translation.as_number(origins[0], ratio)
        translation.set_training("min_lr", ratio * max_lr, *origins, comment=f"{ratio:g} × lr")
    elif min_lr is not None:
        translation.set_training("min_lr", translation.as_number("min_lr", min_lr), *origins)
    elif origins:
        translation.ignore(*origins)
    if translation.number("cosine_constant_lr_ratio"):
        translation.leave_out("here, the cosine falls until the last step", "cosine_constant_lr_ratio")
    else:
        translation.ignore("cosine_constant_lr_ratio")


def _translate_decay(translation: Translation, options: dict[str, Any]) -> None:
    """Translate the decay of warmup_stable_decay."""
    origins = translation.file.names("lr_scheduler_kwargs", "lr_scheduler_args")
    if "num_decay_steps" not in options:
        raise InputError(f"{translation.file.path}: lr_scheduler_kwargs: num_decay_steps is missing")
    translation.set_training("decay_steps", options["num_decay_steps"], *origins)
    decay_type = str(options.get("decay_type", "cosine"))
    if decay_type in ("linear", "cosine", "1-sqrt"):
        translation.set_training("decay_form", decay_type, *origins)
    else:
        translation.leave_out("decay_form is 1-sqrt, linear or cosine", *origins)


def _translate_warmup(translation: Translation) -> None:
    """Translate steps of warm-up, or their share of all steps."""
    file = translation.file
    step_names = file.names("warmup_steps", "lr_scheduler.num_warmup_steps")
    steps = translation.number("warmup_steps", "lr_scheduler.num_warmup_steps")
    ratio_names = file.names("warmup_ratio")
    ratio = translation.number("warmup_ratio")
    if file.get("lr_scheduler_type", "lr_scheduler") == "constant" and (steps or ratio):
        words = "the schedule constant has no warm-up there; here it has one with warmup_steps above 0"
        translation.leave_out(words, *step_names, *ratio_names)
        return
    if steps is not None and 0 < steps < 1:  # a share: transformers 5 has both in one name
        ratio = steps
        ratio_names = step_names
        steps = None

    if steps:
        translation.set_training("warmup_steps", int(steps), *step_names)
        if ratio is not None:
            translation.leave_out("warmup_steps counts", *ratio_names)
    elif ratio:
        if not 0 <= ratio <= 1:
            raise InputError(f"{file.path}: {ratio_names[0]}: expected a share of the steps from 0 to 1, got {ratio:g}")
        rounds_up = file.program != "axolotl"
        rounding = "ceil" if rounds_up else "floor"
        compute = functools.partial(_share_of_steps, share=ratio, rounds_up=rounds_up)
        translation.set_training_by_length("warmup_steps", f"{rounding}({ratio:g} × steps)", compute, *ratio_names)
    elif file.program == "axolotl" and steps is None and not ratio_names:
        comment = "the default of axolotl"
        translation.set_training_by_length(
            "warmup_steps", "min(floor(0.03 × steps), 100)", _warmup_of_axolotl, comment=comment
        )
    else:
        translation.ignore(*step_names, *ratio_names)


def _share_of_steps(length: RunLength, *, share: float, rounds_up: bool) -> int:
    exact = round(share * length.steps, 9)  # 0.1 × 30 is 3.0000000000000004
    return math.ceil(exact) if rounds_up else math.floor(exact)


def _warmup_of_axolotl(length: RunLength) -> int:
    return min(math.floor(0.03 * length.steps), 100)


def _translate_optimizer(translation: Translation) -> None:
    file = translation.file
    names = file.names("optim", "optimizer", "optimizer._component_")
    optimizer = str(file.get(*names)).rpartition(".")[2] if names else ""
    if optimizer in _ADAMW:
        translation.ignore(*names)
    elif optimizer in _ADAMW_IN_FP32:
        translation.set_training("optimizer_states", "float32", *names)
    elif optimizer in _ADAMW_IN_8_BITS:
        translation.set_training("optimizer_states", "8bit", *names)
    elif optimizer == "muon" and "adapter" not in translation.training:  # not the factors of an adapter here
        translation.set_training("optimizer", "muon", *names)
    elif optimizer:
        translation.leave_out("the optimizer here is AdamW, which may need a different learning rate", *names)
        translation.notes.append(f"{names[0]}: {file.get(*names)}: the optimizer here is AdamW, with the same lr")
    for name, argument in (("adam_beta1", "beta1"), ("adam_beta2", "beta2")):
        if file.get(name) is not None:
            translation.set_training(argument, translation.number(name), name)
    betas = file.get("optimizer.betas")
    if isinstance(betas, list) and len(betas) == 2:
        translation.set_training("beta1", betas[0], "optimizer.betas")
        translation.set_training("beta2", betas[1], "optimizer.betas")
    epsilon = translation.number("adam_epsilon", "optimizer.eps")
    if epsilon == 1e-8:
        translation.ignore(*file.names("adam_epsilon", "optimizer.eps"))
    translation.ignore(*file.names("optimizer.fused"))
