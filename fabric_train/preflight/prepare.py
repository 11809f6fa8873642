"""Check a run before any process group exists: its arguments against the files and devices that are there."""

import math
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
from fabric_train.checkpoint.adapter_base import find_base, note_on_other_base
from fabric_train.checkpoint.adapter_folder import choose_adapter, is_adapter
from fabric_train.checkpoint.trainer_json import PROGRAM
from fabric_train.cli.argument_types import Shares
from fabric_train.cli.code_commit import checked_out_commit, installed_commit
from fabric_train.cli.errors import InputError
from fabric_train.cli.launcher import find_other_world, global_rank
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
from fabric_train.preflight.beginning import choose_beginning, named_checkpoint
from fabric_train.preflight.dataset_check import (
    check_deciding_sources,
    faults_of_objective,
    faults_of_validation,
    longest_row,
    note_on_added_tokens,
)
from fabric_train.preflight.memory_plan import resolve_automatic
from fabric_train.preflight.paths import check_output_dir
from fabric_train.preflight.phases import (
    GivenPhase,
    Stretch,
    choose_parts,
    plan_phases,
    read_stretches,
    stretch_of,
)
from fabric_train.preflight.resume_check import check_branch, check_resume, choose_schedule, own_versions
from fabric_train.preflight.steps import plan_steps, rows_at_once, starting_point
from fabric_train.training.components import (
    components_of,
    describe_other_component,
    find_other_components,
)
from fabric_train.training.metrics import find_lost_rows
from fabric_train.training.objective import build_objective
from fabric_train.training.prepared_run import DevicePlan, PreparedRun, RunPhase, StartingPoint, TrainingData
from fabric_train.training.reference_model import check_reference
from fabric_train.training.sample_file import read_samples
from fabric_train.training.sampling import SamplePrompts
from fabric_train.training.trackers import check_trackers

if TYPE_CHECKING:
    from fabric_train.arguments import CheckpointArguments, DataArguments, TrainArguments

_PACKAGES = ("torch", "lightning", "transformers", "datasets", "safetensors")
"""The packages that a run's losses depend on."""


@cache
def package_versions() -> dict[str, str]:
    """Return the installed versions of ``_PACKAGES``, and this program's with its commit; to read them takes 30 ms."""
    commit = "unknown"
    if global_rank() == 0:  # which saves it
        commit = checked_out_commit() or installed_commit() or commit
    own = "not installed"
    with suppress(PackageNotFoundError):
        own = version(PROGRAM)
    return {PROGRAM: f"{own}, commit {commit}", **{name: version(name) for name in _PACKAGES}}


def prepare(
    arguments: "TrainArguments", damages: checkpoints.Damages | None = None, *, compares: bool = True
) -> PreparedRun:
    """Check a run: output folder → devices → checkpoint → data → model → steps → resume → later token datasets.

    ``damages`` are the checkpoints that are known to be damaged. Unless it ``compares``, the run need not fit the
    checkpoint that it continues.
    """
    folder = Path(arguments.save.output_dir)
    given = arguments
    only_reads = arguments.evaluation.only_reads
    check_output_dir(folder, *arguments.data.data_dirs, arguments.checkpoint.checkpoint)
    if arguments.logging.profiled_steps is not None:
        check_no_links_in(folder / "profile")
    devices = _plan_devices(arguments)
    arguments, start_from, checkpoint = choose_beginning(arguments, folder, damages)
    stretches = read_stretches(arguments)
    step = 0
    if checkpoint and not (start_from.weights_only or only_reads):  # a branch may go on with other data
        step = checkpoints.read_trainer_json(checkpoint).state.step + bool(start_from.branch)
    place = stretch_of(stretches, step)
    run = _prepare_stretch(stretches[place], given, devices, checkpoint, start_from)
    if not only_reads:
        rows = find_lost_rows(folder / "metrics.csv", run.start.state, arguments.logging.log_step_interval)
        read_samples(folder / "samples.jsonl", run.start.state.step)  # a damaged file is refused before any is written
        run = _with_notes(run, rows)
    if checkpoint is not None:
        changed: list[str] = []
        if compares and not (start_from.weights_only or only_reads):
            run, changed = (check_branch if start_from.branch else check_resume)(run, checkpoint)
            run, lengths = choose_schedule(run, checkpoint)
            changed += lengths
        elif compares:
            changed += _compare_objectives(run, checkpoint)
        damaged = checkpoints.describe_damaged(checkpoint.parent, checkpoint, damages)
        named = named_checkpoint(start_from)
        chosen = checkpoints.describe_choice(Path(named), checkpoint) if named else None
        run = _with_notes(run, *damaged, chosen, *changed)
    adapter_dir = Path(arguments.adapter.init_adapter or "")
    if compares and arguments.adapter.init_adapter and (adapter_dir / "trainer.json").is_file():
        run = _with_notes(run, *_compare_objectives(run, adapter_dir))
    run = _with_following(run, stretches[place + 1 :])
    goes_on = run.next_run is not None and run.start.state.step == run.plan.last_step and not run.ends_early
    if checkpoint is not None and goes_on and not run.start.state.unlogged:
        return run.continued_from(checkpoint, run.start.state)
    return run


def _compare_objectives(run: PreparedRun, checkpoint: Path) -> list[str]:
    """Compare the objective of a run that takes only weights from a checkpoint, and return notes.

    Raises:
        InputError: An evaluation would compute the loss of another objective, and one of them was registered.
    """
    saved = checkpoints.read_trainer_json(checkpoint)
    others = list(find_other_components(saved, run.components, ("objective",)))
    arguments = run.arguments
    if arguments.evaluation.only_reads and not arguments.checkpoint.allow_changes:
        faults = [describe_other_component(checkpoint, there, here, "another loss") for there, here in others]
        if faults:
            raise InputError(*faults)
    return [f"{checkpoint.name} was trained with the {there}, and this run has the {here}" for there, here in others]


def _prepare_stretch(
    stretch: Stretch,
    given: "TrainArguments",
    devices: DevicePlan,
    checkpoint: Path | None,
    start_from: "CheckpointArguments",
    before: PreparedRun | None = None,
) -> PreparedRun:
    """Prepare the steps with the same token datasets; ``before`` are those with the ones before, in the same run."""
    arguments = stretch.arguments
    only_reads = given.evaluation.only_reads
    folder = Path(arguments.save.output_dir)
    data = _open_data(arguments, folder, checkpoint, stretch.phases)
    if not isinstance(data, Stream):
        stretch.check_length(data.train.lengths())
    if faults := faults_of_objective(arguments, data, devices.accelerator):
        raise InputError(*faults)
    stored = with_parts(before.model, ALL_PARTS) if before else _read_model(arguments, checkpoint, data)
    rope = RopeChange(
        arguments.model.scaling, arguments.model.rope_theta, stretch.option, arguments.checkpoint.allow_changes
    )
    length = longest_row(data)
    extended = replace(rope.apply(stored, length), longest_row=length)
    model = extended
    if data.isolates:
        check_counted_from_rows(model, length)
    masks_because = choose_attention(model, arguments, devices.accelerator)
    phases = plan_phases(stretch, data)
    model, models = choose_parts(stretch, model, phases)
    window = math.prod(rows_at_once(arguments, devices.world_size))  # it may have no rows before it is checked
    saved = checkpoints.read_trainer_json(checkpoint).data if checkpoint and not start_from.weights_only else None
    order = _data_order(data, window, arguments.data, phases, saved)
    if before:
        start = StartingPoint(None, checkpoints.TrainerState(stretch.first_step - 1))
        starts_after = start.state.step
    else:
        start = starting_point(None if only_reads else checkpoint, order, start_from)
        start, starts_after = replace(start, checkpoint=checkpoint), checkpoints.data_starts_after(start.lineage)
    version = order.version if isinstance(order, DataOrder) else SHUFFLED
    plan = plan_steps(arguments, model, data, devices.world_size, starts_after, phases, stretch.last_step, version)
    objective = build_objective(arguments)
    early_stopping = check_deciding_sources(arguments, data, objective)
    if faults := faults_of_validation(arguments, data, objective, early_stopping):
        raise InputError(*faults)
    base = None
    if model.adapter is not None and not arguments.planning.plan:  # a plan reads no weights
        base = find_base(arguments.model.model_name, checkpoint, "--model_name")
    run = PreparedRun(
        user_arguments=given,
        arguments=arguments,
        folder=folder,
        devices=devices,
        start=start,
        data=data,
        model=model,
        plan=plan,
        order=order,
        versions=package_versions() | own_versions(model, data),
        notes=plan.notes,
        early_stopping=early_stopping,
        sample_prompts=_open_sample_prompts(arguments, data, model, checkpoint),
        components=components_of(arguments, objective),
        adapter_base=base,
        models=models,
    ).with_current_parts()
    _check_parts(run)
    check_reference(run)
    begins_with = arguments.adapter.init_adapter
    if base is not None and begins_with is not None and not (checkpoint and is_adapter(checkpoint)):
        run = _with_notes(run, None if global_rank() else note_on_other_base(Path(begins_with), base))
    of_frequencies = note_on_frequencies(model.config, model.source, length)
    run = _with_notes(run, note_on_rope(stored, extended), of_frequencies, *_warnings(run, masks_because))
    return run if arguments.planning.checks else resolve_automatic(run)


def _with_following(run: PreparedRun, later: Sequence[Stretch]) -> PreparedRun:
    """Return a run with what follows it, prepared in their order; nothing follows a run that only reads."""
    if not later:
        return run
    stretch = later[0]
    if run.arguments.preference.needs_reference:
        raise InputError(
            f"{stretch.option}train_data_dir: --objective {run.arguments.preference.objective} compares with a "
            "reference, which is of the pairs that the run begins with; use --branch for other pairs"
        )
    check_output_dir(run.folder, *stretch.arguments.data.data_dirs)
    checkpoint = run.start.checkpoint
    following = _prepare_stretch(
        stretch, run.user_arguments, run.devices, checkpoint, run.user_arguments.checkpoint, run
    )
    notes = [f"from step {stretch.first_step:,} on: {line}" for line in following.notes if line not in run.notes]
    following = _with_following(replace(following, notes=()), later[1:])
    kept = replace(following.start, schedule_steps=run.start.schedule_steps)
    run = replace(run, next_run=replace(following, start=kept))
    return _with_notes(run, *notes, *following.notes)


def _check_parts(run: PreparedRun) -> None:
    """Raise an InputError for rates of parts that do not train, and parts that do not train with FSDP1."""
    rates_by_name(run.arguments.training.rates_of_parts, run.model.names, run.model.source, run.trained_in_any_phase)
    if run.devices.parallelism == "fsdp":
        _check_frozen_ties(run)


def _warnings(run: PreparedRun, masks_because: str | None) -> Iterator[str | None]:
    """Yield what the user should know of the run's speed and arguments, before it starts."""
    if run.devices.parallelism == "xla":
        yield xla.NOTE
    if run.devices.parallelism == "fsdp" and any(
        splits_layers(model.trained, model.frozen) for model in (run.model, *run.models.values())
    ):
        yield "only some parts of a layer train: fsdp reduces gradients of whole layers, and fsdp2 theirs alone"
    yield run.arguments.logging.note
    if run.start.checkpoint and (terms := terms_left_out(run.model.config)):
        yield f"its config.json adds a term to the loss, which was and is left out: {terms}"
    if not isinstance(run.data, Stream) and not global_rank():
        yield note_on_added_tokens(run.model, run.data.parts)
    if masks_because and run.data.isolates:
        tokens = f"{run.plan.tokens_per_row:,}"
        mask = f"a mask of {tokens} × {tokens} tokens"
        yield f"attention is slow: it keeps documents apart by {mask}, because {masks_because}"
    if run.arguments.planning.plan and run.arguments.preference.needs_reference:
        yield "before the first step, a forward pass over all rows computes the reference"


def check_content(fabric: Fabric, run: PreparedRun, note: Callable[[str], None]) -> PreparedRun:
    """Check every byte of the checkpoint that a run starts from, each rank its share.

    Return the run itself, or the run from the checkpoint before if the newest one is damaged.
    """
    damages: dict[Path, str] = {}
    while run.start.checkpoint and (damage := checkpoints.wrong_content(run.start.checkpoint, fabric)):
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
    if planning.plans_for_others and not (planning.checks and device.accelerator == "cpu"):
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
    for name, is_compiled in (("compile", arguments.fsdp.compile is True), ("float8", arguments.model.float8)):
        if is_compiled:
            check_compiler(f"--{name} true", "leave it out")
    return DevicePlan(accelerator, world_size, parallelism)


def _open_data(
    arguments: "TrainArguments", folder: Path, checkpoint: Path | None, phases: Sequence[GivenPhase]
) -> TrainingData:
    """Open the training data, or with ``--eval_only`` the token dataset that has the validation rows."""
    given = arguments.data
    if arguments.evaluation.self_check and given.streaming_dataset is not None:
        raise InputError(
            "--self_check true reads rows of a token dataset, not --streaming_dataset: make a small one of the same "
            "texts with fabric-train tokenize --max_tokens 100000 and give --train_data_dir"
        )
    dataset: TokenDataset | TokenMixture | None = None
    if given.mixes:
        shares = given.shares_of_epochs if given.streaming_dataset is None else Shares("--shares", None)
        later = [phase.shares for phase in phases if phase.shares]
        dataset = open_mixture(given.data_dirs, shares, given.isolate_documents, folder, later)
    elif given.data_dirs:
        dataset = open_dataset(given.data_dirs[0], given.isolate_documents)
    if given.streaming_dataset is None or arguments.evaluation.eval_only:
        if dataset is None:
            raise InputError("--eval_only true needs --train_data_dir: the token dataset with the validation split")
        return dataset
    tokenizer_name = arguments.model.model_name
    streamed = None
    if checkpoint:
        streamed = checkpoints.read_trainer_json(checkpoint).stream
        if (checkpoint / "tokenizer").is_dir():
            tokenizer_name = str(checkpoint / "tokenizer")
    special_text_is_plain = streamed.special_text_is_plain if streamed else None
    return open_stream(given, tokenizer_name, special_text_is_plain, folder / "tokenizer", dataset)


def _read_model(arguments: "TrainArguments", checkpoint: Path | None, data: TrainingData) -> ModelShape:
    given = arguments.model
    layer_class = arguments.fsdp.auto_wrap_policy
    adapter = choose_adapter(arguments.adapter)
    if checkpoint and is_adapter(checkpoint) and adapter is None:
        raise InputError(
            f"{checkpoint} is of an adapter; go on with the same --adapter arguments, or make a whole model of it with "
            "fabric-train convert --merge true"
        )
    if adapter and adapter.base_weights:
        check_installed()
    if adapter and given.family and not checkpoint:
        raise InputError("--adapter: a new model has no weights that an adapter could change; give --model_name")
    if not given.family or checkpoint:
        shape = read_shape(str(checkpoint or given.model_name), layer_class, given.attention, adapter)
    else:
        tokenizer = data.tokenizer if isinstance(data, Stream) else data.manifest and data.manifest.tokenizer
        ends = (tokenizer.bos_token_id, tokenizer.eos_token_id) if tokenizer else ()
        shape = new_shape(given, layer_class, *ends)
    if setting := bidirectional_setting(shape.config):
        raise InputError(
            f"{shape.source}: its tokens see the tokens after them, which they would be trained to predict "
            f"({setting} in config.json); give a causal model, or change the setting to train this one as such"
        )
    if not checkpoint and (terms := terms_left_out(shape.config)):
        raise InputError(
            f"--model_name {given.model_name}: its config.json adds a term to the loss, which is not computed here: "
            f"{terms}; set output_router_logits to false or the factor to 0 in config.json to train without it"
        )
    check_tensor_parallel(shape.config, shape.source, arguments.fsdp.tensor_parallel_size)
    if not checkpoint and not shape.is_new:
        check_readable(shape.source)
        read_stages(given.model_name)  # an InputError if the record is damaged: the run reads it when it has begun
    return shape


def _check_frozen_ties(run: PreparedRun) -> None:
    """Refuse what loses the tie of a frozen weight in torch's FSDP1."""
    tied = [first for first, of_one in run.model.names.items() if len(of_one) > 1]
    is_frozen = any(name not in model.trained for model in (run.model, *run.models.values()) for name in tied)
    is_whole = run.arguments.fsdp.sharding_strategy == "NO_SHARD" or run.devices.world_size == 1
    if is_whole and (is_frozen or (tied and run.model.adapter)):
        alone = run.devices.world_size == 1
        cause = "an adapter" if run.model.adapter else "frozen parts"
        given = "--parallelism fsdp on one device" if alone else "--sharding_strategy NO_SHARD"
        raise InputError(
            f"{given} does not work with {cause} of a model whose head is its embedding; "
            f"use --parallelism {'single' if alone else 'ddp'}"
        )


def _data_order(
    data: TrainingData, rows_per_window: int, given: "DataArguments", phases: tuple[RunPhase, ...], saved: object
) -> DataOrder | StreamOrder:
    if isinstance(data, TokenDataset):
        return DataOrder.for_dataset(data.fingerprint, len(data.train), rows_per_window, given.seed, saved)
    if isinstance(data, TokenMixture):
        rows = list(data.rows_per_epoch)
        later = tuple(PhaseRows(phase.first_step, phase.rows_per_epoch) for phase in phases)
        return DataOrder(data.fingerprint, sum(rows), rows_per_window, given.seed, Mixture.VERSION, rows, later)
    identities = data.documents.identities()
    shares = data.documents.shares
    return StreamOrder(
        sources=[identity for of_place in identities for identity in of_place],
        text_column=given.text_column,
        max_length=data.max_length,
        tokenizer=data.tokenizer_hash,
        special_text_is_plain=data.tokenizer.special_text_is_plain,
        rows_per_window=rows_per_window,
        shares=list(shares) if shares is not None else None,
        files_of_places=[len(of_place) for of_place in identities] if shares is not None else None,
        shuffle_buffer=given.shuffle_buffer,
        seed=given.seed if shares is not None or given.shuffle_buffer else None,
        chat_template=data.chat_template.sha256 if data.chat_template else None,
    )


def _open_sample_prompts(
    arguments: "TrainArguments", data: TrainingData, model: ModelShape, checkpoint: Path | None
) -> SamplePrompts | None:
    """Return the prompts of ``--sample_prompts`` with the tokenizer of the data; None if the run has none."""
    given = arguments.evaluation
    if given.sample_prompts is None or given.only_reads:
        return None
    if data.validation is None:
        raise InputError(
            f"--sample_prompts {given.sample_prompts}: the samples are of each evaluation, and there is no validation "
            "split; tokenize with --validation_split above 0"
        )
    prompts = read_prompts(Path(given.sample_prompts))
    folders = [] if isinstance(data, Stream) else [path for path in data.attachments if path.name == "tokenizer"]
    folders += [checkpoint / "tokenizer"] if checkpoint and (checkpoint / "tokenizer").is_dir() else []
    name = str(folders[0] if folders else arguments.model.model_name)  # whose tokenizer has made the data
    tokenizer = load_hf_tokenizer(name)
    if isinstance(data, Stream) and data.chat_template:
        tokenizer.chat_template = data.chat_template.source
    encoder = PromptEncoder(tokenizer, name, prompts_chats=any(prompt.is_chat for prompt in prompts))
    limits = PromptLimits(model.vocab_size, model.max_positions)
    input_ids = encode_prompts(encoder, prompts, limits, given.sample_tokens, "--sample_tokens")
    texts = [
        prompt.content if isinstance(prompt.content, str) else tokenizer.decode(ids)
        for prompt, ids in zip(prompts, input_ids, strict=True)
    ]
    ends = {*data.stop_token_ids, *encoder.end_ids, tokenizer.eos_token_id} - {None}
    return SamplePrompts(tokenizer, texts, input_ids, frozenset(ends), given.sample_tokens)


def _with_notes(run: PreparedRun, *notes: str | None) -> PreparedRun:
    return replace(run, notes=(*run.notes, *filter(None, notes)))
