"""Learn from the stored values of a teacher (``--teacher_states``), which the batches bring along.

``teacher_states`` has the folders, ``data.teacher_states`` the values in a batch.

Shapes: N targets in a batch, H the teacher's hidden size, k likeliest tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fabric_train.cli.errors import InputError
from fabric_train.data.batch import Batch, Targets
from fabric_train.data.streaming import Stream
from fabric_train.data.teacher_states import HiddenStates
from fabric_train.data.token_dataset import TokenDataset
from fabric_train.distributed.precision import compute_dtype
from fabric_train.model.divergence_loss import FullRows, TeacherHead, TopRows
from fabric_train.model.teacher_head import check_head
from fabric_train.teacher_states.record import TEACH_AGAIN, StatesContent, StatesDifference, find_difference
from fabric_train.teacher_states.stored import StoredStates, open_states
from fabric_train.teacher_states.vocabulary import check_rows_of_head, hash_tokens
from fabric_train.training.prepared_run import PreparedRun
from fabric_train.training.teacher_vocabulary import open_run_tokenizer

_OPTION = "--teacher_states"
_ALLOWED_CHANGES = ("dtype", "attention")
"""The fields of ``StatesContent`` that change only the last digits, which ``--allow_changes true`` accepts."""
_SAME_IN_ALL_FOLDERS = ("teacher", "tokenizer", "named_ids", "dtype", "teacher_weights", "top_k", "hidden_size")
"""The fields of ``StatesContent`` that the loss and the checkpoints record once for all token datasets of a run."""


@dataclass(frozen=True)
class StoredTeacher:
    """A teacher whose values are read together with the rows."""

    content: StatesContent
    head: TeacherHead | None
    """The teacher's head, on this rank's device; None if the values are those of the likeliest tokens."""

    def read(self, batch: Batch, targets: Targets) -> FullRows | TopRows:
        """Return the teacher's distributions of the targets of a batch."""
        states = batch.teacher
        device = targets.ids.device
        if self.head is not None:
            hidden = torch.zeros(0, self.content.hidden_size, dtype=torch.bfloat16, device=device)
            if isinstance(states, HiddenStates):
                hidden = states.bits.view(torch.bfloat16)
            return FullRows(hidden, self.head)

        assert not isinstance(states, HiddenStates)
        if states is None:  # a rank without rows left in a window
            top_k = self.content.top_k or 0
            no_ids = torch.zeros(0, top_k, dtype=torch.int64, device=device)
            return TopRows(no_ids, torch.zeros(0, top_k + 1, device=device))
        return TopRows(states.ids.long(), states.log_probabilities)


def open_stored_teacher(states: StoredStates, device: torch.device) -> StoredTeacher:
    """Open the teacher of stored values on this rank's device."""
    content = states.record.content
    head = None
    if content.top_k is None:
        head = states.read_head(device)
    return StoredTeacher(content, head)


def use_stored_teacher(run: PreparedRun) -> StoredStates | None:
    """Let the rows of a run bring along the values in ``--teacher_states``.

    Returns:
        The values in the first folder; those in all folders have the same teacher, form and named ids. None if the run
        has no such values.

    Raises:
        InputError: A token dataset has no values, or values that were computed otherwise than the run needs them.
    """
    folders = run.arguments.preference.teacher_states
    if folders is None:
        return None
    data = run.data
    if isinstance(data, Stream):
        raise InputError(f"{_OPTION} does not work with --streaming_dataset; tokenize it and give --train_data_dir")
    if run.arguments.evaluation.self_check:
        raise InputError(f"{_OPTION} has no values for the shortened rows of --self_check true; give --teacher instead")
    check_head(run.model, f"--model_name {run.model.source}")
    tokenizer_hash = hash_tokens(open_run_tokenizer(run))
    all_states = [open_states(Path(folder).expanduser()) for folder in folders]
    _check_same_teacher(all_states)
    for dataset in data.parts:
        states = _find_states(dataset, all_states)
        _check_content(run, states, tokenizer_hash)
        splits = {"train": dataset.train}
        if dataset.validation is not None:
            splits["validation"] = dataset.validation
        for name, rows in splits.items():
            size = states.record.splits.get(name)
            if size is None or size.num_rows != len(rows):
                raise InputError(f"{states.folder}: damaged (it lacks values of {name} rows); {TEACH_AGAIN}")
            rows.use_teacher(states.reader(name))
    first = all_states[0]
    check_rows_of_head(run.model.vocab_size, first.record.content.named_ids, f"--model_name {run.model.source}")
    return first


def _check_same_teacher(all_states: Sequence[StoredStates]) -> None:
    """Raise an InputError if two folders have another teacher or form, even if only a later phase reads one of them."""
    first = all_states[0]
    for states in all_states:
        difference = find_difference(first.record.content, states.record.content, _SAME_IN_ALL_FOLDERS)
        if difference is not None:
            raise InputError(
                f"{_OPTION} {states.folder}: its {difference.name} is {difference.second_value}, but "
                f"{difference.first_value} in {first.folder}; store them again with the same teacher and form"
            )


def _find_states(dataset: TokenDataset, all_states: list[StoredStates]) -> StoredStates:
    """Return the values of a token dataset."""
    fingerprint = dataset.fingerprint
    for states in all_states:
        if states.record.content.token_dataset == fingerprint:
            return states
    folders = " ".join(str(states.folder) for states in all_states)
    raise InputError(
        f"{_OPTION} {folders}: no values for the rows of {dataset.name} (fingerprint {fingerprint[:12]}…); store them "
        f"with fabric-train teach --train_data_dir {dataset.name}"
    )


def _check_content(run: PreparedRun, states: StoredStates, tokenizer_hash: str) -> None:
    """Raise an InputError that names the first difference between what values are and what the run needs."""
    arguments = run.arguments
    content = states.record.content
    temperature = arguments.preference.distill_temperature
    if content.top_k is None:
        temperature = 1.0  # hidden states fit any
    needed = replace(
        content,
        isolate_documents=run.data.isolates,
        distill_on=arguments.preference.distill_on,
        tokenizer=tokenizer_hash,
        temperature=temperature,
        teacher_weights=arguments.preference.teacher_weights,
    )
    if not arguments.checkpoint.allow_changes:
        dtype = str(compute_dtype(arguments.model.precision)).removeprefix("torch.")
        needed = replace(needed, dtype=dtype, attention=arguments.model.attention)
    difference = find_difference(content, needed)
    if difference is not None:
        raise InputError(_describe_difference(states.folder, difference))


def _describe_difference(folder: Path, difference: StatesDifference) -> str:
    advice = "store them again with fabric-train teach, or give the run the same"
    if difference.name in _ALLOWED_CHANGES:
        advice += ", or accept it with --allow_changes true"
    return (
        f"{_OPTION} {folder}: the values were stored with another {difference.name}: {difference.first_value}, but the "
        f"run has {difference.second_value}; {advice}"
    )
