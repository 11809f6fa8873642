"""Find the reference model of preference objectives: its location, and a hash of its weights."""

import hashlib
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import torch
from lightning import Fabric

from fabric_train.checkpoint import TrainerJson, TrainerState, read_trainer_json
from fabric_train.checkpoint.adapter_base import find_base
from fabric_train.checkpoint.adapter_folder import is_adapter, read_adapter, read_base_name, trained_adapter
from fabric_train.checkpoint.model_files import hash_model_file, join_hashes, list_model_files, resolve_name
from fabric_train.cli.errors import InputError, naming_option
from fabric_train.data.streaming import Stream
from fabric_train.distributed.ranks import gather_over_ranks
from fabric_train.model.hf_model import ModelShape, check_readable, read_shape
from fabric_train.model.init_weights import new_shape
from fabric_train.model.origin import ReferenceModel
from fabric_train.model.parallelize import check_tensor_parallel
from fabric_train.training.prepared_run import PhaseModels, PreparedRun, StartingPoint
from fabric_train.training.run_log import progress


def check_reference(run: PreparedRun) -> None:
    """Raise an InputError if ``--reference`` names no model, or one that cannot be compared with the run's model."""
    reference = run.arguments.preference.reference
    if reference is None or run.arguments.planning.plan:
        return
    with naming_option("--reference ", instead_of="--model_name "):
        shape = reference_run(run, resolve_reference_path(run)).model
        if not (Path(shape.source) / "trainer.json").is_file():
            check_readable(shape.source)
    if shape.vocab_size != run.model.vocab_size:
        raise InputError(
            f"--reference {reference}: it has {shape.vocab_size} tokens, but {run.model.source} has "
            f"{run.model.vocab_size}; give a model with the same tokenizer"
        )
    check_positions(run, shape, f"--reference {reference}")
    tensor_parallel_size = run.arguments.fsdp.tensor_parallel_size
    if shape.adapter and tensor_parallel_size > 1:
        raise InputError(
            f"--tensor_parallel_size does not work with an adapter as --reference; merge {reference} into a full model "
            "first"
        )
    check_tensor_parallel(shape.config, f"--reference {reference}", tensor_parallel_size)


def check_positions(run: PreparedRun, shape: ModelShape, option: str) -> None:
    """Raise an InputError that names the option of a model if the run's rows are too long for it."""
    row_length = run.plan.tokens_per_row
    if (shape.max_positions or math.inf) < row_length:
        raise InputError(
            f"{option}: it has {shape.max_positions} positions, but the rows have {row_length} tokens; give another "
            "model, or tokenize with a smaller --max_length"
        )


def with_saved_reference(run: PreparedRun) -> tuple[PreparedRun, ReferenceModel | None]:
    """Return the run, and the reference model in its checkpoint, which a run without ``--reference`` uses again.

    There is no saved reference if the run begins now, or if it names another one.
    """
    saved = run.start.saved
    if saved is None:
        return run, None
    begins_now = not run.start.resumes and not run.arguments.evaluation.only_reads
    if begins_now:  # it takes only weights from the checkpoint
        return run, None
    preference = run.arguments.preference
    gives_another = preference.reference is not None and not is_reference_of(saved, preference.reference)
    if gives_another:
        return run, None
    preference = replace(preference, reference=saved.arguments.get("reference"))
    return replace(run, arguments=replace(run.arguments, preference=preference)), saved.reference


def is_reference_of(saved: TrainerJson, reference: str) -> bool:
    """Return whether ``--reference`` names the reference with which a checkpoint's run began, by any path."""
    if reference == saved.arguments.get("reference"):
        return True
    return saved.reference is not None and resolve_name(reference) == saved.reference.location


def resolve_reference_path(run: PreparedRun) -> str:
    """Return the location of a new run's reference: ``--reference``, or the weights that the run starts from.

    This is an absolute path or a name on the hub, or "" for the random weights of the run's seed.
    """
    reference = run.arguments.preference.reference
    checkpoint = run.start.checkpoint
    if reference is not None:
        return resolve_name(reference)

    # an adapter trains: the one that it begins with, or the base of a new one
    if run.adapter_base is not None:
        if checkpoint is not None and is_adapter(checkpoint):
            return os.path.realpath(checkpoint)
        init_adapter = run.arguments.adapter.init_adapter
        return os.path.realpath(init_adapter) if init_adapter else run.adapter_base.location

    # the model itself trains: its weights at the start
    if checkpoint is not None:
        return os.path.realpath(checkpoint)
    if run.model.is_new:
        return ""
    model_name = run.arguments.model.model_name
    if Path(model_name).is_dir():
        return os.path.realpath(model_name)
    return model_name  # a name on the hub


def reference_run(run: PreparedRun, path: str) -> PreparedRun:
    """Return a run at step 0 whose model is the reference at ``path``, for ``build_run.set_up_model``.

    A run with an adapter and without ``--reference`` compares with the adapter that it starts from.
    """
    if run.arguments.preference.reference is not None:
        return run_of_model(run, path, "--reference", moved_base=run.arguments.model.model_name)
    if path.startswith("/") and not Path(path).is_dir():
        raise InputError(f"the reference model {path} no longer exists; restore it, or give --reference")
    if run.model.adapter is None:
        return run_of_model(run, path, "--reference", moved_base=run.arguments.model.model_name)

    # the run's own adapter, as it starts; if it is new, the reference is its base
    if not is_adapter_path(path):
        return replace(run, start=StartingPoint(None, TrainerState()))
    return replace(run, start=_starting_point(Path(path)))


def _starting_point(model_dir: Path) -> StartingPoint:
    """Return a starting point with the weights of a checkpoint; of another folder, with those of the model's source."""
    saved = None
    if (model_dir / "trainer.json").is_file():
        saved = read_trainer_json(model_dir)
    return StartingPoint(saved, TrainerState())


def run_of_model(run: PreparedRun, path: str, option: str, *, moved_base: str | None = None) -> PreparedRun:
    """Return a run at step 0 whose model is the one at ``path``, for ``build_run.set_up_model``.

    Args:
        run: The run that uses the model beside its own.
        path: A hub name, or the absolute path of a folder, a checkpoint or an adapter; "" for the random weights of the
            run's seed.
        option: The argument that names the model, for messages.
        moved_base: The folder of the base of a checkpoint's adapter, if its recorded base no longer exists.
    """
    arguments = run.arguments
    model_dir = Path(path)
    if path.startswith("/") and not model_dir.is_dir():
        raise InputError(f"{option} {path}: no such folder; give a hub name, folder, checkpoint or run")
    start = _starting_point(model_dir) if path else StartingPoint(None, TrainerState())

    # a whole model
    longest_row = run.model.longest_row  # decides rotary frequencies that depend on the length of a text
    if not is_adapter_path(path):
        shape = replace(_reference_shape(run, path), longest_row=longest_row)
        return replace(run, start=start, models=PhaseModels({1: shape}), adapter_base=None)

    # an adapter on a base of its own
    if start.saved is not None:
        base = find_base(moved_base, model_dir, "--model_name" if moved_base else None)
        adapter = trained_adapter(model_dir)
    else:
        base = find_base(read_base_name(model_dir), None, "--model_name")
        adapter = read_adapter(model_dir)
    attention = run.model.config._attn_implementation
    shape = read_shape(base.location, arguments.fsdp.auto_wrap_policy, attention, adapter)
    shape = replace(shape, longest_row=longest_row)
    adapter_arguments = replace(arguments.adapter, adapter=None, init_adapter=path, base_weights=None)
    arguments = replace(arguments, adapter=adapter_arguments)
    return replace(run, start=start, models=PhaseModels({1: shape}), adapter_base=base, arguments=arguments)


def is_adapter_path(path: str) -> bool:
    """Return whether a location of a model, see ``resolve_reference_path``, is a folder with an adapter."""
    return bool(path) and Path(path).is_dir() and is_adapter(Path(path))


def _reference_shape(run: PreparedRun, path: str) -> ModelShape:
    """Return the model at a path; without a path, the model with random weights that the run began with."""
    arguments = run.arguments
    layer_class = arguments.fsdp.auto_wrap_policy
    attention = run.model.config._attn_implementation
    if path:
        return read_shape(path, layer_class, attention)
    if run.model.is_new:
        return run.model
    assert not isinstance(run.data, Stream)
    tokenizer = run.data.manifest and run.data.manifest.tokenizer
    if tokenizer:
        shape = new_shape(arguments.model, layer_class, tokenizer.bos_token_id, tokenizer.eos_token_id)
    else:
        shape = new_shape(arguments.model, layer_class)
    shape.config._attn_implementation = attention
    return shape


def hash_reference(fabric: Fabric, reference: PreparedRun, path: str) -> str:
    """Return a hash of the model's files, each read by one rank; for a new model, of its seed and configuration.

    All ranks call this together. ``reference`` is the ``reference_run`` of ``path``.
    """
    if not path:
        config = json.dumps(reference.model.config.to_dict(), sort_keys=True, default=str)
        return hashlib.sha256(f"{reference.arguments.data.seed} {config}".encode()).hexdigest()

    files = list_model_files(path, reference.adapter_base)
    local_hashes = torch.zeros(len(files), 2, dtype=torch.int64)  # 128 bits of each file that this rank reads
    for index in range(fabric.global_rank, len(files), fabric.world_size):
        progress.info("hashing the files of the frozen model %d/%d", index + 1, len(files))
        local_hashes[index] = torch.from_numpy(hash_model_file(files[index]))
    hashes = gather_over_ranks(fabric, local_hashes).sum(dim=0).cpu()  # the other ranks have zeros
    return join_hashes(hashes.numpy())


def check_unchanged(saved: ReferenceModel, fingerprint: str) -> None:
    """Raise an InputError unless the reference of a checkpoint still has the weights with which its run began."""
    if fingerprint != saved.fingerprint:
        raise InputError(
            f"the weights of the reference model {saved.location} have changed since the run began; restore them"
        )
