"""What a checkpoint says about its model, read once for all sections of the card."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fabric_train.checkpoint import (
    BranchPoint,
    HubDataset,
    StreamOrder,
    TrainerState,
    TrainingSession,
    TrainingStage,
    read_trainer_json,
    run_of,
)
from fabric_train.export.average import AveragePart
from fabric_train.export.model_card.public_names import PublicNames, last_part
from fabric_train.model.origin import ModelOrigin
from fabric_train.tokenization.manifest import Manifest, SourceRecord, read_manifest
from fabric_train.tokenization.reading.source_names import place_of
from fabric_train.training.replay_certificate import StoredCertificate, read_certificate

# "NAME, subset SUBSET, SPLIT, commit COMMIT", see ``StreamedSource.identities``; "version" in earlier versions
_HUB_IDENTITY = re.compile(r"([^,]+), .*(?:commit|version) ([^,]*)")


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


@dataclass(frozen=True)
class StreamPlace:
    """A place of --streaming_dataset: its public name, the share that a pass reads, and its dataset on the hub."""

    name: str
    share: float
    dataset: HubDataset | None


@dataclass(frozen=True)
class ModelRecord:
    """The content of a checkpoint's trainer.json and manifest.json, and the certificate of its run.

    ``trainer`` is the whole of trainer.json. ``names`` are the public names of the sources. ``parts`` are the
    checkpoints whose average the weights are, of which this is the last; none if the weights are its own. ``stages``
    are the runs before this one, each of which began with the weights of the one before.
    """

    checkpoint: Path
    trainer: dict[str, Any]
    state: TrainerState
    manifest: Manifest | None
    stream: StreamOrder | None
    origin: ModelOrigin | None
    lineage: tuple[BranchPoint, ...]
    sessions: tuple[TrainingSession, ...]
    certificate: StoredCertificate | None
    names: PublicNames
    parts: tuple[AveragePart, ...]
    stages: tuple[TrainingStage, ...]

    @property
    def row_length(self) -> int | None:
        """Number of tokens in a row; None if a token dataset had no manifest."""
        if self.manifest:
            return self.manifest.settings.max_length
        return self.stream.max_length if self.stream else None

    @property
    def has_chats(self) -> bool | None:
        """Whether the model was trained on chats; None if that is not known."""
        if self.manifest:
            return self.manifest.tokenizer.chat_template_sha256 is not None
        return self.stream.chat_template is not None if self.stream else None

    def part_name(self, part: str) -> str:
        """Return the public name of a part of the last validation, see ``Evaluation.parts``."""
        sources = list(self.state.evaluation.sources) if self.state.evaluation else []
        if part != "all":
            return self.names[part]
        return "all sources" if len(sources) > 1 else self.names[sources[0]] if sources and sources[0] else "validation"

    def training_sources(self) -> list[SourceRecord]:
        """Return the sources of ``--dataset``. One that is also a ``--validation_dataset`` is in ``sources`` twice."""
        if self.manifest is None:
            return []
        settings = [part.settings for part in self.manifest.parts] or [self.manifest.settings]
        held_out = Counter(name for one in settings for name in one.validation_dataset or ())
        times = Counter(source.given for source in self.manifest.sources)
        return [source for source in self.manifest.sources if times[source.given] > held_out[source.given]]

    def stream_places(self) -> list[StreamPlace]:
        """Return the places that a stream reads, in their order."""
        identities = [_HUB_IDENTITY.fullmatch(line) for line in (self.stream.sources if self.stream else ())]
        commits = {found[1]: found[2] for found in identities if found}
        places = []
        for number, given in enumerate(self.trainer["arguments"].get("streaming_dataset") or ()):
            place = place_of(given)
            repository = re.split("[:@]", place)[0]
            dataset = HubDataset(repository, commits[repository]) if repository in commits else None
            own_name = given.removesuffix(place).rstrip("=")
            name = own_name or (repository if dataset else last_part(place))
            shares = self.stream.shares if self.stream else None
            share = shares[number] if shares and number < len(shares) else 1.0
            places.append(StreamPlace(name, share, dataset))
        return places

    def hub_datasets(self) -> list[str]:
        """Return the datasets on the hub that the model was trained on, in any stage, without subset and revision."""
        streamed = [place.dataset.repository for place in self.stream_places() if place.dataset]
        stored = [source.hub_name for source in self.training_sources() if source.kind == "hub"]
        before = [one.repository for stage in self.stages for source in stage.sources for one in source.datasets]
        return list(dict.fromkeys([*before, *streamed, *stored]))


def read_record(checkpoint: Path, parts: Sequence[AveragePart] = ()) -> ModelRecord:
    """Return what a complete checkpoint says about its model.

    Raises:
        InputError: trainer.json or manifest.json is damaged.
    """
    saved, manifest = read_trainer_json(checkpoint), read_manifest(checkpoint)
    return ModelRecord(
        checkpoint=checkpoint,
        trainer=saved.content,
        state=saved.state,
        manifest=manifest,
        stream=saved.stream,
        origin=saved.base_model,
        lineage=saved.lineage,
        sessions=saved.sessions,
        certificate=read_certificate(run_of(checkpoint), saved.state.step),
        names=PublicNames(manifest),
        parts=tuple(parts),
        stages=saved.stages,
    )
