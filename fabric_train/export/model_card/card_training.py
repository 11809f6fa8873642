"""How a model was trained, for its card: devices and hours, hyperparameters, lineage, replay, versions."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import huggingface_hub
import safetensors
import torch
import transformers

from arguments import TrainingArguments
from fabric_train.checkpoint import BranchPoint, TrainingSession
from fabric_train.export.model_card.card_data import all_stages, earlier_data
from fabric_train.export.model_card.markdown import Markdown, code, escaped, folded, listed, steps, table
from fabric_train.export.model_card.public_names import last_part, public_value
from fabric_train.export.model_card.record import ModelRecord
from fabric_train.training.replay_certificate import StoredCertificate

_DATA = ("train_data_dir", "streaming_dataset")
_HYPERPARAMETERS = ("precision", "parallelism", "seed", *(field.name for field in fields(TrainingArguments)))


def training(record: ModelRecord) -> str:
    """Return the sections on how the model was trained."""
    state = record.state
    skipped = ""
    if state.skipped_steps:
        skipped = f" {state.skipped_steps:,} of the steps were left out, because loss or gradient was not finite."
    hyperparameters = table("argument | value", _hyperparameters(record.trainer["arguments"]))
    sections = [
        f"## Training\n\n{state.num_tokens:,} tokens in {steps(state.step)}.{skipped}",
        _compute(record),
        "### Hyperparameters\n\n" + hyperparameters,
        _lineage(record.lineage) if record.lineage else "",
        _replay(record.certificate) if record.certificate else "",
        folded("Versions of packages", table("package | training | export", _versions(record.trainer["versions"]))),
    ]
    return "\n\n".join(section for section in sections if section)


def stages(record: ModelRecord) -> str:
    """Return the section of the stages of training; empty if there is only one."""
    if not record.stages:
        return ""
    found = all_stages(record)
    rows = []
    for number, stage in enumerate(found, start=1):
        hours = device_hours(stage.sessions) if stage.sessions else "not recorded"
        begun = (
            f"stage {number - 1}"
            if number > 1
            else code(stage.base_model.name)
            if stage.base_model
            else "random weights"
        )
        rows.append((f"{number}", code(stage.run), begun, f"{stage.num_tokens:,}", f"{stage.step:,}", Markdown(hours)))
    parts = [
        f"## Stages\n\nThe model was trained in {len(found):,} stages, each of which began with the weights of the one "
        f"before. Results, training data and training of this card are those of stage {len(found):,}, the last one.",
        table("stage | run | began with | tokens | steps | compute", rows),
        earlier_data(record),
    ]
    return "\n\n".join(filter(None, parts))


def device_hours(sessions: Sequence[TrainingSession]) -> str:
    """Return the hours of all devices together in words, such as ``98.4 GPU hours on 8 × NVIDIA H100``."""
    devices = listed([escaped(one) for one in dict.fromkeys(map(_hardware, sessions))])
    since = f", without the first {sessions[0].after_step:,} steps" if sessions[0].after_step else ""
    return f"{_totals(sessions)[1]} {_unit(sessions)} on {devices}{since}"


def _unit(sessions: Sequence[TrainingSession]) -> str:
    return "GPU hours" if all(_is_gpu(session.device) for session in sessions) else "device hours"


def _compute(record: ModelRecord) -> str:
    """Return the devices and their hours by steps; the steps of runs that this one branched off are apart."""
    if not record.sessions:
        device = record.trainer.get("device")
        return f"### Compute\n\nTrained on {code(device)}; the time was not recorded." if device else ""
    first = record.sessions[0].after_step
    unknown = f" The time of the first {first:,} steps was not recorded." if first else ""
    borders = {branch.step for branch in record.lineage}
    rows: list[list[TrainingSession]] = []
    for session in record.sessions:
        if rows and _hardware(rows[-1][0]) == _hardware(session) and session.after_step not in borders:
            rows[-1].append(session)
        else:
            rows.append([session])
    ends = [*(row[0].after_step for row in rows[1:]), record.state.step]
    cells = [
        (f"{row[0].after_step + 1:,} to {end:,}", _hardware(row[0]), *_totals(row))
        for row, end in zip(rows, ends, strict=True)
    ]
    if len(rows) > 1:
        cells.append(("all", "", *_totals(record.sessions)))
    return (
        f"### Compute\n\n{table(f'steps | devices | hours | {_unit(record.sessions)}', cells)}\n\n"
        "Wall-clock time from the start of training to this checkpoint, with evaluations and saves. What an "
        f"interrupted session did after its last save is not counted.{unknown}"
    )


def _totals(sessions: Sequence[TrainingSession]) -> tuple[str, str]:
    """Return the hours of the clock, and those of all devices together."""
    of_clock, of_devices = sum(one.seconds for one in sessions) / 3600, sum(one.device_hours for one in sessions)
    return _hours(of_clock), _hours(of_devices)


def _hardware(session: TrainingSession) -> str:
    name, _, more = session.device.partition(", ")  # of a CPU, instructions and threads
    return f"{session.num_devices:,} × {name}" + (f" ({more})" if more else "")


def _is_gpu(device: str) -> bool:
    """Return whether this is the name of a GPU, see ``device_name``."""
    return not device.startswith(("CPU", "xla"))


def _hours(hours: float) -> str:
    return f"{hours:,.1f}" if hours >= 10 else f"{hours:.2g}" if hours >= 0.01 else "under 0.01"


def _lineage(branches: Sequence[BranchPoint]) -> str:
    rows = []
    for branch in branches:
        changed = [
            f"`{name}`: {escaped(public_value(there))} → {escaped(public_value(here))}"
            for name, (there, here) in branch.changed.items()
            if name in (*_HYPERPARAMETERS, *_DATA, "phases")
        ]
        data = [] if branch.continues_data else ["other data from the start"]
        what = Markdown(", ".join([*changed, *data]) or "nothing")
        rows.append((code(last_part(branch.run)), f"{branch.step:,}", what))
    return (
        "### Lineage\n\nThe training data and the hyperparameters of this card are those of the last run, after the "
        "last step in this table.\n\n" + table("branch of run | after step | changed", rows)
    )


def _replay(certificate: StoredCertificate) -> str:
    return (
        f"### Replay\n\nThe steps {certificate.trained_from:,} to {certificate.steps[1]:,} of this run were trained "
        f"again on {escaped(certificate.here)} ({escaped(certificate.date)}), and have the figures of the run, "
        f"{escaped(certificate.rule)}. Compared: {escaped(', '.join(certificate.compared))}. Not compared: "
        f"{escaped('; '.join(certificate.not_compared))}. Content of the rows: {escaped(certificate.contents)}."
    )


def _hyperparameters(arguments: dict[str, Any]) -> list[tuple[str, ...]]:
    return [(code(name), f"{arguments[name]}") for name in _HYPERPARAMETERS if arguments.get(name) is not None]


def _versions(training: dict[str, str]) -> list[tuple[str, ...]]:
    packages = (torch, transformers, huggingface_hub, safetensors)
    export = {package.__name__: package.__version__ for package in packages}
    return [(name, training.get(name, ""), export.get(name, "")) for name in sorted({*training, *export})]
