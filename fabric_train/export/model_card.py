"""Write the model card, ``README.md`` of an exported folder, from the checkpoint.

``templates/model_card.md.j2`` has its text and the order of its sections. It contains nothing private to the machine:
only the last part of paths, and only the arguments that are listed here.
"""

import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import huggingface_hub
import safetensors
import torch
import transformers
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import AutoConfig

from fabric_train import checkpoint as checkpoints
from fabric_train.arguments import SETTINGS_OF_OBJECTIVES, TrainingArguments
from fabric_train.checkpoint.adapter_folder import is_adapter
from fabric_train.cli.errors import InputError
from fabric_train.cli.output import redact
from fabric_train.export import card_facts
from fabric_train.export.card_facts import ModelRecord, Row, read_record
from fabric_train.export.publish import read_cleaning
from fabric_train.export.source import AveragePart, ExportSource, MergeInto
from fabric_train.export.verification import REPORT_NAME, OutputReport, VerificationReport
from fabric_train.files.regular_file import read_json, write_atomically
from fabric_train.model.origin import STAGES, ModelOrigin, TrainingStage, legal_files
from fabric_train.pages.markdown import Markdown, code, link, render
from fabric_train.training.curves import PICTURE, draw_loss_curves, read_lineage

_HASHES = "training_data.sha256"
_CARD = Path(__file__).with_name("templates") / "model_card.md.j2"
_METRICS = {"perplexity": "Perplexity", "bits_per_byte": "Bits per byte"}
_HYPERPARAMETERS = (
    *("precision", "parallelism", "seed", "rope_scaling", "rope_theta"),
    *(field.name for field in fields(TrainingArguments)),
)
_OF_ADAPTERS = (
    *("adapter", "lora_rank", "lora_alpha", "lora_dropout", "lora_rslora", "lora_targets", "train_also"),
    "base_weights",
)
_PARTS = ("train_only", "freeze")
_SHOWN_AS_PARTS = ("optimizer_settings", "reference")  # with the optimizer; a path of the machine
_DATA = ("train_data_dir", "streaming_dataset", "phases")
_MARK = re.compile(r"\n<!-- written by Fabric Train; SHA-256 of the text above: ([0-9a-f]{64}) -->\n\Z")


@dataclass(frozen=True)
class CardFacts:
    """What a checkpoint does not say about its export."""

    name: str  # the repository that it is pushed to, else the name of its folder
    license: str | None = None  # identifier on the hub; None takes the base model's
    languages: tuple[str, ...] | None = None  # ISO 639 codes; None if they are not known
    base_model: str | None = None  # name on the hub; None takes the one that the checkpoint names


def write_card(source: ExportSource, folder: Path, facts: CardFacts) -> None:
    """Write the model card ``README.md`` into the export ``folder``, with its picture and a hidden last line."""
    draw_card_picture(source.checkpoint, folder, facts)
    write_model_card(source.checkpoint, folder, facts, source.parts, source.merges)
    text = (folder / "README.md").read_text(encoding="utf-8")
    mark = f"\n<!-- written by Fabric Train; SHA-256 of the text above: {_sha256(text)} -->\n"
    write_atomically(folder / "README.md", text + mark)


def renew_card(source: ExportSource, folder: Path, facts: CardFacts) -> None:
    """Write a finished export's card again with ``facts``, unless a user has edited it or an older version wrote it."""
    text = (folder / "README.md").read_text(encoding="utf-8")
    found = _MARK.search(text)
    if found and found[1] == _sha256(text[: found.start()]):
        write_card(source, folder, facts)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write_model_card(
    checkpoint: Path,
    folder: Path,
    facts: CardFacts,
    parts: Sequence[AveragePart] = (),
    merges: MergeInto | None = None,
) -> None:
    """Write ``README.md`` into ``folder``, and the hashes of the training data and the stages of training beside it.

    The export ``folder`` has the licence's files, and the picture of the losses if the card shall show it. ``parts``
    are the checkpoints whose average is exported; none if it is the checkpoint itself. ``merges`` says which weights
    its adapter is merged into. A report of the verification that lies in ``folder`` gives the difference.
    """
    record = read_record(checkpoint, parts, merges)
    if name := facts.base_model:  # the revision stays if the name is the same
        origin = record.origin or ModelOrigin(name)
        revision = origin.revision if origin.repository == name else None
        record = replace(record, origin=replace(origin, name=name, repository=name, revision=revision))
    _write_stages(record, folder)
    text = redact(card_text(record, facts, folder))
    ModelCard(f"---\n{card_metadata(record, facts, folder).to_yaml()}\n---\n\n{text}\n").save(folder / "README.md")


def _write_stages(record: ModelRecord, folder: Path) -> None:
    """Write the stages of training, from which a run that begins with the export takes them, and the source files.

    Each source file is a line, as ``sha256sum`` writes it, with a name of the form SOURCE/FILE.
    """
    stages = card_facts.all_stages(record)
    text = json.dumps([asdict(stage) for stage in stages], indent=2)
    (folder / STAGES).write_text(redact(text) + "\n", encoding="utf-8")
    files = (line for stage in stages for source in stage.sources for line in source.files)
    if lines := dict.fromkeys("".join(part if part.isprintable() else "?" for part in line) for line in files):
        (folder / _HASHES).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def card_metadata(record: ModelRecord, facts: CardFacts, folder: Path) -> ModelCardData:
    """Return the metadata of a model's card; ``folder`` is the export, with the licence's files."""
    repository = record.origin.repository if record.origin else None
    results = _eval_results(record)
    return ModelCardData(
        base_model=repository,
        base_model_relation=("adapter" if is_adapter(folder) else "finetune") if repository else None,
        datasets=record.hub_datasets() or None,
        eval_results=results or None,
        language=list(facts.languages) if facts.languages else None,
        library_name="peft" if is_adapter(folder) else "transformers",
        model_name=Path(facts.name).name if results else None,
        pipeline_tag="text-generation",
        tags=["fabric-train"],
        **({"license": facts.license} if facts.license else licence_metadata(record.origin, folder)),  # type: ignore[arg-type]
    )


def licence_metadata(origin: ModelOrigin | None, folder: Path) -> dict[str, str]:
    """Return the base model's licence as a card's metadata; empty if it is not known, or there is no base model.

    The hub takes ``LICENSE``, ``LICENSE.md`` or a URL as the link to the text of a licence that has no identifier.
    """
    if origin is None:
        return {}
    texts = [file.name for file in legal_files(folder) if file.name.upper().startswith("LICEN")]
    if origin.license is None and not texts:
        return {}
    name = origin.license_name
    link = origin.license_link
    if link and "://" not in link and not (folder / link).is_file():
        link = f"https://huggingface.co/{origin.repository}/blob/main/{link}" if origin.repository else None
    if origin.license in (None, "other"):  # the hub then asks for its name and text
        name = name or "license-of-the-base-model"
        link = link or (texts[0] if texts else None)
    given = {"license": origin.license or "other", "license_name": name, "license_link": link}
    return {key: value for key, value in given.items() if value is not None}


def _eval_results(record: ModelRecord) -> list[EvalResult]:
    """Return the finite figures of the last validation, of each source and of all; none of an average."""
    evaluation = record.saved.state.evaluation
    if evaluation is None or record.parts:
        return []
    unit = card_facts.unit_of_loss(record.saved)
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=record.part_name(part),
            dataset_name=f"{record.part_name(part)}, held out",
            dataset_split="validation",
            metric_type=figure,
            metric_name=f"Loss ({unit})" if figure == "loss" else _METRICS.get(figure, figure.replace("_", " ")),
            metric_value=float(f"{value:.6g}"),
        )
        for part, loss in evaluation.parts.items()
        for figure, value in loss.figures().items()
        if value is not None and math.isfinite(value)
    ]


def card_text(record: ModelRecord, facts: CardFacts, folder: Path) -> str:
    """Return the card without its metadata; ``folder`` is the export."""
    saved = record.saved
    state = record.saved.state
    stages = card_facts.all_stages(record)
    sessions = [session for stage in stages for session in stage.sessions]
    sources = card_facts.stored_sources(record)
    config = AutoConfig.from_pretrained(record.checkpoint, trust_remote_code=False)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    # not known, if a token dataset had no manifest
    has_chats = None
    row_length = None
    if saved.stream:
        has_chats = saved.stream.chat_template is not None
        row_length = saved.stream.max_length
    if record.manifest:
        has_chats = record.manifest.tokenizer.chat_template_sha256 is not None
        row_length = record.manifest.settings.max_length
    lengths = [f"{positions:,} tokens"] if positions else []
    lengths += [f"trained on rows of {row_length:,} tokens"] if row_length else []
    return render(
        _CARD,
        record=record,
        facts=facts,
        card_facts=card_facts,
        title=Path(facts.name).name,
        steps=f"{state.step:,} optimizer step{'s' * (state.step != 1)}",
        model_type=config.model_type,
        trained_on=_trained_on(record),
        data_begins=checkpoints.data_starts_after(saved.lineage) + 1,
        legal_files=Markdown(", ".join(link(file.name, file.name) for file in legal_files(folder) if record.origin)),
        context_length=lengths,
        compute=card_facts.device_hours(sessions) if sessions else None,
        has_chats=has_chats,
        has_chat_template=has_chat_template(record.checkpoint / "tokenizer"),
        stages=stages,
        stage_rows=[_stage_row(number, stage) for number, stage in enumerate(stages, 1)],
        earlier_rows=[
            (number, *card_facts.source_row(one))
            for number, stage in enumerate(saved.stages, 1)
            for one in stage.sources
        ],
        picture=PICTURE if (folder / PICTURE).is_file() else None,
        hyperparameters=_hyperparameters(saved),
        unit=card_facts.unit_of_loss(saved),
        objective=saved.component("objective"),
        is_adapter=is_adapter(folder),
        in_4_bits=saved.adapter_base is not None and saved.arguments.get("base_weights") is not None,
        difference=_difference_from_training(folder),
        lineage_rows=[card_facts.lineage_row(one, (*_HYPERPARAMETERS, *_DATA)) for one in saved.lineage],
        export_versions={one.__name__: one.__version__ for one in (torch, transformers, huggingface_hub, safetensors)},
        source_rows=list(map(card_facts.source_row, sources)),
        most_files=max((len(source.files) for source in sources), default=0),
        cleaning=read_cleaning(manifest) if (manifest := record.manifest) else None,
        hashes=_HASHES,
        **card_facts.results_of(record),
    )


def _hyperparameters(saved: checkpoints.TrainerJson) -> dict[str, Any]:
    """Return the values of the arguments that decided the training, and the parts that were registered."""
    objective = saved.component("objective")
    names = [*(_OF_ADAPTERS if saved.adapter_base else _PARTS), *_HYPERPARAMETERS]
    if objective.is_own and objective.name != "sft":
        names += ["objective", *SETTINGS_OF_OBJECTIVES.get(objective.name, ())]
    names = [name for name in names if name not in _SHOWN_AS_PARTS]
    values = {name: saved.arguments[name] for name in names if saved.arguments.get(name) is not None}
    for component in (objective, saved.component("optimizer")):
        if not component.is_own:
            values[component.kind] = component.description
    return values


def _difference_from_training(folder: Path) -> OutputReport | None:
    """Return how far logits are from the trained model's; None if that is not measured, or not yet."""
    if not (folder / REPORT_NAME).is_file():
        return None
    return read_json(folder / REPORT_NAME, VerificationReport, "convert again").trained


def _trained_on(record: ModelRecord) -> list[Markdown]:
    """Return the sources, with their shares if there are several."""
    shares = [(name, share) for name, share in card_facts.seen_shares(record) if share]
    names = [Markdown(code(name) + (f" ({share:.1%})" if len(shares) > 1 else "")) for name, share in shares]
    return names or [code(place.name) for place in record.stream_places()]


def has_chat_template(tokenizer: Path) -> bool:
    """Return whether the files of a tokenizer have a chat template."""
    config = tokenizer / "tokenizer_config.json"
    if (tokenizer / "chat_template.jinja").is_file():
        return True
    return config.is_file() and bool(read_json(config, dict, "fetch it again").get("chat_template"))


def _stage_row(number: int, stage: TrainingStage) -> Row:
    begun = f"stage {number - 1}" if number > 1 else "random weights"
    if number == 1 and stage.base_model:
        begun = code(stage.base_model.name)
    hours = card_facts.device_hours(stage.sessions) if stage.sessions else "not recorded"
    return number, code(stage.run), begun, stage.num_tokens, stage.step, hours


def draw_card_picture(checkpoint: Path, folder: Path, facts: CardFacts) -> None:
    """Draw the losses of the checkpoint's run into ``folder``, and of the runs that it branched off.

    Nothing is drawn if a metrics.csv is missing or damaged. Runs that it branched off may be gone.
    """
    record = read_record(checkpoint)
    try:
        table = read_lineage(checkpoints.run_of(checkpoint), record.saved.lineage, record.saved.state.step)
    except InputError:
        return
    if not len(table.steps):
        return
    columns = {}
    for column, values in table.columns.items():
        figure, slash, name = column.partition("/")
        columns[f"{figure}/{record.names[name]}" if slash else column] = values
    run = checkpoints.run_of(checkpoint)
    branched_after = [branch.step for branch in record.saved.lineage if not branch.is_border_of(run)]
    draw_loss_curves(replace(table, columns=columns), folder / PICTURE, Path(facts.name).name, branched_after)
