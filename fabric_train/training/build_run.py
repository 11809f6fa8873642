"""Build the parts of a prepared run: model, optimizer, batches, evaluation, checkpoints, loggers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning import Fabric
from rich.console import Console

from fabric_train import checkpoint as checkpoints
from fabric_train.checkpoint.adapter_folder import is_adapter, open_adapted
from fabric_train.checkpoint.base_weights import start_hashing
from fabric_train.checkpoint.manager import CheckpointManager, read_cursors
from fabric_train.checkpoint.tensors import restore_optimizer
from fabric_train.cli.argument_types import counted
from fabric_train.cli.parser import flatten
from fabric_train.data.row_documents import WorstDocuments
from fabric_train.data.step_sampler import TrainBatches, WindowSource, validation_batches
from fabric_train.data.stream_batches import LaneOrder, StreamBatches
from fabric_train.data.streaming import Stream
from fabric_train.data.token_mixture import TokenMixture
from fabric_train.distributed.decoder_layers import MAX_STATIC_LENGTHS
from fabric_train.distributed.precision import weights_dtype
from fabric_train.distributed.ranks import data_ranks, first_text
from fabric_train.distributed.sharded_parameters import flat_shards
from fabric_train.distributed.signals import Heartbeat
from fabric_train.distributed.strategy import device_name
from fabric_train.model.flops import peak_flops_of_run
from fabric_train.model.generation_settings import add_stop_tokens, read_generation_config
from fabric_train.model.init_weights import open_new
from fabric_train.model.load_weights import MetaModel, open_checkpoint, open_pretrained
from fabric_train.model.origin import (
    SPLIT_ARGUMENTS,
    ModelOrigin,
    TrainingSession,
    TrainingStage,
    find_origin,
    legal_files,
    read_stages,
)
from fabric_train.model.parallelize import setup_model
from fabric_train.model.trained_parts import TrainedParts, freeze_other_parts, rates_by_name, trained_parameters
from fabric_train.model.untrained_rows import note_on_end_of_turn
from fabric_train.optim.adamw import LowPrecisionAdamW
from fabric_train.optim.optimizer import build_optimizer, decayed_names, use_triton
from fabric_train.training.components import component
from fabric_train.training.evaluation import Validation, select_metrics
from fabric_train.training.loggers import GuardedLogger, LoggedRun, Outputs, open_loggers
from fabric_train.training.loop import Loop, ProfiledWindows
from fabric_train.training.metrics import further_columns
from fabric_train.training.objective import Objective, counts_pieces
from fabric_train.training.panel import open_progress
from fabric_train.training.prepared_run import PreparedRun, TrainingData
from fabric_train.training.run_log import log, note, progress, warn
from fabric_train.training.run_times import TIMES, TimesFile
from fabric_train.training.step import OwnTime, StepGuard, Stepper


def set_up_model(fabric: Fabric, run: PreparedRun, shows_notes: bool = True) -> tuple[Any, set[str]]:
    """Return the model, and the names of its parameters with weight decay; mapped weight files are closed again."""
    arguments = run.arguments
    progress.info("building the model")
    if run.adapter_base and run.adapter_base.fingerprint is None and fabric.is_global_zero and shows_notes:
        start_hashing(run.adapter_base)  # while the model is read and the first steps are taken
    meta_model = _open(run)
    if shows_notes and fabric.is_global_zero and not isinstance(run.data, Stream):
        for line in filter(None, (note_on_end_of_turn(meta_model, part) for part in run.data.parts)):
            note(line)
    model: Any = meta_model.model
    if not run.model.is_new:
        model.generation_config = read_generation_config(run.model.source, run.model.config)
    if model.generation_config is not None:
        add_stop_tokens(model.generation_config, run.data.stop_token_ids)
    freeze_other_parts(model, run.model.adapter, run.model.parts)
    decayed = decayed_names(model)
    data = run.data
    lengths = {data.max_length} if isinstance(data, Stream) else data.train.lengths()
    lengths |= data.validation.lengths() if data.validation else set()
    any_length = arguments.evaluation.self_check or len(lengths) > MAX_STATIC_LENGTHS
    model = setup_model(fabric, model, run.model.layer_classes, arguments, meta_model.weights, any_length=any_length)
    return model, decayed


def set_up_optimizer(fabric: Fabric, model: Any, decayed: set[str], run: PreparedRun) -> Any:
    """Return the optimizer, with its state from the checkpoint if the run resumes."""
    arguments = run.arguments
    progress.info("building the optimizer")
    fused = arguments.model.precision != "16-mixed" and fabric.device.type != "xla"
    named = trained_parameters(model)
    seed = arguments.data.seed
    compiles = arguments.fsdp.compile is True
    rates = rates_by_name(arguments.training.rates_of_parts, run.model.names, run.model.source, run.ever_trained)
    built = build_optimizer(named, decayed, arguments.training, fused, seed, flat_shards(model), compiles, rates)
    optimizer: Any = fabric.setup_optimizers(built)
    if isinstance(built, LowPrecisionAdamW) and named[0][1].device.type == "cuda":
        _choose_step(fabric, built)
    if run.start.checkpoint and run.start.resumes:
        if run.adapter_base and not is_adapter(run.start.checkpoint):
            if fabric.is_global_zero:
                note("the optimizer starts from zero: the checkpoint has states of weights that are frozen now")
            return optimizer
        there = checkpoints.read_trainer_json(run.start.checkpoint).component("optimizer")
        here = component(run.components, "optimizer")
        if (there.name, there.module) != (here.name, here.module):
            if fabric.is_global_zero:
                note(f"the optimizer starts from zero: the checkpoint has the states of the {there}")
            return optimizer
        progress.info("loading the optimizer's state")
        new = run.model.trained.keys() - _trained_there(run, run.start.checkpoint)
        if new and fabric.is_global_zero:
            note(f"the optimizer starts from zero for {counted(len(new), 'weight')}, frozen up to this step")
        restore_optimizer(run.start.checkpoint, fabric, model, optimizer, new)
    return optimizer


def _trained_there(run: PreparedRun, checkpoint: Path) -> set[str]:
    """Return the names of the parameters that the step of a checkpoint trained."""
    if run.model.adapter:
        return set(run.model.trained)
    return TrainedParts(*checkpoints.read_trainer_json(checkpoint).parts).choose(run.model.names, run.model.source)


def _choose_step(fabric: Fabric, optimizer: LowPrecisionAdamW) -> None:
    """Let the Triton kernel update the parameters if it works on every rank, and note which step runs."""
    progress.info("trying the optimizer's kernel")
    fault = first_text(fabric, use_triton(optimizer))
    if fault is not None:
        optimizer.launch = None  # all ranks must round in the same way
    if fabric.is_global_zero:
        step = "one Triton kernel updates all parameters"
        note(f"AdamW: {step}" if fault is None else f"AdamW: parameters are updated one by one, not by Triton: {fault}")


def build_validation(
    fabric: Fabric, model: Any, run: PreparedRun, objective: Objective, heartbeat: Heartbeat
) -> Validation | None:
    """Return what evaluates this rank's share of the validation split, and samples; None without such a split."""
    rows = run.data.validation
    limits = run.arguments.evaluation
    given = run.arguments.data
    if rows is None:
        return None
    ranks = data_ranks(fabric)
    size = limits.eval_batch_size
    limit = limits.eval_iters
    batches = validation_batches(rows, size, ranks.size, ranks.rank, limit, given.seed, given.num_workers)
    return Validation(
        fabric=fabric,
        model=model,
        objective=objective,
        metrics=select_metrics(limits.computed_metrics),
        batches=batches,
        source_names=rows.source_names,
        prompts=run.sample_prompts,
        heartbeat=heartbeat,
    )


def build_outputs(
    fabric: Fabric, run: PreparedRun, objective: Objective, console: Console, heartbeat: Heartbeat
) -> Outputs:
    """Return the loggers and the display of the progress on rank 0, nothing on other ranks."""
    given = run.arguments.logging
    state = run.start.state
    if not fabric.is_global_zero:
        return Outputs([], given.log_model)
    logged = LoggedRun(
        folder=run.folder,
        last_step=state.step - (bool(state.unlogged) or state.step == 0),  # a run that starts at step 0 logs it
        config=flatten(run.arguments),
        columns=further_columns(
            objective.metric_names,
            run.arguments.evaluation.computed_metrics,
            run.sources_ever_logged,
            counts_pieces(objective),
        ),
        branched_after=[branch.step for branch in run.start.lineage if not branch.is_border_of(run.folder)],
    )
    loggers = open_loggers(given.opened_loggers, logged)
    num_steps = run.plan.num_steps
    shown = GuardedLogger("progress", lambda: open_progress(run.folder.name, state.step, num_steps, console, heartbeat))
    times = GuardedLogger(TIMES, lambda: TimesFile(run.folder / TIMES, heartbeat, state.step, fabric.world_size))
    return Outputs([*loggers, shown, times], given.log_model)


def build_loop(
    fabric: Fabric,
    model: Any,
    optimizer: Any,
    objective: Objective,
    run: PreparedRun,
    heartbeat: Heartbeat,
    validation: Validation | None,
    outputs: Outputs,
    manager: type[CheckpointManager] = CheckpointManager,
) -> Loop:
    """Return the loop of a run, whose ``outputs`` get every complete checkpoint of the ``manager``."""

    def saved(path: Path) -> None:
        log.info("saved %s", path)
        outputs.saved(path)

    given = run.arguments
    base = _base_model(run) if fabric.is_global_zero else (None, (), ())  # rank 0 writes it
    saves = manager(
        run.folder / "checkpoints",
        fabric,
        model,
        optimizer,
        _description(run, fabric, *base),
        given.save.keep_checkpoints,
        given.save.async_save,
        saved,
        run.start.state.step,
    )
    stepper = Stepper(
        fabric=fabric,
        model=model,
        optimizer=optimizer,
        objective=objective,
        arguments=given,
        schedules=run.schedules,
        guard=_guard(fabric, run.data),
        checkpoints=saves,
        heartbeat=heartbeat,
        flops=run.model.flops,
        num_sources=len(run.logged_sources),
        own_time=OwnTime(fabric.device),
    )
    return Loop(
        run=run,
        stepper=stepper,
        batches=_batches(fabric, run, heartbeat),
        num_steps=run.border,
        checkpoints=saves,
        validation=validation,
        outputs=outputs,
        peak_flops=peak_flops_of_run(fabric, given.model.precision),
    )


def _guard(fabric: Fabric, data: TrainingData) -> StepGuard:
    if isinstance(data, Stream):
        return StepGuard(fabric, "the stream", warn)
    worst = WorstDocuments(fabric, data).describe
    if isinstance(data, TokenMixture):
        return StepGuard(fabric, "the token datasets", warn, data.row_name, worst)
    return StepGuard(fabric, f"{data.folder / 'train'}", warn, worst=worst)


def _open(run: PreparedRun) -> MetaModel:
    dtype = weights_dtype(run.arguments.model.precision)
    given = run.arguments
    if run.adapter_base:
        checkpoint = run.start.checkpoint
        goes_on = checkpoint is not None and is_adapter(checkpoint)
        begins_with = checkpoint if goes_on else given.adapter.init_adapter and Path(given.adapter.init_adapter)
        return open_adapted(run.model, run.adapter_base, dtype, given.data.seed, begins_with or None)
    if run.start.checkpoint:
        return open_checkpoint(run.model, run.start.checkpoint, dtype)
    if run.model.is_new:
        return open_new(run.model, dtype, given.data.seed)
    return open_pretrained(run.model, dtype)


def _description(
    run: PreparedRun,
    fabric: Fabric,
    base_model: ModelOrigin | None,
    stages: tuple[TrainingStage, ...],
    licence: tuple[Path, ...],
) -> checkpoints.Description:
    arguments = run.arguments
    data = run.data
    start = run.start
    given = flatten(arguments) | {"gradient_accumulation_steps": run.plan.accumulation}
    split = given | {"parallelism": run.devices.parallelism}
    session = TrainingSession(
        start.state.step,
        device_name(fabric.device),
        fabric.world_size,
        arguments={name: split[name] for name in (*SPLIT_ARGUMENTS, "log_step_interval")},
    )
    # if the run takes only a model's weights, that model's are not its own
    earlier = checkpoints.read_trainer_json(start.checkpoint).sessions if start.checkpoint and start.resumes else ()
    mixture = data if isinstance(data, TokenMixture) else None
    return checkpoints.Description(
        state_dict_type=arguments.fsdp.state_dict_type,
        weights_dtype=str(weights_dtype(arguments.model.precision)).removeprefix("torch."),
        data=run.order,
        arguments=given,
        versions=run.versions,
        base_model=base_model,
        attachments=(*run.data.attachments, *licence),
        schedule_steps=run.schedule_steps,
        lineage=tuple(
            replace(one, run=checkpoints.OWN_RUN) if one.is_border_of(run.folder) else one for one in start.lineage
        ),
        phase_schedules=run.phase_schedules,
        phase_parts=run.phase_parts,
        trained_modules=run.model.describe_trained() if run.model.frozen else None,
        device=session.device,
        mixture_sources=tuple(source.name for source in mixture.sources) if mixture else (),
        mixture_tokens=tuple(map(mixture.tokens_of, mixture.sources)) if mixture else (),
        sessions=(*earlier, session),
        stages=stages,
        adapter_base=run.adapter_base,
        reference=run.reference,
        components=run.components,
    )


def _base_model(run: PreparedRun) -> tuple[ModelOrigin | None, tuple[TrainingStage, ...], tuple[Path, ...]]:
    """Return the pretrained model that the run's weights come from, the stages since then, and its licence's files.

    An export that is not on the hub is no base that others could find: its own base stands for it.
    """
    start = run.start
    name = run.arguments.model.model_name
    if start.checkpoint:
        base = checkpoints.read_trainer_json(start.checkpoint).base_model
        return base, start.stages, tuple(legal_files(start.checkpoint))
    if run.model.is_new:
        return None, (), ()
    origin, licence = find_origin(name)
    stages = read_stages(name)
    base = stages[-1].base_model if stages else None
    if base and origin.repository is None:
        origin = replace(origin, name=base.name, repository=base.repository, revision=base.revision)
    return origin, stages, licence


def _batches(fabric: Fabric, run: PreparedRun, heartbeat: Heartbeat) -> WindowSource:
    given = run.arguments.logging
    on_gpu = fabric.device.type == "cuda"
    batches = _untraced_batches(fabric, run)
    if given.profiled_steps is None or (given.profile_ranks == "first" and fabric.global_rank):
        return batches
    folder = run.folder / "profile"
    return ProfiledWindows(batches, *given.profiled_steps, folder, fabric.global_rank, on_gpu, heartbeat)


def _untraced_batches(fabric: Fabric, run: PreparedRun) -> WindowSource:
    arguments = run.arguments
    plan = run.plan
    data = run.data
    num_workers = arguments.data.num_workers
    pins = fabric.device.type == "cuda"
    ranks = data_ranks(fabric)
    if not isinstance(data, Stream):
        order = plan.window_order(arguments.data.seed, ranks.rank)
        return TrainBatches(
            data.train,
            order,
            num_workers,
            pins,
            starts_after=plan.data_starts_after,
            known_step=run.start.state.step,
            known_hash=run.start.state.rows_hash or "",
        )
    fabric.barrier()  # rank 0 has written the tokenizer
    start = run.start
    has_begun = start.checkpoint is not None and start.state.step > plan.data_starts_after
    return StreamBatches(
        read=data.documents.read,
        encode=data.open_encoder(),
        num_sources=len(data.source_names),
        max_length=data.max_length,
        isolates=data.isolates,
        order=LaneOrder(plan.rows_per_window, arguments.training.micro_batch_size, ranks.size, ranks.rank),
        cursors=read_cursors(start.checkpoint) if start.checkpoint and has_begun else None,
        num_workers=num_workers,
        pin_memory=pins,
    )
