"""Write the model card, ``README.md`` of an exported folder, from the checkpoint.

``templates/model_card.md.j2`` has its text and the order of its sections. It contains nothing private to the machine:
only the last part of paths, and only the arguments that are listed here.
"""

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import safetensors
import torch
import transformers
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import AutoConfig

from arguments import TrainingArguments
from fabric_train import checkpoint as checkpoints
from fabric_train.checkpoint import is_adapter
from fabric_train.cli.errors import InputError
from fabric_train.cli.output import redact
from fabric_train.export import card_facts
from fabric_train.export.card_facts import ModelRecord, Row, read_record
from fabric_train.export.source import AveragePart, ExportSource, MergeInto
from fabric_train.export.verification import REPORT_NAME, OutputReport, VerificationReport
from fabric_train.files.regular_file import read_json, write_atomically
from fabric_train.model.origin import ModelOrigin, TrainingStage, legal_files
from fabric_train.pages.markdown import Markdown, code, escaped, last_part, link, public_value, render
from fabric_train.training.curves import PICTURE, MetricsTable, draw_loss_curves, joined, read_curves

_CARD = Path(__file__).with_name("templates") / "model_card.md.j2"
_METRICS = {"loss": "Loss (nats per token)", "perplexity": "Perplexity", "bits_per_byte": "Bits per byte"}
_HYPERPARAMETERS = ("precision", "parallelism", "seed", *(field.name for field in fields(TrainingArguments)))
_OF_ADAPTERS = (
    *("adapter", "lora_rank", "lora_alpha", "lora_dropout", "lora_rslora", "lora_targets", "train_also"),
    "base_weights",
)
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
    card_facts.write_stages(record, folder)
    text = redact(card_text(record, facts, folder))
    ModelCard(f"---\n{card_metadata(record, facts, folder).to_yaml()}\n---\n\n{text}\n").save(folder / "README.md")


def card_metadata(record: ModelRecord, facts: CardFacts, folder: Path) -> ModelCardData:
    """Return the metadata of a model's card; ``folder`` is the export, with the licence's files."""
    repository, results = record.origin.repository if record.origin else None, _eval_results(record)
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
        **({"license": facts.license} if facts.license else _licence(record.origin, folder)),  # type: ignore[arg-type]
    )


def _licence(origin: ModelOrigin | None, folder: Path) -> dict[str, str]:
    """Return the base model's licence; empty if it is not known, or there is no base model.

    The hub takes ``LICENSE``, ``LICENSE.md`` or a URL as the link to the text of a licence that has no identifier.
    """
    if origin is None:
        return {}
    texts = [file.name for file in legal_files(folder) if file.name.upper().startswith("LICEN")]
    if origin.license is None and not texts:
        return {}
    name, link = origin.license_name, origin.license_link
    if link and "://" not in link and not (folder / link).is_file():
        link = f"https://huggingface.co/{origin.repository}/blob/main/{link}" if origin.repository else None
    if origin.license in (None, "other"):  # the hub then asks for its name and text
        name, link = name or "license-of-the-base-model", link or (texts[0] if texts else None)
    given = {"license": origin.license or "other", "license_name": name, "license_link": link}
    return {key: value for key, value in given.items() if value is not None}


def _eval_results(record: ModelRecord) -> list[EvalResult]:
    """Return the finite figures of the last validation, of each source and of all; none of an average."""
    evaluation = record.saved.state.evaluation
    if evaluation is None or record.parts:
        return []
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=record.part_name(part),
            dataset_name=f"{record.part_name(part)}, held out",
            dataset_split="validation",
            metric_type=figure,
            metric_name=_METRICS.get(figure, figure.replace("_", " ")),
            metric_value=float(f"{value:.6g}"),
        )
        for part, loss in evaluation.parts.items()
        for figure, value in loss.figures().items()
        if value is not None and math.isfinite(value)
    ]


def card_text(record: ModelRecord, facts: CardFacts, folder: Path) -> str:
    """Return the card without its metadata; ``folder`` is the export."""
    saved, state, stages = record.saved, record.saved.state, card_facts.all_stages(record)
    sessions, sources = [session for stage in stages for session in stage.sessions], card_facts.stored_sources(record)
    config = AutoConfig.from_pretrained(record.checkpoint, trust_remote_code=False)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    has_chats, row_length = None, None  # not known, if a token dataset had no manifest
    if saved.stream:
        has_chats, row_length = saved.stream.chat_template is not None, saved.stream.max_length
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
        legal_files=Markdown(", ".join(link(file.name, file.name) for file in legal_files(folder) if record.origin)),
        context_length=lengths,
        compute=card_facts.device_hours(sessions) if sessions else None,
        has_chats=has_chats,
        has_chat_template=_has_chat_template(record.checkpoint / "tokenizer"),
        stages=stages,
        stage_rows=[_stage_row(number, stage) for number, stage in enumerate(stages, 1)],
        earlier_rows=[
            (number, *card_facts.source_row(one))
            for number, stage in enumerate(saved.stages, 1)
            for one in stage.sources
        ],
        picture=PICTURE if (folder / PICTURE).is_file() else None,
        hyperparameters=(*(_OF_ADAPTERS if saved.adapter_base else ()), *_HYPERPARAMETERS),
        is_adapter=is_adapter(folder),
        in_4_bits=saved.adapter_base is not None and saved.arguments.get("base_weights") is not None,
        difference=_difference_from_training(folder),
        lineage_rows=list(map(lineage_row, saved.lineage)),
        export_versions={one.__name__: one.__version__ for one in (torch, transformers, huggingface_hub, safetensors)},
        source_rows=list(map(card_facts.source_row, sources)),
        most_files=max((len(source.files) for source in sources), default=0),
        **results_of(record),
    )


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


def _has_chat_template(tokenizer: Path) -> bool:
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


def lineage_row(branch: checkpoints.BranchPoint) -> Row:
    """Return the run that was branched off, the step, and the changed arguments without private places."""
    changed = [
        f"`{name}`: {escaped(public_value(there))} → {escaped(public_value(here))}"
        for name, (there, here) in branch.changed.items()
        if name in (*_HYPERPARAMETERS, *_DATA)
    ]
    data = [] if branch.continues_data else ["other data from the start"]
    return code(last_part(branch.run)), branch.step, Markdown(", ".join([*changed, *data]) or "nothing")


def results_of(record: ModelRecord) -> dict[str, Any]:
    """Return what the section on the results has: the losses of each source, at the first evaluation and now."""
    state, total = record.saved.state, sum(part.weight for part in record.parts)
    now, first = state.evaluation, state.first_evaluation or state.evaluation
    rows: list[Row] = []
    columns = ["source", f"{now.whole.unit if now else 'token'}s evaluated"]
    if now and first:
        figures = list(now.whole.figures())
        columns += [figure.replace("_", " ") for figure in figures]
        has_before = first.step < now.step
        columns += ["change of loss"] if has_before else []
        for name, before, after in checkpoints.compare_evaluations(first, now):
            pairs = zip(_cells(before, figures), _cells(after, figures), strict=True)
            cells = [f"{there}\u00a0→\u00a0{here}".strip("\u00a0→") if has_before else here for there, here in pairs]
            change = [_change(before, after)] if has_before else []
            rows.append((record.part_name(name), after.num_tokens, *cells, *change))
    runs = [code(last_part(str(checkpoints.run_of(part.checkpoint)))) for part in record.parts]
    return {
        "part_rows": [
            (run, checkpoints.read_trainer_json(part.checkpoint).state.step, f"{part.weight / total:.2%}")
            for run, part in zip(runs, record.parts, strict=True)
        ],
        "now": now,
        "first": first,
        "perplexity": None if state.val_loss is None else checkpoints.perplexity(state.val_loss),
        "result_columns": " | ".join(columns),
        "result_rows": rows,
    }


def _cells(loss: checkpoints.TokenLoss | None, figures: Sequence[str]) -> Iterator[str]:
    for value in (loss.figures().get(figure) if loss else None for figure in figures):
        digits = 3 if value is None or value < 100 else 1 if value < 1000 else 0
        yield "" if value is None else f"{value:,.{digits}f}"


def _change(before: checkpoints.TokenLoss | None, after: checkpoints.TokenLoss) -> str:
    if before is None or not before.loss > 0:
        return ""
    return f"{after.loss / before.loss - 1:+.1%}".replace("-", "−")  # also of the bits per byte


def draw_card_picture(checkpoint: Path, folder: Path, facts: CardFacts) -> None:
    """Draw the losses of the checkpoint's run into ``folder``, and of the runs that it branched off.

    Nothing is drawn if the run has no metrics.csv that can be read. Runs that it branched off may be gone.
    """
    record = read_record(checkpoint)
    own = _read(checkpoints.run_of(checkpoint), record.saved.state.step)
    if not len(own.steps):
        return
    parts, after = list[MetricsTable](), -1
    for branch in record.saved.lineage:
        part = _read(Path(branch.run), branch.step).between(after, branch.step)
        parts, after = [*parts, part], branch.step
    table = joined([*parts, own.between(after, math.inf)])
    columns = {}
    for column, values in table.columns.items():
        figure, slash, name = column.partition("/")
        columns[f"{figure}/{record.names[name]}" if slash else column] = values
    branched_after = [branch.step for branch in record.saved.lineage]
    draw_loss_curves(replace(table, columns=columns), folder / PICTURE, Path(facts.name).name, branched_after)


def _read(run: Path, last_step: int) -> MetricsTable:
    try:
        return read_curves(run / "metrics.csv").between(-1, last_step)
    except InputError:
        return MetricsTable(np.empty(0, np.int64), {})
