"""What a card says about cleaning: the steps, the evaluation tasks that were looked for, and what was changed."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from fabric_train.export.model_card.markdown import code, escaped, table
from fabric_train.export.model_card.public_names import PublicNames, last_part
from fabric_train.tokenization.manifest import Manifest

_TASKS = "decontaminate"
_WHAT_BECAME = {"drop": "left out", "mark": "kept"}


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
