"""Find where a model's weights come from: hub repository, revision, licence, and the stages of its training.

``download_model.py`` writes the source to ``hub_source.json`` next to the model's files. A run stores the origin in its
checkpoints, so that an export's model card has it even if the base model's folder is gone.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import AliasChoices, Field, NonNegativeInt, PositiveInt
from yaml import YAMLError

from fabric_train.files.typed_json import read_json

HUB_SOURCE = "hub_source.json"
"""The file that ``download_model.py`` adds to a folder, with the fields of :class:`HubSource`."""

STAGES = "training_stages.json"
"""The file in an export with the stages of its training, see ``TrainingStage``."""

_NAME = "[A-Za-z0-9_][A-Za-z0-9_.-]*"
Repository: TypeAlias = Annotated[str, Field(pattern=f"^({_NAME}/)?{_NAME}$", max_length=96)]
"""A name on the hub: OWNER/NAME, or NAME for some old ones."""

_Location: TypeAlias = Annotated[str, Field(validation_alias=AliasChoices("location", "place"))]
"""The hub name or absolute path of a model. Files of earlier versions call it ``place``."""

_LEGAL_FILE = re.compile(r"(LICEN[CS]E|NOTICE|USE_POLICY)([._-].*)?", re.ASCII | re.IGNORECASE)
_PATTERNS = ["LICEN[CS]E*", "NOTICE*", "Notice*", "USE_POLICY*", "README.md", STAGES]
_CACHED = re.compile(r"models--([^/]+)/snapshots/([0-9a-f]{40})")
_PLAIN = re.compile(r"[!-~]{1,200}")  # printable, without spaces


@dataclass(frozen=True)
class HubSource:
    """A repository on the hub, OWNER/NAME, and the commit that was downloaded."""

    repository: Repository
    revision: str


@dataclass(frozen=True)
class ModelOrigin:
    """The pretrained model that a run began with; unknown values are None.

    ``name`` is the repository, or the name of a folder whose origin is not known. ``repository`` is OWNER/NAME on the
    hub, ``revision`` the commit. ``license`` is the identifier in the model's own card. A licence without an identifier
    is ``other``, with its name in ``license_name`` and the location of its text in ``license_link``.
    """

    name: str
    repository: Repository | None = None
    revision: str | None = None
    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None


@dataclass(frozen=True)
class HashedFile:
    """A file of weights that was hashed, with the system's data about it; no program can set ``changed_ns``."""

    name: str
    num_bytes: NonNegativeInt
    inode: int
    modified_ns: int
    changed_ns: int


@dataclass(frozen=True)
class AdapterBase:
    """The model that an adapter is trained on; a checkpoint has no copy of it."""

    location: _Location
    """The model's hub name or absolute path."""
    fingerprint: str | None = None
    """A hash of the weights (``checkpoint.base_weights``); None before it is computed, and in old checkpoints."""
    files: tuple[HashedFile, ...] = ()
    """The files that were hashed; empty if they may have changed at the same time."""


@dataclass(frozen=True)
class ReferenceModel:
    """The model with which preference objectives compare; a checkpoint has no copy of it.

    ``location`` is the hub name or the absolute path of the folder, checkpoint or adapter that it is read from; empty
    for the random weights of the run's seed. ``fingerprint`` is a hash of the bytes of its weights.
    """

    location: _Location
    fingerprint: str


@dataclass(frozen=True)
class TeacherModel:
    """The model from whose distributions a run learns; a checkpoint has no copy of it.

    ``location`` and ``fingerprint`` are as in :class:`ReferenceModel`. ``origin`` is for the model card. ``stored_as``
    is the form of stored values, such as ``last hidden states``; None if the teacher reads the rows itself.
    """

    location: _Location
    fingerprint: str
    origin: ModelOrigin | None = None
    stored_as: str | None = None


SPLIT_ARGUMENTS = (
    "parallelism",
    "micro_batch_size",
    "gradient_accumulation_steps",
    "sharding_strategy",
    "tensor_parallel_size",
    "context_parallel_size",
    "cpu_offload",
    "gradient_reduction",
    "compile",
    "activation_checkpointing",
    "mlp_tile_size",
)
"""Arguments that change the order of additions, and so the last digits of the losses."""


@dataclass(frozen=True)
class TrainingSession:
    """The steps of a run after ``after_step`` that the same processes took, with their devices and time.

    ``device`` is a ``device_name``. ``seconds`` are from the first step to the save, evaluations included.
    ``arguments`` are ``SPLIT_ARGUMENTS`` and ``log_step_interval``; empty if an earlier version saved it.
    """

    after_step: NonNegativeInt
    device: str
    num_devices: PositiveInt
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def device_hours(self) -> float:
        return self.num_devices * self.seconds / 3600


@dataclass(frozen=True)
class HubDataset:
    """A dataset on the hub; ``revision`` is its commit, None if it is not known."""

    repository: str
    revision: str | None


@dataclass(frozen=True)
class StageSource:
    """The part of a source that a stage of training read."""

    name: str
    """The source's public name."""
    share: float
    """The source's share of the stage's tokens, or of a pass over a stream."""
    tokens: NonNegativeInt | None
    """None for a stream."""
    documents: NonNegativeInt | None
    """None for a stream."""
    files: list[str]
    """Lines as ``sha256sum`` writes them, with SOURCE/FILE as the name."""
    datasets: list[HubDataset]


@dataclass(frozen=True)
class TrainingStage:
    """A run from whose weights after ``step`` the next stage began; the first stage began with ``base_model``."""

    run: str
    step: NonNegativeInt
    num_tokens: NonNegativeInt
    base_model: ModelOrigin | None
    sources: list[StageSource]
    sessions: list[TrainingSession]


def find_origin(model_name: str) -> tuple[ModelOrigin, tuple[Path, ...]]:
    """Return the origin of a folder or cached hub name, and its licence's files, which are downloaded if possible."""
    is_local = Path(model_name).is_dir()
    folder = Path(model_name) if is_local else _download_legal_files(model_name)
    if folder is None:  # it is not in the cache
        return ModelOrigin(name=model_name, repository=model_name), ()
    if is_local:
        source = _local_source(folder)
    else:
        source = HubSource(repository=model_name, revision=folder.name)  # the cache names a folder by its commit
    card = _read_card(folder / "README.md")
    licence: dict[str, str] = {}
    for key in ("license", "license_name", "license_link"):
        text = card.get(key)
        if isinstance(text, str) and _PLAIN.fullmatch(text):
            licence[key] = text
    if source is None:
        origin = ModelOrigin(Path(os.path.realpath(folder)).name, **licence)
    else:
        origin = ModelOrigin(name=source.repository, repository=source.repository, revision=source.revision, **licence)
    return origin, tuple(legal_files(folder))


def read_stages(model_name: str) -> tuple[TrainingStage, ...]:
    """Return the stages that an export (a folder or a cached hub name) records; other models have none."""
    file = find_stages_file(model_name)
    if file is None:
        return ()
    return tuple(read_json(file, list[TrainingStage], "export the model again, or remove this file"))


def find_stages_file(model_name: str) -> Path | None:
    """Return the file with an export's stages in ``--model_name``, a folder or a cached hub name."""
    from huggingface_hub import try_to_load_from_cache  # slow, and not needed to read a trainer.json

    folder = Path(model_name)
    if folder.is_dir():
        file = folder / STAGES
    else:
        cached = try_to_load_from_cache(model_name, STAGES)
        if not isinstance(cached, str):  # not in the cache, or known to be absent
            return None
        file = Path(cached)
    return file if os.path.lexists(file) else None


def legal_files(folder: Path) -> Iterator[Path]:
    """Yield the files in a model folder or checkpoint with its licence, notices and terms of use."""
    for path in sorted(folder.iterdir()):
        if _LEGAL_FILE.fullmatch(path.name) and path.is_file():
            yield path


def _local_source(folder: Path) -> HubSource | None:
    """Return the source of a folder from ``download_model.py`` or in the cache of the hub; None for another folder."""
    file = folder / HUB_SOURCE
    if file.exists():
        return read_json(file, HubSource, "download the model again, or remove this file")
    # in the cache: models--OWNER--NAME/snapshots/COMMIT
    cache_path = "/".join(Path(os.path.realpath(folder)).parts[-3:])
    match = _CACHED.fullmatch(cache_path)
    if match is None:
        return None
    return HubSource(repository=match[1].replace("--", "/", 1), revision=match[2])


def _download_legal_files(repository: str) -> Path | None:
    """Return the folder of a hub name in the cache, with the repository's card and licence if they can be fetched."""
    from huggingface_hub import snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import HTTPError

    config = try_to_load_from_cache(repository, "config.json")
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    with suppress(OSError, HTTPError):  # a machine without internet trains as well
        snapshot_download(repository, revision=folder.name, allow_patterns=_PATTERNS)
    return folder


def _read_card(file: Path) -> dict[str, Any]:
    """Return the metadata of a model card; empty if it cannot be read, because the model can be trained anyway."""
    from huggingface_hub import metadata_load

    try:
        return metadata_load(file) or {}
    except (OSError, ValueError, YAMLError, RecursionError):
        return {}
