"""Check a run before a process group exists: its arguments, and the files and devices that they need."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from lightning import Fabric

from fabric_train import checkpoint as checkpoints
from fabric_train.checkpoint import TrainerJson
from fabric_train.checkpoint.adapter_base import find_base, note_on_other_base
from fabric_train.checkpoint.adapter_folder import choose_adapter, is_adapter
from fabric_train.checkpoint.trainer_json import PROGRAM
from fabric_train.cli.code_commit import checked_out_commit, installed_commit
from fabric_train.cli.errors import InputError
from fabric_train.cli.launcher import find_other_world, global_rank
from fabric_train.cli.shares import Shares
from fabric_train.data.data_order import SHUFFLED, DataOrder, PhaseRows, StreamOrder
from fabric_train.data.mixture import Mixture
from fabric_train.data.streaming import Stream, open_stream
from fabric_train.data.token_dataset import TokenDataset, open_dataset
from fabric_train.data.token_mixture import TokenMixture, open_mixture
from fabric_train.distributed import strategy, xla
from fabric_train.distributed.decoder_layers import check_compiler
from fabric_train.distributed.precision import check_float8
from fabric_train.files.regular_file import check_no_links_in
from fabric_train.inference.prompt_file import read_prompts
from fabric_train.inference.prompts import PromptEncoder, PromptLimits, encode_prompts
from fabric_train.model.attention_choice import check_attention, check_counted_from_rows, choose_attention
from fabric_train.model.computed_settings import bidirectional_setting, terms_left_out
from fabric_train.model.hf_model import ModelShape, check_readable, load_hf_tokenizer, read_shape, with_parts
from fabric_train.model.init_weights import new_shape
from fabric_train.model.nf4 import check_installed
from fabric_train.model.origin import read_stages
from fabric_train.model.parallelize import check_tensor_parallel
from fabric_train.model.rope import RopeChange, note_on_rope
from fabric_train.model.rope_frequencies import note_on_frequencies
from fabric_train.model.trained_parts import ALL_PARTS, rates_by_name, splits_layers
from fabric_train.optim.learning_rate import Schedule, Schedules
from fabric_train.preflight.automatic import resolve_automatic
from fabric_train.preflight.beginning import choose_beginning, named_checkpoint
from fabric_train.preflight.dataset_check import (
    check_deciding_sources,
    faults_of_objective,
    faults_of_validation,
    longest_row,
    note_on_added_tokens,
)
from fabric_train.preflight.memory_forecast import make_request
from fabric_train.preflight.paths import check_output_dir
from fabric_train.preflight.phases import (
    PhaseSettings,
    Stretch,
    choose_parts,
    plan_phases,
    read_stretches,
    stretch_of,
)
from fabric_train.preflight.resume_check import check_branch, check_resume, choose_schedule, own_versions
from fabric_train.preflight.steps import plan_steps, rows_of_step, starting_point
from fabric_train.rollouts.prompts import PromptLengths, Prompts, open_prompts
from fabric_train.training.components import (
    components_of,
    describe_other_component,
    find_other_components,
)
from fabric_train.training.live_reference import find_live_reference
from fabric_train.training.metrics import find_lost_rows
from fabric_train.training.objective import build_objective
from fabric_train.training.prepared_run import DevicePlan, PreparedRun, StartingPoint, TrainingData, is_evaluated
from fabric_train.training.reference_model import check_reference
from fabric_train.training.rollout_run import open_run_rewards
from fabric_train.training.sample_file import read_samples
from fabric_train.training.samplers import SAMPLERS
from fabric_train.training.sampling import SamplePrompts
from fabric_train.training.step_plan import RunPhase
from fabric_train.training.stored_teacher import use_stored_teacher
from fabric_train.training.teacher import find_teacher
from fabric_train.training.trackers import check_trackers

if TYPE_CHECKING:
    from fabric_train.arguments import CheckpointArguments, DataArguments, TrainArguments

_PACKAGES = ("torch", "lightning", "transformers", "datasets", "safetensors")
"""The packages on which a run's losses depend."""


@cache
def package_versions() -> dict[str, str]:
    """Return the versions of ``_PACKAGES`` and of this program, with its commit; reading them takes 30 ms."""
    commit: str | None = None
    if global_rank() == 0:  # which saves it
        commit = checked_out_commit() or installed_commit()
    if not commit:
        commit = "unknown"
    program_version = "not installed"
    with suppress(PackageNotFoundError):
        program_version = version(PROGRAM)
    versions = {PROGRAM: f"{program_version}, commit {commit}"}
    for name in _PACKAGES:
        versions[name] = version(name)
    return versions


def prepare(
    arguments: "TrainArguments", damages: checkpoints.Damages | None = None, *, compares: bool = True
) -> PreparedRun:
    """Check a run: output folder → devices → checkpoint → data → model → steps → resume → later token datasets.

    ``damages`` are checkpoints that are known to be damaged. Without ``compares``, the run need not fit the
    checkpoint that it continues.
    """
    user_arguments = arguments
    folder = Path(arguments.save.output_dir)
    only_reads = arguments.evaluation.only_reads

    # output folder, devices, and the checkpoint to begin with
    check_output_dir(folder, *arguments.data.data_dirs, arguments.checkpoint.checkpoint)
    if arguments.logging.profiled_steps is not None:
        check_no_links_in(folder / "profile")
    devices = _plan_devices(arguments)
    beginning = choose_beginning(arguments, folder, damages)
    arguments = beginning.arguments
    start_from = beginning.start_from
    saved = beginning.saved
    continues_steps = saved is not None and not (start_from.weights_only or only_reads)

    # data, model and steps of the stretch that the run begins in
    stretches = read_stretches(arguments)
    step = 0
    if saved is not None and continues_steps:
        step = saved.state.step
        if start_from.branch:  # a branch may go on with other data
            step += 1
    stretch_index = stretch_of(stretches, step)
    run = _prepare_stretch(stretches[stretch_index], user_arguments, devices, saved, start_from)
    if not only_reads:
        lost_rows = find_lost_rows(folder / "metrics.csv", run.start.state, arguments.logging.log_step_interval)
        read_samples(folder / "samples.jsonl", run.start.state.step)  # a damaged file is refused before any is written
        run = _with_notes(run, lost_rows)

    # what differs from the checkpoint
    if saved is not None:
        checkpoint = saved.checkpoint
        differences: list[str] = []
        if compares and continues_steps:
            compare = check_branch if start_from.branch else check_resume
            run, differences = compare(run, saved)
            run, schedule_notes = choose_schedule(run, saved)
            differences = [*differences, *schedule_notes]
        elif compares:
            differences = _compare_objectives(run, saved)
        damaged = checkpoints.describe_damaged(checkpoint.parent, checkpoint, damages)
        name = named_checkpoint(start_from)
        choice = checkpoints.describe_choice(Path(name), checkpoint) if name else None
        run = _with_notes(run, *damaged, choice, *differences)
    adapter_dir = Path(arguments.adapter.init_adapter or "")
    if compares and arguments.adapter.init_adapter and (adapter_dir / "trainer.json").is_file():
        run = _with_notes(run, *_compare_objectives(run, checkpoints.read_trainer_json(adapter_dir)))

    # the stretches after it; a run that has completed its own stretch goes on with the next one
    run = _with_following(run, stretches[stretch_index + 1 :])
    has_ended = run.start.state.step == run.plan.last_step and not run.ends_early
    is_complete = has_ended and not run.start.state.unlogged
    if saved is not None and run.next_run is not None and is_complete:
        return run.continued_from(saved, run.start.state)
    return run


def _compare_objectives(run: PreparedRun, saved: TrainerJson) -> list[str]:
    """Compare the objective of a run that takes only weights from a checkpoint with the checkpoint's; return notes.

    Raises:
        InputError: An evaluation would compute the loss of another objective, and one of them was registered.
    """
    checkpoint = saved.checkpoint
    pairs = list(find_other_components(saved, run.components, ("objective",)))
    arguments = run.arguments
    faults = []
    notes = []
    for saved_objective, run_objective in pairs:
        faults.append(describe_other_component(checkpoint, saved_objective, run_objective, "another loss"))
        notes.append(f"{checkpoint.name} was trained with the {saved_objective}, but this run has the {run_objective}")
    if faults and arguments.evaluation.only_reads and not arguments.checkpoint.allow_changes:
        raise InputError(*faults)
    return notes


def _prepare_stretch(
    stretch: Stretch,
    user_arguments: "TrainArguments",
    devices: DevicePlan,
    saved: TrainerJson | None,
    start_from: "CheckpointArguments",
    previous: PreparedRun | None = None,
) -> PreparedRun:
    """Prepare the steps with the same token datasets; ``previous`` is the stretch before it in the same run."""
    arguments = stretch.arguments
    folder = Path(arguments.save.output_dir)
    checkpoint = saved.checkpoint if saved else None

    # the data
    data = _open_data(arguments, folder, saved, stretch.phases)
    if not isinstance(data, Stream):
        stretch.check_length(data.train.lengths())
    faults = faults_of_objective(arguments, data, devices.accelerator)
    if faults:
        raise InputError(*faults)

    # the model: its positions for the longest row, its attention, and the parts that train
    if previous:
        stored_model = with_parts(previous.model, ALL_PARTS)
    else:
        stored_model = _read_model(arguments, checkpoint, data)
    extended_model = _extend_to_rows(stored_model, stretch, data)
    mask_reason = choose_attention(extended_model, arguments, devices.accelerator)
    phases, phase_schedules = plan_phases(stretch, data)
    models = choose_parts(stretch, extended_model, phases)
    model = models.at(stretch.first_step)

    # the order of the data, and the step to begin with
    rows_per_window = rows_of_step(arguments, devices.world_size)  # 0 is refused by plan_steps
    saved_order = None
    if saved and not start_from.weights_only:
        saved_order = saved.data
    order = _data_order(data, rows_per_window, arguments.data, phases, saved_order)
    if previous:
        start = StartingPoint(saved=None, state=checkpoints.TrainerState(step=stretch.first_step - 1))
        data_starts_after = start.state.step
    else:
        # a run that only reads has the checkpoint's weights, but not its state
        continued = None if user_arguments.evaluation.only_reads else saved
        start = starting_point(continued, order, start_from)
        start = replace(start, saved=saved)
        data_starts_after = checkpoints.data_starts_after(start.lineage)

    # the steps
    plan = plan_steps(
        arguments,
        model,
        data,
        world_size=devices.world_size,
        phases=phases,
        data_starts_after=data_starts_after,
        data_ends_after=stretch.last_step,
        order_version=order.version if isinstance(order, DataOrder) else SHUFFLED,
    )

    # the objective, and the validation rows that it decides by
    objective = build_objective(arguments)
    early_stopping = check_deciding_sources(arguments, data, objective)
    faults = faults_of_validation(arguments, data, objective, early_stopping)
    if faults:
        raise InputError(*faults)

    adapter_base = None
    if model.adapter is not None and not arguments.planning.plan:  # a plan reads no weights
        adapter_base = find_base(arguments.model.model_name, checkpoint, "--model_name")
    run = PreparedRun(
        user_arguments=user_arguments,
        arguments=arguments,
        folder=folder,
        devices=devices,
        start=start,
        data=data,
        order=order,
        models=models,
        plan=plan,
        schedules=Schedules(Schedule(plan.num_steps, arguments.training), phase_schedules),
        versions=package_versions() | own_versions(model, data),
        notes=plan.notes,
        early_stopping=early_stopping,
        sample_prompts=_open_sample_prompts(arguments, data, model, checkpoint),
        components=components_of(arguments, objective),
        adapter_base=adapter_base,
    )
    _check_parts(run)
    check_reference(run)
    _check_rollouts(run)
    frozen_model = find_teacher(run) or find_live_reference(run)
    run = replace(run, frozen_model=frozen_model, teacher_states=use_stored_teacher(run))

    # notes for the user, and what `auto` means
    run = _with_notes(
        run,
        _note_on_adapter_base(run, checkpoint),
        note_on_rope(stored_model, extended_model),
        note_on_frequencies(model.config, model.source, longest_row(data)),
        *_warnings(run, mask_reason),
    )
    if arguments.planning.checks:
        return run
    return resolve_automatic(run)


def _check_rollouts(run: PreparedRun) -> None:
    """Raise an InputError for a sampler or a reward that cannot be opened, or a column that the prompts lack."""
    if not isinstance(run.data, Prompts) or global_rank():
        return
    if not run.arguments.planning.plan:  # a plan opens no sampler
        SAMPLERS[run.arguments.rollouts.sampler].check(run.arguments)
    # The run starts these processes again. Handed over, they would make a prepared run, which is a description, own
    # processes that every later refusal, plan and check has to end.
    rewards = open_run_rewards(run.arguments)
    try:
        rewards.check_columns(run.data.columns_by_source, f"--prompts {run.data.name}")
        validation_prompts = run.data.validation_prompts
        if validation_prompts is not None:
            option = f"--validation_prompts {validation_prompts.name}"
            rewards.check_columns(validation_prompts.columns_by_source, option)
    finally:
        rewards.close()


def _extend_to_rows(stored_model: ModelShape, stretch: Stretch, data: TrainingData) -> ModelShape:
    """Return the model with positions for the longest row of the data, and with the rope that the user asks for.

    Raises:
        InputError: the model cannot be extended, or cannot keep the documents of a row apart.
    """
    arguments = stretch.arguments
    rope = RopeChange(
        scaling=arguments.model.scaling,
        theta=arguments.model.rope_theta,
        option_prefix=stretch.option,
        allows_longer_rows=arguments.checkpoint.allow_changes,
    )
    length = longest_row(data)
    extended_model = replace(rope.apply(stored_model, length), longest_row=length)
    if data.isolates:
        check_counted_from_rows(extended_model, length)
    return extended_model


def _note_on_adapter_base(run: PreparedRun, checkpoint: Path | None) -> str | None:
    """Return rank 0's note if ``--init_adapter`` was trained on another base; None if the checkpoint has an adapter."""
    init_adapter = run.arguments.adapter.init_adapter
    has_own_adapter = checkpoint is not None and is_adapter(checkpoint)
    if init_adapter is None or has_own_adapter or run.adapter_base is None or global_rank() != 0:
        return None
    return note_on_other_base(Path(init_adapter), run.adapter_base)


def _with_following(run: PreparedRun, stretches: Sequence[Stretch]) -> PreparedRun:
    """Return a run with the runs on later token datasets, prepared in order; a run that only reads has none."""
    if not stretches:
        return run
    stretch, *later_stretches = stretches
    if run.arguments.preference.needs_reference:
        raise InputError(
            f"{stretch.option}train_data_dir: --objective {run.arguments.preference.objective} compares with a "
            "reference model, which is only run on the pairs at the start of the run; use --branch to train on "
            "other pairs"
        )
    check_output_dir(run.folder, *stretch.arguments.data.data_dirs)
    next_run = _prepare_stretch(
        stretch,
        run.user_arguments,
        run.devices,
        run.start.saved,
        start_from=run.user_arguments.checkpoint,
        previous=run,
    )
    new_notes = [line for line in next_run.notes if line not in run.notes]
    notes = [f"from step {stretch.first_step:,} on: {line}" for line in new_notes]
    next_run = _with_following(replace(next_run, notes=()), later_stretches)
    schedules = next_run.schedules.with_length(run.schedules.run_schedule.num_steps)
    run = replace(run, next_run=replace(next_run, schedules=schedules))
    return _with_notes(run, *notes, *next_run.notes)


def _check_parts(run: PreparedRun) -> None:
    """Raise an InputError for learning rates of parts that do not train, and for parts that FSDP1 cannot train."""
    rates = run.arguments.training.rates_of_parts
    rates_by_name(rates, run.model.names, run.model.source, run.models.trained_in_any_phase)
    if run.devices.parallelism == "fsdp":
        _check_frozen_ties(run)


def _warnings(run: PreparedRun, mask_reason: str | None) -> Iterator[str | None]:
    """Yield warnings about the run's speed and arguments for the user, before the run starts."""
    if run.devices.parallelism == "xla":
        yield xla.NOTE
    divides_layers = any(splits_layers(model.trained, model.frozen) for model in run.models.all)
    if divides_layers and run.devices.parallelism == "fsdp":
        yield (
            "only parts of a layer are trained: fsdp reduces the gradients of entire layers, fsdp2 only those of the "
            "trained parts"
        )
    yield run.arguments.logging.note
    if run.start.checkpoint:
        terms = terms_left_out(run.model.config)
        if terms:
            yield f"the model's config.json adds a term to the loss, which this project leaves out: {terms}"
    if not isinstance(run.data, Stream) and not global_rank():
        yield note_on_added_tokens(run.model, run.data.parts)
    if mask_reason and run.data.isolates:
        tokens = f"{run.plan.tokens_per_row:,}"
        mask = f"a mask of {tokens} × {tokens} tokens"
        yield f"attention is slow: it isolates documents with {mask}, because {mask_reason}"
    yield _note_on_sampling_copy(run)
    if run.arguments.planning.plan and run.arguments.preference.needs_reference:
        yield "before the first step, the run computes the reference in a forward pass over all rows"


def _note_on_sampling_copy(run: PreparedRun) -> str | None:
    """Return a note on the copy of a sharded model that samples; None if there is none, or a plan shows it."""
    if run.arguments.planning.plan or not isinstance(run.data, Prompts):
        return None
    num_bytes = make_request(run).bytes_of_sampling_copy()
    if not num_bytes:
        return None
    return f"each device also holds a full copy of the model for sampling, {num_bytes / 1e9:,.1f} GB"


def check_content(fabric: Fabric, run: PreparedRun, note: Callable[[str], None]) -> PreparedRun:
    """Check every byte of the checkpoint that a run starts from; each rank checks its share.

    Return the run, or if its checkpoint was the newest one and is damaged, the run from the previous checkpoint.
    """
    damages: dict[Path, str] = {}
    while run.start.checkpoint:
        damage = checkpoints.wrong_content(run.start.checkpoint, fabric)
        if not damage:
            break
        damages[Path(os.path.realpath(run.start.checkpoint))] = damage
        run = prepare(run.user_arguments, damages)
        for line in run.notes:
            note(line)
    return run


def _plan_devices(arguments: "TrainArguments") -> DevicePlan:
    """Count the processes and check that they can compute the run."""
    device = arguments.device
    planning = arguments.planning
    if planning.checks and str(device.devices) in ("auto", "-1"):
        device = replace(device, devices=1)
    checks_for_cpu = planning.checks and device.accelerator == "cpu"
    if planning.plans_for_others and not checks_for_cpu:
        accelerator = "cuda"
        num_devices = strategy.count_planned_devices(device.devices)
    else:
        accelerator = strategy.resolve_accelerator(device.accelerator)
        num_devices = strategy.count_devices(device.devices, accelerator)
    world_size = num_devices * device.num_nodes
    fault = find_other_world(num_devices, device.num_nodes)
    if fault and not planning.plan:
        raise InputError(fault)
    parallelism = strategy.resolve_parallelism(arguments, world_size, accelerator)
    if accelerator == "cuda" and not planning.plans_for_others:
        strategy.check_bf16(arguments.model.precision, parallelism, device.devices)
    check_attention(arguments, accelerator)
    if arguments.model.float8:
        check_float8(arguments, accelerator)
    check_trackers(arguments.logging.opened_loggers)
    if arguments.fsdp.compile is True:
        check_compiler("--compile true", "leave it out")
    if arguments.model.float8:
        check_compiler("--float8 true", "leave it out")
    return DevicePlan(accelerator, world_size, parallelism)


def _open_data(
    arguments: "TrainArguments", folder: Path, saved: TrainerJson | None, phases: Sequence[PhaseSettings]
) -> TrainingData:
    """Open the training data, or with ``--eval_only`` the token dataset with the validation rows."""
    data_arguments = arguments.data
    if data_arguments.prompts is not None:
        return _open_prompts(arguments, data_arguments.prompts, folder, saved)
    is_streamed = data_arguments.streaming_dataset is not None
    if arguments.evaluation.self_check and is_streamed:
        raise InputError(
            "--self_check true needs a token dataset, not --streaming_dataset; tokenize some of the texts with "
            "fabric-train tokenize --max_tokens 100000, and give --train_data_dir"
        )

    # the token datasets; those beside a stream have its validation rows
    dataset: TokenDataset | TokenMixture | None = None
    if data_arguments.mixes:
        shares = Shares("--shares", None) if is_streamed else data_arguments.shares_of_epochs
        phase_shares = [phase.shares for phase in phases if phase.shares]
        dataset = open_mixture(data_arguments.data_dirs, shares, data_arguments.isolate_documents, folder, phase_shares)
    elif data_arguments.data_dirs:
        dataset = open_dataset(data_arguments.data_dirs[0], data_arguments.isolate_documents)
    if dataset is not None and arguments.preference.distill_on == "all":
        dataset.train.predicts_all = True
        if dataset.validation is not None:
            dataset.validation.predicts_all = True
    if not is_streamed or arguments.evaluation.eval_only:
        if dataset is None:
            raise InputError(
                "--eval_only true needs --train_data_dir; give the token dataset with the validation split"
            )
        return dataset

    # the stream, with the tokenizer that the checkpoint's run has used
    tokenizer_name = arguments.model.model_name
    special_text_is_plain = None
    if saved:
        if saved.stream:
            special_text_is_plain = saved.stream.special_text_is_plain
        saved_tokenizer = saved.checkpoint / "tokenizer"
        if saved_tokenizer.is_dir():
            tokenizer_name = str(saved_tokenizer)
    return open_stream(data_arguments, tokenizer_name, special_text_is_plain, folder / "tokenizer", dataset)


def _open_prompts(
    arguments: "TrainArguments", entries: Sequence[str], folder: Path, saved: TrainerJson | None
) -> Prompts:
    """Open the prompts with the tokenizer that the checkpoint's run has used, or the model's."""
    tokenizer_name = arguments.model.model_name
    if saved is not None and (saved.checkpoint / "tokenizer").is_dir():
        tokenizer_name = str(saved.checkpoint / "tokenizer")
    lengths = PromptLengths(arguments.data.max_length, arguments.rollouts.max_new_tokens)
    dataset = None
    if arguments.data.data_dirs:
        dataset = open_dataset(arguments.data.data_dirs[0], arguments.data.isolate_documents)
        if dataset.has_pairs or dataset.has_unpaired:
            raise InputError(
                f"--train_data_dir {dataset.name} has pairs or labelled answers, which --objective rl cannot train on; "
                "give documents or chats"
            )
    shares = Shares("--shares", arguments.data.shares)
    return open_prompts(
        entries,
        tokenizer_name,
        lengths,
        folder / "tokenizer",
        shares,
        dataset,
        validation_entries=arguments.evaluation.validation_prompts,
    )


def _read_model(arguments: "TrainArguments", checkpoint: Path | None, data: TrainingData) -> ModelShape:
    """Return the model of a checkpoint, of ``--model_name``, or a new one; refuse a model that is not supported."""
    model_arguments = arguments.model
    layer_class = arguments.fsdp.auto_wrap_policy
    is_new = bool(model_arguments.family) and checkpoint is None
    adapter = choose_adapter(arguments.adapter)
    if checkpoint and is_adapter(checkpoint) and adapter is None:
        raise InputError(
            f"{checkpoint} holds an adapter; continue with the same --adapter arguments, or merge it into a full "
            "model with fabric-train convert --merge true"
        )
    if adapter and adapter.base_weights:
        check_installed()
    is_plan = arguments.planning.plan
    if adapter and is_new and not is_plan:  # sizes are all that a plan needs
        raise InputError(
            "--adapter: a new model has no pretrained weights for an adapter to change; use --model_name instead, or "
            "add --plan true to plan a pretrained model with these sizes"
        )

    # a new model has the BOS and EOS of the data's tokenizer
    if is_new:
        bos_and_eos: tuple[int | None, ...] = ()
        if isinstance(data, Stream):
            bos_and_eos = (data.tokenizer.bos_token_id, data.tokenizer.eos_token_id)
        elif data.manifest:
            bos_and_eos = (data.manifest.tokenizer.bos_token_id, data.manifest.tokenizer.eos_token_id)
        shape = new_shape(model_arguments, layer_class, *bos_and_eos, adapter=adapter)
    else:
        source = str(checkpoint or model_arguments.model_name)
        shape = read_shape(source, layer_class, model_arguments.attention, adapter)

    # what the model computes that training here does not
    setting = bidirectional_setting(shape.config)
    if setting:
        raise InputError(
            f"{shape.source}: its tokens attend to later tokens, which they would be trained to predict ({setting} "
            "in config.json); give a causal model, or change the setting to train this model as a causal one"
        )
    terms = terms_left_out(shape.config)
    if terms and not checkpoint:
        raise InputError(
            f"--model_name {model_arguments.model_name}: its config.json adds a term to the loss, which is not "
            f"computed here: {terms}; set output_router_logits to false or the factor to 0 in config.json to train "
            "without it"
        )
    check_tensor_parallel(shape.config, shape.source, arguments.fsdp.tensor_parallel_size)
    if checkpoint is None and not is_new and not is_plan:
        check_readable(shape.source)
        # an InputError if the record is damaged: the run reads it when it has begun
        read_stages(model_arguments.model_name)
    return shape


def _check_frozen_ties(run: PreparedRun) -> None:
    """Refuse models in which torch's FSDP1 would lose the tie of a frozen weight."""
    has_one_device = run.devices.world_size == 1
    keeps_whole_weights = has_one_device or run.arguments.fsdp.sharding_strategy == "NO_SHARD"
    if not keeps_whole_weights:  # only these lose the tie
        return
    tied_names = [name for name, aliases in run.model.names.items() if len(aliases) > 1]
    is_any_frozen = False  # in some phase
    for model in run.models.all:
        if any(name not in model.trained for name in tied_names):
            is_any_frozen = True
    if is_any_frozen or (tied_names and run.model.adapter):
        cause = "an adapter" if run.model.adapter else "frozen parts"
        option = "--parallelism fsdp on one device" if has_one_device else "--sharding_strategy NO_SHARD"
        raise InputError(
            f"{option} does not work with {cause} of a model that ties its head to its embedding; use --parallelism "
            f"{'single' if has_one_device else 'ddp'}"
        )


def _data_order(
    data: TrainingData,
    rows_per_window: int,
    arguments: "DataArguments",
    phases: tuple[RunPhase, ...],
    saved_order: object,
) -> DataOrder | StreamOrder:
    """Return the values that decide the order of the data, as a checkpoint records them."""
    seed = arguments.seed
    rows_per_epoch = data.rows_per_epoch if isinstance(data, TokenMixture | Prompts) else None
    if isinstance(data, TokenMixture | Prompts) and rows_per_epoch is not None:
        phase_rows = tuple(PhaseRows(phase.first_step, phase.rows_per_epoch) for phase in phases)
        return DataOrder(
            fingerprint=data.fingerprint,
            num_rows=sum(rows_per_epoch),
            rows_per_window=rows_per_window,
            seed=seed,
            version=Mixture.VERSION,
            rows_per_epoch=list(rows_per_epoch),
            phases=phase_rows,
        )
    if isinstance(data, TokenDataset | Prompts):
        return DataOrder.for_dataset(data.fingerprint, len(data.train), rows_per_window, seed, saved_order)
    assert isinstance(data, Stream)  # a mixture has rows per epoch

    # a stream, whose seed counts only if it mixes or shuffles
    identities_by_source = data.documents.identities()
    file_identities = []
    for identities in identities_by_source:
        file_identities += identities
    shares = data.documents.shares
    is_mixed = shares is not None
    return StreamOrder(
        sources=file_identities,
        text_column=arguments.text_column,
        max_length=data.max_length,
        tokenizer=data.tokenizer_hash,
        special_text_is_plain=data.tokenizer.special_text_is_plain,
        rows_per_window=rows_per_window,
        shares=list(shares) if shares is not None else None,
        files_of_places=[len(identities) for identities in identities_by_source] if is_mixed else None,
        shuffle_buffer=arguments.shuffle_buffer,
        seed=seed if is_mixed or arguments.shuffle_buffer else None,
        chat_template=data.chat_template.sha256 if data.chat_template else None,
    )


def _open_sample_prompts(
    arguments: "TrainArguments", data: TrainingData, model: ModelShape, checkpoint: Path | None
) -> SamplePrompts | None:
    """Return the prompts of ``--sample_prompts`` with the tokenizer of the data; None if the run has none."""
    evaluation = arguments.evaluation
    if evaluation.sample_prompts is None or evaluation.only_reads:
        return None
    if not is_evaluated(data):
        lacking = "no validation split; tokenize with --validation_split above 0"
        if isinstance(data, Prompts):
            lacking = "none; give --validation_prompts"
        raise InputError(
            f"--sample_prompts {evaluation.sample_prompts}: samples are generated at each evaluation, but there is "
            f"{lacking}"
        )
    prompts = read_prompts(Path(evaluation.sample_prompts))

    # the tokenizer that has made the data
    tokenizer_dirs: list[Path] = []
    if not isinstance(data, Stream):
        tokenizer_dirs = [path for path in data.attachments if path.name == "tokenizer"]
    if checkpoint and (checkpoint / "tokenizer").is_dir():
        tokenizer_dirs.append(checkpoint / "tokenizer")
    tokenizer_name = str(tokenizer_dirs[0]) if tokenizer_dirs else arguments.model.model_name
    tokenizer = load_hf_tokenizer(tokenizer_name)
    if isinstance(data, Stream) and data.chat_template:
        tokenizer.chat_template = data.chat_template.source

    has_chats = any(prompt.is_chat for prompt in prompts)
    encoder = PromptEncoder(tokenizer, tokenizer_name, prompts_chats=has_chats)
    limits = PromptLimits(model.vocab_size, model.max_positions)
    input_ids = encode_prompts(encoder, prompts, limits, evaluation.sample_tokens, "--sample_tokens")
    texts = []
    for prompt, token_ids in zip(prompts, input_ids, strict=True):
        texts.append(prompt.content if isinstance(prompt.content, str) else tokenizer.decode(token_ids))
    stop_ids = {*data.stop_token_ids, *encoder.end_ids, tokenizer.eos_token_id} - {None}
    return SamplePrompts(
        tokenizer=tokenizer,
        texts=texts,
        input_ids=input_ids,
        end_ids=frozenset(stop_ids),
        num_tokens=evaluation.sample_tokens,
    )


def _with_notes(run: PreparedRun, *notes: str | None) -> PreparedRun:
    new_notes = [note for note in notes if note]
    return replace(run, notes=(*run.notes, *new_notes))
