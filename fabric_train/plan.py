"""What a run will do, worked out from the arguments, the model's configuration and the token dataset before anything
is built.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabric_train.batches import TokenDataset
from fabric_train.contract import compare_with_contract
from fabric_train.errors import InputError
from fabric_train.model import ModelShape

if TYPE_CHECKING:
    from arguments import TrainArguments


@dataclass(frozen=True)
class Plan:
    """Counts of a run; a window is what one optimizer step consumes over all ranks.

    ``notes`` are lines the user should read before it starts.
    """

    num_rows: int
    world_size: int
    accumulation: int
    rows_per_window: int
    windows_per_epoch: int
    num_steps: int
    tokens_per_row: int
    notes: tuple[str, ...]


def make_plan(arguments: "TrainArguments", shape: ModelShape, dataset: TokenDataset, world_size: int) -> Plan:
    """Work out the run's windows and steps.

    Raises:
        InputError: where the batch does not divide, or the data do not suit the model.
    """
    training = arguments.training
    verdict = compare_with_contract(dataset, shape, arguments.data.isolate_documents)
    faults = list(verdict.faults)
    if arguments.evaluation.eval_only and dataset.validation is None:
        faults.append(
            f"--eval_only true: {dataset.folder} has no validation split; tokenize with --validation_split above 0"
        )
    together = training.micro_batch_size * world_size
    accumulation = training.gradient_accumulation_steps
    if training.total_batch_size is not None:
        accumulation = training.total_batch_size // together
        if training.total_batch_size % together:
            nearest = sorted({together * max(accumulation, 1), together * (accumulation + 1)})
            faults.append(
                f"--total_batch_size {training.total_batch_size} is no multiple of {together}, "
                f"--micro_batch_size {training.micro_batch_size} on {world_size} devices; "
                f"nearest: {' or '.join(map(str, nearest))}"
            )
    if faults:
        raise InputError(*faults)
    rows_per_window = together * accumulation
    windows_per_epoch = math.ceil(len(dataset.train) / rows_per_window)
    in_epochs = windows_per_epoch * training.number_epochs
    num_steps = min(training.max_step or in_epochs, in_epochs)
    return Plan(
        num_rows=len(dataset.train),
        world_size=world_size,
        accumulation=accumulation,
        rows_per_window=rows_per_window,
        windows_per_epoch=windows_per_epoch,
        num_steps=num_steps,
        tokens_per_row=dataset.train.longest(),
        notes=(*verdict.notes, *_notes(arguments, num_steps, in_epochs, dataset)),
    )


def _notes(arguments: "TrainArguments", num_steps: int, in_epochs: int, dataset: TokenDataset) -> list[str]:
    notes = []
    training = arguments.training
    if training.max_step and training.max_step > in_epochs:
        notes.append(
            f"--max_step {training.max_step} is beyond the data: {training.number_epochs} epochs end at step "
            f"{in_epochs}, where the learning rate ends too; raise --number_epochs to go further"
        )
    elif training.max_step and training.max_step < in_epochs:
        notes.append(
            f"--max_step {training.max_step} ends the run before its {training.number_epochs} epochs, {in_epochs} steps"
        )
    if training.warmup_steps > num_steps:
        notes.append(f"--warmup_steps {training.warmup_steps} is longer than the run's {num_steps} steps")
    if dataset.validation is None:
        notes.append(f"{dataset.folder} has no validation split: nothing will be evaluated")
    return notes
