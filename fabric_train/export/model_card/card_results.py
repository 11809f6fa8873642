"""The results of a model card: validation before and after, by source, and the picture of the losses."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fabric_train.checkpoint import Evaluation, TokenLoss, compare_evaluations, perplexity, read_trainer_json, run_of
from fabric_train.cli.errors import InputError
from fabric_train.export.average import AveragePart
from fabric_train.export.model_card.record import ModelRecord, code, last_part, table
from fabric_train.training.loss_curves import PICTURE, draw_loss_curves
from fabric_train.training.metrics import Metrics, read_metrics


def results(record: ModelRecord, folder: Path) -> str:
    """Return the section of the results; ``folder`` is the export, with or without the picture."""
    state = record.state
    parts = ["## Results", _average(record.parts) if record.parts else "", _validation(record)]
    if state.train_loss is not None:
        parts.append(f"Training loss of the last step: {state.train_loss:.4f} nats per token.")
    if (folder / PICTURE).is_file():
        parts.append(f"![Training loss, validation loss and learning rate over the optimizer steps]({PICTURE})")
    else:
        parts.append("There is no picture of the losses: the run's metrics.csv was not at hand for the export.")
    return "\n\n".join(part for part in parts if part)


def _average(parts: Sequence[AveragePart]) -> str:
    """Return the checkpoints whose average the weights are, and their shares."""
    total = sum(part.weight for part in parts)
    rows = [
        (
            code(last_part(str(run_of(part.checkpoint)))),
            f"{read_trainer_json(part.checkpoint).state.step:,}",
            f"{part.weight / total:.2%}",
        )
        for part in parts
    ]
    return (
        "The weights are the average of these checkpoints. The losses below are those of the last one, not of the "
        f"average.\n\n{table('run | step | share', rows)}"
    )


def _validation(record: ModelRecord) -> str:
    """Return the table of the losses of each source, at the first evaluation and now."""
    now, first = record.state.evaluation, record.state.first_evaluation
    if now is None:
        loss = record.state.val_loss
        if loss is None:
            return "The step of this checkpoint was not evaluated."
        return f"Validation loss {loss:.4f} nats per token, perplexity {perplexity(loss):.2f}."
    first, figures = first or now, list(now.whole.figures())
    rows = []
    for name, before, after in compare_evaluations(first, now):
        pairs = zip(_cells(before, figures), _cells(after, figures), strict=True)
        cells = [
            f"{there}\u00a0→\u00a0{here}".strip("\u00a0→") if first.step < now.step else here for there, here in pairs
        ]
        change = [_change(before, after)] if first.step < now.step else []
        rows.append((record.part_name(name), f"{after.num_tokens:,}", *cells, *change))
    columns = ["source", "tokens evaluated", *(figure.replace("_", " ") for figure in figures)]
    columns += ["change of loss"] if first.step < now.step else []
    return f"{_explanation(first, now.step, len(record.stages) + 1)}\n\n" + table(" | ".join(columns), rows)


def _explanation(evaluated: Evaluation, now: int, stage: int) -> str:
    """Return what was compared, after which steps of the last ``stage``."""
    text, first = f"On held-out documents, after step {now:,}.", evaluated.step
    if first < now:
        start = "before training" if stage == 1 else f"before stage {stage:,} of training (after stage {stage - 1:,})"
        before = f"after step {first:,}" if first else start
        text = f"On held-out documents, {before} → after step {now:,}."
    if evaluated.follows_other_rows:
        text += f" Before step {first:,} other rows were evaluated, so losses of earlier steps are not compared."
    return f"{text} Loss is in nats per token; lower is better. Bits per byte do not depend on the tokenizer."


def _cells(loss: TokenLoss | None, figures: Sequence[str]) -> list[str]:
    values = [loss.figures().get(figure) if loss else None for figure in figures]
    return ["" if value is None else _figure(value) for value in values]


def _figure(value: float) -> str:
    return f"{value:.3f}" if value < 100 else f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def _change(before: TokenLoss | None, after: TokenLoss) -> str:
    """Return the relative change of the loss, which is that of the bits per byte; empty if there is nothing to compare.

    Both are of the same text and tokenizer.
    """
    if before is None or not before.loss > 0:
        return ""
    return f"{after.loss / before.loss - 1:+.1%}".replace("-", "−")


def draw_run(record: ModelRecord, picture: Path, title: str) -> None:
    """Draw the losses of a run up to the record's step, those of the runs that it branched off included.

    Nothing is drawn if the run has no metrics.csv that can be read. Runs that it branched off may be gone.

    Args:
        record: of a checkpoint of the run.
        picture: the PNG to write.
        title: the title of the picture.
    """
    own = _read(run_of(record.checkpoint), record.state.step)
    if not own:
        return
    rows: list[Metrics] = []
    for branch in record.lineage:
        after = rows[-1].step if rows else -1
        rows += [row for row in _read(Path(branch.run), branch.step) if row.step > after]
    after = record.lineage[-1].step if record.lineage else -1
    rows += [row for row in own if row.step > after]
    draw_loss_curves(
        [_with_public_names(row, record) for row in rows], picture, title, [branch.step for branch in record.lineage]
    )


def _read(run: Path, last_step: int) -> list[Metrics]:
    try:
        return read_metrics(run / "metrics.csv", last_step)
    except InputError:
        return []


def _with_public_names(row: Metrics, record: ModelRecord) -> Metrics:
    by_source = {}
    for column, value in row.by_source.items():
        figure, _, name = column.partition("/")
        by_source[f"{figure}/{record.names[name]}"] = value
    return replace(row, by_source=by_source)
