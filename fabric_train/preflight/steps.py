"""The steps of a run: where they begin, and how many they are.

A run begins at step 1, at a checkpoint, or as a branch of another run. The windows and steps follow from the
arguments, the model's configuration and the data.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fabric_train import checkpoint as checkpoints
from fabric_train.cli.errors import InputError
from fabric_train.data.data_order import SHUFFLED, DataOrder, PhaseRows, StreamOrder
from fabric_train.data.mixture import Mixture
from fabric_train.data.mixture_order import MixtureOrder
from fabric_train.data.streaming import Stream
from fabric_train.data.token_mixture import TokenMixture
from fabric_train.model.hf_model import ModelShape
from fabric_train.model.rope import how_to_extend
from fabric_train.optim.learning_rate import num_decay_steps
from fabric_train.preflight.dataset_check import check_dataset, resize_advice
from fabric_train.training.metrics import are_columns
from fabric_train.training.prepared_run import RunPhase, StartingPoint, StepPlan, TrainingData

if TYPE_CHECKING:
    from fabric_train.arguments import CheckpointArguments, TrainArguments, TrainingArguments


def starting_point(
    checkpoint: Path | None, order: DataOrder | StreamOrder, given: "CheckpointArguments"
) -> StartingPoint:
    """Return the state and the lineage of a checkpoint, with a new branch point if the run branches off there.

    Without a checkpoint, or if only its weights are taken, the run begins with step 1.
    """
    start = StartingPoint(checkpoint, checkpoints.TrainerState())
    if checkpoint is None:
        return start
    if given.weights_only:
        from fabric_train.export.card_facts import all_stages, read_record  # slow

        return replace(start, stages=all_stages(read_record(checkpoint)))
    saved = checkpoints.read_trainer_json(checkpoint)
    state = saved.state
    if state.unlogged and not are_columns(list(state.unlogged)):
        raise InputError(f"{checkpoint / 'trainer.json'}: damaged (unlogged: unknown metrics); use another checkpoint")
    start = replace(start, state=state, lineage=saved.lineage, stages=saved.stages)
    if given.branch is None:
        return start
    same_data = not saved.data_changes(order)
    branch = checkpoints.BranchPoint(str(checkpoints.run_of(checkpoint)), state.step, same_data, {})
    # metrics that a signal left unlogged are of the other run's step; of other data, no row was read
    state = replace(state, unlogged=None, progress=None, rows_of_sources=state.rows_of_sources if same_data else None)
    return replace(start, state=state, lineage=(*saved.lineage, branch), branches=True)


def plan_steps(
    arguments: "TrainArguments",
    model: ModelShape,
    data: TrainingData,
    world_size: int,
    data_starts_after: int,
    phases: tuple[RunPhase, ...],
    data_ends_after: int | None = None,
    order_version: int = SHUFFLED,
) -> StepPlan:
    """Count the windows and steps of a run, whose data begin after one step and end after another."""
    training = arguments.training
    dataset = data.held_out if isinstance(data, Stream) else data
    parts = dataset.parts if dataset else ()
    checks = [check_dataset(part, model, arguments.data.isolate_documents) for part in parts]
    faults = [fault for check in checks for fault in check.faults]
    if isinstance(data, Stream):
        faults += _faults_of_stream(data, model, training.max_step)
    elif arguments.evaluation.eval_only and data.validation is None:
        faults.append(
            f"--eval_only true: {data.name} has no validation split; tokenize with --validation_split above 0"
        )
    num_data_ranks = world_size // arguments.fsdp.ranks_of_rows
    together, accumulation = rows_at_once(arguments, world_size)
    if (total := training.total_batch_size) is not None and total % together:
        nearest = " or ".join(map(str, sorted({together * max(accumulation, 1), together * (accumulation + 1)})))
        split = f"--micro_batch_size {training.micro_batch_size} on {num_data_ranks} devices"
        faults.append(f"--total_batch_size {total} is not a multiple of {together}, {split}; nearest: {nearest}")
    if faults:
        raise InputError(*faults)
    num_rows = windows_per_epoch = in_epochs = mixture = None
    if isinstance(data, TokenMixture):
        window = (together * accumulation, arguments.data.seed)
        mixture = order_of_mixture(data, data.rows_per_epoch, *window, phases, data_starts_after)
    if not isinstance(data, Stream):
        num_rows = sum(data.rows_per_epoch) if isinstance(data, TokenMixture) else len(data.train)
        windows_per_epoch = math.ceil(num_rows / (together * accumulation))
        in_epochs = None if arguments.data.phases else data_starts_after + windows_per_epoch * training.number_epochs
    num_steps = min(steps for steps in (training.max_step, in_epochs) if steps is not None)
    if not arguments.evaluation.only_reads and (fault := fault_of_decay(training, num_steps)):
        raise InputError(fault)
    return StepPlan(
        num_rows=num_rows,
        world_size=world_size,
        num_data_ranks=num_data_ranks,
        micro_batch_size=training.micro_batch_size,
        accumulation=accumulation,
        rows_per_window=together * accumulation,
        windows_per_epoch=windows_per_epoch,
        num_steps=num_steps,
        tokens_per_row=data.max_length if isinstance(data, Stream) else data.train.longest(),
        mixture=mixture,
        phases=phases,
        notes=(*(note for check in checks for note in check.notes), *_notes(arguments, num_steps, in_epochs, data)),
        data_starts_after=data_starts_after,
        data_ends_after=data_ends_after,
        order_version=order_version,
    )


def order_of_mixture(
    data: TokenMixture,
    rows_per_epoch: Sequence[int],
    rows_per_window: int,
    seed: int,
    phases: Iterable[RunPhase | PhaseRows],
    starts_after: int,
) -> MixtureOrder:
    """Return the order of a mixture and its phases, whose data begin after the step ``starts_after``."""
    sizes = tuple(source.num_rows for source in data.sources)
    order = MixtureOrder((Mixture(sizes, tuple(rows_per_epoch), rows_per_window, seed),))
    for phase in phases:
        order = order.followed_by(max(0, phase.first_step - 1 - starts_after), phase.rows_per_epoch)
    return order


def rows_at_once(arguments: "TrainArguments", world_size: int) -> tuple[int, int]:
    """Return the rows of one micro-batch over all ranks, and the number of micro-batches on a rank in a step."""
    training = arguments.training
    together = training.micro_batch_size * (world_size // arguments.fsdp.ranks_of_rows)
    if training.total_batch_size is None:
        return together, training.gradient_accumulation_steps
    return together, training.total_batch_size // together


def _faults_of_stream(stream: Stream, model: ModelShape, max_step: int | None) -> list[str]:
    faults = []
    if max_step is None:
        faults.append("--streaming_dataset has no known length: give --max_step")
    if model.max_positions is not None and stream.max_length > model.max_positions:
        advice = f"give no more{how_to_extend(model, stream.max_length)}"
        faults.append(f"--max_length {stream.max_length}: {model.source} takes {model.max_positions}; {advice}")
    if stream.tokenizer.vocab_size > model.vocab_size:
        faults.append(
            f"{stream.tokenizer.name}: its tokenizer has ids up to {stream.tokenizer.vocab_size - 1}, {model.source} "
            f"has {model.vocab_size} tokens; {resize_advice(model, stream.tokenizer.vocab_size)}"
        )
    return faults


def fault_of_decay(training: "TrainingArguments", num_steps: int, of: str = "the run") -> str | None:
    """Return a fault if a ``wsd`` schedule has no step at its peak between warm-up and decay, else None."""
    if training.lr_schedule != "wsd" or not training.lr_decay:
        return None
    decay = num_decay_steps(num_steps, training)
    rises = max(training.warmup_steps, 1)
    if decay + rises <= num_steps:
        return None
    given = f"--decay_steps {decay}" if training.decay_steps else f"--decay_share {training.decay_share:g}"
    return (
        f"{given}: {of} has {num_steps} steps, and {rises} {'is' if rises == 1 else 'are'} needed to reach --lr; give "
        f"fewer, at most {max(num_steps - rises, 0)} steps"
    )


def _notes(arguments: "TrainArguments", num_steps: int, in_epochs: int | None, data: TrainingData) -> list[str]:
    notes = []
    training = arguments.training
    if training.max_step and in_epochs and training.max_step > in_epochs:
        notes.append(
            f"--max_step {training.max_step} is beyond the data: {training.number_epochs} epochs end at step "
            f"{in_epochs}, where the learning rate ends too; raise --number_epochs to go further"
        )
    elif training.max_step and in_epochs and training.max_step < in_epochs:
        notes.append(
            f"--max_step {training.max_step} ends the run before its {training.number_epochs} epochs, {in_epochs} steps"
        )
    if training.warmup_steps > num_steps:
        notes.append(f"--warmup_steps {training.warmup_steps} is longer than the run's {num_steps} steps")
    if data.validation is None:
        folders = ", ".join(arguments.data.data_dirs)
        lacking = f"{folders} has no validation split" if folders else "--train_data_dir is not given"
        notes.append(f"{lacking}: nothing will be evaluated")
    if isinstance(data, Stream):
        notes += data.chat_template.notes if data.chat_template else ()
        notes += data.notes
    return notes
