"""Read what a checkpoint says about its model: sources, stages, mixture, devices and hours, as facts and table rows."""

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabric_train import checkpoint as checkpoints
from fabric_train.files.typed_json import read_json_lines
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
from fabric_train.token_dataset.manifest import Manifest, Settings, SourceRecord, read_manifest

if TYPE_CHECKING:
    from fabric_train.export.average import WeightedCheckpoint
    from fabric_train.export.merged_adapter import MergeInto

EXPORTS = "exports.jsonl"
_NATS = "nats per token"
# "NAME, subset SUBSET, SPLIT, commit COMMIT", see ``StreamedSource.identities``; "version" in earlier versions
_HUB_IDENTITY = re.compile(r"([^,]+), .*(?:commit|version) ([^,]*)")

Row = tuple[Any, ...]
"""A row of a table, see ``markdown.table``."""


class PublicNames:
    """A different public name for each source: its given name, its dataset on the hub, or the last part of its path."""

    def __init__(self, manifest: Manifest | None) -> None:
        self._names: dict[str, str] = {}
        for source in manifest.sources if manifest else ():
            # a dataset on the hub that was given no other name keeps its name there
            if source.kind == "hub" and source.place in (None, source.name):
                self._add(source.name, source.hub_name)
            else:
                self._add(source.name, last_part(source.name))

    def __getitem__(self, name: str) -> str:
        if name not in self._names:
            self._add(name, last_part(name))
        return self._names[name]

    def _add(self, name: str, public_name: str) -> None:
        """Give a source a public name, with a number if another source has it already."""
        if name in self._names:
            return
        numbered_name = public_name
        for count in itertools.count(2):
            if numbered_name not in self._names.values():
                break
            numbered_name = f"{public_name} ({count})"
        self._names[name] = numbered_name


@dataclass(frozen=True)
class ModelRecord:
    """The facts about a model in a checkpoint's files."""

    checkpoint: Path
    saved: checkpoints.TrainerJson
    manifest: Manifest | None
    origin: ModelOrigin | None
    """The model that the run began with."""
    names: PublicNames
    """The public names of the sources."""
    averaged: "tuple[WeightedCheckpoint, ...]"
    """The checkpoints that the weights average, this one last; empty if the weights are not an average."""
    merges: "MergeInto | None"
    """The weights that the adapter is merged into; None for an adapter that is not merged, or a model without one."""

    def evaluated_name(self, source: str) -> str:
        """Return the public name of a source in the last validation, or of "all"; see ``Evaluation.parts``."""
        if source != "all":
            return self.names[source]
        evaluation = self.saved.state.evaluation
        sources = list(evaluation.sources) if evaluation else []
        if len(sources) > 1:
            return "all sources"
        return self.names[sources[0]] if sources and sources[0] else "validation"

    def training_sources(self) -> list[SourceRecord]:
        """Return the sources in ``--dataset``; one that is also in ``--validation_dataset`` is in ``sources`` twice."""
        if self.manifest is None:
            return []
        held_out_counts: Counter[str] = Counter()
        for settings in _all_settings(self.manifest):
            held_out_counts.update(settings.validation_dataset or ())
        counts = Counter(source.argument for source in self.manifest.sources)
        training_sources: list[SourceRecord] = []
        for source in self.manifest.sources:
            if counts[source.argument] > held_out_counts[source.argument]:
                training_sources.append(source)
        return training_sources

    def stream_sources(self) -> list[StageSource]:
        """Return the sources that a stream reads, in order, with the share that a pass reads."""
        stream = self.saved.stream
        commits = {}  # by the name of a dataset on the hub
        for identity in stream.sources if stream else ():
            match = _HUB_IDENTITY.fullmatch(identity)
            if match:
                repository, commit = match.groups()
                commits[repository] = commit

        sources = []
        for index, entry in enumerate(self.saved.arguments.get("streaming_dataset") or ()):
            location = place_of(entry)
            repository = re.split("[:@]", location)[0]  # without subset and revision
            datasets = []
            if repository in commits:
                datasets = [HubDataset(repository, commits[repository])]
            name = entry.removesuffix(location).rstrip("=")  # entries are NAME=LOCATION or LOCATION
            if not name:
                name = repository if datasets else last_part(location)
            share = 1.0
            if stream and stream.shares and index < len(stream.shares):
                share = stream.shares[index]
            sources.append(StageSource(name, share, tokens=None, documents=None, files=[], datasets=datasets))
        return sources

    def hub_datasets(self) -> list[str]:
        """Return the hub datasets that the model was trained on in any stage, without subset and revision."""
        repositories = []
        for stage in self.saved.stages:
            for source in stage.sources:
                repositories += [dataset.repository for dataset in source.datasets]
        for source in self.stream_sources():
            repositories += [dataset.repository for dataset in source.datasets]
        repositories += [source.hub_name for source in self.training_sources() if source.kind == "hub"]
        return list(dict.fromkeys(repositories))


def _all_settings(manifest: Manifest) -> list[Settings]:
    """Return the settings of each merged token dataset, or of the only one."""
    return [dataset.settings for dataset in manifest.parts] or [manifest.settings]


def read_record(
    saved: checkpoints.TrainerJson,
    averaged: "Sequence[WeightedCheckpoint]" = (),
    merges: "MergeInto | None" = None,
) -> ModelRecord:
    """Read the facts about a model in a complete checkpoint."""
    checkpoint = saved.checkpoint
    manifest = read_manifest(checkpoint)
    return ModelRecord(
        checkpoint=checkpoint,
        saved=saved,
        manifest=manifest,
        origin=saved.base_model,
        names=PublicNames(manifest),
        averaged=tuple(averaged),
        merges=merges,
    )


@dataclass(frozen=True)
class ExportRecord:
    """A line of RUN/exports.jsonl: an export of one of the run's checkpoints, and the result of its verification."""

    time: str
    source: str
    folder: str
    """The name of the exported folder."""
    dtype: str
    num_tensors: int
    logit_difference: float | None
    weights: dict[str, str]
    """The SHA-256 of the weight files by name."""
    faults: str
    """Why the export was given up; the fields about its content are then empty."""


def read_exports(run: Path) -> list[ExportRecord]:
    """Return the exports of a run that :func:`convert.convert` has recorded; an InputError if they are damaged."""
    return list(read_json_lines(run / EXPORTS, ExportRecord, "move the file away"))


def all_stages(record: ModelRecord) -> tuple[TrainingStage, ...]:
    """Return the stages of training, the record's own run last.

    The sources have shares of the tokens seen, or if these are not known, of the token dataset.
    """
    shares = _seen_shares_by_tokens(record) or dict(seen_shares(record))
    sources = stored_sources(record) or record.stream_sources()
    if all(source.name in shares for source in sources):
        sources = [replace(source, share=shares[source.name]) for source in sources]
    state = record.saved.state
    last_stage = TrainingStage(
        run=last_part(str(checkpoints.run_of(record.checkpoint))),
        step=state.step,
        num_tokens=state.num_tokens,
        base_model=record.origin,
        sources=sources,
        sessions=list(record.saved.sessions),
    )
    return (*record.saved.stages, last_stage)


def stored_sources(record: ModelRecord) -> list[StageSource]:
    """Return the sources of a token dataset in order, with their shares of its tokens; none without a manifest."""
    if record.manifest is None:
        return []
    records_by_name: dict[str, list[SourceRecord]] = {}
    for source in record.training_sources():
        records_by_name.setdefault(source.name, []).append(source)
    train = record.manifest.ledger.splits.get("train")

    sources: list[StageSource] = []
    for name, records in records_by_name.items():
        # manifests of earlier versions count nothing by source
        counted = train.sources.get(name) if train else None
        if counted:
            documents = counted.documents
            tokens = counted.tokens_in_rows
        else:
            documents = sum(source.documents for source in records)
            tokens = sum(source.train_tokens or source.tokens for source in records)

        public_name = record.names[name]
        file_lines = []
        hub_datasets = {}
        for source in records:
            for file in source.files:
                file_lines.append(f"{last_part(file.sha256)}  {public_name}/{last_part(file.path)}")
            if source.kind == "hub":
                hub_datasets[source.hub_name] = HubDataset(source.hub_name, source.revision)
        sources.append(
            StageSource(
                name=public_name,
                share=0.0,  # once the total is known
                tokens=tokens,
                documents=documents,
                files=file_lines,
                datasets=list(hub_datasets.values()),
            )
        )
    total = max(sum(source.tokens or 0 for source in sources), 1)
    return [replace(source, share=(source.tokens or 0) / total) for source in sources]


def seen_shares(record: ModelRecord) -> list[tuple[str, float]]:
    """Return each source's public name and its share of the tokens that the steps consumed; none if not known.

    For a mixture, these are shares of rows. They are shares of supervised tokens if the run has several sources
    otherwise, or has read other data before. Checkpoints of earlier versions lack these counts; a run that reads
    full passes then has the shares of its token dataset.
    """
    state = record.saved.state
    mixture_sources = record.saved.content.get("mixture_sources") or ()
    rows = state.rows_of_sources or ()
    has_rows = bool(mixture_sources) and len(mixture_sources) == len(rows)
    read_only_mixture = has_rows and sum(rows) == state.num_samples  # no other data before it
    tokens_of_sources = state.counted_of_sources or {}
    if read_only_mixture or (has_rows and not tokens_of_sources):  # rows are all that is counted, or all that was read
        counts = list(zip(mixture_names(record), rows, strict=True))
    elif tokens_of_sources:
        counts = [(record.names[name], num_tokens) for name, num_tokens in tokens_of_sources.items()]
    elif not mixture_sources:  # a single token dataset of an earlier version, read in whole passes
        counts = [(source.name, source.tokens or 0) for source in stored_sources(record)]
    else:
        counts = []
    total = sum(count for _, count in counts)
    return [(name, count / total) for name, count in counts] if total else []


def _seen_shares_by_tokens(record: ModelRecord) -> dict[str, float]:
    """Return each source's share of the tokens seen in a mixture, by public name; empty if not known.

    The mixture counts rows of its entries, each of which may have several sources. The rows of an entry are divided
    in proportion to the tokens of its sources.
    """
    rows_of_entries = record.saved.state.rows_of_sources
    tokens_of_entries = record.saved.content.get("mixture_tokens") or ()  # of each entry, the tokens of its sources
    if not rows_of_entries or len(rows_of_entries) != len(tokens_of_entries) or not all(tokens_of_entries):
        return {}
    total_rows = sum(rows_of_entries)
    if total_rows != record.saved.state.num_samples:  # the run has read other data before
        return {}
    shares: dict[str, float] = {}
    for num_rows, tokens_by_source in zip(rows_of_entries, tokens_of_entries, strict=True):
        entry_share = num_rows / total_rows
        entry_tokens = max(sum(tokens_by_source.values()), 1)
        for name, num_tokens in tokens_by_source.items():
            public_name = record.names[name]
            shares[public_name] = shares.get(public_name, 0.0) + entry_share * num_tokens / entry_tokens
    return shares


def source_row(source: StageSource) -> Row:
    """Return name, share, tokens, documents, number of files, and the files' short hash or the revision on the hub."""
    lines = source.files
    if not lines:
        revisions = [dataset.revision[:SHOWN_DIGITS] for dataset in source.datasets if dataset.revision]
        identity = Markdown(", ".join(map(code, dict.fromkeys(revisions))))
    elif len(lines) == 1:
        file_hash = lines[0].split()[0]
        identity = code(file_hash[:SHOWN_DIGITS])
    else:
        text = "\n".join(lines) + "\n"
        identity = code(hashlib.sha256(text.encode()).hexdigest()[:SHOWN_DIGITS])
    name = _linked_name(source.name, source.datasets)
    return name, f"{source.share:.2%}", source.tokens, source.documents, len(lines) or None, identity


def _linked_name(name: str, datasets: Sequence[HubDataset]) -> Markdown:
    """Return the name of a source, with links to its datasets on the hub."""
    if not datasets:
        return code(name)
    repositories = [dataset.repository for dataset in datasets]
    links = Markdown(", ".join(map(dataset_link, repositories)))
    return links if name in repositories else Markdown(f"{code(name)}: {links}")


def stream_rows(record: ModelRecord) -> list[Row]:
    """Return name, share of a pass and revision of each source of a stream."""
    rows = []
    for source in record.stream_sources():
        revisions = [code(dataset.revision[:SHOWN_DIGITS]) for dataset in source.datasets if dataset.revision]
        name = _linked_name(source.name, source.datasets)
        rows.append((name, f"{source.share:g}", Markdown(", ".join(revisions))))
    return rows


def stream_files(record: ModelRecord) -> list[str]:
    """Return name, size and hash of each file of a stream."""
    if not record.saved.stream:
        return []
    lines = []
    for identity in record.saved.stream.sources:
        # "PATH, SIZE bytes, sha256 of its ends HASH" for a file, see ``StreamedSource.identities``
        *name_and_size, file_hash = identity.rsplit(", ", 2)
        if file_hash.startswith("sha256"):
            path, size = name_and_size
            lines.append(f"{last_part(path)}, {size}, {file_hash}")
    return lines


def left_out_rows(manifest: Manifest, names: PublicNames) -> list[Row]:
    """Return the documents read, kept and left out, for each source or, if that is not known, for all together."""
    kept_documents: dict[str, int] = {}
    left_out: dict[str, Counter[str]] = {}  # by the name of the source and the reason
    if all(source.documents_skipped is not None for source in manifest.sources):
        for source in manifest.sources:
            source_name = code(names[source.name])
            kept_documents[source_name] = kept_documents.get(source_name, 0) + source.documents
            # a sum of counters leaves out the reasons that are 0
            left_out[source_name] = left_out.get(source_name, Counter()) + Counter(source.documents_skipped)
    if len(kept_documents) != 1:
        kept_documents["all"] = manifest.ledger.documents_kept
        left_out["all"] = Counter(manifest.ledger.documents_skipped)

    rows: list[Row] = []
    for name, num_kept in kept_documents.items():
        counts = left_out[name]
        reasons = [f"{count:,} {reason.replace('_', ' ')}" for reason, count in counts.most_common()]
        rows.append((name, num_kept + counts.total(), num_kept, ", ".join(reasons)))
    return rows


def mixture_names(record: ModelRecord) -> list[str]:
    """Return the public names of a mixture's parts: SOURCE for FOLDER:SOURCE, unless two folders have it."""
    # the names of the sources alone would be ambiguous if two folders have a source of the same name
    entries = record.saved.content["mixture_sources"]
    sources = [entry.rpartition(":")[2] for entry in entries]
    training_names = {source.name for source in record.training_sources()}
    if training_names.issuperset(sources) and len(set(sources)) == len(sources):
        return [record.names[name] for name in sources]
    return [last_part(entry) for entry in entries]


def mixture_rows(record: ModelRecord) -> list[Row]:
    """Return name, share and tokens seen of each source of a mixture; none without a mixture."""
    if record.manifest is None or not record.saved.content.get("mixture_sources"):
        return []
    names = mixture_names(record)
    rows_of_sources = record.saved.state.rows_of_sources or [0] * len(names)
    total_rows = max(sum(rows_of_sources), 1)
    tokens_per_row = record.manifest.settings.max_length
    table_rows = []
    for name, num_rows in zip(names, rows_of_sources, strict=True):
        table_rows.append((code(name), f"{num_rows / total_rows:.2%}", num_rows * tokens_per_row))
    return table_rows


def phase_rows(record: ModelRecord) -> list[Row]:
    """Return first step, shares and learning rate of each phase that has begun; none without phases."""
    content = record.saved.content
    names = [code(name) for name in mixture_names(record)]
    begun_phases = []
    for phase in content["data"].get("phases", []):
        if phase["first_step"] <= record.saved.state.step:
            begun_phases.append(phase)
    if not begun_phases:
        return []
    schedules = {phase["first_step"]: phase["arguments"] for phase in content["phase_schedules"]}
    trained_parts = {phase.first_step: phase.train_only for phase in record.saved.phase_parts}

    # the shares of the command line, until the first phase begins
    data_begins = checkpoints.data_starts_after(record.saved.lineage) + 1
    phases = begun_phases
    if begun_phases[0]["first_step"] > data_begins:
        command_line = {"first_step": data_begins, "rows_per_epoch": content["data"]["rows_per_epoch"]}
        phases = [command_line, *begun_phases]

    table_rows = []
    for phase in phases:
        first_step = phase["first_step"]
        total_rows = sum(phase["rows_per_epoch"])
        shares = []
        for name, num_rows in zip(names, phase["rows_per_epoch"], strict=True):
            if num_rows:
                shares.append(f"{name} {num_rows / total_rows:.2%}")
        rate: str = "as in the run"
        schedule = schedules.get(first_step)
        if schedule is not None:
            rate = Markdown(
                f"{escaped(schedule['lr_schedule'])}, `lr` {schedule['lr']:g}, `min_lr` {schedule['min_lr']:g}"
            )
        if trained_parts.get(first_step):
            rate = Markdown(f"{rate}; trains {', '.join(map(code, trained_parts[first_step]))}")
        table_rows.append((first_step, Markdown(", ".join(shares)), rate))
    return table_rows


def device_hours(sessions: Sequence[TrainingSession]) -> Markdown:
    """Return the total device hours in words, such as ``98.4 GPU hours on 8 × NVIDIA H100``."""
    devices = listed(list(dict.fromkeys(map(_hardware, sessions))))
    unrecorded = f", without the first {sessions[0].after_step:,} steps" if sessions[0].after_step else ""
    hours = _shown_hours(sum(session.device_hours for session in sessions))
    return Markdown(f"{hours} {hours_unit(sessions)} on {devices}{unrecorded}")


def hours_unit(sessions: Sequence[TrainingSession]) -> str:
    """Return the unit of the devices' hours; the name of a device that is not a GPU begins as in ``device_name``."""
    has_other_devices = any(session.device.startswith(("CPU", "xla")) for session in sessions)
    return "device hours" if has_other_devices else "GPU hours"


def compute_rows(record: ModelRecord) -> list[Row]:
    """Return the devices and their hours by steps, with separate rows for runs that this one branched off."""
    sessions = record.saved.sessions
    branch_steps = {branch.step for branch in record.saved.lineage}
    # consecutive sessions of one run on the same hardware are one row
    groups: list[list[TrainingSession]] = []
    for session in sessions:
        is_same_run = session.after_step not in branch_steps
        if groups and is_same_run and _hardware(groups[-1][0]) == _hardware(session):
            groups[-1].append(session)
        else:
            groups.append([session])

    ends = [*(group[0].after_step for group in groups[1:]), record.saved.state.step]
    rows: list[Row] = []
    for group, end in zip(groups, ends, strict=True):
        steps = f"{group[0].after_step + 1:,} to {end:,}"
        rows.append((steps, _hardware(group[0]), *_clock_and_device_hours(group)))
    if len(rows) > 1:
        rows.append(("all", "", *_clock_and_device_hours(sessions)))
    return rows


def _clock_and_device_hours(sessions: Sequence[TrainingSession]) -> tuple[str, str]:
    """Return the hours on the clock, and the total device hours."""
    clock_hours = sum(session.seconds for session in sessions) / 3600
    device_hours = sum(session.device_hours for session in sessions)
    return _shown_hours(clock_hours), _shown_hours(device_hours)


def _shown_hours(hours: float) -> str:
    if hours >= 10:
        return f"{hours:,.1f}"
    return f"{hours:.2g}" if hours >= 0.01 else "under 0.01"


def _hardware(session: TrainingSession) -> str:
    """Return the number and the name of a session's devices."""
    name, _, cpu_details = session.device.partition(", ")  # instructions and threads
    hardware = f"{session.num_devices:,} × {name}"
    return f"{hardware} ({cpu_details})" if cpu_details else hardware


def lineage_row(branch: checkpoints.BranchPoint, shown_arguments: Sequence[str] | None = None) -> Row:
    """Return the run that was branched off, the step, and the changed arguments, or only ``shown_arguments`` of them.

    Paths are shown by their last part.
    """
    changes = []
    for name, (value_before, value_after) in branch.changed.items():
        if shown_arguments is None or name in shown_arguments:
            changes.append(f"`{name}`: {escaped(public_value(value_before))} → {escaped(public_value(value_after))}")
    if not branch.continues_data:
        changes.append("different data, read from the beginning")
    return code(last_part(branch.run)), branch.step, Markdown(", ".join(changes) or "nothing")


def unit_of_loss(saved: checkpoints.TrainerJson) -> str:
    """Return the unit of a run's losses, such as nats per token."""
    objective = saved.component("objective")
    evaluation = saved.state.evaluation
    if objective.is_own:
        if objective.name == "sft" or saved.teacher is not None:
            return _NATS
        if objective.name == "rl":
            return "(policy gradient)"
        is_of_answers = evaluation is not None and evaluation.whole.of_answers
        return "per answer" if is_of_answers else "per pair"
    if evaluation is not None and evaluation.whole.is_likelihood:
        return _NATS
    return f"in the unit of the {objective.kind} {objective.name}"


def results_of(record: ModelRecord) -> dict[str, Any]:
    """Return the values of the section on results: each source's loss at the first evaluation and now.

    The names are the same as in ``templates/model_card.md.j2``.
    """
    state = record.saved.state
    evaluation = state.evaluation
    first_evaluation = state.first_evaluation or evaluation
    columns = ["source", f"{evaluation.whole.unit if evaluation else 'token'}s evaluated"]
    rows: list[Row] = []
    if evaluation and first_evaluation:
        has_earlier = first_evaluation.step < evaluation.step
        columns += [figure.replace("_", " ") for figure in evaluation.whole.figures()]
        has_change = has_earlier and not evaluation.whole.of_completions  # a reward may be 0 or negative
        if has_change:
            columns.append("change of loss")
        for source, first_loss, loss in checkpoints.compare_evaluations(first_evaluation, evaluation):
            name = record.evaluated_name(source)
            cells = _result_cells(first_loss, loss, evaluation.whole.figures(), has_earlier=has_earlier)
            if has_change:
                cells.append(_change_of_loss(first_loss, loss))
            rows.append((name, loss.num_tokens, *cells))
    perplexity = None
    has_perplexity = unit_of_loss(record.saved) == _NATS and record.saved.teacher is None
    if state.val_loss is not None and has_perplexity:
        perplexity = checkpoints.perplexity(state.val_loss)
    return {
        "averaged_rows": _averaged_rows(record),
        "now": evaluation,
        "first": first_evaluation,
        "perplexity": perplexity,
        "result_columns": " | ".join(columns),
        "result_rows": rows,
    }


def _result_cells(
    first_loss: checkpoints.TokenLoss | None, loss: checkpoints.TokenLoss, figures: Iterable[str], *, has_earlier: bool
) -> list[str]:
    """Return a source's figures, "before → after" if there was an evaluation before."""
    cells = []
    for figure in figures:
        cell = _figure_cell(loss, figure)
        first_cell = _figure_cell(first_loss, figure) if has_earlier else ""
        if first_cell and cell:
            cells.append(f"{first_cell}\u00a0→\u00a0{cell}")  # spaces that do not end a line
        else:
            cells.append(first_cell or cell)
    return cells


def _averaged_rows(record: ModelRecord) -> list[Row]:
    """Return the run, step and share of each checkpoint of an average."""
    rows: list[Row] = []
    total_weight = sum(averaged.weight for averaged in record.averaged)
    for averaged in record.averaged:
        run = code(last_part(str(checkpoints.run_of(averaged.checkpoint))))
        step = checkpoints.read_trainer_json(averaged.checkpoint).state.step
        rows.append((run, step, f"{averaged.weight / total_weight:.2%}"))
    return rows


def _figure_cell(loss: checkpoints.TokenLoss | None, figure: str) -> str:
    """Format a figure, with fewer digits the larger it is; "" if there is none."""
    value = loss.figures().get(figure) if loss else None
    if value is None:
        return ""
    if value < 100:
        return f"{value:,.3f}"
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _change_of_loss(first_loss: checkpoints.TokenLoss | None, loss: checkpoints.TokenLoss) -> str:
    """Return the relative change in percent, which bits per byte have too; "" if there is none."""
    if first_loss is None or not first_loss.loss > 0:
        return ""
    change = loss.loss / first_loss.loss - 1
    return f"{change:+.1%}".replace("-", "−")
