"""Write the model card, ``README.md`` of an exported folder, from the checkpoint.

It contains nothing private to the machine: only the last part of paths, and only the arguments listed here.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import huggingface_hub
import safetensors
import torch
import transformers
from huggingface_hub import ModelCard, ModelCardData

from arguments import TrainingArguments
from fabric_train.checkpoint import (
    BranchPoint,
    Evaluation,
    StreamOrder,
    TokenLoss,
    TrainerState,
    compare_evaluations,
    perplexity,
    read_base_model,
    read_lineage,
    read_stream_order,
    read_trainer_json,
    read_trainer_state,
    run_of,
)
from fabric_train.export.average import AveragePart
from fabric_train.model.origin import ModelOrigin, legal_files
from fabric_train.tokenization.manifest import Manifest, SourceRecord, read_manifest
from fabric_train.tokenization.reading.source_names import place_of
from fabric_train.training.replay_certificate import StoredCertificate, read_certificate

_DATA = ("train_data_dir", "streaming_dataset")
_HYPERPARAMETERS = ("precision", "parallelism", "seed", *(field.name for field in fields(TrainingArguments)))


@dataclass(frozen=True)
class CardFacts:
    """What a checkpoint does not say about its export.

    Args:
        name: the repository that it is pushed to, else the name of its folder.
        license: the licence's identifier on the hub; None takes that of the base model.
        languages: ISO 639 codes; None if they are not known.
        base_model: the base model's hub name; None takes the one that the checkpoint names.
    """

    name: str
    license: str | None = None
    languages: tuple[str, ...] | None = None
    base_model: str | None = None


def write_model_card(checkpoint: Path, folder: Path, facts: CardFacts, parts: Sequence[AveragePart] = ()) -> None:
    """Write ``README.md`` into ``folder``: base model, licence, data, losses, hyperparameters and versions.

    Args:
        checkpoint: a complete checkpoint.
        folder: the export, with the licence's files.
        facts: what the checkpoint does not say.
        parts: the checkpoints whose average is exported; none if it is the checkpoint itself.

    Raises:
        InputError: trainer.json or manifest.json of the checkpoint is damaged.
    """
    trainer = read_trainer_json(checkpoint)
    manifest = read_manifest(checkpoint)
    origin = read_base_model(checkpoint)
    if facts.base_model:
        is_same = origin is not None and origin.repository == facts.base_model
        origin = replace(
            origin or ModelOrigin(facts.base_model),
            name=facts.base_model,
            repository=facts.base_model,
            revision=origin.revision if origin and is_same else None,
        )
    streamed = [place_of(name) for name in trainer["arguments"].get("streaming_dataset") or ()]
    licence = {"license": facts.license} if facts.license else _licence(origin, folder)
    data = ModelCardData(
        base_model=origin.repository if origin else None,
        datasets=_hub_datasets(manifest, streamed, read_stream_order(checkpoint)) or None,
        language=list(facts.languages) if facts.languages else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["fabric-train"],
        **licence,  # type: ignore[arg-type]
    )
    lineage, state = read_lineage(checkpoint), read_trainer_state(checkpoint)
    certificate = read_certificate(run_of(checkpoint), state.step)
    sections = [
        f"# {Path(facts.name).name}",
        _introduction(origin, "base_model" in trainer) + _legal_note(folder, facts.license, origin),
        _usage(facts.name),
        _training_data(manifest, streamed),
        *(
            [_mixture(trainer, state, manifest.settings.max_length)]
            if trainer.get("mixture_sources") and manifest
            else []
        ),
        *([_lineage(lineage)] if lineage else []),
        *([_average(parts)] if parts else []),
        _results(state),
        *([_replay(certificate)] if certificate else []),
        "## Hyperparameters\n\n" + _table("argument | value", _hyperparameters(trainer["arguments"])),
        "## Versions\n\n" + _table("package | training | export", _versions(trainer["versions"])),
        "## Verification\n\nBefore this folder got its name, a fresh process loaded it with plain transformers and "
        "compared tensors, logits on a fixed text and tokenizer with the checkpoint: see `verification.json`.",
    ]
    card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n")
    card.save(folder / "README.md")


def _licence(origin: ModelOrigin | None, folder: Path) -> dict[str, str]:
    """Return the base model's licence for the metadata; empty if it is not known, or there is no base model."""
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


def _hub_datasets(manifest: Manifest | None, streamed: list[str], order: StreamOrder | None) -> list[str]:
    """Return the datasets on the hub that the model was trained on, without subset and revision."""
    if streamed:
        # "NAME, subset SUBSET, SPLIT, commit COMMIT", see ``StreamedSource.identities``; "version" in earlier versions
        ends = [identity.partition(", ") for identity in (order.sources if order else [])]
        names = {name for name, _, rest in ends if re.search(r", (commit|version) [^,]*$", rest)}
        used = [name for name in streamed if re.split("[:@]", name)[0] in names]
    else:
        used = [source.hub_name for source in _training_sources(manifest) if source.kind == "hub"] if manifest else []
    return list(dict.fromkeys(re.split("[:@]", name)[0] for name in used))


def _training_sources(manifest: Manifest) -> list[SourceRecord]:
    """Return the sources of ``--dataset``. One that is also a ``--validation_dataset`` is in ``sources`` twice."""
    settings = [part.settings for part in manifest.parts] or [manifest.settings]
    held_out = Counter(name for one in settings for name in one.validation_dataset or ())
    times = Counter(source.given for source in manifest.sources)
    return [source for source in manifest.sources if times[source.given] > held_out[source.given]]


def _introduction(origin: ModelOrigin | None, is_known: bool) -> str:
    if origin is None:
        return "Trained with Fabric Train" + (" from random weights." if is_known else "; its base model is not known.")
    name = f"`{origin.name}`"
    if origin.repository:
        name = f"[{origin.repository}](https://huggingface.co/{origin.repository})"
    revision = f" (revision `{origin.revision}`)" if origin.revision else ""
    return f"{name}{revision}, trained further with Fabric Train."


def _legal_note(folder: Path, license: str | None, origin: ModelOrigin | None) -> str:
    """Return a sentence about the base model's licence and its files; empty for a model from random weights."""
    if origin is None:
        return ""
    files = ", ".join(f"[{file.name}]({file.name})" for file in legal_files(folder))
    terms = "" if license else " The base model's licence applies to it."
    return terms + (f" From the base model: {files}." if files else "")


def _public_name(name: str) -> str:
    """Return a name that looks like one of the hub unchanged, or the last part of a path."""
    looks_like_hub = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name) and not Path(name).exists()
    return name if looks_like_hub else Path(name).name


def _usage(name: str) -> str:
    return (
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{name}", dtype="auto")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n```'
    )


def _training_data(manifest: Manifest | None, streamed: list[str]) -> str:
    if streamed:
        return f"## Training data\n\nStreamed: {', '.join(f'`{_public_name(name)}`' for name in streamed)}."
    if manifest is None:
        return "## Training data\n\nThe token dataset had no manifest."
    names = [
        source.hub_name if source.kind == "hub" else Path(source.place or source.name).name
        for source in _training_sources(manifest)
    ]
    sources = ", ".join(f"`{name}`" for name in dict.fromkeys(names))
    rows = [
        (name, f"{split.documents:,}", f"{split.characters:,}", f"{split.tokens_in_rows:,}", f"{split.rows:,}")
        for name, split in manifest.ledger.splits.items()
    ]
    return (
        f"## Training data\n\nSources: {sources}. Tokenizer: `{_public_name(manifest.tokenizer.name)}`. "
        f"Rows of {manifest.settings.max_length:,} tokens.\n\n"
        + _table("split | documents | characters | tokens | rows", rows)
    )


def _mixture(trainer: dict[str, Any], state: TrainerState, tokens_per_row: int) -> str:
    """Return the tokens that were seen of each source of a mixture, and the shares of the phases that have begun."""
    names = [f"`{Path(name).name}`" for name in trainer["mixture_sources"]]
    seen = state.rows_of_sources or [0] * len(names)
    rows = [
        (name, f"{count / max(sum(seen), 1):.2%}", f"{count * tokens_per_row:,}")
        for name, count in zip(names, seen, strict=True)
    ]
    text = "## Mixture\n\n" + _table("source | share | tokens seen", rows)
    phases = [phase for phase in trainer["data"].get("phases", []) if phase["first_step"] <= state.step]
    if not phases:
        return text
    schedules = {one["first_step"]: one["arguments"] for one in trainer["phase_schedules"]}
    stretches = [{"first_step": 1, "rows_per_epoch": trainer["data"]["rows_per_epoch"]}, *phases]
    lines = [
        (f"{one['first_step']:,}", _shares_in_words(names, one["rows_per_epoch"]), _rates(schedules, one["first_step"]))
        for one in stretches[phases[0]["first_step"] == 1 :]
    ]
    return text + "\n\n" + _table("from step | shares | learning rate", lines)


def _shares_in_words(names: Sequence[str], rows: Sequence[int]) -> str:
    return ", ".join(f"{name} {count / sum(rows):.2%}" for name, count in zip(names, rows, strict=True) if count)


def _rates(schedules: dict[int, dict[str, Any]], first_step: int) -> str:
    """Return the learning rate of a phase in short: its own, or that of the hyperparameters."""
    own = schedules.get(first_step)
    return f"{own['lr_schedule']}, `lr` {own['lr']:g}, `min_lr` {own['min_lr']:g}" if own else "that of the run"


def _lineage(branches: Sequence[BranchPoint]) -> str:
    rows = []
    for branch in branches:
        changed = [
            f"`{name}`: {_public_value(there)} → {_public_value(here)}"
            for name, (there, here) in branch.changed.items()
            if name in (*_HYPERPARAMETERS, *_DATA, "phases")
        ]
        data = [] if branch.continues_data else ["other data from the start"]
        rows.append((f"`{Path(branch.run).name}`", f"{branch.step:,}", ", ".join([*changed, *data]) or "nothing"))
    return (
        "## Lineage\n\nThe training data and the hyperparameters of this card are those of the last run, after the "
        "last step in this table.\n\n" + _table("branch of run | after step | changed", rows)
    )


def _public_value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_public_value, value))
    return _public_name(value) if isinstance(value, str) else f"{value}"


def _average(parts: Sequence[AveragePart]) -> str:
    """Return the checkpoints whose average the weights are, and their shares."""
    total = sum(part.weight for part in parts)
    rows = [
        (f"`{run_of(checkpoint).name}`", f"{read_trainer_state(checkpoint).step:,}", f"{weight / total:.2%}")
        for checkpoint, weight in ((part.checkpoint, part.weight) for part in parts)
    ]
    return (
        "## Average\n\nThe weights are the average of these checkpoints. The counts and losses below are those of the "
        "last one, not of the average.\n\n" + _table("run | step | share", rows)
    )


def _results(state: TrainerState) -> str:
    rows = [("optimizer steps", f"{state.step:,}"), ("tokens trained on", f"{state.num_tokens:,}")]
    if state.train_loss is not None:
        rows.append(("training loss", f"{state.train_loss:.4f}"))
    if state.val_loss is not None:
        rows.append(("validation loss", f"{state.val_loss:.4f}"))
        rows.append(("validation perplexity", f"{perplexity(state.val_loss):.2f}"))
    results = "## Results\n\n" + _table("measure | value", rows)
    if state.evaluation is None:
        return results
    return f"{results}\n\n{_validation(state.evaluation, state.first_evaluation)}"


def _validation(now: Evaluation, first: Evaluation | None) -> str:
    """Return the table of the validation losses of each source, at the first evaluation and now."""
    first = first or now
    rows = [
        (_public_name(name) if name != "all" else name, *_figures(before), *_figures(after))
        for name, before, after in compare_evaluations(first, now)
    ]
    figures = ("loss", "perplexity", "bits per byte")
    columns = [f"{figure} at step {evaluation.step:,}" for evaluation in (first, now) for figure in figures]
    return "Validation by source, in nats per token:\n\n" + _table(" | ".join(["source", *columns]), rows)


def _figures(loss: TokenLoss | None) -> list[str]:
    figures = loss.figures().values() if loss else [None] * 3
    return ["" if value is None else f"{value:.3f}" for value in figures]


def _replay(certificate: StoredCertificate) -> str:
    return (
        f"## Replay\n\nThe steps {certificate.trained_from:,} to {certificate.steps[1]:,} of this run were trained "
        f"again on {certificate.here} ({certificate.date}). Losses, gradient norms, learning rates and rows are those "
        f"of the run, {certificate.rule}. Content of the rows: {certificate.contents}."
    )


def _hyperparameters(arguments: dict[str, Any]) -> list[tuple[str, ...]]:
    return [(f"`{name}`", f"{arguments[name]}") for name in _HYPERPARAMETERS if arguments.get(name) is not None]


def _versions(training: dict[str, str]) -> list[tuple[str, ...]]:
    packages = (torch, transformers, huggingface_hub, safetensors)
    export = {package.__name__: package.__version__ for package in packages}
    return [(name, training.get(name, ""), export.get(name, "")) for name in sorted({*training, *export})]


def _table(head: str, rows: Sequence[tuple[str, ...]]) -> str:
    line = "|".join("---" for _ in head.split("|"))
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join([f"| {head} |", f"|{line}|", *(f"| {' | '.join(row)} |" for row in cells)])
