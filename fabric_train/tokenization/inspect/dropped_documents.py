"""Read the sample of documents that were left out, and compare it with the ledger."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from fabric_train.cli.errors import InputError
from fabric_train.files.regular_file import open_regular
from fabric_train.files.typed_json import parse_json
from fabric_train.tokenization.cleaning.dropped_sample import FILE_NAME
from fabric_train.tokenization.inspect.split_check import Problem
from fabric_train.tokenization.manifest import Manifest

_MOST_BYTES = 64 << 20  # some hundred reasons with 20 texts of 500 characters are less


@dataclass(frozen=True)
class SampledDrop:
    """A document that was left out: a line of ``dropped.jsonl``."""

    reason: str
    detail: str
    place: str
    text: str


def read_dropped(folder: Path, manifest: Manifest | None) -> tuple[dict[str, list[SampledDrop]], list[Problem]]:
    """Return the sample of a token dataset by reason, and what is wrong with it; a dataset may have none."""
    file = folder / FILE_NAME
    if not file.exists():
        return {}, []
    try:
        with open_regular(file, "tokenize again") as opened:
            content = opened.read(_MOST_BYTES + 1)
    except (InputError, OSError) as error:
        return {}, [Problem(FILE_NAME, f"cannot be read: {error}")]
    if len(content) > _MOST_BYTES:
        return {}, [Problem(FILE_NAME, f"larger than {_MOST_BYTES >> 20} MiB, so it is not what its name says")]
    by_reason: dict[str, list[SampledDrop]] = {}
    problems = []
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            document = parse_json(line, SampledDrop)
        except ValueError as error:
            problems.append(Problem(FILE_NAME, f"line {number:,} is damaged: {error}"))
            break
        by_reason.setdefault(document.reason, []).append(document)
    return by_reason, problems + _disagreements(by_reason, manifest)


def _disagreements(by_reason: dict[str, list[SampledDrop]], manifest: Manifest | None) -> list[Problem]:
    """Return a problem for each reason that the ledger has less often than the sample."""
    skipped = Counter(manifest.ledger.documents_skipped if manifest else {})
    return [
        Problem(FILE_NAME, f"{len(documents):,} documents are skipped as {reason}, in the ledger {skipped[reason]:,}")
        for reason, documents in by_reason.items()
        if len(documents) > skipped[reason]
    ]
