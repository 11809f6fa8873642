"""The metadata of a model card, as https://huggingface.co/docs/hub/model-cards describes them."""

import math
from pathlib import Path

from huggingface_hub import EvalResult, ModelCardData

from fabric_train.checkpoint import TokenLoss
from fabric_train.export.model_card.record import CardFacts, ModelRecord
from fabric_train.model.origin import ModelOrigin, legal_files

_METRICS = {"loss": "Loss (nats per token)", "perplexity": "Perplexity", "bits_per_byte": "Bits per byte"}


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
            metric_name=_METRICS[figure],
            metric_value=float(f"{value:.6g}"),
        )
        for figure, value in loss.figures().items()
        if value is not None and math.isfinite(value)
    ]
