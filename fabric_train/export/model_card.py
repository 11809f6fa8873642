"""Write the model card, ``README.md`` of an exported folder, from the checkpoint.

``templates/model_card.md.j2`` has the text and the order of the sections. The card contains nothing private to the
machine: only the last part of paths, and only the arguments that are listed here.
"""

import hashlib
import json
import math
import re
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

import huggingface_hub
import safetensors
import torch
import transformers
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import AutoConfig, PretrainedConfig

from fabric_train import checkpoint as checkpoints
from fabric_train.arguments import OBJECTIVE_ARGUMENTS, TrainingArguments
from fabric_train.checkpoint.adapter_folder import is_adapter
from fabric_train.cli.errors import InputError
from fabric_train.cli.output import redact
from fabric_train.export import card_facts
from fabric_train.export.card_facts import ModelRecord, Row, read_record
from fabric_train.export.publish import read_cleaning
from fabric_train.export.source import ExportSource
from fabric_train.export.verification_report import REPORT_NAME, OutputReport, VerificationReport
from fabric_train.files.regular_file import write_atomically
from fabric_train.files.typed_json import read_json
from fabric_train.model.nf4 import DOUBLE
from fabric_train.model.origin import STAGES, ModelOrigin, TrainingStage, legal_files
from fabric_train.pages.markdown import Markdown, code, escaped, last_part, link, render
from fabric_train.rollouts.rewards import name_rewards
from fabric_train.training.loss_curves import PICTURE, draw_loss_curves
from fabric_train.training.metrics_table import read_lineage

_HASHES = "training_data.sha256"
_CARD = Path(__file__).with_name("templates") / "model_card.md.j2"
_METRICS = {"perplexity": "Perplexity", "bits_per_byte": "Bits per byte"}
_HYPERPARAMETERS = (
    *("precision", "parallelism", "seed", "rope_scaling", "rope_theta"),
    *(field.name for field in fields(TrainingArguments)),
)
_ADAPTER_ARGUMENTS = (
    *("adapter", "lora_rank", "lora_alpha", "lora_dropout", "lora_rslora", "lora_targets", "train_also"),
    "base_weights",
)
_TRAINED_PARTS_ARGUMENTS = ("train_only", "freeze")
_ROLLOUT_ARGUMENTS = (
    *("prompts_per_step", "group_size", "max_new_tokens", "temperature", "reward_weights"),
    *("advantage", "loss_normalisation", "kl_weight", "refill"),
)
_UNLISTED_ARGUMENTS = ("optimizer_settings", "reference", "teacher", "teacher_states")
"""Arguments that the description of the optimizer has, or that are paths of the machine."""
_DATA_ARGUMENTS = ("train_data_dir", "streaming_dataset", "phases")
_MARK = re.compile(r"\n<!-- written by Fabric Train; SHA-256 of the text above: ([0-9a-f]{64}) -->\n\Z")


@dataclass(frozen=True)
class CardFacts:
    """The facts about an export that are not in its checkpoint."""

    name: str
    """The repository that the export is pushed to, or else the name of its folder."""
    license: str | None = None
    """The licence's identifier on the hub; None takes the base model's."""
    languages: tuple[str, ...] | None = None
    """The languages as ISO 639 codes; None if they are not known."""
    base_model: str | None = None
    """The base model's name on the hub; None takes the name in the checkpoint."""


def write_card(source: ExportSource, folder: Path, facts: CardFacts) -> None:
    """Write the model card ``README.md`` to the export ``folder``, with its picture and a hidden last line."""
    record = read_record(source.saved, source.averaged, source.merges)
    draw_card_picture(record, folder, facts)
    write_model_card(record, folder, facts)
    text = (folder / "README.md").read_text(encoding="utf-8")
    mark = f"\n<!-- written by Fabric Train; SHA-256 of the text above: {_sha256(text)} -->\n"
    write_atomically(folder / "README.md", text + mark)


def renew_card(source: ExportSource, folder: Path, facts: CardFacts) -> None:
    """Rewrite a finished export's card with ``facts``, unless a user has edited it or an older version wrote it."""
    text = (folder / "README.md").read_text(encoding="utf-8")
    mark = _MARK.search(text)
    if mark and mark[1] == _sha256(text[: mark.start()]):
        write_card(source, folder, facts)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write_model_card(record: ModelRecord, folder: Path, facts: CardFacts) -> None:
    """Write ``README.md`` to ``folder``, with the hashes of the training data and the stages of training next to it.

    Args:
        record: The facts in the exported checkpoint.
        folder: The export. It has the licence's files, the picture of the losses if the card is to show it, and the
            report of the verification if the card is to give the difference from the trained model.
        facts: The facts that are not in the checkpoint.
    """
    name = facts.base_model
    if name:
        origin = record.origin or ModelOrigin(name)
        revision = origin.revision if origin.repository == name else None  # stays if the name is the same
        record = replace(record, origin=replace(origin, name=name, repository=name, revision=revision))
    _write_stages(record, folder)
    text = redact(card_text(record, facts, folder))
    metadata = card_metadata(record, facts, folder)
    ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n{text}\n").save(folder / "README.md")


def _write_stages(record: ModelRecord, folder: Path) -> None:
    """Write the stages of training, which a run that begins with the export reads, and the hashes of the source files.

    Each source file is a line, as ``sha256sum`` writes it, with a name of the form SOURCE/FILE.
    """
    stages = card_facts.all_stages(record)
    text = json.dumps([asdict(stage) for stage in stages], indent=2)
    (folder / STAGES).write_text(redact(text) + "\n", encoding="utf-8")

    lines: dict[str, None] = {}  # each once, in order
    for stage in stages:
        for source in stage.sources:
            for line in source.files:
                printable_line = "".join(character if character.isprintable() else "?" for character in line)
                lines[printable_line] = None
    if lines:
        (folder / _HASHES).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def card_metadata(record: ModelRecord, facts: CardFacts, folder: Path) -> ModelCardData:
    """Return the metadata of a model's card; ``folder`` is the export, with the licence's files."""
    repository = record.origin.repository if record.origin else None
    relation = None
    if repository:
        relation = "adapter" if is_adapter(folder) else "finetune"
    results = _eval_results(record)
    if facts.license:
        licence = {"license": facts.license}
    else:
        licence = licence_metadata(record.origin, folder)
    return ModelCardData(
        base_model=repository,
        base_model_relation=relation,
        datasets=record.hub_datasets() or None,
        eval_results=results or None,
        language=list(facts.languages) if facts.languages else None,
        library_name="peft" if is_adapter(folder) else "transformers",
        model_name=Path(facts.name).name if results else None,
        pipeline_tag="text-generation",
        tags=["fabric-train"],
        **licence,  # type: ignore[arg-type]
    )


def licence_metadata(origin: ModelOrigin | None, folder: Path) -> dict[str, str]:
    """Return the base model's licence as a card's metadata; empty if it is not known, or there is no base model.

    The hub takes ``LICENSE``, ``LICENSE.md`` or a URL as the link to the text of a licence that has no identifier.
    """
    if origin is None:
        return {}
    licence_files = [file.name for file in legal_files(folder) if file.name.upper().startswith("LICEN")]
    if origin.license is None and not licence_files:
        return {}

    # a link to a file that the export does not have leads to the base model
    name = origin.license_name
    link = origin.license_link
    if link and "://" not in link and not (folder / link).is_file():
        link = f"https://huggingface.co/{origin.repository}/blob/main/{link}" if origin.repository else None
    if origin.license in (None, "other"):  # the hub then asks for its name and text
        name = name or "license-of-the-base-model"
        if not link:
            link = licence_files[0] if licence_files else None

    metadata = {"license": origin.license or "other"}
    if name is not None:
        metadata["license_name"] = name
    if link is not None:
        metadata["license_link"] = link
    return metadata


def _eval_results(record: ModelRecord) -> list[EvalResult]:
    """Return the finite figures of the last validation, for each source and for all; an average has none."""
    evaluation = record.saved.state.evaluation
    if evaluation is None or record.averaged:
        return []
    loss_name = f"Loss ({card_facts.unit_of_loss(record.saved)})"
    results = []
    for source, loss in evaluation.parts.items():
        name = record.evaluated_name(source)
        for figure, value in loss.figures().items():
            if value is None or not math.isfinite(value):
                continue
            results.append(
                EvalResult(
                    task_type="text-generation",
                    dataset_type=name,
                    dataset_name=f"{name}, held out",
                    dataset_split="validation",
                    metric_type=figure,
                    metric_name=loss_name if figure == "loss" else _METRICS.get(figure, figure.replace("_", " ")),
                    metric_value=float(f"{value:.6g}"),
                )
            )
    return results


def card_text(record: ModelRecord, facts: CardFacts, folder: Path) -> str:
    """Return the card without its metadata; ``folder`` is the export."""
    # what several values are made of
    saved = record.saved
    stages = card_facts.all_stages(record)
    sessions = list(chain.from_iterable(stage.sessions for stage in stages))
    sources = card_facts.stored_sources(record)
    config = AutoConfig.from_pretrained(record.checkpoint, trust_remote_code=False)
    links = [link(file.name, file.name) for file in legal_files(folder) if record.origin]
    packages = (torch, transformers, huggingface_hub, safetensors)
    earlier_rows = []
    for stage_number, stage in enumerate(saved.stages, 1):
        for source in stage.sources:
            earlier_rows.append((stage_number, *card_facts.source_row(source)))
    return render(
        _CARD,
        record=record,
        facts=facts,
        card_facts=card_facts,
        title=Path(facts.name).name,
        steps=f"{saved.state.step:,} optimizer step{'s' * (saved.state.step != 1)}",
        model_type=config.model_type,
        trained_on=_trained_on(record),
        data_begins=checkpoints.data_starts_after(saved.lineage) + 1,
        legal_files=Markdown(", ".join(links)),
        context_length=_context_lengths(record, config),
        compute=card_facts.device_hours(sessions) if sessions else None,
        has_chats=_has_chats(record),
        has_chat_template=has_chat_template(record.checkpoint / "tokenizer"),
        stages=stages,
        stage_rows=[_stage_row(stage_number, stage) for stage_number, stage in enumerate(stages, 1)],
        earlier_rows=earlier_rows,
        picture=PICTURE if (folder / PICTURE).is_file() else None,
        hyperparameters=_hyperparameters(saved),
        unit=card_facts.unit_of_loss(saved),
        objective=saved.component("objective"),
        teacher=_describe_teacher(saved),
        is_adapter=is_adapter(folder),
        in_4_bits=saved.adapter_base is not None and saved.arguments.get("base_weights") is not None,
        has_8bit_scales=saved.arguments.get("base_weights") == DOUBLE,
        difference=_difference_from_training(folder),
        lineage_rows=[card_facts.lineage_row(run, (*_HYPERPARAMETERS, *_DATA_ARGUMENTS)) for run in saved.lineage],
        export_versions={package.__name__: package.__version__ for package in packages},
        source_rows=list(map(card_facts.source_row, sources)),
        most_files=max((len(source.files) for source in sources), default=0),
        cleaning=read_cleaning(record.manifest) if record.manifest else None,
        hashes=_HASHES,
        **card_facts.results_of(record),
    )


def _describe_teacher(saved: checkpoints.TrainerJson) -> Markdown | None:
    """Return the teacher with its revision and licence, and the divergence; None for a model without a teacher."""
    if saved.teacher is None:
        return None
    origin = saved.teacher.origin or ModelOrigin(last_part(saved.teacher.location))
    text = code(origin.name)
    if origin.repository:
        text = link(origin.repository, f"https://huggingface.co/{origin.repository}")
    details = []
    if origin.revision:
        details.append(f"revision {code(origin.revision)}")
    details.append(f"licence {escaped(origin.license)}" if origin.license else "licence not stated")
    divergence = code(str(saved.arguments.get("divergence")))
    stored = ""
    if saved.teacher.stored_as:
        stored = f", from stored values ({escaped(saved.teacher.stored_as)})"
    return Markdown(f"distilled from {text} ({', '.join(details)}) by {divergence}{stored}")


def _context_lengths(record: ModelRecord, config: PretrainedConfig) -> list[str]:
    """Return the model's number of positions and the length of its training rows, in words; each may be unknown."""
    lengths = []
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions:
        lengths.append(f"{positions:,} tokens")
    row_length = None
    if record.manifest:
        row_length = record.manifest.settings.max_length
    elif record.saved.stream:
        row_length = record.saved.stream.max_length
    if row_length:
        lengths.append(f"trained on rows of {row_length:,} tokens")
    return lengths


def _has_chats(record: ModelRecord) -> bool | None:
    """Return whether the training data has chats; None if a token dataset has no manifest."""
    if record.manifest:
        return record.manifest.tokenizer.chat_template_sha256 is not None
    if record.saved.stream:
        return record.saved.stream.chat_template is not None
    return None


def _hyperparameters(saved: checkpoints.TrainerJson) -> dict[str, Any]:
    """Return the values of the arguments that decided the training, and the registered components."""
    objective = saved.component("objective")
    names = [*(_ADAPTER_ARGUMENTS if saved.adapter_base else _TRAINED_PARTS_ARGUMENTS), *_HYPERPARAMETERS]
    if objective.is_own and objective.name != "sft":
        names += ["objective", *OBJECTIVE_ARGUMENTS.get(objective.name, ())]
    if saved.samples_rows:
        names += _ROLLOUT_ARGUMENTS
        names.remove("gradient_accumulation_steps")  # it follows from the completions
    values = {}
    for name in names:
        if name not in _UNLISTED_ARGUMENTS and saved.arguments.get(name) is not None:
            values[name] = saved.arguments[name]
    if saved.arguments.get("rewards"):
        values["rewards"] = ", ".join(name_rewards(saved.arguments["rewards"]))  # without their files
    for component in (objective, saved.component("optimizer")):
        if not component.is_own:
            values[component.kind] = component.description
    return values


def _difference_from_training(folder: Path) -> OutputReport | None:
    """Return how far logits are from the trained model's; None if this is not measured, or not yet."""
    if not (folder / REPORT_NAME).is_file():
        return None
    return read_json(folder / REPORT_NAME, VerificationReport, "convert again").trained


def _trained_on(record: ModelRecord) -> list[Markdown]:
    """Return the sources, with their shares if there are several."""
    shares = [(name, share) for name, share in card_facts.seen_shares(record) if share]
    if len(shares) > 1:
        return [Markdown(f"{code(name)} ({share:.1%})") for name, share in shares]
    if shares:
        return [code(name) for name, _ in shares]
    return [code(source.name) for source in record.stream_sources()]


def has_chat_template(tokenizer: Path) -> bool:
    """Return whether the files of a tokenizer have a chat template."""
    config = tokenizer / "tokenizer_config.json"
    if (tokenizer / "chat_template.jinja").is_file():
        return True
    return config.is_file() and bool(read_json(config, dict, "download it again").get("chat_template"))


def _stage_row(stage_number: int, stage: TrainingStage) -> Row:
    """Return number, run, start, tokens, steps and device hours of a stage."""
    if stage_number > 1:
        began_with = f"stage {stage_number - 1}"
    elif stage.base_model:
        began_with = code(stage.base_model.name)
    else:
        began_with = "random weights"
    hours = card_facts.device_hours(stage.sessions) if stage.sessions else "not recorded"
    return stage_number, code(stage.run), began_with, stage.num_tokens, stage.step, hours


def draw_card_picture(record: ModelRecord, folder: Path, facts: CardFacts) -> None:
    """Draw the losses of the checkpoint's run, and of the runs that it branched off, in ``folder``.

    Nothing is drawn if a metrics.csv is missing or damaged. The runs that it branched off may be gone.
    """
    run = checkpoints.run_of(record.checkpoint)
    try:
        table = read_lineage(run, record.saved.lineage, record.saved.state.step)
    except InputError:
        return
    if not len(table.steps):
        return

    # columns such as val_loss/SOURCE get the public name of the source
    columns = {}
    for column, values in table.columns.items():
        figure, slash, source = column.partition("/")
        if slash:
            column = f"{figure}/{record.names[source]}"
        columns[column] = values
    branched_after = [branch.step for branch in record.saved.lineage if not branch.is_border_of(run)]
    draw_loss_curves(replace(table, columns=columns), folder / PICTURE, Path(facts.name).name, branched_after)
