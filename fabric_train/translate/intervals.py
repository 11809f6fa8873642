"""Translate when a run evaluates, saves and logs, and to which trackers it logs."""

import functools
import math
from typing import Any

from fabric_train.cli.errors import InputError
from fabric_train.translate.run_length import RunLength
from fabric_train.translate.translation import Translation

_NEVER = 1_000_000_000
"""An interval that no run reaches, so that only the end of each epoch and of the run matters."""
_OFF = (None, False, "no", "none", "None", "")
_LOGGERS = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "DiskLogger": "csv",
    "StdoutLogger": "csv",
    "WandBLogger": "wandb",
    "TensorBoardLogger": "tensorboard",
}
_PROJECT_NAMES = (
    "wandb_project",
    "trackio_project_name",
    "mlflow_experiment_name",
    "project",
    "metric_logger.project",
)


def translate_intervals(translation: Translation) -> None:
    """Translate evaluation, saving and logging."""
    _translate_evaluation(translation)
    _translate_saving(translation)
    _translate_log_interval(translation)
    _translate_loggers(translation)
    file = translation.file
    output = file.get("output_dir", "checkpointer.output_dir")
    if isinstance(output, str):
        translation.set_training("output_dir", output, *file.names("output_dir", "checkpointer.output_dir"))
    translation.ignore(*file.names("logging_dir", "metric_logger.log_dir", "overwrite_output_dir"))


def _translate_evaluation(translation: Translation) -> None:
    file = translation.file
    batch_names = file.names("per_device_eval_batch_size", "eval_batch_size", "batch_size_val")
    if batch_names:
        translation.set_training("eval_batch_size", file.get(*batch_names), *batch_names)

    # how often: several times in an epoch, an interval in steps, or only at the end of each epoch
    strategy_names = file.names("eval_strategy", "evaluation_strategy")
    strategy = str(file.get("eval_strategy", "evaluation_strategy"))
    interval_names = file.names("eval_steps", "run_val_every_n_steps")
    interval = file.get("eval_steps", "run_val_every_n_steps")
    per_epoch = translation.number("evals_per_epoch")
    only_at_epoch_ends = "no evaluation in between; one at the end of each epoch"
    if per_epoch:
        _set_interval_by_epochs(translation, "eval_step_interval", per_epoch, "evals_per_epoch")
    elif strategy == "epoch":  # also if the file has an interval
        translation.set_training("eval_step_interval", _NEVER, *strategy_names, comment="at the end of each epoch")
    elif strategy == "no":  # also if the file has an interval; here, a run always evaluates when an epoch ends
        translation.set_training("eval_step_interval", _NEVER, *strategy_names, comment=only_at_epoch_ends)
    elif interval not in _OFF:
        _set_interval(translation, "eval_step_interval", interval, *interval_names, *strategy_names)
    elif strategy == "steps":  # without eval_steps, transformers evaluates every logging_steps
        logging_steps = file.get("logging_steps") or 500
        _set_interval(translation, "eval_step_interval", logging_steps, *strategy_names)
    else:  # the file says nothing about evaluation, or turns it off
        translation.set_training("eval_step_interval", _NEVER, *strategy_names, comment=only_at_epoch_ends)
    # Of these names, only those that no branch has used are ignored, because the first outcome of a name applies.
    translation.ignore(*interval_names, "evals_per_epoch")
    if file.names("eval_on_start"):
        translation.set_training("eval_at_start", file.is_on("eval_on_start"), "eval_on_start")
    translation.ignore(*file.names("do_eval", "do_train"))


def _translate_saving(translation: Translation) -> None:
    file = translation.file
    strategy = str(file.get("save_strategy"))
    interval_names = file.names("save_steps", "save_strategy")
    interval = file.get("save_steps")
    per_epoch = translation.number("saves_per_epoch")
    ends = "at the end of each epoch and of the run"
    if per_epoch:
        _set_interval_by_epochs(translation, "save_step_interval", per_epoch, "saves_per_epoch")
    elif strategy in ("no", "epoch", "best"):
        translation.set_training("save_step_interval", _NEVER, *interval_names, comment=ends)
    elif interval not in _OFF:
        _set_interval(translation, "save_step_interval", interval, *interval_names)
    elif file.program in ("axolotl", "torchtune"):
        translation.set_default("save_step_interval", _NEVER, ends)
    else:
        translation.set_default("save_step_interval", 500)
    translation.ignore(*interval_names, "saves_per_epoch")
    if translation.number("save_total_limit"):
        translation.set_training("keep_checkpoints", file.get("save_total_limit"), "save_total_limit")
    if file.names("load_best_model_at_end"):
        translation.set_training("save_best", file.is_on("load_best_model_at_end"), "load_best_model_at_end")
    if file.get("metric_for_best_model") in ("loss", "eval_loss"):
        translation.ignore("metric_for_best_model")


def _translate_log_interval(translation: Translation) -> None:
    file = translation.file
    names = file.names("logging_steps", "log_every_n_steps")
    if names and file.get("logging_strategy") not in ("no", "epoch"):
        _set_interval(translation, "log_step_interval", file.get(*names), *names)
    if file.get("logging_strategy") in ("steps", "no", "epoch"):
        translation.ignore("logging_strategy")


def _set_interval(translation: Translation, argument: str, interval: Any, *origins: str) -> None:
    """Set an interval in steps; a value below 1 is a share of all steps, as in transformers."""
    name = origins[0]
    steps_or_share = translation.as_number(name, interval)
    if steps_or_share <= 0:
        raise InputError(f"{translation.file.path}: {name}: expected a number above 0, got {steps_or_share:g}")
    # once in one epoch is the share 1
    is_share = steps_or_share < 1 or name in ("evals_per_epoch", "saves_per_epoch")
    if is_share:
        compute = functools.partial(_share_of_steps, share=steps_or_share)
        translation.set_training_by_length(argument, f"ceil({steps_or_share:g} × steps)", compute, *origins)
    else:
        translation.set_training(argument, math.ceil(steps_or_share), *origins)


def _set_interval_by_epochs(translation: Translation, argument: str, times_per_epoch: float, origin: str) -> None:
    """Set an interval for ``times_per_epoch`` events: a share of all steps, as axolotl computes it."""
    num_epochs = translation.number("num_epochs") or 1
    share_of_steps = 1 / (times_per_epoch * num_epochs)
    _set_interval(translation, argument, share_of_steps, origin)


def _share_of_steps(length: RunLength, *, share: float) -> int:
    steps = round(share * length.steps, 9)  # 0.1 × 30 is 3.0000000000000004
    return max(1, math.ceil(steps))


def _translate_loggers(translation: Translation) -> None:
    """Translate the trackers and their settings; in axolotl, a project is enough to turn a tracker on."""
    file = translation.file
    names = file.names("report_to", "metric_logger._component_")

    # what the file lists
    listed_loggers = file.get("report_to")
    if isinstance(listed_loggers, str):
        listed_loggers = listed_loggers.replace(",", " ").split()
    if file.names("metric_logger._component_"):
        listed_loggers = [str(file.get("metric_logger._component_")).rpartition(".")[2]]
    if not listed_loggers:
        listed_loggers = []
    elif not isinstance(listed_loggers, list):
        listed_loggers = [listed_loggers]
    loggers = ["csv"]
    unknown: list[str] = []
    for logger in map(str, listed_loggers):
        if logger in _LOGGERS:
            loggers.append(_LOGGERS[logger])
        elif logger == "all":
            loggers.append("tensorboard")
        elif logger not in ("none", "None"):
            unknown.append(logger)

    # what axolotl's other settings turn on
    if file.program == "axolotl":
        if file.names("use_wandb", "wandb_project") and file.get("use_wandb") is not False:
            loggers.append("wandb")
        if file.names("use_mlflow", "mlflow_tracking_uri") and file.get("use_mlflow") is not False:
            loggers.append("mlflow")
        if file.is_on("use_tensorboard"):
            loggers.append("tensorboard")
    if unknown:
        translation.leave_out(f"no logger for {', '.join(unknown)}: --loggers has the others", *names)
    loggers = list(dict.fromkeys(loggers))
    if listed_loggers or len(loggers) > 1:
        other_loggers = [logger for logger in loggers if logger != "csv"]
        translation.set_training("loggers", other_loggers or ["csv"], *names)

    # what the trackers are told
    uses_tracker = bool({"wandb", "mlflow", "trackio"} & set(loggers))
    names_by_argument = {
        "project": file.names(*_PROJECT_NAMES),
        "entity": file.names("wandb_entity"),
        "run_name": file.names("wandb_name", "run_name", "metric_logger.name"),
        "group": file.names("wandb_group", "metric_logger.group"),
    }
    for argument, keys in names_by_argument.items():
        if keys and uses_tracker:
            translation.set_training(argument, file.get(*keys), *keys)
        else:
            translation.ignore(*keys)
