"""Write the model card, ``README.md`` of an exported folder, from the checkpoint.

It contains nothing private to the machine: only the last part of paths, and only the arguments listed in
``card_training``.
"""

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from fabric_train.checkpoint import TokenLoss
from fabric_train.cli.output import redact
from fabric_train.export.average import AveragePart, ExportSource
from fabric_train.export.model_card.card_data import training_data, write_hashes, write_stages
from fabric_train.export.model_card.card_results import PICTURE, draw_run, results
from fabric_train.export.model_card.card_training import citation, introduction, key_facts, stages, training, usage
from fabric_train.export.model_card.record import CardFacts, ModelRecord, escaped, read_record
from fabric_train.files.regular_file import write_atomically
from fabric_train.model.origin import ModelOrigin, legal_files

_METRICS = {"loss": "Loss (nats per token)", "perplexity": "Perplexity", "bits_per_byte": "Bits per byte"}
_MARK = re.compile(r"\n<!-- written by Fabric Train; SHA-256 of the text above: ([0-9a-f]{64}) -->\n\Z")


def card_metadata(record: ModelRecord, facts: CardFacts, folder: Path) -> ModelCardData:
    """Return the metadata of a model's card; ``folder`` is the export, with the licence's files."""
    repository, results = record.origin.repository if record.origin else None, _eval_results(record)
    return ModelCardData(
        base_model=repository,
        base_model_relation="finetune" if repository else None,
        datasets=record.hub_datasets() or None,
        eval_results=results or None,
        language=list(facts.languages) if facts.languages else None,
        library_name="transformers",
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
    if record.state.evaluation is None or record.parts:
        return []
    return [
        result
        for name, loss in record.state.evaluation.parts.items()
        for result in _results_of(record.part_name(name), loss)
    ]


def _results_of(name: str, loss: TokenLoss) -> list[EvalResult]:
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=name,
            dataset_name=f"{name}, held out",
            dataset_split="validation",
            metric_type=figure,
            metric_name=_METRICS.get(figure, figure.replace("_", " ")),
            metric_value=float(f"{value:.6g}"),
        )
        for figure, value in loss.figures().items()
        if value is not None and math.isfinite(value)
    ]


def draw_card_picture(checkpoint: Path, folder: Path, facts: CardFacts) -> None:
    """Draw the losses of the checkpoint's run into ``folder``, for the card; nothing without its metrics.csv.

    Raises:
        InputError: trainer.json or manifest.json of the checkpoint is damaged.
    """
    draw_run(read_record(checkpoint), folder / PICTURE, Path(facts.name).name)


def write_model_card(checkpoint: Path, folder: Path, facts: CardFacts, parts: Sequence[AveragePart] = ()) -> None:
    """Write ``README.md`` into ``folder``, and the hashes of the training data and the stages of training beside it.

    The card has the picture of the losses if it is in ``folder``, see :func:`draw_card_picture`.

    Args:
        checkpoint: a complete checkpoint.
        folder: the export, with the licence's files.
        facts: what the checkpoint does not say.
        parts: the checkpoints whose average is exported; none if it is the checkpoint itself.

    Raises:
        InputError: trainer.json or manifest.json of the checkpoint is damaged.
    """
    record = _with_base_model(read_record(checkpoint, parts), facts.base_model)
    write_hashes(record, folder)
    write_stages(record, folder)
    sections = [
        f"# {escaped(Path(facts.name).name)}",
        introduction(record),
        key_facts(record, facts, folder),
        usage(record, facts.name),
        stages(record),
        results(record, folder),
        training_data(record),
        training(record),
        "## Verification\n\nBefore this folder got its name, a fresh process compared its tensors, settings and "
        "tokenizer with the checkpoint, and what plain transformers computes with it for a fixed text: see "
        "[verification.json](verification.json).",
        citation(record, facts.name),
    ]
    text = redact("\n\n".join(section for section in sections if section))
    metadata = card_metadata(record, facts, folder)
    ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n{text}\n").save(folder / "README.md")


def _with_base_model(record: ModelRecord, name: str | None) -> ModelRecord:
    """Return the record with another base model, OWNER/NAME on the hub; its revision stays if the name is the same."""
    if name is None:
        return record
    origin = record.origin
    revision = origin.revision if origin and origin.repository == name else None
    return replace(record, origin=replace(origin or ModelOrigin(name), name=name, repository=name, revision=revision))


def write_card(source: ExportSource, folder: Path, facts: CardFacts) -> None:
    """Write the model card ``README.md`` into the export ``folder``, with its picture and a hidden last line.

    Raises:
        InputError: trainer.json or manifest.json of the checkpoint is damaged.
    """
    draw_card_picture(source.checkpoint, folder, facts)
    write_model_card(source.checkpoint, folder, facts, source.parts)
    text = (folder / "README.md").read_text(encoding="utf-8")
    mark = f"\n<!-- written by Fabric Train; SHA-256 of the text above: {_sha256(text)} -->\n"
    write_atomically(folder / "README.md", text + mark)


def renew_card(source: ExportSource, folder: Path, facts: CardFacts) -> None:
    """Write the card of a finished export again with ``facts``, which may name another repository.

    A card that a user has edited, or that an older version wrote, stays.
    """
    text = (folder / "README.md").read_text(encoding="utf-8")
    found = _MARK.search(text)
    if found and found[1] == _sha256(text[: found.start()]):
        write_card(source, folder, facts)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
