"""Write the model card, ``README.md`` of an exported folder, from the checkpoint.

It contains nothing private to the machine: only the last part of paths, and only the arguments listed here.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import huggingface_hub
import safetensors
import torch
import transformers
from huggingface_hub import ModelCard, ModelCardData

from arguments import TrainingArguments
from fabric_train.checkpoint import TrainerState, read_trainer_json, read_trainer_state
from fabric_train.tokenization.manifest import Manifest, read_manifest

_HYPERPARAMETERS = ("precision", "parallelism", "seed", *(field.name for field in fields(TrainingArguments)))


def write_model_card(checkpoint: Path, folder: Path, title: str) -> None:
    """Write ``README.md`` into ``folder``: base model, data, losses, hyperparameters and versions.

    Args:
        checkpoint: a complete checkpoint.
        folder: where to write.
        title: the model's name.

    Raises:
        InputError: trainer.json or manifest.json of the checkpoint is damaged.
    """
    trainer = read_trainer_json(checkpoint)
    manifest = read_manifest(checkpoint)
    base = str(trainer["arguments"]["model_name"])
    data = ModelCardData(
        base_model=base if is_hub_name(base) else None,
        datasets=[source.name for source in manifest.sources if source.kind == "hub"] or None if manifest else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["fabric-train"],
    )
    sections = [
        f"# {title}",
        f"`{public_name(base)}` trained further with Fabric Train. See the base model for its licence.",
        _usage(title),
        _training_data(manifest, trainer["arguments"].get("streaming_dataset")),
        _results(read_trainer_state(checkpoint)),
        "## Hyperparameters\n\n" + _table("argument | value", _hyperparameters(trainer["arguments"])),
        "## Versions\n\n" + _table("package | training | export", _versions(trainer["versions"])),
        "## Verification\n\nBefore this folder got its name, a fresh process loaded it with plain transformers and "
        "compared tensors, logits on a fixed text and tokenizer with the checkpoint: see `verification.json`.",
    ]
    card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n")
    card.save(folder / "README.md")


def is_hub_name(name: str) -> bool:
    """Whether a model name is a hub name (OWNER/NAME) and not a folder on this machine."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name) is not None and not Path(name).exists()


def public_name(name: str) -> str:
    """Return a hub name unchanged, or the last part of a path."""
    return name if is_hub_name(name) else Path(name).name


def _usage(title: str) -> str:
    return (
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{title}", dtype="auto")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{title}")\n```'
    )


def _training_data(manifest: Manifest | None, streamed: list[str] | None) -> str:
    if streamed:
        return f"## Training data\n\nStreamed: {', '.join(f'`{public_name(name)}`' for name in streamed)}."
    if manifest is None:
        return "## Training data\n\nThe token dataset had no manifest."
    sources = ", ".join(f"`{public_name(source.name)}`" for source in manifest.sources)
    rows = [
        (name, f"{split.documents:,}", f"{split.characters:,}", f"{split.tokens_in_rows:,}", f"{split.rows:,}")
        for name, split in manifest.ledger.splits.items()
    ]
    return (
        f"## Training data\n\nSources: {sources}. Tokenizer: `{public_name(manifest.tokenizer.name)}`. "
        f"Rows of {manifest.settings.max_length:,} tokens.\n\n"
        + _table("split | documents | characters | tokens | rows", rows)
    )


def _results(state: TrainerState) -> str:
    rows = [("optimizer steps", f"{state.step:,}"), ("tokens trained on", f"{state.num_tokens:,}")]
    if state.train_loss is not None:
        rows.append(("training loss", f"{state.train_loss:.4f}"))
    if state.val_loss is not None:
        rows.append(("validation loss", f"{state.val_loss:.4f}"))
        rows.append(("validation perplexity", f"{math.exp(state.val_loss):.2f}"))
    return "## Results\n\n" + _table("measure | value", rows)


def _hyperparameters(arguments: dict[str, Any]) -> list[tuple[str, ...]]:
    return [(f"`{name}`", f"{arguments[name]}") for name in _HYPERPARAMETERS if arguments.get(name) is not None]


def _versions(training: dict[str, str]) -> list[tuple[str, ...]]:
    packages = (torch, transformers, huggingface_hub, safetensors)
    export = {package.__name__: package.__version__ for package in packages}
    return [(name, training.get(name, ""), export.get(name, "")) for name in sorted({*training, *export})]


def _table(head: str, rows: Sequence[tuple[str, ...]]) -> str:
    line = "|".join("---" for _ in head.split("|"))
    return "\n".join([f"| {head} |", f"|{line}|", *(f"| {' | '.join(row)} |" for row in rows)])
