"""How a model was trained, for its card: devices and hours, hyperparameters, lineage, replay, versions."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import huggingface_hub
import safetensors
import torch
import transformers
from transformers import AutoConfig, PretrainedConfig

from arguments import TrainingArguments
from fabric_train.checkpoint import BranchPoint, TrainingSession
from fabric_train.export.model_card.card_data import all_stages, earlier_data, seen_shares
from fabric_train.export.model_card.record import (
    CardFacts,
    Markdown,
    ModelRecord,
    code,
    escaped,
    folded,
    last_part,
    link,
    listed,
    public_value,
    rounded,
    steps,
    table,
)
from fabric_train.files.typed_json import read_json
from fabric_train.model.origin import ModelOrigin, legal_files
from fabric_train.training.replay_certificate import StoredCertificate

_DATA = ("train_data_dir", "streaming_dataset")
_HYPERPARAMETERS = ("precision", "parallelism", "seed", *(field.name for field in fields(TrainingArguments)))
_TEXT = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("{name}")

inputs = tokenizer("Once upon a time", return_tensors="pt")
output = model.generate(**inputs, max_new_tokens=50)
print(tokenizer.decode(output[0], skip_special_tokens=True))
```"""
_CHAT = """```python
messages = [{"role": "user", "content": "What is the capital of Spain?"}]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
)
output = model.generate(**inputs, max_new_tokens=50)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
```"""


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


def introduction(record: ModelRecord) -> str:
    """Return two sentences: what the model began as, and what it was trained on."""
    state = record.state
    shares = [(name, share) for name, share in seen_shares(record) if share]
    sources = [code(name) + (f" ({share:.1%})" if len(shares) > 1 else "") for name, share in shares]
    sources = sources or [code(place.name) for place in record.stream_places()]
    data = f" from {listed(sources)}" if sources else ""
    average = f" The weights are the average of {len(record.parts):,} checkpoints." if record.parts else ""
    last = f"In the last of {len(record.stages) + 1:,} stages, it" if record.stages else "It"
    trained = f"{last} was trained on {rounded(state.num_tokens)} tokens{data}, in {steps(state.step)}."
    return f"{_beginning(record)} {trained}{average}"


def _beginning(record: ModelRecord) -> str:
    if record.origin:
        return f"{_linked(record.origin)}, trained further with Fabric Train."
    kind, is_known = _config(record).model_type, "base_model" in record.trainer
    beginning = "from random weights" if is_known else "from a base model that is not known"
    return f"A language model ({code(kind)}), trained with Fabric Train {beginning}."


def _config(record: ModelRecord) -> PretrainedConfig:
    return AutoConfig.from_pretrained(record.checkpoint, trust_remote_code=False)


def _linked(origin: ModelOrigin) -> str:
    name = code(origin.name)
    if origin.repository:
        name = link(origin.repository, f"https://huggingface.co/{origin.repository}")
    return name + (f" (revision {code(origin.revision)})" if origin.revision else "")


def key_facts(record: ModelRecord, facts: CardFacts, folder: Path) -> str:
    """Return a list of what a reader looks for first; ``folder`` is the export, with the licence's files."""
    sessions = [session for stage in all_stages(record) for session in stage.sessions]
    found = [
        ("Licence", _licence(record.origin, facts.license, folder)),
        ("Languages", ", ".join(facts.languages or ())),
        ("Context length", _context_length(record)),
        ("Compute", device_hours(sessions) if sessions else ""),
    ]
    return "\n".join(f"- **{name}:** {fact}" for name, fact in found if fact)


def _licence(origin: ModelOrigin | None, license: str | None, folder: Path) -> str:
    """Return the licence and the files of the base model about it; empty if nothing is known."""
    if origin is None:
        return license or ""
    files = ", ".join(link(file.name, file.name) for file in legal_files(folder))
    if license:
        return license + (f"; of the base model: {files}" if files else "")
    return ", ".join([*map(escaped, filter(None, [origin.license])), "as the base model"]) + (
        f": {files}" if files else ""
    )


def _context_length(record: ModelRecord) -> str:
    """Return the largest number of positions, and the length of the rows in training."""
    positions = getattr(_config(record).get_text_config(), "max_position_embeddings", None)
    longest = [f"{positions:,} tokens"] if positions else []
    rows = [f"trained on rows of {record.row_length:,} tokens"] if record.row_length else []
    return ", ".join([*longest, *rows])


def usage(record: ModelRecord, name: str) -> str:
    """Return code that completes a text, and one that chats if the tokenizer has a chat template."""
    text = "## How to use\n\n" + _TEXT.replace("{name}", name)
    if not _has_chat_template(record.checkpoint / "tokenizer"):
        return text
    caution = "" if record.has_chats in (None, True) else ", which the training data did not use"
    return f"{text}\n\nA chat, with the tokenizer's template{caution}:\n\n{_CHAT}"


def _has_chat_template(tokenizer: Path) -> bool:
    config = tokenizer / "tokenizer_config.json"
    if (tokenizer / "chat_template.jinja").is_file():
        return True
    return config.is_file() and bool(read_json(config, dict, "fetch it again").get("chat_template"))


def citation(record: ModelRecord, name: str) -> str:
    """Return an entry for BibTeX if the model has a place on the hub, and how to cite the base model."""
    parts = ["## Citation"]
    owner, _, model = name.rpartition("/")
    if owner:
        entry = [f"title = {{{model}}}", f"author = {{{owner}}}", f"url = {{https://huggingface.co/{name}}}"]
        parts.append("```bibtex\n@misc{" + ",\n  ".join([model, *entry]) + "\n}\n```")
    repository = record.origin.repository if record.origin else None
    if repository:
        parts.append(f"Cite the base model as {link('its card', f'https://huggingface.co/{repository}')} says.")
    return "\n\n".join(parts) if len(parts) > 1 else ""
