"""Compare the vocabularies of a teacher and a student token by token.

Their heads may have a different number of rows: rows that no token names are padding, and take no part in the loss.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fabric_train.cli.errors import InputError
from fabric_train.data.streaming import Stream
from fabric_train.model.hf_model import ModelShape, load_hf_tokenizer
from fabric_train.training.prepared_run import PreparedRun


@dataclass(frozen=True)
class NamedIdRange:
    """The token ids that have a token: all below ``end``, except the ``gaps``."""

    end: int
    gaps: tuple[int, ...]


def find_named_ids(run: PreparedRun, teacher: ModelShape) -> NamedIdRange:
    """Return the ids of the tokens that a run's student and its teacher have in common, which must be all.

    The student's tokens are those of the tokenizer that made its rows.

    Raises:
        InputError: A token has another id in the teacher's tokenizer, or only one of both has it, or a head has too few
            rows.
    """
    named_ids = compare_vocabularies(_open_tokenizer(run), load_hf_tokenizer(teacher.source), teacher.source)
    for name, shape in (("--model_name", run.model), ("--teacher", teacher)):
        if shape.vocab_size < named_ids.end:
            raise InputError(
                f"{name} {shape.source}: its head has {shape.vocab_size:,} rows, but the tokenizer has ids up to "
                f"{named_ids.end - 1:,}; give another model"
            )
    return named_ids


def compare_vocabularies(student_tokenizer: Any, teacher_tokenizer: Any, teacher_source: str) -> NamedIdRange:
    """Return the ids of the tokens of two tokenizers of transformers; ``teacher_source`` is for messages.

    Raises:
        InputError: A token has another id in the teacher's tokenizer, or only one of both has it.
    """
    student_tokens = _read_tokens(student_tokenizer)
    _compare(student_tokens, _read_tokens(teacher_tokenizer), teacher_source)
    end = max(student_tokens) + 1
    gaps = tuple(token_id for token_id in range(end) if token_id not in student_tokens)
    return NamedIdRange(end, gaps)


def _open_tokenizer(run: PreparedRun) -> Any:
    """Return the tokenizer of the run's rows; of a token dataset without a tokenizer, the model's."""
    data = run.data
    if isinstance(data, Stream):
        return load_hf_tokenizer(run.model.source)
    for dataset in data.parts:
        folder = dataset.folder / "tokenizer"
        if folder.is_dir():
            return load_hf_tokenizer(folder)
    return load_hf_tokenizer(run.model.source)


def _read_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the tokens of a tokenizer by their ids."""
    return {token_id: token for token, token_id in tokenizer.get_vocab().items()}


def _compare(student: Mapping[int, str], teacher: Mapping[int, str], teacher_source: str) -> None:
    """Raise an InputError that names the first difference between two vocabularies, if there is one."""
    advice = "give a teacher with the student's tokenizer"
    for token_id in sorted(student.keys() & teacher.keys()):
        if student[token_id] != teacher[token_id]:
            raise InputError(
                f"--teacher {teacher_source}: it has a different tokenizer: id {token_id} is {teacher[token_id]!r}, "
                f"but {student[token_id]!r} in the student's; {advice}"
            )
    only_student = sorted(student.keys() - teacher.keys())
    if only_student:
        raise InputError(
            f"--teacher {teacher_source}: it lacks {len(only_student):,} tokens of the student, such as id "
            f"{only_student[0]}, {student[only_student[0]]!r}; {advice}"
        )
    only_teacher = sorted(teacher.keys() - student.keys())
    if only_teacher:
        raise InputError(
            f"--teacher {teacher_source}: it has {len(only_teacher):,} tokens that the student lacks, such as id "
            f"{only_teacher[0]}, {teacher[only_teacher[0]]!r}; {advice}"
        )
