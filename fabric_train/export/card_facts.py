"""What a checkpoint says about its model: sources, stages, mixture, devices and hours, as facts and rows of tables."""

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabric_train import checkpoint as checkpoints
from fabric_train.files.regular_file import read_json_lines
from fabric_train.model.origin import HubDataset, ModelOrigin, StageSource, TrainingSession, TrainingStage
from fabric_train.pages.markdown import (
    SHOWN_DIGITS,
    Markdown,
    code,
    dataset_link,
    escaped,
    last_part,
    listed,
    public_value,
)
from fabric_train.reading.sources import place_of
from fabric_train.token_dataset.manifest import Manifest, SourceRecord, read_manifest
from fabric_train.training.replay_certificate import StoredCertificate, read_certificate

if TYPE_CHECKING:
    from fabric_train.export.source import AveragePart, MergeInto

EXPORTS = "exports.jsonl"
_NATS = "nats per token"
# "NAME, subset SUBSET, SPLIT, commit COMMIT", see ``StreamedSource.identities``; "version" in earlier versions
_HUB_IDENTITY = re.compile(r"([^,]+), .*(?:commit|version) ([^,]*)")

Row = tuple[Any, ...]
"""A row of a table, see ``markdown.table``."""


class PublicNames:
    """A public name for each source, no two the same: its given name, dataset on the hub, or last part of its path."""

    def __init__(self, manifest: Manifest | None) -> None:
        self._names: dict[str, str] = {}
        for source in manifest.sources if manifest else ():
            is_plain_hub = source.kind == "hub" and source.place in (None, source.name)
            self._add(source.name, source.hub_name if is_plain_hub else last_part(source.name))

    def __getitem__(self, name: str) -> str:
        if name not in self._names:
            self._add(name, last_part(name))
        return self._names[name]

    def _add(self, name: str, public: str) -> None:
        if name not in self._names:
            names = (f"{public} ({number})" if number > 1 else public for number in itertools.count(1))
            self._names[name] = next(one for one in names if one not in self._names.values())


@dataclass(frozen=True)
class ModelRecord:
    """What the files of a checkpoint and the certificate of its run say about a model."""

    checkpoint: Path
    saved: checkpoints.TrainerJson
    manifest: Manifest | None
    origin: ModelOrigin | None  # the model that the run began with
    certificate: StoredCertificate | None
    names: PublicNames  # of the sources
    parts: "tuple[AveragePart, ...]"  # whose average the weights are, this one the last; none if they are its own
    merges: "MergeInto | None"  # the weights that its adapter is merged into; None for an adapter or a whole model

    def part_name(self, part: str) -> str:
        """Return the public name of a part of the last validation, see ``Evaluation.parts``."""
        evaluation = self.saved.state.evaluation
        sources = list(evaluation.sources) if evaluation else []
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

    def stream_places(self) -> list[StageSource]:
        """Return the places that a stream reads, in their order, with the share that a pass reads."""
        stream = self.saved.stream
        identities = [_HUB_IDENTITY.fullmatch(line) for line in (stream.sources if stream else ())]
        commits = {found[1]: found[2] for found in identities if found}
        places = []
        for number, given in enumerate(self.saved.arguments.get("streaming_dataset") or ()):
            place = place_of(given)
            repository = re.split("[:@]", place)[0]
            datasets = [HubDataset(repository, commits[repository])] if repository in commits else []
            own_name = given.removesuffix(place).rstrip("=")
            name = own_name or (repository if datasets else last_part(place))
            shares = stream.shares if stream else None
            share = shares[number] if shares and number < len(shares) else 1.0
            places.append(StageSource(name, share, None, None, [], datasets))
        return places

    def hub_datasets(self) -> list[str]:
        """Return the datasets on the hub that the model was trained on, in any stage, without subset and revision."""
        streamed = [one.repository for place in self.stream_places() for one in place.datasets]
        stored = [source.hub_name for source in self.training_sources() if source.kind == "hub"]
        before = [one.repository for stage in self.saved.stages for source in stage.sources for one in source.datasets]
        return list(dict.fromkeys([*before, *streamed, *stored]))


def read_record(
    checkpoint: Path, parts: "Sequence[AveragePart]" = (), merges: "MergeInto | None" = None
) -> ModelRecord:
    """Return what a complete checkpoint says about its model."""
    saved = checkpoints.read_trainer_json(checkpoint)
    manifest = read_manifest(checkpoint)
    certificate = read_certificate(checkpoints.run_of(checkpoint), saved.state.step)
    return ModelRecord(
        checkpoint, saved, manifest, saved.base_model, certificate, PublicNames(manifest), tuple(parts), merges
    )


@dataclass(frozen=True)
class ExportRecord:
    """A line of RUN/exports.jsonl: an export of a checkpoint of the run, and what its verification found.

    ``folder`` is the name of the exported folder, ``weights`` has the SHA-256 of its weight files by name.
    ``faults`` says why it was given up; then the other fields about its content are empty.
    """

    time: str
    source: str
    folder: str
    dtype: str
    num_tensors: int
    logit_difference: float | None
    weights: dict[str, str]
    faults: str


def read_exports(run: Path) -> list[ExportRecord]:
    """Return the exports of a run that :func:`convert.convert` has noted there; an InputError if they are damaged."""
    return [*read_json_lines(run / EXPORTS, ExportRecord, "move the file away")]


def all_stages(record: ModelRecord) -> tuple[TrainingStage, ...]:
    """Return the stages, the record's own run last, with shares of the tokens seen, else of the token dataset."""
    seen = _seen_of_sources(record) or dict(seen_shares(record))
    sources = stored_sources(record) or record.stream_places()
    if seen.keys() >= {source.name for source in sources}:
        sources = [replace(source, share=seen[source.name]) for source in sources]
    state = record.saved.state
    run = last_part(str(checkpoints.run_of(record.checkpoint)))
    own = TrainingStage(run, state.step, state.num_tokens, record.origin, sources, list(record.saved.sessions))
    return (*record.saved.stages, own)


def stored_sources(record: ModelRecord) -> list[StageSource]:
    """Return the sources of a token dataset in their order, with shares of its tokens; none without a manifest."""
    if record.manifest is None:
        return []
    by_name: dict[str, list[SourceRecord]] = {}
    for source in record.training_sources():
        by_name.setdefault(source.name, []).append(source)
    train = record.manifest.ledger.splits.get("train")
    sources: list[StageSource] = []
    for name, records in by_name.items():
        counted = train.sources.get(name) if train else None
        documents = counted.documents if counted else sum(one.documents for one in records)
        tokens = counted.tokens_in_rows if counted else sum(one.train_tokens or one.tokens for one in records)
        public = record.names[name]
        files = [file for one in records for file in one.files]
        on_hub = [one for one in records if one.kind == "hub"]
        lines = [f"{last_part(file.sha256)}  {public}/{last_part(file.path)}" for file in files]
        datasets = {one.hub_name: HubDataset(one.hub_name, one.revision) for one in on_hub}
        sources.append(StageSource(public, 0.0, tokens, documents, lines, [*datasets.values()]))
    total = max(sum(source.tokens or 0 for source in sources), 1)
    return [replace(source, share=(source.tokens or 0) / total) for source in sources]


def seen_shares(record: ModelRecord) -> list[tuple[str, float]]:
    """Return the public name of each source and its share of what the steps consumed; none if that is not known.

    Of a mixture, these are shares of rows. They are shares of supervised tokens if the run has several sources
    otherwise, or has read other data before. Checkpoints of earlier versions have no such counts: then a run that reads
    whole passes has the shares of its token dataset.
    """
    state = record.saved.state
    names = record.saved.content.get("mixture_sources") or ()
    rows = state.rows_of_sources or ()
    has_rows = bool(names) and len(names) == len(rows)
    has_all_rows = has_rows and sum(rows) == state.num_samples
    counts: list[tuple[str, int]] = []
    if has_all_rows or (has_rows and not state.counted_of_sources):
        counts = list(zip(mixture_names(record), rows, strict=True))
    elif state.counted_of_sources:
        counts = [(record.names[name], number) for name, number in state.counted_of_sources.items()]
    elif not names:
        counts = [(source.name, source.tokens or 0) for source in stored_sources(record)]
    total = sum(number for _, number in counts)
    return [(name, number / total) for name, number in counts] if total else []


def _seen_of_sources(record: ModelRecord) -> dict[str, float]:
    """Return each source's share of the tokens seen in a mixture, in proportion to its dataset, by public name."""
    rows = record.saved.state.rows_of_sources
    tokens = record.saved.content.get("mixture_tokens") or ()
    if not rows or len(rows) != len(tokens) or not all(map(bool, tokens)):
        return {}
    if sum(rows) != record.saved.state.num_samples:  # it has read other data before
        return {}
    seen: dict[str, float] = dict.fromkeys((record.names[name] for one in tokens for name in one), 0.0)
    for count, one in zip(rows, tokens, strict=True):
        for name, number in one.items():
            seen[record.names[name]] += count / sum(rows) * number / max(sum(one.values()), 1)
    return seen


def source_row(source: StageSource) -> Row:
    """Return name, share, tokens, documents, number of files, and their hash or the revision on the hub, in short."""
    lines = source.files
    if not lines:
        revisions = [one.revision[:SHOWN_DIGITS] for one in source.datasets if one.revision]
        identity = Markdown(", ".join(map(code, dict.fromkeys(revisions))))
    elif len(lines) == 1:
        identity = code(lines[0].split()[0][:SHOWN_DIGITS])
    else:
        identity = code(hashlib.sha256("\n".join([*lines, ""]).encode()).hexdigest()[:SHOWN_DIGITS])
    counts = (source.tokens, source.documents, len(lines) or None)
    return _linked(source.name, source.datasets), f"{source.share:.2%}", *counts, identity


def _linked(name: str, datasets: Sequence[HubDataset]) -> Markdown:
    """Return the name of a source, with links to its datasets on the hub."""
    names = [one.repository for one in datasets]
    links = Markdown(", ".join(map(dataset_link, names)))
    return links if name in names else Markdown(f"{code(name)}: {links}") if links else code(name)


def stream_rows(record: ModelRecord) -> list[Row]:
    """Return name, share of a pass and revision of each place of a stream."""
    rows = []
    for place in record.stream_places():
        revision = ", ".join(code(one.revision[:SHOWN_DIGITS]) for one in place.datasets if one.revision)
        rows.append((_linked(place.name, place.datasets), f"{place.share:g}", Markdown(revision)))
    return rows


def stream_files(record: ModelRecord) -> list[str]:
    """Return name, size and hash of each file of a stream."""
    identities = [line.rsplit(", ", 2) for line in (record.saved.stream.sources if record.saved.stream else ())]
    return [f"{last_part(one[0])}, {one[1]}, {one[2]}" for one in identities if one[-1].startswith("sha256")]


def left_out_rows(manifest: Manifest, names: PublicNames) -> list[Row]:
    """Return the documents read, kept and left out of each source; of all together if no more is known."""
    counted: dict[str, tuple[int, Counter[str]]] = {}
    if all(source.documents_skipped is not None for source in manifest.sources):
        for source in manifest.sources:
            own = code(names[source.name])
            kept, skipped = counted.get(own, (0, Counter[str]()))
            counted[own] = kept + source.documents, skipped + Counter(source.documents_skipped)
    if len(counted) != 1:
        counted["all"] = manifest.ledger.documents_kept, Counter(manifest.ledger.documents_skipped)
    rows: list[Row] = []
    for name, (kept, skipped) in counted.items():
        reasons = ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in skipped.most_common())
        rows.append((name, kept + skipped.total(), kept, reasons))
    return rows


def mixture_names(record: ModelRecord) -> list[str]:
    """Return the public names of what has a share: SOURCE for FOLDER:SOURCE, if no two folders have it."""
    given = record.saved.content["mixture_sources"]
    sources = [name.rpartition(":")[2] for name in given]
    known = {source.name for source in record.training_sources()}
    if known.issuperset(sources) and len(set(sources)) == len(sources):
        return [record.names[name] for name in sources]
    return [last_part(name) for name in given]


def mixture_rows(record: ModelRecord) -> list[Row]:
    """Return name, share and number of the tokens that were seen of each source of a mixture; none without one."""
    if record.manifest is None or not record.saved.content.get("mixture_sources"):
        return []
    names = mixture_names(record)
    seen = record.saved.state.rows_of_sources or [0] * len(names)
    tokens_per_row = record.manifest.settings.max_length
    return [
        (code(name), f"{count / max(sum(seen), 1):.2%}", count * tokens_per_row)
        for name, count in zip(names, seen, strict=True)
    ]


def phase_rows(record: ModelRecord) -> list[Row]:
    """Return first step, shares and learning rate of the phases that have begun; none without phases."""
    content = record.saved.content
    names = list(map(code, mixture_names(record)))
    phases = [one for one in content["data"].get("phases", []) if one["first_step"] <= record.saved.state.step]
    if not phases:
        return []
    schedules = {one["first_step"]: one["arguments"] for one in content["phase_schedules"]}
    parts = {one.first_step: one.train_only for one in record.saved.phase_parts}
    first = checkpoints.data_starts_after(record.saved.lineage) + 1
    stretches = [{"first_step": first, "rows_per_epoch": content["data"]["rows_per_epoch"]}, *phases]
    rows = []
    for one in stretches[phases[0]["first_step"] <= first :]:
        total = sum(one["rows_per_epoch"])
        shares = [f"{name} {rows / total:.2%}" for name, rows in zip(names, one["rows_per_epoch"], strict=True) if rows]
        own = schedules.get(one["first_step"])
        rate = "as in the run"
        if own is not None:
            rate = Markdown(f"{escaped(own['lr_schedule'])}, `lr` {own['lr']:g}, `min_lr` {own['min_lr']:g}")
        if own_parts := parts.get(one["first_step"]):
            rate = Markdown(f"{rate}; trains {', '.join(map(code, own_parts))}")
        rows.append((one["first_step"], Markdown(", ".join(shares)), rate))
    return rows


def device_hours(sessions: Sequence[TrainingSession]) -> Markdown:
    """Return the hours of all devices together in words, such as ``98.4 GPU hours on 8 × NVIDIA H100``."""
    devices = listed([*dict.fromkeys(map(_hardware, sessions))])
    since = f", without the first {sessions[0].after_step:,} steps" if sessions[0].after_step else ""
    return Markdown(f"{_totals(sessions)[1]} {hours_unit(sessions)} on {devices}{since}")


def hours_unit(sessions: Sequence[TrainingSession]) -> str:
    """Return the unit of the devices' hours; a name of a device that is no GPU begins as ``device_name`` says."""
    return "device hours" if any(one.device.startswith(("CPU", "xla")) for one in sessions) else "GPU hours"


def compute_rows(record: ModelRecord) -> list[Row]:
    """Return the devices and their hours by steps; the steps of runs that this one branched off are apart."""
    sessions = record.saved.sessions
    borders = {branch.step for branch in record.saved.lineage}
    groups: list[list[TrainingSession]] = []
    for session in sessions:
        if groups and _hardware(groups[-1][0]) == _hardware(session) and session.after_step not in borders:
            groups[-1].append(session)
        else:
            groups.append([session])
    ends = [*(group[0].after_step for group in groups[1:]), record.saved.state.step]
    rows: list[Row] = [
        (f"{group[0].after_step + 1:,} to {end:,}", _hardware(group[0]), *_totals(group))
        for group, end in zip(groups, ends, strict=True)
    ]
    return [*rows, ("all", "", *_totals(sessions))] if len(rows) > 1 else rows


def _totals(sessions: Sequence[TrainingSession]) -> tuple[str, str]:
    """Return the hours of the clock, and the hours of all devices together."""
    of_clock, of_devices = (
        f"{hours:,.1f}" if hours >= 10 else f"{hours:.2g}" if hours >= 0.01 else "under 0.01"
        for hours in (sum(one.seconds for one in sessions) / 3600, sum(one.device_hours for one in sessions))
    )
    return of_clock, of_devices


def _hardware(session: TrainingSession) -> str:
    name, _, more = session.device.partition(", ")  # of a CPU, instructions and threads
    return f"{session.num_devices:,} × {name}" + (f" ({more})" if more else "")


def lineage_row(branch: checkpoints.BranchPoint, shown: Sequence[str] | None = None) -> Row:
    """Return the run that was branched off, the step, and the changed arguments, or the ``shown`` ones of these.

    Paths are shown by their last part.
    """
    changed = [
        f"`{name}`: {escaped(public_value(there))} → {escaped(public_value(here))}"
        for name, (there, here) in branch.changed.items()
        if shown is None or name in shown
    ]
    data = [] if branch.continues_data else ["other data from the start"]
    return code(last_part(branch.run)), branch.step, Markdown(", ".join([*changed, *data]) or "nothing")


def unit_of_loss(saved: checkpoints.TrainerJson) -> str:
    """Return the unit of a run's losses, such as nats per token."""
    objective = saved.component("objective")
    evaluation = saved.state.evaluation
    if objective.is_own:
        return _NATS if objective.name == "sft" else "a pair"
    if evaluation is not None and evaluation.whole.is_likelihood:
        return _NATS
    return f"in the unit of the {objective.kind} {objective.name}"


def results_of(record: ModelRecord) -> dict[str, Any]:
    """Return what the section on the results has: the losses of each source, at the first evaluation and now."""
    state = record.saved.state
    total = sum(part.weight for part in record.parts)
    now = state.evaluation
    first = state.first_evaluation or state.evaluation
    in_nats = unit_of_loss(record.saved) == _NATS
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
        "perplexity": None if state.val_loss is None or not in_nats else checkpoints.perplexity(state.val_loss),
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
