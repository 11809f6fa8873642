"""What is checked before a run begins, by each process alone: arguments against files and devices."""

import os
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from fabric_train import checkpoint as checkpoints
from fabric_train.cli.errors import InputError
from fabric_train.cli.launcher import num_restarts
from fabric_train.data.step_sampler import WindowOrder
from fabric_train.data.streaming import Stream, open_stream
from fabric_train.data.token_dataset import TokenDataset, open_dataset
from fabric_train.distributed import devices
from fabric_train.distributed.compile import refuse_without_compiler
from fabric_train.distributed.float8 import refuse_unusable_float8
from fabric_train.distributed.strategy import resolve_parallelism
from fabric_train.distributed.tensor_parallel import refuse_uncuttable
from fabric_train.files.atomic_folder import refuse_dead_link, refuse_inside
from fabric_train.model.attention import refuse_unusable
from fabric_train.model.hf_model import ModelShape, read_shape, refuse_unreadable
from fabric_train.model.init_weights import new_shape
from fabric_train.preflight.resume_check import check_resumption
from fabric_train.preflight.step_plan import Plan, make_plan

if TYPE_CHECKING:
    from arguments import TrainArguments

PACKAGES = ("torch", "lightning", "transformers", "datasets", "safetensors")
"""Those that the losses of a run depend on."""


@dataclass(frozen=True)
class Prepared:
    """A run that has been checked as far as one process can, and not begun."""

    arguments: "TrainArguments"
    folder: Path
    checkpoint: Path | None
    shape: ModelShape
    data: TokenDataset | Stream
    accelerator: str
    parallelism: str
    plan: Plan
    order: checkpoints.DataOrder | checkpoints.StreamOrder
    state: checkpoints.TrainerState
    notes: tuple[str, ...]


def prepare(arguments: "TrainArguments", damages: checkpoints.Damages | None = None) -> Prepared:
    """Check the arguments against the files and devices there are, and what is known to be wrong with checkpoints.

    Raises:
        InputError: for whatever the user can mend.
    """
    folder = Path(arguments.save.output_dir)
    _refuse_place(folder, arguments.data.train_data_dir, arguments.checkpoint.checkpoint)
    wanted = arguments.checkpoint
    if num_restarts():  # torchrun goes on by itself
        goes_on = checkpoints.newest_checkpoint(folder, damages) is not None
        wanted = replace(wanted, resume=True)
        if goes_on:
            wanted = replace(wanted, checkpoint=None, weights_only=False)
    checkpoint = checkpoints.choose_checkpoint(
        folder,
        wanted.checkpoint,
        wanted.resume,
        anew=wanted.weights_only,
        only_reads=arguments.evaluation.only_reads,
        damages=damages,
    )
    if arguments.planning.plans_for_others:
        accelerator, num_devices = "cuda", devices.count_planned(arguments.device.devices)
    else:
        accelerator = devices.resolve_accelerator(arguments.device.accelerator)
        num_devices = devices.count_devices(arguments.device.devices, accelerator)
    if not arguments.planning.plan:
        devices.refuse_lone_node(arguments.device.num_nodes)
    world_size = num_devices * arguments.device.num_nodes
    parallelism = resolve_parallelism(arguments, world_size, accelerator)
    refuse_unusable(arguments, accelerator)
    if arguments.model.float8:
        refuse_unusable_float8(arguments, accelerator)
    if arguments.fsdp.compile:
        refuse_without_compiler("--compile true", "leave it out")
    data = _open_data(arguments, folder, checkpoint)
    shape = _shape(arguments, checkpoint, data)
    refuse_uncuttable(shape.config, shape.source, arguments.fsdp.tensor_parallel_size)
    plan = make_plan(arguments, shape, data, world_size)
    if not checkpoint and not shape.is_new:
        refuse_unreadable(shape.source)
    order = _order(data, plan, arguments.data.seed)
    state, notes = checkpoints.TrainerState(), plan.notes
    if checkpoint:
        notes += tuple(checkpoints.describe_damaged(checkpoint.parent, checkpoint, damages))
    if checkpoint and not (wanted.weights_only or arguments.evaluation.only_reads):
        state = checkpoints.read_trainer_state(checkpoint)
        rows_hash = window_order(data, plan, arguments).rows_hash if isinstance(data, TokenDataset) else None
        versions = {name: version(name) for name in PACKAGES}
        notes += tuple(check_resumption(checkpoint, state, order, rows_hash, arguments, plan, versions))
    return Prepared(arguments, folder, checkpoint, shape, data, accelerator, parallelism, plan, order, state, notes)


def _shape(arguments: "TrainArguments", checkpoint: Path | None, data: TokenDataset | Stream) -> ModelShape:
    """Return the shape of the model to start from: the checkpoint's, a new one's, or the pretrained one's."""
    given, layer_class = arguments.model, arguments.fsdp.auto_wrap_policy
    if not given.family or checkpoint:
        return read_shape(str(checkpoint or given.model_name), layer_class, given.attention)
    if isinstance(data, Stream):
        return new_shape(given, layer_class, data.tokenizer.bos_token_id, data.tokenizer.eos_token_id)
    if data.manifest:
        return new_shape(given, layer_class, data.manifest.tokenizer.bos_token_id, data.manifest.tokenizer.eos_token_id)
    return new_shape(given, layer_class)


def _refuse_place(folder: Path, *inputs: str | None) -> None:
    """Refuse an output folder that cannot be written to, or that lies in what is read."""
    refuse_dead_link(folder)
    for given in inputs:
        if given and not (Path(given) / "checkpoints").is_dir():  # a run may go on in its own folder
            refuse_inside(folder, Path(given))
    nearest = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        reason = "is not writable" if nearest.is_dir() else "is a file"
        raise InputError(f"--output_dir {folder}: {nearest} {reason}; give another folder")


def _open_data(arguments: "TrainArguments", folder: Path, checkpoint: Path | None) -> TokenDataset | Stream:
    """Open what is trained on; to evaluate alone, the token dataset that has the rows for it."""
    given = arguments.data
    if arguments.evaluation.self_check and given.streaming_dataset is not None:
        raise InputError(
            "--self_check true reads rows of a token dataset, not --streaming_dataset: make a small one of the same "
            "texts with tokenize_dataset.py --max_tokens 100000 and give --train_data_dir"
        )
    dataset = open_dataset(given.train_data_dir, given.isolate_documents) if given.train_data_dir else None
    if given.streaming_dataset is None or arguments.evaluation.eval_only:
        if dataset is None:
            raise InputError("--eval_only true needs --train_data_dir: the token dataset with the validation split")
        return dataset
    tokenizer_name, streamed = arguments.model.model_name, None
    if checkpoint:
        streamed = checkpoints.read_stream_order(checkpoint)
        if (checkpoint / "tokenizer").is_dir():
            tokenizer_name = str(checkpoint / "tokenizer")
    return open_stream(
        given.streaming_dataset,
        given.text_column,
        given.max_length,
        tokenizer_name,
        streamed.special_text_is_plain if streamed else None,
        folder / "tokenizer",
        given.isolate_documents,
        dataset,
    )


def _order(data: TokenDataset | Stream, plan: Plan, seed: int) -> checkpoints.DataOrder | checkpoints.StreamOrder:
    if isinstance(data, TokenDataset):
        return checkpoints.DataOrder(data.fingerprint, len(data.train), plan.rows_per_window, seed)
    return checkpoints.StreamOrder(
        sources=data.texts.identities(),
        text_column=data.texts.column,
        max_length=data.max_length,
        tokenizer=data.tokenizer_hash,
        special_text_is_plain=data.tokenizer.special_text_is_plain,
        rows_per_window=plan.rows_per_window,
    )


def window_order(data: TokenDataset, plan: Plan, arguments: "TrainArguments", rank: int = 0) -> WindowOrder:
    """Return which rows of a token dataset a rank takes at every step."""
    rows, share = len(data.train), (arguments.training.micro_batch_size, plan.num_data_ranks, rank)
    return WindowOrder(rows, plan.rows_per_window, *share, arguments.data.seed)
