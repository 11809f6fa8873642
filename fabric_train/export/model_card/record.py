"""What a checkpoint says about its model, read once for all sections of the card."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

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
from fabric_train.cli.output import redact
from fabric_train.export.average import AveragePart
from fabric_train.model.origin import ModelOrigin
from fabric_train.tokenization.manifest import Manifest, SourceRecord, read_manifest
from fabric_train.tokenization.reading.sources import place_of
from fabric_train.training.replay_certificate import StoredCertificate, read_certificate

_SPACE = re.compile(r"[\t\r\n\f\v ]+")
_SPECIAL = re.compile(r"[\\`*_~\[\]<>&]")
_UNESCAPED_PIPE = re.compile(r"(?<!\\)((?:\\\\)*)\|")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# "NAME, subset SUBSET, SPLIT, commit COMMIT", see ``StreamedSource.identities``; "version" in earlier versions
_HUB_IDENTITY = re.compile(r"([^,]+), .*(?:commit|version) ([^,]*)")


class Markdown(str):
    """Text that is Markdown already; any other is escaped where it becomes a part of a card."""

    __slots__ = ()


def escaped(text: str) -> Markdown:
    """Return one line of which nothing is Markdown or HTML, unless it is :class:`Markdown` already."""
    if isinstance(text, Markdown):
        return text
    return Markdown(_SPECIAL.sub(r"\\\g<0>", _SPACE.sub(" ", redact(text)).strip()))  # a secret is found unescaped


def table(head: str, rows: Sequence[Sequence[str]]) -> str:
    """Return a table; ``head`` has the names of its columns, separated by ``|``.

    Cells are escaped, see :func:`escaped`. A pipe has an odd number of backslashes before it, or it would end its cell.
    """
    line = "|".join("---" for _ in head.split("|"))
    cells = [[_UNESCAPED_PIPE.sub(r"\1\\|", escaped(cell)) for cell in row] for row in rows]
    return "\n".join([f"| {head} |", f"|{line}|", *(f"| {' | '.join(row)} |" for row in cells)])


def folded(title: str, text: str) -> str:
    """Return a text of which only the title is shown until a reader opens it."""
    return f"<details>\n<summary>{title}</summary>\n\n{text}\n\n</details>"


def code(text: str) -> Markdown:
    """Return a name in the font of code; nothing in it is Markdown."""
    return Markdown(f"`{_SPACE.sub(' ', text.replace('`', chr(39)))}`")


def link(text: str, target: str) -> Markdown:
    """Return a link to a file beside the card, or to the path of a URL."""
    return Markdown(f"[{escaped(text)}]({quote(target, safe=':/@.')})")


def listed(names: Sequence[str], most: int = 6) -> str:
    """Return names as ``a, b and c``; after the first ones only the number of the others."""
    names = [*names[:most], f"{len(names) - most:,} others"] if len(names) > most else names
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def steps(number: int) -> str:
    """Return a number of optimizer steps in words."""
    return f"{number:,} optimizer step{'s' * (number != 1)}"


def rounded(number: int) -> str:
    """Return a large number as it is read, such as ``1.23 billion``."""
    for size, word in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return f"{number:,}"


def last_part(place: str) -> str:
    """Return the last part of a path or URL, in printable characters."""
    _, is_url, after = redact(place).partition("://")
    path = after.partition("?")[0].partition("/")[2] if is_url else place
    return "".join(part if part.isprintable() else "?" for part in Path(path).name) or "unnamed"


def public_value(value: Any) -> str:
    """Return the value of an argument. A text that looks like a name on the hub stays, of another one the last part."""
    if isinstance(value, list | tuple):
        return ", ".join(map(public_value, value))
    if not isinstance(value, str):
        return f"{value}"
    return value if _HUB_NAME.fullmatch(value) and not Path(value).exists() else last_part(value)


def public_source(source: SourceRecord) -> str:
    """Return the name that a source was given, else that of its dataset on the hub, else the last part of its path."""
    if source.kind == "hub" and source.place in (None, source.name):
        return source.hub_name
    return last_part(source.name)


class PublicNames:
    """The public name of each source; two sources never have the same."""

    def __init__(self, manifest: Manifest | None) -> None:
        """Name the sources of a manifest first."""
        self._names: dict[str, str] = {}
        for source in manifest.sources if manifest else ():
            self._add(source.name, public_source(source))

    def __getitem__(self, name: str) -> str:
        if name not in self._names:
            self._add(name, last_part(name))
        return self._names[name]

    def _add(self, name: str, public: str) -> None:
        if name not in self._names:
            names = (f"{public} ({number})" if number > 1 else public for number in count(1))
            self._names[name] = next(one for one in names if one not in self._names.values())


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
