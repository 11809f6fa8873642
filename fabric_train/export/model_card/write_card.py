"""Write the model card, ``README.md`` of an exported folder, from the checkpoint.

It contains nothing private to the machine: only the last part of paths, and only the arguments listed in
``card_training``.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from huggingface_hub import ModelCard

from fabric_train.cli.redaction import redact
from fabric_train.export.average import AveragePart
from fabric_train.export.model_card.card_data import training_data, write_hashes, write_stages
from fabric_train.export.model_card.card_metadata import card_metadata
from fabric_train.export.model_card.card_overview import citation, introduction, key_facts, usage
from fabric_train.export.model_card.card_results import PICTURE, draw_run, results
from fabric_train.export.model_card.card_training import stages, training
from fabric_train.export.model_card.markdown import escaped
from fabric_train.export.model_card.record import CardFacts, ModelRecord, read_record
from fabric_train.model.origin import ModelOrigin


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
