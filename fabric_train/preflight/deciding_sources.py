"""Check the sources whose validation losses decide: --best_by and --early_stopping."""

from typing import TYPE_CHECKING

from fabric_train.cli.errors import InputError
from fabric_train.data.streaming import Stream
from fabric_train.training.early_stopping import EarlyStopping, parse_early_stopping
from fabric_train.training.prepared_run import TrainingData

if TYPE_CHECKING:
    from arguments import EvaluationArguments


def check_deciding_sources(given: "EvaluationArguments", data: TrainingData) -> EarlyStopping | None:
    """Check the sources of ``--best_by`` and ``--early_stopping``, and return the latter, None if it is not given.

    Raises:
        InputError: the validation split has no document of such a source.
    """
    names = _validated_sources(data)
    faults = [] if given.best_by == "all" or given.best_by in names else [_fault("best_by", given.best_by, names)]
    stopping = None
    if given.early_stopping is not None:
        stopping = parse_early_stopping(given.early_stopping, names)
        if stopping.source not in (*names, *(["all"] if names else [])):
            faults.append(_fault("early_stopping", stopping.source, names))
    if faults:
        raise InputError(*faults)
    return stopping


def _fault(option: str, source: str, names: list[str]) -> str:
    if not names:
        return f"--{option} {source}: there is no validation split; tokenize with --validation_split above 0"
    if option == "early_stopping" and source.isdecimal():
        return f"--early_stopping {source}: a source comes before the number; give all:{source}, or {names[0]}:{source}"
    return f"--{option} {source}: the validation split has no such source; give all, {', '.join(names)}"


def _validated_sources(data: TrainingData) -> list[str]:
    """Return the names of the sources that have documents in the validation split."""
    dataset = data.held_out if isinstance(data, Stream) else data
    names: dict[str, None] = {}
    for part in dataset.parts if dataset else ():
        if part.validation is None:
            continue
        ledger = part.manifest.ledger.splits.get("validation") if part.manifest else None
        names |= dict.fromkeys(ledger.sources if ledger and ledger.sources else part.source_names)
    return list(names)
