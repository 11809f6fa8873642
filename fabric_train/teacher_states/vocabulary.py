"""Compare the vocabularies of a teacher and a student token by token.

Their heads may have a different number of rows: rows that no token names are padding, and take no part in the loss.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fabric_train.cli.errors import InputError
from fabric_train.model.divergence_loss import NamedIds
from fabric_train.model.hf_model import load_hf_tokenizer


@dataclass(frozen=True)
class NamedIdRange:
    """The token ids that have a token: all below ``end``, except the ``gaps``."""

    end: int
    gaps: tuple[int, ...]

    @property
    def num_ids(self) -> int:
        """The number of ids that have a token."""
        return self.end - len(self.gaps)

    def on_device(self, device: torch.device) -> NamedIds:
        """Return the ids in the form in which the loss reads them."""
        return NamedIds(self.end, torch.tensor(self.gaps, dtype=torch.int64, device=device))


def open_tokenizer(source: Path | str) -> Any:
    """Return transformers' tokenizer of a hub name, a folder or a checkpoint."""
    tokenizer_of_checkpoint = Path(source) / "tokenizer"
    if tokenizer_of_checkpoint.is_dir():
        return load_hf_tokenizer(tokenizer_of_checkpoint)
    return load_hf_tokenizer(source)


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


def hash_tokens(tokenizer: Any) -> str:
    """Return a hash of the tokens of a tokenizer and their ids, SHA-256 in hexadecimal."""
    return hashlib.sha256(json.dumps(sorted(_read_tokens(tokenizer).items())).encode()).hexdigest()


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


def check_rows_of_head(num_rows: int, named_ids: NamedIdRange, model: str) -> None:
    """Raise an InputError if the head of a model, named by its option and value, has too few rows for all tokens."""
    if num_rows < named_ids.end:
        raise InputError(
            f"{model}: its head has {num_rows:,} rows, but the tokenizer has ids up to {named_ids.end - 1:,}; give "
            "another model"
        )
