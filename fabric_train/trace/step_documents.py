"""List the documents that a step read, from the rows of its window."""

from dataclasses import dataclass

from fabric_train.cli.errors import InputError
from fabric_train.data.row_documents import RowDocument, documents_in
from fabric_train.data.token_dataset import TokenDataset
from fabric_train.tokenization.tokenizers.vocabulary import load_vocabulary
from fabric_train.trace.run_history import RunHistory


@dataclass(frozen=True)
class DocumentInStep:
    """A document, or the part of one, in a row of a step.

    ``ranks`` read the row, ``row`` of the token dataset's train split. ``first_token`` is the position in the document
    of the first token that is in the row, and ``tokens`` their number. ``source``, ``file`` and ``line`` are None
    without a document index: then it is the whole row.
    """

    ranks: list[int]
    dataset: str
    row: int
    source: str | None
    file: str | None
    line: int | None
    first_token: int
    tokens: int
    text: str


@dataclass(frozen=True)
class StepDocuments:
    """The documents of a step, in the order of its rows, and the checkpoint that says how many ranks took it.

    ``is_taken``: whether a checkpoint has the step; otherwise it is one that the run would take.
    """

    step: int
    epoch: int
    is_taken: bool
    run: str
    checkpoint: str
    num_ranks: int
    num_rows: int
    documents: list[DocumentInStep]


def list_documents(history: RunHistory, step: int, rank: int | None) -> StepDocuments:
    """Return the documents of a step, those of one rank if ``rank`` is given.

    Raises:
        InputError: the run has no such step or rank, or its token datasets are not there.
    """
    stretch = history.stretch_of(step)
    data = history.data_of(stretch)
    ranks, checkpoint = history.ranks_of(step)
    if rank is not None and rank >= ranks.number:
        raise InputError(f"--rank {rank}: step {step} has the ranks 0 to {ranks.number - 1}, as {checkpoint} says")
    rows = data.order.rows_of(step - stretch.starts_after).tolist()
    places = [(ranks.at(position), *data.place(row)) for position, row in enumerate(rows)]
    wanted = [place for place in places if rank is None or rank in place[0]]
    vocabularies = {part.folder: load_vocabulary(part.folder / "tokenizer") for part in data.datasets.parts}
    return StepDocuments(
        step=step,
        epoch=data.order.epoch_of(step - stretch.starts_after),
        is_taken=step <= history.num_done,
        run=str(stretch.run),
        checkpoint=str(checkpoint),
        num_ranks=ranks.number,
        num_rows=len(rows),
        documents=[
            _name(list(own), dataset, row, document)
            for own, dataset, row in wanted
            for document in documents_in(dataset, row, vocabularies[dataset.folder])
        ],
    )


def _name(ranks: list[int], dataset: TokenDataset, row: int, document: RowDocument) -> DocumentInStep:
    origin = document.origin
    source, file, line = (origin.source, origin.file, origin.row) if origin else (None, None, None)
    place = (ranks, str(dataset.folder), row, source, file, line)
    return DocumentInStep(*place, document.start, document.num_tokens, document.text)
