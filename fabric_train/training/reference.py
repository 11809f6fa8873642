"""Compute the reference log-probabilities of pairs and unpaired answers once, before the run's model is built.

A run then has only one model in memory. ``reference_files`` stores the log-probabilities.
"""

import gc
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from lightning import Fabric
from lightning.fabric.wrappers import _FabricModule

from fabric_train.cli.errors import InputError
from fabric_train.data.step_sampler import positions, validation_batches
from fabric_train.data.streaming import Stream
from fabric_train.data.token_dataset import Rows, TokenDataset
from fabric_train.distributed.ranks import data_ranks
from fabric_train.distributed.signals import Heartbeat, StepPhase
from fabric_train.model.context_parallel import place_batch
from fabric_train.model.origin import ReferenceModel
from fabric_train.training.build_run import set_up_model
from fabric_train.training.preference import answer_logps
from fabric_train.training.prepared_run import PreparedRun
from fabric_train.training.reference_files import (
    ReferenceContent,
    ReferenceFiles,
    count_pairs,
    find_files,
    write_files,
)
from fabric_train.training.reference_model import (
    check_unchanged,
    hash_reference,
    reference_run,
    resolve_reference_path,
    with_saved_reference,
)
from fabric_train.training.run_log import log, progress


def compare_with_reference(fabric: Fabric, run: PreparedRun, heartbeat: Heartbeat) -> PreparedRun:
    """Give the run's pairs their reference log-probabilities if its objective needs them.

    Return the run with its reference model. Files that do not exist yet are computed by all ranks, before the run's own
    model is built. All ranks call this together.
    """
    if not run.arguments.preference.needs_reference or run.arguments.evaluation.self_check:
        return run
    progress.info("looking for reference log-probabilities")

    # The reference of the run: the one that it began with, or a new one.
    run, saved_reference = with_saved_reference(run)
    if saved_reference is None:
        path = resolve_reference_path(run)
        reference = ReferenceModel(path, hash_reference(fabric, reference_run(run, path), path))
    else:
        reference = saved_reference

    # Look for all files before any is computed: a fault in one of them comes first.
    assert not isinstance(run.data, Stream)  # preflight refuses it
    datasets = run.data.parts
    contents = [ReferenceContent(_describe_inputs(run, dataset, reference), reference.location) for dataset in datasets]
    found_files = []
    for dataset, content in zip(datasets, contents, strict=True):
        found_files.append(_agree_on_files(fabric, run, dataset, content))

    # Compute what is missing, with one model for all token datasets.
    model = None
    for dataset, content, files in zip(datasets, contents, found_files, strict=True):
        splits = _list_splits(run, dataset)
        if files.missing_splits:
            if model is None:
                model = _set_up_reference(fabric, run, reference, is_saved=saved_reference is not None)
            logps = {}
            for name in files.missing_splits:
                logps[name] = _compute_logps(fabric, model, run, name=name, rows=splits[name], heartbeat=heartbeat)
            if fabric.is_global_zero:
                write_files(files.folder, content, logps)
            fabric.barrier()
            num_documents = sum(len(split_logps) for split_logps in logps.values())
            assert dataset.manifest is not None  # a token dataset with two sequences a document has one
            kind = dataset.manifest.kind
            log.info("reference log-probabilities of %s %s → %s", f"{num_documents:,}", kind, files.folder)
        for name, rows in splits.items():
            rows.use_reference(files.folder / f"{name}.npy")

    if model is not None:
        heartbeat.enter(StepPhase.LOADING)
        del model
        gc.collect()
        if fabric.device.type == "cuda":
            torch.cuda.empty_cache()
    return replace(run, reference=reference)


def _list_splits(run: PreparedRun, dataset: TokenDataset) -> dict[str, Rows]:
    """Return the splits that a run reads, by name."""
    splits: dict[str, Rows] = {}
    if not run.arguments.evaluation.eval_only:
        splits["train"] = dataset.train
    if dataset.validation:
        splits["validation"] = dataset.validation
    return splits


def _describe_inputs(run: PreparedRun, dataset: TokenDataset, reference: ReferenceModel) -> dict[str, str]:
    """Return the values that decide the log-probabilities of a token dataset, by their names in messages."""
    adapter = run.model.adapter
    if run.arguments.preference.reference is not None:
        adapter = reference_run(run, reference.location).model.adapter
    kinds = []  # a new adapter of lora changes nothing
    if adapter and adapter.base_weights:
        kinds.append(adapter.base_weights)
    if adapter and adapter.kind != "lora":
        kinds.append(adapter.kind)
    dtype: str = run.arguments.model.precision
    if run.arguments.model.float8:
        dtype += " float8"
    return {
        "token dataset": dataset.fingerprint,
        "model": reference.fingerprint,
        "dtype": dtype,
        "attention": run.model.config._attn_implementation,
        "weight type": " ".join(kinds),
    }


def _agree_on_files(
    fabric: Fabric, run: PreparedRun, dataset: TokenDataset, content: ReferenceContent
) -> ReferenceFiles:
    """Return on all ranks the files that rank 0 finds; a fault is raised on all ranks."""
    folder = ""
    missing_splits: list[str] = []
    fault = ""
    if fabric.is_global_zero:
        try:
            files = find_files(dataset.folder, run.folder, content, _list_splits(run, dataset))
            folder = str(files.folder)
            missing_splits = list(files.missing_splits)
        except InputError as error:
            fault = str(error)
    # Ranks may see different files on a network file system: rank 0 decides.
    folder, missing_splits, fault = fabric.broadcast((folder, missing_splits, fault))
    if fault:
        raise InputError(fault)
    return ReferenceFiles(Path(folder), missing_splits)


def _set_up_reference(fabric: Fabric, run: PreparedRun, reference: ReferenceModel, *, is_saved: bool) -> _FabricModule:
    """Set up the reference model, without dropout; raise an InputError if its weights have changed since the start."""
    model_run = reference_run(run, reference.location)
    if is_saved:
        check_unchanged(reference, hash_reference(fabric, model_run, reference.location))
    model, _ = set_up_model(fabric, model_run, shows_notes=False)
    return model.eval()


@torch.no_grad()
def _compute_logps(
    fabric: Fabric, model: _FabricModule, run: PreparedRun, name: str, rows: Rows, heartbeat: Heartbeat
) -> np.ndarray:
    """Return the log-probabilities of both answers of each pair in a split, fp64 [pairs, 2]."""
    assert rows.index is not None
    arguments = run.arguments
    ranks = data_ranks(fabric)
    batch_size = arguments.training.micro_batch_size
    batches = validation_batches(
        rows,
        batch_size,
        world_size=ranks.size,
        rank=ranks.rank,
        limit=None,
        seed=arguments.data.seed,
        num_workers=arguments.data.num_workers,
    )
    logps = torch.zeros(count_pairs(rows), 2, dtype=torch.float64, device=fabric.device)
    for index, batch in enumerate(batches):
        heartbeat.enter(StepPhase.VALIDATION, index)
        progress.info("reference log-probabilities of %s, batch %d of %d", name, index + 1, len(batches))
        batch_logps, _ = answer_logps(model, place_batch(fabric, batch))
        row_range = positions(index, batch_size, ranks.size, ranks.rank)
        local_rows = np.arange(row_range.start, min(row_range.stop, len(rows)))
        if len(local_rows):
            pairs = torch.from_numpy(rows.index.pieces(local_rows).documents)
            logps[pairs.to(fabric.device)] = batch_logps
    if fabric.world_size > 1:
        # the ranks of a group have the same values: only the first one adds them
        is_first_of_group = fabric.global_rank % ranks.group_size == 0
        if not is_first_of_group:
            logps.zero_()
        dist.all_reduce(logps)
    return logps.cpu().numpy()
