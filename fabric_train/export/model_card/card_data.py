"""The training data of a model card: sources with shares, counts and hashes, and the mixture with its phases."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fabric_train.checkpoint import HubDataset, StageSource, TrainingStage, run_of
from fabric_train.cli.output import redact
from fabric_train.export.model_card.record import (
    Markdown,
    ModelRecord,
    PublicNames,
    code,
    escaped,
    folded,
    last_part,
    link,
    public_value,
    read_record,
    table,
)
from fabric_train.model.origin import STAGES
from fabric_train.tokenization.manifest import Manifest, SourceRecord

_TASKS = "decontaminate"
_WHAT_BECAME = {"drop": "left out", "mark": "kept"}
HASHES = "training_data.sha256"
_SHOWN_DIGITS = 12
_COLUMNS = "source | share | tokens | documents | files | SHA-256 or revision"


def cleaning(manifest: Manifest) -> list[str]:
    """Return paragraphs in Markdown; none if no text was cleaned."""
    parts = [part.cleaning for part in manifest.parts] or [manifest.cleaning]
    edits = [(kind, f"{count:,}") for kind, count in manifest.ledger.edits.items()]
    texts = _steps(manifest)
    texts += ["Changes to the texts:", table("change | count", edits)] if edits else []
    return [*texts, *_checked_tasks(parts, manifest.ledger.contaminated)]


def left_out(manifest: Manifest, names: PublicNames) -> list[str]:
    """Return what was read, kept and left out of each source in Markdown; of all together if that is all one knows."""
    ledger, rows = manifest.ledger, list[tuple[str, str, str, str]]()
    by_source: dict[str, tuple[int, Counter[str]]] = {}
    for source in manifest.sources:
        kept, skipped = by_source.get(source.name, (0, Counter[str]()))
        by_source[source.name] = kept + source.documents, skipped + Counter(source.documents_skipped or {})
    if any(source.documents_skipped is None for source in manifest.sources):
        by_source = {}
    for name, (kept, skipped) in by_source.items():
        rows.append(_read_and_kept(code(names[name]), kept, skipped))
    if len(rows) != 1:
        rows.append(_read_and_kept("all", ledger.documents_kept, Counter(ledger.documents_skipped)))
    return ["Documents that were read for training and validation:", table("source | read | kept | left out", rows)]


def _read_and_kept(name: str, kept: int, skipped: Counter[str]) -> tuple[str, str, str, str]:
    reasons = ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in skipped.most_common())
    return name, f"{kept + skipped.total():,}", f"{kept:,}", reasons


def _steps(manifest: Manifest) -> list[str]:
    """Return the steps before tokenization; those of each token dataset if several were merged and differ."""
    by_dataset = [(last_part(part.name), part.cleaning) for part in manifest.parts] or [("", manifest.cleaning)]
    steps = [{name: json.dumps(part[name]) for name in part if name != _TASKS} for _, part in by_dataset]
    if not any(steps):
        return []
    if all(one == steps[0] for one in steps):
        return [
            "Steps before tokenization:",
            table("step | settings", [tuple(map(code, one)) for one in steps[0].items()]),
        ]
    cells = [
        (code(dataset), code(name) if name else "none", code(settings) if name else "")
        for (dataset, _), one in zip(by_dataset, steps, strict=True)
        for name, settings in (one or {"": ""}).items()
    ]
    return ["Steps before tokenization, of each token dataset:", table("dataset | step | settings", cells)]


def _checked_tasks(parts: Sequence[dict[str, Any]], contaminated: dict[str, int]) -> list[str]:
    checks = [part[_TASKS] for part in parts if _TASKS in part]
    if not checks:
        return []
    words, shortest = checks[0]["ngram_words"], checks[0]["shortest_text"]
    actions = {check["contaminated"] for check in checks}
    became = " or ".join(word for action, word in _WHAT_BECAME.items() if action in actions)
    text = (
        f"Documents that have {words} words in a row in common with an item of these evaluation tasks "
        f"(arXiv:2005.14165, appendix C) were {became}. Items of {escaped(str(shortest))} to {words - 1} words were "
        "looked for as a whole; shorter ones were not checked."
    )
    rows = []
    for task in dict.fromkeys(task for check in checks for task in check["tasks"]):
        counts = [check["tasks"][task] for check in checks if task in check["tasks"]]
        items, too_short = (max(one[name] for one in counts) for name in ("items", "too_short"))
        where = "all" if len(counts) == len(parts) else f"{len(counts):,} of {len(parts):,} parts"
        rows.append((code(task), f"{items:,}", f"{too_short:,}", where, f"{contaminated.get(task, 0):,}"))
    return [text, table("task | items | not checked | checked in | documents that share words", rows)]


def stages_through(checkpoint: Path) -> tuple[TrainingStage, ...]:
    """Return the stages of training up to a checkpoint, which is in the last one.

    Raises:
        InputError: trainer.json or manifest.json is damaged.
    """
    return all_stages(read_record(checkpoint))


def all_stages(record: ModelRecord) -> tuple[TrainingStage, ...]:
    """Return the stages of training, of which the record's own run is the last.

    Its shares are of the tokens that were seen, of those in the token dataset if that is not known.
    """
    seen = _seen_of_sources(record) or dict(seen_shares(record))
    sources = source_rows(record) or [
        StageSource(place.name, place.share, None, None, [], [place.dataset] if place.dataset else [])
        for place in record.stream_places()
    ]
    if seen.keys() >= {source.name for source in sources}:
        sources = [replace(source, share=seen[source.name]) for source in sources]
    state = record.state
    run = last_part(str(run_of(record.checkpoint)))
    own = TrainingStage(run, state.step, state.num_tokens, record.origin, sources, list(record.sessions))
    return (*record.stages, own)


def source_rows(record: ModelRecord) -> list[StageSource]:
    """Return the sources of a token dataset in their order, with shares of its tokens; none without a manifest."""
    if record.manifest is None:
        return []
    by_name: dict[str, list[SourceRecord]] = {}
    for source in record.training_sources():
        by_name.setdefault(source.name, []).append(source)
    train = record.manifest.ledger.splits.get("train")
    rows: list[StageSource] = []
    for name, records in by_name.items():
        counted = train.sources.get(name) if train else None
        documents = counted.documents if counted else sum(one.documents for one in records)
        tokens = counted.tokens_in_rows if counted else sum(one.train_tokens or one.tokens for one in records)
        public = record.names[name]
        datasets = {one.hub_name: HubDataset(one.hub_name, one.revision) for one in records if one.kind == "hub"}
        rows.append(StageSource(public, 0.0, tokens, documents, _hash_lines(public, records), [*datasets.values()]))
    total = max(sum(row.tokens or 0 for row in rows), 1)
    return [replace(row, share=(row.tokens or 0) / total) for row in rows]


def seen_shares(record: ModelRecord) -> list[tuple[str, float]]:
    """Return the public name of each source and its share of the tokens that were seen; none if they are not known."""
    names = record.trainer.get("mixture_sources") or ()
    rows, parts = record.state.rows_of_sources, source_rows(record)
    if names and rows and len(names) == len(rows):
        pairs = [(name, float(count)) for name, count in zip(_mixture_names(record), rows, strict=True)]
    else:
        pairs = [] if names else [(part.name, float(part.tokens or 0)) for part in parts]
    total = sum(number for _, number in pairs)
    return [(name, number / total) for name, number in pairs] if total else []


def _seen_of_sources(record: ModelRecord) -> dict[str, float]:
    """Return the share of the tokens seen of each source of documents in a mixture, by its public name.

    A token dataset gives tokens of its sources as it has them. Nothing is returned if the checkpoint does not say.
    """
    rows, tokens = record.state.rows_of_sources, record.trainer.get("mixture_tokens") or ()
    if not rows or len(rows) != len(tokens) or not all(map(bool, tokens)):
        return {}
    seen: dict[str, float] = dict.fromkeys((record.names[name] for one in tokens for name in one), 0.0)
    for count, one in zip(rows, tokens, strict=True):
        for name, number in one.items():
            seen[record.names[name]] += count / sum(rows) * number / max(sum(one.values()), 1)
    return seen


def training_data(record: ModelRecord) -> str:
    """Return the section of the training data."""
    if record.stream or record.trainer["arguments"].get("streaming_dataset"):
        parts = _streamed(record)
    elif record.manifest is None:
        parts = ["The token dataset had no manifest."]
    else:
        parts = _stored(record, record.manifest)
    if record.manifest and record.trainer.get("mixture_sources"):
        parts.append(_mixture(record, record.manifest.settings.max_length))
    return "\n\n".join(["## Training data", *parts])


def write_hashes(record: ModelRecord, folder: Path) -> None:
    """Write the SHA-256 of each source file of all stages, as ``sha256sum`` does, with names of the form SOURCE/FILE.

    Nothing is written if there are no source files.
    """
    lines = dict.fromkeys(
        "".join(part if part.isprintable() else "?" for part in line)
        for stage in all_stages(record)
        for source in stage.sources
        for line in source.files
    )
    if lines:
        (folder / HASHES).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def write_stages(record: ModelRecord, folder: Path) -> None:
    """Write the stages of training, from which a run that begins with the export takes them."""
    stages = json.dumps([asdict(stage) for stage in all_stages(record)], indent=2)
    (folder / STAGES).write_text(redact(stages) + "\n", encoding="utf-8")


def earlier_data(record: ModelRecord) -> str:
    """Return the table of what the stages before the last one read."""
    cells = [
        (f"{number}", *_cells(source))
        for number, stage in enumerate(record.stages, start=1)
        for source in stage.sources
    ]
    text = (
        "What the earlier stages read: shares of the tokens seen (of a stream, the share of a pass), tokens and "
        "documents of the token dataset."
    )
    return f"{text}\n\n{table(f'stage | {_COLUMNS}', cells)}" if cells else ""


def _cells(row: StageSource) -> tuple[str, ...]:
    counts = ("" if count is None else f"{count:,}" for count in (row.tokens, row.documents))
    return _linked(row), f"{row.share:.2%}", *counts, *_files(row)


def _stored(record: ModelRecord, manifest: Manifest) -> list[str]:
    rows = source_rows(record)
    texts = ["What the token dataset has of each source for training:", table(_COLUMNS, list(map(_cells, rows)))]
    if any(row.files for row in rows):
        of_several = any(len(row.files) > 1 for row in rows)
        note = " That of several files is the hash of their lines there." if of_several else ""
        texts.append(f"The SHA-256 of every source file is in [{HASHES}]({HASHES}).{note}")
    splits = [
        (name, f"{split.documents:,}", f"{split.characters:,}", f"{split.tokens_in_rows:,}", f"{split.rows:,}")
        for name, split in manifest.ledger.splits.items()
    ]
    texts.append(
        f"Tokenizer: {code(public_value(manifest.tokenizer.name))}. Rows of {manifest.settings.max_length:,} tokens."
    )
    texts.append(table("split | documents | characters | tokens | rows", splits))
    return [*texts, *left_out(manifest, record.names), *cleaning(manifest)]


def _linked(row: StageSource) -> Markdown:
    """Return the name of a source, with links to its datasets on the hub."""
    if not row.datasets:
        return code(row.name)
    links = Markdown(", ".join(map(_link, row.datasets)))
    return links if row.name in [one.repository for one in row.datasets] else Markdown(f"{code(row.name)}: {links}")


def _link(dataset: HubDataset) -> Markdown:
    return link(dataset.repository, f"https://huggingface.co/datasets/{dataset.repository}")


def _files(row: StageSource) -> tuple[str, str]:
    """Return the number of source files, and their hash or the revision of a dataset on the hub, in short."""
    lines = row.files
    if not lines:
        revisions = [one.revision[:_SHOWN_DIGITS] for one in row.datasets if one.revision]
        return "", Markdown(", ".join(map(code, dict.fromkeys(revisions))))
    digest = lines[0].split()[0] if len(lines) == 1 else hashlib.sha256("\n".join([*lines, ""]).encode()).hexdigest()
    return f"{len(lines):,}", code(digest[:_SHOWN_DIGITS])


def _hash_lines(name: str, records: Sequence[SourceRecord]) -> list[str]:
    files = [file for record in records for file in record.files]
    return [f"{last_part(file.sha256)}  {name}/{last_part(file.path)}" for file in files]


def _streamed(record: ModelRecord) -> list[str]:
    """Return the places of a stream with their shares, and what identifies their files."""
    cells = []
    for place in record.stream_places():
        revision = (place.dataset.revision or "") if place.dataset else ""
        name = code(place.name)
        if place.dataset:
            linked = _link(place.dataset)
            name = linked if place.name == place.dataset.repository else Markdown(f"{name}: {linked}")
        cells.append((name, f"{place.share:g}", code(revision[:_SHOWN_DIGITS]) if revision else ""))
    texts = ["Documents were read and tokenized during training.", table("source | share of a pass | revision", cells)]
    identities = [line.rsplit(", ", 2) for line in (record.stream.sources if record.stream else ())]
    files = [
        f"- {escaped(f'{last_part(one[0])}, {one[1]}, {one[2]}')}" for one in identities if one[-1].startswith("sha256")
    ]
    if files:
        texts.append(folded("Size, and hash of the first and last MiB, of each file", "\n".join(files)))
    return texts


def _mixture(record: ModelRecord, tokens_per_row: int) -> str:
    """Return the tokens that were seen of each source of a mixture, and the shares of the phases that have begun."""
    trainer, state = record.trainer, record.state
    names = [code(name) for name in _mixture_names(record)]
    seen = state.rows_of_sources or [0] * len(names)
    rows = [
        (name, f"{count / max(sum(seen), 1):.2%}", f"{count * tokens_per_row:,}")
        for name, count in zip(names, seen, strict=True)
    ]
    text = "### Mixture\n\nWhat was read of each source up to this step:\n\n" + table(
        "source | share | tokens seen", rows
    )
    phases = [phase for phase in trainer["data"].get("phases", []) if phase["first_step"] <= state.step]
    if not phases:
        return text
    schedules = {one["first_step"]: one["arguments"] for one in trainer["phase_schedules"]}
    stretches = [{"first_step": 1, "rows_per_epoch": trainer["data"]["rows_per_epoch"]}, *phases]
    lines = [
        (f"{one['first_step']:,}", _shares_in_words(names, one["rows_per_epoch"]), _rates(schedules, one["first_step"]))
        for one in stretches[phases[0]["first_step"] == 1 :]
    ]
    return text + "\n\n" + table("from step | shares | learning rate", lines)


def _mixture_names(record: ModelRecord) -> list[str]:
    """Return the public names of what has a share: SOURCE for FOLDER:SOURCE, if no two folders have it."""
    given = record.trainer["mixture_sources"]
    sources = [name.rpartition(":")[2] for name in given]
    known = {source.name for source in record.training_sources()}
    if known.issuperset(sources) and len(set(sources)) == len(sources):
        return [record.names[name] for name in sources]
    return [last_part(name) for name in given]


def _shares_in_words(names: Sequence[Markdown], rows: Sequence[int]) -> Markdown:
    shares = (f"{name} {count / sum(rows):.2%}" for name, count in zip(names, rows, strict=True) if count)
    return Markdown(", ".join(shares))


def _rates(schedules: dict[int, dict[str, Any]], first_step: int) -> str:
    """Return the learning rate of a phase in short: its own, or that of the hyperparameters."""
    own = schedules.get(first_step)
    if own is None:
        return "that of the run"
    return Markdown(f"{escaped(str(own['lr_schedule']))}, `lr` {own['lr']:g}, `min_lr` {own['min_lr']:g}")
