"""The arguments of training, by group. Code imports them from ``fabric_train/arguments.py``, which defines them."""

from fabric_train.arguments import (
    AdapterArguments,
    CheckpointArguments,
    DataArguments,
    DeviceArguments,
    EvaluationArguments,
    ExtensionArguments,
    FSDPArguments,
    LoggingArguments,
    ModelArguments,
    PlanArguments,
    PreferenceArguments,
    SaveArguments,
    TrainArguments,
    TrainingArguments,
    parse,
)

__all__ = [
    "AdapterArguments",
    "CheckpointArguments",
    "DataArguments",
    "DeviceArguments",
    "EvaluationArguments",
    "ExtensionArguments",
    "FSDPArguments",
    "LoggingArguments",
    "ModelArguments",
    "PlanArguments",
    "PreferenceArguments",
    "SaveArguments",
    "TrainArguments",
    "TrainingArguments",
    "parse",
]
