"""Compare the vocabulary of a run's teacher with that of its rows."""

from typing import Any

from fabric_train.data.streaming import Stream
from fabric_train.model.hf_model import ModelShape
from fabric_train.teacher_states.vocabulary import (
    NamedIdRange,
    check_rows_of_head,
    compare_vocabularies,
    open_tokenizer,
)
from fabric_train.training.prepared_run import PreparedRun


def find_named_ids(run: PreparedRun, teacher: ModelShape) -> NamedIdRange:
    """Return the ids of the tokens that a run's student and its teacher have in common, which must be all.

    The student's tokens are those of the tokenizer that made its rows.

    Raises:
        InputError: A token has another id in the teacher's tokenizer, or only one of both has it, or a head has too few
            rows.
    """
    named_ids = compare_vocabularies(open_run_tokenizer(run), open_tokenizer(teacher.source), teacher.source)
    for option, shape in (("--model_name", run.model), ("--teacher", teacher)):
        check_rows_of_head(shape.vocab_size, named_ids, f"{option} {shape.source}")
    return named_ids


def open_run_tokenizer(run: PreparedRun) -> Any:
    """Return the tokenizer of the run's rows; of a token dataset without a tokenizer, the model's."""
    data = run.data
    if isinstance(data, Stream):
        return open_tokenizer(run.model.source)
    for dataset in data.parts:
        folder = dataset.folder / "tokenizer"
        if folder.is_dir():
            return open_tokenizer(folder)
    return open_tokenizer(run.model.source)
