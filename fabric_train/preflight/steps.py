"""Plan the steps of a run: where they begin, and how many there are.

A run begins at step 1, at a checkpoint, or as a branch of another run. The windows and steps follow from the
arguments, the model's configuration and the data.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fabric_train.checkpoint import BranchPoint, TrainerJson, TrainerState, run_of
from fabric_train.cli.errors import InputError
from fabric_train.data.data_order import SHUFFLED, DataOrder, PhaseRows, StreamOrder
from fabric_train.data.mixture import Mixture
from fabric_train.data.mixture_order import MixtureOrder
from fabric_train.data.streaming import Stream
from fabric_train.data.token_dataset import TokenDataset
from fabric_train.data.token_mixture import TokenMixture
from fabric_train.model.hf_model import ModelShape
from fabric_train.model.rope import how_to_extend
from fabric_train.optim.learning_rate import num_decay_steps
from fabric_train.preflight.dataset_check import check_dataset, resize_advice
from fabric_train.rollouts.prompts import Prompts
from fabric_train.tokenization.tokenizers.tokenizer_folder import CorpusTokenizer
from fabric_train.training.metrics import are_columns
from fabric_train.training.prepared_run import StartingPoint, TrainingData, is_evaluated
from fabric_train.training.step_plan import RunPhase, StepPlan

if TYPE_CHECKING:
    from fabric_train.arguments import CheckpointArguments, TrainArguments, TrainingArguments


def starting_point(
    saved: TrainerJson | None, order: DataOrder | StreamOrder, start_from: "CheckpointArguments"
) -> StartingPoint:
    """Return the state and the lineage of a checkpoint, with a new branch point if the run branches off there.

    Without a checkpoint, or if only its weights are taken, the run begins with step 1.
    """
    start = StartingPoint(saved, TrainerState())
    if saved is None:
        return start
    if start_from.weights_only:
        from fabric_train.export.card_facts import all_stages, read_record  # slow

        return replace(start, stages=all_stages(read_record(saved)))

    # the run, or a branch of it, continues with the checkpoint's state
    state = saved.state
    if state.unlogged and not are_columns(list(state.unlogged)):
        file = saved.checkpoint / "trainer.json"
        raise InputError(f"{file}: damaged (unlogged: unknown metrics); use another checkpoint")
    start = replace(start, state=state, lineage=saved.lineage, stages=saved.stages)
    if start_from.branch is None:
        return start

    # the branch: unlogged metrics and early stopping stay with the other run; of other data, no row is read yet
    has_same_data = not saved.data_changes(order)
    branch = BranchPoint(run=str(run_of(saved.checkpoint)), step=state.step, continues_data=has_same_data, changed={})
    rows_of_sources = state.rows_of_sources if has_same_data else None
    state = replace(state, unlogged=None, progress=None, rows_of_sources=rows_of_sources)
    return replace(start, state=state, lineage=(*saved.lineage, branch), branches=True)


def plan_steps(
    arguments: "TrainArguments",
    model: ModelShape,
    data: TrainingData,
    *,
    world_size: int,
    phases: tuple[RunPhase, ...],
    data_starts_after: int,
    data_ends_after: int | None = None,
    order_version: int = SHUFFLED,
) -> StepPlan:
    """Count the windows and steps of a run.

    The data order begins after the step ``data_starts_after`` and ends after the step ``data_ends_after``, or if that
    is None, with the run.
    """
    training = arguments.training

    # the data, and the rows of a window
    notes = _check_data(arguments, model, data, world_size)
    _, accumulation = rows_at_once(arguments, world_size)
    rows_per_window = rows_of_step(arguments, world_size)

    # the rows and windows of an epoch; a stream has no known length
    mixture = None
    num_rows = None
    windows_per_epoch = None
    steps_of_epochs = None
    rows_per_epoch = data.rows_per_epoch if isinstance(data, TokenMixture | Prompts) else None
    if isinstance(data, TokenMixture | Prompts) and rows_per_epoch is not None:
        num_rows = sum(rows_per_epoch)
        mixture = order_of_mixture(
            data,
            rows_per_epoch,
            rows_per_window,
            seed=arguments.data.seed,
            phases=phases,
            data_starts_after=data_starts_after,
        )
    elif not isinstance(data, Stream):
        num_rows = len(data.train)
    if num_rows is not None:
        windows_per_epoch = math.ceil(num_rows / rows_per_window)
        if not arguments.data.phases:
            steps_of_epochs = data_starts_after + windows_per_epoch * training.number_epochs

    # the steps: up to --max_step or the end of the epochs, whichever comes first
    num_steps = min(steps for steps in (training.max_step, steps_of_epochs) if steps is not None)
    if not arguments.evaluation.only_reads:
        decay_fault = fault_of_decay(training, num_steps)
        if decay_fault:
            raise InputError(decay_fault)
    notes += _notes(arguments, num_steps, steps_of_epochs, data)
    return StepPlan(
        num_rows=num_rows,
        world_size=world_size,
        num_data_ranks=world_size // arguments.fsdp.ranks_of_rows,
        micro_batch_size=training.micro_batch_size,
        accumulation=accumulation,
        rows_per_window=rows_per_window,
        windows_per_epoch=windows_per_epoch,
        num_steps=num_steps,
        tokens_per_row=data.max_length if isinstance(data, Stream) else data.train.longest(),
        mixture=mixture,
        phases=phases,
        notes=tuple(notes),
        data_starts_after=data_starts_after,
        data_ends_after=data_ends_after,
        order_version=order_version,
        completions_per_prompt=arguments.rollouts.group_size if isinstance(data, Prompts) else None,
    )


def _check_data(arguments: "TrainArguments", model: ModelShape, data: TrainingData, world_size: int) -> list[str]:
    """Check that the model can read the data, and that the ranks can share ``--total_batch_size``; return notes.

    Raises:
        InputError: the data or the batch size cannot be used; it lists all faults.
    """
    faults: list[str] = []
    token_data: TokenDataset | TokenMixture | None
    if isinstance(data, Stream):
        token_data = data.held_out  # the token dataset for validation, if there is one
        faults += _faults_of_stream(data, model, arguments.training.max_step)
    elif isinstance(data, Prompts):
        token_data = data.dataset
        faults += _faults_of_rows(model, data.train.row_length, data.tokenizer)
    else:
        token_data = data
        # with --eval_only, the data are never a stream
        if arguments.evaluation.eval_only and data.validation is None:
            faults.append(
                f"--eval_only true: {data.name} has no validation split; tokenize with --validation_split above 0"
            )

    notes: list[str] = []
    if token_data is not None:
        for dataset in token_data.parts:
            check = check_dataset(dataset, model, arguments.data.isolate_documents)
            faults += check.faults
            notes += check.notes
    faults += _faults_of_batch_size(arguments, world_size)
    if faults:
        raise InputError(*faults)
    return notes


def _faults_of_batch_size(arguments: "TrainArguments", world_size: int) -> list[str]:
    """Return a fault with the nearest sizes if the ranks' micro-batches do not divide ``--total_batch_size``."""
    total_batch_size = arguments.training.total_batch_size
    rows_per_micro_batch, accumulation = rows_at_once(arguments, world_size)
    if total_batch_size is None or total_batch_size % rows_per_micro_batch == 0:
        return []
    lower = rows_per_micro_batch * max(accumulation, 1)
    upper = rows_per_micro_batch * (accumulation + 1)
    nearest = " or ".join(map(str, sorted({lower, upper})))
    num_data_ranks = world_size // arguments.fsdp.ranks_of_rows
    split = f"--micro_batch_size {arguments.training.micro_batch_size} on {num_data_ranks} devices"
    return [
        f"--total_batch_size {total_batch_size} is not a multiple of {rows_per_micro_batch} ({split}); give {nearest}"
    ]


def order_of_mixture(
    data: TokenMixture | Prompts,
    rows_per_epoch: Sequence[int],
    rows_per_window: int,
    seed: int,
    phases: Iterable[RunPhase | PhaseRows],
    data_starts_after: int,
) -> MixtureOrder:
    """Return the order of a mixture and its phases, which begins after the step ``data_starts_after``."""
    sizes = tuple(source.num_rows for source in data.sources)
    mixture = Mixture(sizes, tuple(rows_per_epoch), rows_per_window, seed)
    order = MixtureOrder((mixture,))
    for phase in phases:
        windows_before = max(0, phase.first_step - 1 - data_starts_after)
        order = order.followed_by(windows_before, phase.rows_per_epoch)
    return order


def rows_at_once(arguments: "TrainArguments", world_size: int) -> tuple[int, int]:
    """Return the number of rows in one micro-batch over all ranks, and of micro-batches on a rank in a step."""
    training = arguments.training
    num_data_ranks = world_size // arguments.fsdp.ranks_of_rows
    rows_per_micro_batch = training.micro_batch_size * num_data_ranks
    if arguments.data.prompts is not None:
        # at most: completions are packed, so a step has fewer rows than completions
        num_completions = arguments.rollouts.prompts_per_step * arguments.rollouts.group_size
        return rows_per_micro_batch, math.ceil(num_completions / rows_per_micro_batch)
    if training.total_batch_size is None:
        return rows_per_micro_batch, training.gradient_accumulation_steps
    return rows_per_micro_batch, training.total_batch_size // rows_per_micro_batch


def rows_of_step(arguments: "TrainArguments", world_size: int) -> int:
    """Return how many rows of the training data an optimizer step takes; of --prompts, prompts."""
    if arguments.data.prompts is not None:
        return arguments.rollouts.prompts_per_step
    rows_per_micro_batch, accumulation = rows_at_once(arguments, world_size)
    return rows_per_micro_batch * accumulation


def _faults_of_stream(stream: Stream, model: ModelShape, max_step: int | None) -> list[str]:
    """Return why a model cannot be trained on a stream."""
    faults = []
    if max_step is None:
        faults.append("--streaming_dataset has no known length; give --max_step")
    return faults + _faults_of_rows(model, stream.max_length, stream.tokenizer)


def _faults_of_rows(model: ModelShape, row_length: int, tokenizer: CorpusTokenizer) -> list[str]:
    """Return why a model cannot read rows of --max_length tokens that a run encodes itself."""
    faults = []
    if model.max_positions is not None and row_length > model.max_positions:
        advice = f"give a smaller --max_length{how_to_extend(model, row_length)}"
        faults.append(f"--max_length {row_length}: {model.source} has {model.max_positions} positions; {advice}")
    if tokenizer.vocab_size > model.vocab_size:
        faults.append(
            f"{tokenizer.name}: its tokenizer has ids up to {tokenizer.vocab_size - 1}, but {model.source} has "
            f"{model.vocab_size} tokens; {resize_advice(model, tokenizer.vocab_size)}"
        )
    return faults


def fault_of_decay(training: "TrainingArguments", num_steps: int, unit: str = "the run") -> str | None:
    """Return a fault if a ``wsd`` schedule has no step at its peak between warm-up and decay, and otherwise None.

    ``unit`` is the run or the phase that has ``num_steps`` steps.
    """
    if training.lr_schedule != "wsd" or not training.lr_decay:
        return None
    decay_steps = num_decay_steps(num_steps, training)
    warmup_steps = max(training.warmup_steps, 1)
    if decay_steps + warmup_steps <= num_steps:
        return None
    option = f"--decay_steps {decay_steps}" if training.decay_steps else f"--decay_share {training.decay_share:g}"
    verb = "is" if warmup_steps == 1 else "are"
    return (
        f"{option}: {unit} has {num_steps} steps, of which {warmup_steps} {verb} needed to reach --lr; give at most "
        f"{max(num_steps - warmup_steps, 0)} decay steps"
    )


def _notes(arguments: "TrainArguments", num_steps: int, steps_of_epochs: int | None, data: TrainingData) -> list[str]:
    """Return notes for the user on the steps and the data."""
    notes = []
    training = arguments.training
    if training.max_step and steps_of_epochs and training.max_step > steps_of_epochs:
        notes.append(
            f"--max_step {training.max_step} is beyond the end of the data: {training.number_epochs} epochs end at "
            f"step {steps_of_epochs}, and so does the learning rate schedule; increase --number_epochs to train "
            "longer"
        )
    elif training.max_step and steps_of_epochs and training.max_step < steps_of_epochs:
        notes.append(
            f"--max_step {training.max_step} ends the run before the end of its {training.number_epochs} epochs, "
            f"which have {steps_of_epochs} steps"
        )
    if training.warmup_steps > num_steps:
        notes.append(f"--warmup_steps {training.warmup_steps} is longer than the run's {num_steps} steps")
    if not is_evaluated(data):
        folders = ", ".join(arguments.data.data_dirs)
        cause = f"{folders} has no validation split" if folders else "--train_data_dir is not given"
        if isinstance(data, Prompts):
            cause = "--validation_prompts is not given"
        notes.append(f"{cause}; nothing will be evaluated")
    if isinstance(data, Stream):
        if data.chat_template:
            notes += data.chat_template.notes
        notes += data.notes
    if isinstance(data, Prompts):
        notes += data.notes
    return notes
