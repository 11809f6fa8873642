"""What a card says about cleaning: the steps, the evaluation tasks that were looked for, and what was changed."""

import json
from collections.abc import Sequence
from typing import Any

from fabric_train.export.model_card.markdown import code, escaped, table
from fabric_train.tokenization.manifest import Manifest

_TASKS = "decontaminate"
_WHAT_BECAME = {"drop": "left out", "mark": "kept"}


def cleaning(manifest: Manifest) -> list[str]:
    """Return paragraphs in Markdown; none if no text was cleaned."""
    parts = [part.cleaning for part in manifest.parts] or [manifest.cleaning]
    steps = [(code(name), code(json.dumps(part[name]))) for part in parts for name in part if name != _TASKS]
    edits = [(kind, f"{count:,}") for kind, count in manifest.ledger.edits.items()]
    texts = ["Steps before tokenization:", table("step | settings", list(dict.fromkeys(steps)))] if steps else []
    texts += ["Changes to the texts:", table("change | count", edits)] if edits else []
    return [*texts, *_checked_tasks(parts, manifest.ledger.contaminated)]


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
