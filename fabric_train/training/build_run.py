"""Build the parts of a prepared run: model, optimizer, batches, evaluation, checkpoints, loggers."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from lightning import Fabric
from lightning.fabric.wrappers import _FabricModule, _FabricOptimizer
from rich.console import Console
from transformers import PreTrainedModel

from fabric_train.checkpoint import TrainerJson
from fabric_train.checkpoint.adapter_base import open_adapted
from fabric_train.checkpoint.adapter_folder import is_adapter
from fabric_train.checkpoint.base_weights import start_hashing
from fabric_train.checkpoint.manager import CheckpointManager
from fabric_train.checkpoint.stream_cursors import read_cursors
from fabric_train.checkpoint.tensors import restore_optimizer
from fabric_train.cli.argument_types import counted
from fabric_train.cli.parser import flatten
from fabric_train.data.row_documents import WorstDocuments
from fabric_train.data.step_sampler import TrainBatches, WindowSource, validation_batches
from fabric_train.data.stream_batches import LaneOrder, StreamBatches
from fabric_train.data.streaming import Stream
from fabric_train.data.token_dataset import TokenDataset
from fabric_train.data.token_mixture import TokenMixture
from fabric_train.distributed.decoder_layers import MAX_STATIC_LENGTHS
from fabric_train.distributed.precision import gathered_dtype, weights_dtype
from fabric_train.distributed.ranks import data_ranks, first_text
from fabric_train.distributed.sharded_parameters import flat_shards
from fabric_train.distributed.signals import Heartbeat
from fabric_train.distributed.strategy import ParameterMaterializer
from fabric_train.model.adapter import materialize
from fabric_train.model.flops import peak_flops_of_run
from fabric_train.model.generation_settings import add_stop_tokens, read_generation_config
from fabric_train.model.hf_model import ModelShape
from fabric_train.model.init_weights import open_new
from fabric_train.model.load_weights import MetaModel, open_checkpoint, open_pretrained
from fabric_train.model.parallelize import setup_model
from fabric_train.model.trained_parts import TrainedParts, freeze_other_parts, rates_by_name, trained_parameters
from fabric_train.model.untrained_rows import note_on_end_of_turn
from fabric_train.optim.adamw import LowPrecisionAdamW
from fabric_train.optim.kernel_trial import use_triton
from fabric_train.optim.optimizer import build_optimizer, decayed_names
from fabric_train.rollouts.prompts import Prompts
from fabric_train.rollouts.rewards import name_rewards
from fabric_train.rollouts.windows import RolloutWindows
from fabric_train.training.checkpoint_description import describe_run
from fabric_train.training.components import component
from fabric_train.training.evaluation import RowEvaluator, Validation, select_metrics
from fabric_train.training.logger import GuardedLogger, LoggedRun, Logger, Outputs
from fabric_train.training.loggers import open_loggers
from fabric_train.training.loop import Loop
from fabric_train.training.metrics import extra_columns
from fabric_train.training.objective import Objective, counts_pieces, metrics_by_source
from fabric_train.training.own_time import OwnTime
from fabric_train.training.panel import open_progress
from fabric_train.training.prepared_run import PreparedRun, TrainingData, logged_sources
from fabric_train.training.profiling import ProfiledWindows
from fabric_train.training.prompt_validation import name_standard_errors
from fabric_train.training.rollout_run import build_prompt_evaluator, build_rollout_windows
from fabric_train.training.run_log import log, note, progress, warn
from fabric_train.training.run_times import TIMES, TimesFile
from fabric_train.training.step import Stepper
from fabric_train.training.step_guard import StepGuard


def set_up_model(fabric: Fabric, run: PreparedRun, *, shows_notes: bool = True) -> tuple[_FabricModule, set[str]]:
    """Set up the model on its devices; also return the names of its parameters with weight decay.

    Weight files that were mapped into memory are closed.
    """
    arguments = run.arguments
    data = run.data
    progress.info("building the model")
    shows_notes = shows_notes and fabric.is_global_zero
    if run.adapter_base and run.adapter_base.fingerprint is None and shows_notes:
        start_hashing(run.adapter_base)  # in the background, while the model is read and the first steps are taken

    # The model without weights, on the meta device.
    meta_model = open_model(run)
    model = meta_model.model
    if shows_notes and not isinstance(data, Stream):
        for dataset in data.parts:
            line = note_on_end_of_turn(meta_model, dataset)
            if line:
                note(line)
    if not run.model.is_new:
        model.generation_config = read_generation_config(run.model.source, run.model.config)
    if model.generation_config is not None:
        add_stop_tokens(model.generation_config, data.stop_token_ids)

    # Names with weight decay depend on the shapes, so they come before sharding makes parameters flat.
    freeze_other_parts(model, run.model.adapter, run.model.parts)
    names_with_decay = decayed_names(model)

    wrapped = setup_model(
        fabric, model, run.model.layer_classes, arguments, meta_model.weights, any_length=has_many_lengths(run)
    )
    return wrapped, names_with_decay


def has_many_lengths(run: PreparedRun) -> bool:
    """Return whether rows have so many lengths that compiled layers must take any length."""
    data = run.data
    if isinstance(data, Prompts):
        return True  # packed completions have any length
    row_lengths = {data.max_length} if isinstance(data, Stream) else data.train.lengths()
    if data.validation:
        row_lengths = row_lengths | data.validation.lengths()
    return run.arguments.evaluation.self_check or len(row_lengths) > MAX_STATIC_LENGTHS


def open_model(run: PreparedRun, dtype: torch.dtype | None = None) -> MetaModel:
    """Open the model that a run starts from: an adapter, a checkpoint, a new or a pretrained model.

    ``dtype`` is that of the weights; None means the one that they have in training.
    """
    arguments = run.arguments
    checkpoint = run.start.checkpoint
    if dtype is None:
        dtype = weights_dtype(arguments.model.precision)
    seed = arguments.data.seed
    if run.adapter_base:
        adapter_dir = None
        if checkpoint is not None and is_adapter(checkpoint):
            adapter_dir = checkpoint
        elif arguments.adapter.init_adapter:
            adapter_dir = Path(arguments.adapter.init_adapter)
        return open_adapted(run.model, run.adapter_base, dtype, seed, adapter_dir)
    if checkpoint:
        return open_checkpoint(run.model, checkpoint, dtype)
    if run.model.is_new:
        return open_new(run.model, dtype, seed)
    return open_pretrained(run.model, dtype)


def _open_sampling_copy(fabric: Fabric, run: PreparedRun) -> PreTrainedModel:
    """Return an unsharded model like the run's on this rank's device, for sampling; its values do not matter.

    Its weights have the dtype in which the ranks gather them: they are rounded as in a step, and take no more memory.
    """
    model = open_model(run, gathered_dtype(run.arguments, run.devices.parallelism)).model
    materialize(model, fabric.device)
    model.apply(ParameterMaterializer(fabric.device))
    model.tie_weights()
    fabric.to_device(model)
    return model.requires_grad_(False)


def set_up_optimizer(
    fabric: Fabric, model: _FabricModule, names_with_decay: set[str], run: PreparedRun
) -> _FabricOptimizer:
    """Return the optimizer, with its state from the checkpoint if the run resumes."""
    arguments = run.arguments
    progress.info("building the optimizer")
    # After sharding: the optimizer updates this rank's shards.
    named_parameters = trained_parameters(model)
    rates = rates_by_name(
        arguments.training.rates_of_parts, run.model.names, run.model.source, run.models.trained_in_any_phase
    )
    torch_optimizer = build_optimizer(
        named_parameters,
        names_with_decay,
        arguments.training,
        # Fabric could not clip under an fp16 gradient scaler, and XLA fuses by itself
        fused=arguments.model.precision != "16-mixed" and fabric.device.type != "xla",
        seed=arguments.data.seed,
        flat_shards=flat_shards(model),
        compiles=arguments.fsdp.compile is True,
        rates=rates,
    )
    optimizer = fabric.setup_optimizers(torch_optimizer)
    assert isinstance(optimizer, _FabricOptimizer)
    # The ranks choose the update together, before any state is restored.
    for single_optimizer in torch_optimizer.joined:
        if isinstance(single_optimizer, LowPrecisionAdamW) and named_parameters[0][1].device.type == "cuda":
            _choose_update(fabric, single_optimizer)
    if run.start.saved and run.start.resumes:
        _restore_optimizer(fabric, model, optimizer, run, run.start.saved)
    return optimizer


def _restore_optimizer(
    fabric: Fabric, model: _FabricModule, optimizer: _FabricOptimizer, run: PreparedRun, saved: TrainerJson
) -> None:
    """Restore the optimizer's state from a checkpoint, for the parameters that train now and have a state in it."""
    checkpoint = saved.checkpoint
    # An adapter on the weights of a checkpoint that trained all of them.
    if run.adapter_base and not is_adapter(checkpoint):
        if fabric.is_global_zero:
            note("the optimizer starts from zero: the checkpoint has states of weights that are now frozen")
        return
    # Another optimizer, which has other states.
    saved_optimizer = saved.component("optimizer")
    current_optimizer = component(run.components, "optimizer")
    if (saved_optimizer.name, saved_optimizer.module) != (current_optimizer.name, current_optimizer.module):
        if fabric.is_global_zero:
            note(f"the optimizer starts from zero: the checkpoint has the states of the {saved_optimizer}")
        return
    # Parameters that were frozen up to here have no states yet.
    progress.info("loading the optimizer's state")
    new_names = run.model.trained.keys() - _saved_trained_names(run.model, saved)
    if new_names and fabric.is_global_zero:
        note(f"the optimizer starts from zero for {counted(len(new_names), 'weight')}, frozen until this step")
    restore_optimizer(checkpoint, fabric, model, optimizer, new_names)


def _saved_trained_names(model: ModelShape, saved: TrainerJson) -> set[str]:
    """Return the names of the parameters that the checkpoint's step trained."""
    if model.adapter:
        return set(model.trained)
    saved_parts = TrainedParts(*saved.parts)
    return saved_parts.choose(model.names, model.source)


def _choose_update(fabric: Fabric, optimizer: LowPrecisionAdamW) -> None:
    """Use the Triton kernel for updates if it works on every rank, and print a note on which update runs."""
    progress.info("testing the optimizer's kernel")
    fault = first_text(fabric, use_triton(optimizer))
    if fault is not None:
        optimizer.launch = None  # all ranks must round in the same way
    if not fabric.is_global_zero:
        return
    if fault is None:
        note("AdamW: one Triton kernel updates all parameters")
    else:
        note(f"AdamW: parameters are updated one by one, not by the Triton kernel: {fault}")


def build_validation(
    fabric: Fabric, model: _FabricModule, run: PreparedRun, objective: Objective, heartbeat: Heartbeat
) -> Validation | None:
    """Build the evaluation of this rank's share of the validation split, and the samples; None without that split.

    Held-out prompts are evaluated by what :func:`build_loop` adds, because their sampler is that of the steps.
    """
    rows = run.data.validation
    if rows is None:
        return None
    arguments = run.arguments
    # Each group of ranks that computes the same rows reads its share of the split.
    ranks = data_ranks(fabric)
    batches = validation_batches(
        rows,
        arguments.evaluation.eval_batch_size,
        world_size=ranks.size,
        rank=ranks.rank,
        limit=arguments.evaluation.eval_iters,
        seed=arguments.data.seed,
        num_workers=arguments.data.num_workers,
    )
    evaluator = RowEvaluator(
        fabric=fabric,
        model=model,
        objective=objective,
        metrics=select_metrics(arguments.evaluation.computed_metrics),
        batches=batches,
        source_names=rows.source_names,
        heartbeat=heartbeat,
    )
    return Validation(fabric, model, evaluator, run.sample_prompts, heartbeat)


def build_outputs(
    fabric: Fabric, run: PreparedRun, objective: Objective, console: Console, heartbeat: Heartbeat
) -> Outputs:
    """Open the loggers and the display of the progress on rank 0; other ranks have none."""
    arguments = run.arguments.logging
    state = run.start.state
    if not fabric.is_global_zero:
        return Outputs([], arguments.log_model)

    # A run that starts at step 0 logs it, and so does one whose evaluation a signal interrupted.
    logs_current_step = bool(state.unlogged) or state.step == 0
    evaluation_metrics: Sequence[str] = run.arguments.evaluation.computed_metrics
    if isinstance(run.data, Prompts):
        evaluation_metrics = ()
        if run.data.validation_prompts is not None:
            evaluation_metrics = name_standard_errors(name_rewards(run.arguments.rollouts.rewards or ()))
    columns = extra_columns(
        objective.metric_names,
        evaluation_metrics,
        run.all_logged_sources,
        metrics_by_source=metrics_by_source(objective),
        counts_pieces=counts_pieces(objective),
    )
    logged_run = LoggedRun(
        folder=run.folder,
        last_step=state.step - 1 if logs_current_step else state.step,
        config=flatten(run.arguments),
        columns=columns,
        branched_after=[branch.step for branch in run.start.lineage if not branch.is_border_of(run.folder)],
    )
    loggers = open_loggers(arguments.opened_loggers, logged_run)

    # Both are guarded: a run goes on without its panel, and without times.jsonl.
    def open_display() -> Logger:
        return open_progress(run.folder.name, state.step, run.plan.num_steps, console, heartbeat)

    def open_times() -> Logger:
        return TimesFile(run.folder / TIMES, heartbeat, state.step, fabric.world_size)

    display = GuardedLogger("progress", open_display)
    times = GuardedLogger(TIMES, open_times)
    return Outputs([*loggers, display, times], arguments.log_model)


def build_loop(
    fabric: Fabric,
    model: _FabricModule,
    optimizer: _FabricOptimizer,
    objective: Objective,
    run: PreparedRun,
    heartbeat: Heartbeat,
    validation: Validation | None,
    outputs: Outputs,
    manager: type[CheckpointManager] = CheckpointManager,
) -> Loop:
    """Build the loop of a run; its ``outputs`` are told of every complete checkpoint of the ``manager``."""

    def record_save(checkpoint: Path) -> None:
        log.info("saved %s", checkpoint)
        outputs.saved(checkpoint)

    arguments = run.arguments
    batches = _build_batches(fabric, model, run, heartbeat)
    if isinstance(batches, RolloutWindows) and batches.prompts.validation_prompts is not None:
        evaluator = build_prompt_evaluator(run, batches.prompts.validation_prompts, batches)
        validation = Validation(fabric, model, evaluator, run.sample_prompts, heartbeat)
    # The manager removes unfinished checkpoints of a run that was killed.
    checkpoint_manager = manager(
        run.folder / "checkpoints",
        fabric=fabric,
        model=model,
        optimizer=optimizer,
        description=describe_run(run, fabric),
        keep=arguments.save.keep_checkpoints,
        asynchronous=arguments.save.async_save,
        on_saved=record_save,
        after_step=run.start.state.step,
    )
    # What takes a step, and what drives it.
    stepper = Stepper(
        fabric=fabric,
        model=model,
        optimizer=optimizer,
        objective=objective,
        arguments=arguments,
        schedules=run.schedules,
        guard=_build_guard(fabric, run.data),
        checkpoints=checkpoint_manager,
        heartbeat=heartbeat,
        flops=run.model.flops,
        num_sources=len(logged_sources(run.data)),
        own_time=OwnTime(fabric.device),
    )
    return Loop(
        run=run,
        stepper=stepper,
        batches=_with_profile(fabric, run, batches, heartbeat),
        num_steps=run.last_loop_step,
        checkpoints=checkpoint_manager,
        validation=validation,
        outputs=outputs,
        peak_flops=peak_flops_of_run(fabric, arguments.model.precision),
    )


def _build_guard(fabric: Fabric, data: TrainingData) -> StepGuard:
    """Build the guard of a run's steps, which names rows in the way of the run's data."""
    if isinstance(data, Stream):
        return StepGuard(fabric, "the stream", warn)
    if isinstance(data, Prompts):
        return StepGuard(fabric, "the completions", warn)
    worst_documents = WorstDocuments(fabric, data).describe
    if isinstance(data, TokenMixture):
        return StepGuard(fabric, "the token datasets", warn, data.row_name, worst_documents)
    return StepGuard(fabric, f"{data.folder / 'train'}", warn, worst=worst_documents)


def _build_batches(fabric: Fabric, model: _FabricModule, run: PreparedRun, heartbeat: Heartbeat) -> WindowSource:
    """Build the windows of a run."""
    if isinstance(run.data, Stream):
        return _build_stream_batches(fabric, run, run.data)
    if isinstance(run.data, Prompts):
        open_copy = partial(_open_sampling_copy, fabric, run)
        return build_rollout_windows(fabric, model, run, run.data, heartbeat, open_copy)
    return _build_row_batches(fabric, run, run.data)


def _with_profile(fabric: Fabric, run: PreparedRun, batches: WindowSource, heartbeat: Heartbeat) -> WindowSource:
    """Return the windows of a run, some of which are traced on this rank if ``--profile`` says so."""
    arguments = run.arguments.logging
    if arguments.profiled_steps is None:
        return batches
    if arguments.profile_ranks == "first" and fabric.global_rank:
        return batches
    first_step, last_step = arguments.profiled_steps
    return ProfiledWindows(
        batches,
        first_step,
        last_step,
        run.folder / "profile",
        fabric.global_rank,
        on_gpu=fabric.device.type == "cuda",
        heartbeat=heartbeat,
    )


def _build_row_batches(fabric: Fabric, run: PreparedRun, data: TokenDataset | TokenMixture) -> TrainBatches:
    """Build this rank's micro-batches of token datasets."""
    arguments = run.arguments.data
    order = run.plan.window_order(arguments.seed, data_ranks(fabric).rank)
    state = run.start.state
    return TrainBatches(
        data.train,
        order,
        arguments.num_workers,
        pin_memory=fabric.device.type == "cuda",
        data_starts_after=run.plan.data_starts_after,
        known_step=state.step,
        known_hash=state.rows_hash or "",
    )


def _build_stream_batches(fabric: Fabric, run: PreparedRun, data: Stream) -> StreamBatches:
    """Build this rank's micro-batches of a stream, from the cursors of the checkpoint that the run resumes from."""
    arguments = run.arguments
    plan = run.plan
    ranks = data_ranks(fabric)
    fabric.barrier()  # rank 0 has written the tokenizer
    cursors = None
    checkpoint = run.start.checkpoint
    if checkpoint is not None and run.start.state.step > plan.data_starts_after:
        cursors = read_cursors(checkpoint)
    return StreamBatches(
        read=data.documents.read,
        encode=data.open_encoder(),
        num_sources=len(data.source_names),
        max_length=data.max_length,
        isolates=data.isolates,
        order=LaneOrder(plan.rows_per_window, arguments.training.micro_batch_size, ranks.size, ranks.rank),
        cursors=cursors,
        num_workers=arguments.data.num_workers,
        pin_memory=fabric.device.type == "cuda",
    )
