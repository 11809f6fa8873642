"""Reference log-probabilities of preference pairs: computed once by the run's kind of model, kept beside the rows.

So a run has one model in memory. The files lie in ``DATASET/reference/HASH``, or in the run's folder if the token
dataset cannot be written: ``train.npy`` and ``validation.npy``, fp64 [pairs, 2] of chosen and rejected answers in the
order of the document index, and ``reference.json``, which says what the hash is of.
"""

import gc
import hashlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from huggingface_hub import try_to_load_from_cache
from lightning import Fabric

from fabric_train import checkpoint as checkpoints
from fabric_train.checkpoint import TrainerJson, TrainerState, read_trainer_json
from fabric_train.checkpoint.adapter_folder import (
    files_of_adapter,
    find_base,
    is_adapter,
    read_adapter,
    read_base_name,
    trained_adapter,
)
from fabric_train.cli.errors import InputError, naming_option
from fabric_train.data.step_sampler import positions, validation_batches
from fabric_train.data.streaming import Stream
from fabric_train.data.token_dataset import Rows, TokenDataset
from fabric_train.distributed.ranks import data_ranks, gather_over_ranks
from fabric_train.distributed.signals import Heartbeat, StepPhase
from fabric_train.files.regular_file import check_no_link, open_regular, read_json, write_atomically
from fabric_train.model.context_parallel import place_batch
from fabric_train.model.hf_model import ModelShape, check_readable, read_shape
from fabric_train.model.init_weights import new_shape
from fabric_train.model.load_weights import find_safetensors
from fabric_train.model.origin import ReferenceModel
from fabric_train.model.parallelize import check_tensor_parallel
from fabric_train.token_dataset.manifest import REFERENCE
from fabric_train.training.build_run import set_up_model
from fabric_train.training.objective import answers_of
from fabric_train.training.prepared_run import PreparedRun, StartingPoint
from fabric_train.training.run_log import log, progress

_FILE = "reference.json"
_READ_BYTES = 1 << 24


@dataclass(frozen=True)
class _Content:
    """The content of ``reference.json``; ``made_of`` decides the values, ``files`` has the XXH3-128 of each file."""

    made_of: dict[str, str]
    model: str
    files: dict[str, str] = field(default_factory=dict)


def check_reference(run: PreparedRun) -> None:
    """Raise an InputError if ``--reference`` names no model, or one with another vocabulary than the run's model."""
    if (given := run.arguments.preference.reference) is None or run.arguments.planning.plan:
        return
    with naming_option("--reference ", instead_of="--model_name "):
        shape = _reference_run(run, _place(run)).model
        if not (Path(shape.source) / "trainer.json").is_file():
            check_readable(shape.source)
    if shape.vocab_size != run.model.vocab_size:
        raise InputError(
            f"--reference {given}: it has {shape.vocab_size} tokens and {run.model.source} has {run.model.vocab_size}; "
            "give a model of the same tokenizer"
        )
    if (shape.max_positions or math.inf) < run.plan.tokens_per_row:
        raise InputError(
            f"--reference {given}: it takes {shape.max_positions} tokens and the rows have {run.plan.tokens_per_row}; "
            "give another reference, or tokenize with a smaller --max_length"
        )
    if shape.adapter and run.arguments.fsdp.tensor_parallel_size > 1:
        raise InputError(f"--tensor_parallel_size does not work with the adapter --reference {given}; merge it first")
    check_tensor_parallel(shape.config, f"--reference {given}", run.arguments.fsdp.tensor_parallel_size)


def compare_with_reference(fabric: Fabric, run: PreparedRun, heartbeat: Heartbeat) -> PreparedRun:
    """Give the run's pairs their reference log-probabilities if its objective needs them, and return it with the model.

    Files that are not there yet are computed by all ranks, before the run's own model is built. All ranks call
    this together.
    """
    if not run.arguments.preference.needs_reference or run.arguments.evaluation.self_check:
        return run
    progress.info("looking for reference log-probabilities")
    run, reference = _with_saved_reference(run)
    assert not isinstance(run.data, Stream)  # preflight refuses it
    if is_new := reference is None:
        place = _place(run)
        reference = ReferenceModel(place, _fingerprint(fabric, _reference_run(run, place), place))
    contents = [_Content(_made_of(run, part, reference), reference.place) for part in run.data.parts]
    agreed = [_agree(fabric, run, part, content) for part, content in zip(run.data.parts, contents, strict=True)]
    model = None
    for part, content, (folder, missing) in zip(run.data.parts, contents, agreed, strict=True):
        splits = _splits(run, part)
        if missing:
            if model is None:  # for all token datasets
                model = _set_up(fabric, run, reference, is_new)
            found = {name: _of_split(fabric, model, run, name, splits[name], heartbeat) for name in missing}
            if fabric.is_global_zero:
                _write(folder, content, found)
            fabric.barrier()
            pairs = sum(map(len, found.values()))
            log.info("reference log-probabilities of %s pairs → %s", f"{pairs:,}", folder)
        for name, rows in splits.items():
            rows.use_reference(folder / f"{name}.npy")
    if model is not None:
        heartbeat.enter(StepPhase.LOADING)
        del model
        gc.collect()
        if fabric.device.type == "cuda":
            torch.cuda.empty_cache()
    return replace(run, reference=reference)


def _splits(run: PreparedRun, part: TokenDataset) -> dict[str, Rows]:
    """Return the splits that a run reads, by name."""
    splits = {} if run.arguments.evaluation.eval_only else {"train": part.train}
    return splits | ({"validation": part.validation} if part.validation else {})


def _with_saved_reference(run: PreparedRun) -> tuple[PreparedRun, ReferenceModel | None]:
    """Return a run, with the ``--reference`` that it began with if it gives none, and the reference of its checkpoint.

    There is no such reference if the run begins, or gives another one.
    """
    if run.start.checkpoint is None or not (run.start.resumes or run.arguments.evaluation.only_reads):
        return run, None
    saved = read_trainer_json(run.start.checkpoint)
    given = run.arguments
    name = saved.arguments.get("reference")
    if given.preference.reference is not None and not is_reference_of(saved, given.preference.reference):
        return run, None
    preference = replace(given.preference, reference=name)
    return replace(run, arguments=replace(given, preference=preference)), saved.reference


def _place(run: PreparedRun) -> str:
    """Return the place of the reference of a run that begins: of ``--reference``, or of the weights it starts from."""
    given = run.arguments.preference.reference
    checkpoint = run.start.checkpoint
    if given is not None:
        return _place_of(given)
    if run.adapter_base is not None:
        if checkpoint is not None and is_adapter(checkpoint):
            return os.path.realpath(checkpoint)
        begins_with = run.arguments.adapter.init_adapter
        return os.path.realpath(begins_with) if begins_with else run.adapter_base.place
    if checkpoint is not None:
        return os.path.realpath(checkpoint)
    name = run.arguments.model.model_name
    return "" if run.model.is_new else os.path.realpath(name) if Path(name).is_dir() else name


def _place_of(given: str) -> str:
    """Return the place of the model that ``--reference`` names: an absolute path, or a name on the hub."""
    if checkpoints.means_checkpoint(Path(given)):
        return os.path.realpath(checkpoints.find_checkpoint(Path(given)))
    if Path(given).is_dir():
        return os.path.realpath(given)
    return given


def is_reference_of(saved: TrainerJson, given: str) -> bool:
    """Return whether ``--reference`` names the reference that a checkpoint's run began with, by whatever path."""
    if given == saved.arguments.get("reference"):
        return True
    return saved.reference is not None and _place_of(given) == saved.reference.place


def _reference_run(run: PreparedRun, place: str) -> PreparedRun:
    """Return a run at step 0 whose model is the reference: what ``build_run.set_up_model`` needs of it.

    A run with an adapter, whose reference is not given, has its own adapter there, a new one or that at ``place``.
    """
    given = run.arguments
    folder = Path(place)
    if place.startswith("/") and not folder.is_dir():
        fault = f"the reference model {place} is gone; put it back, or give --reference"
        missing = f"--reference {place}: no such folder; give a hub name, folder, checkpoint or run"
        raise InputError(missing if given.preference.reference else fault)
    is_saved = bool(place) and (folder / "trainer.json").is_file()
    of_adapter = _is_adapter(place)
    start = StartingPoint(folder if is_saved else None, TrainerState())
    if run.adapter_base is not None and given.preference.reference is None:
        return replace(run, start=start if of_adapter else StartingPoint(None, TrainerState()))
    layer_class = given.fsdp.auto_wrap_policy
    attention = run.model.config._attn_implementation
    if of_adapter:
        name = given.model.model_name if is_saved else read_base_name(folder)
        base = find_base(name, folder if is_saved else None, "--model_name")
        adapter = replace(given.adapter, adapter=None, init_adapter=place, base_weights=None)
        read = trained_adapter if is_saved else read_adapter
        shape = read_shape(base.place, layer_class, attention, read(folder))
        return replace(run, start=start, model=shape, adapter_base=base, arguments=replace(given, adapter=adapter))
    return replace(run, start=start, model=_shape(run, place), adapter_base=None)


def _is_adapter(place: str) -> bool:
    return bool(place) and Path(place).is_dir() and is_adapter(Path(place))


def _shape(run: PreparedRun, place: str) -> ModelShape:
    given = run.arguments
    attention = run.model.config._attn_implementation
    if place:
        return read_shape(place, given.fsdp.auto_wrap_policy, attention)
    if run.model.is_new:
        return run.model
    assert not isinstance(run.data, Stream)
    tokenizer = run.data.manifest and run.data.manifest.tokenizer
    ends = (tokenizer.bos_token_id, tokenizer.eos_token_id) if tokenizer else ()
    shape = new_shape(given.model, given.fsdp.auto_wrap_policy, *ends)
    shape.config._attn_implementation = attention
    return shape


def _fingerprint(fabric: Fabric, run: PreparedRun, place: str) -> str:
    """Return a hash of the bytes of the model's files, each read by one rank; of a new model, of its seed."""
    if not place:
        config = json.dumps(run.model.config.to_dict(), sort_keys=True, default=str)
        return hashlib.sha256(f"{run.arguments.data.seed} {config}".encode()).hexdigest()
    files = list(_files_of(run.adapter_base.place if run.adapter_base else place))
    files += files_of_adapter(Path(place)) if _is_adapter(place) else []
    own = torch.zeros(len(files), 2, dtype=torch.int64)
    for number in range(fabric.global_rank, len(files), fabric.world_size):
        progress.info("hashing the reference model's files %d/%d", number + 1, len(files))
        own[number] = torch.from_numpy(np.frombuffer(bytes.fromhex(_hash_of(files[number])), np.int64).copy())
    of_files = gather_over_ranks(fabric, own).sum(dim=0).cpu()  # the others have zeros
    return hashlib.sha256(of_files.numpy().tobytes()).hexdigest()


def _files_of(place: str) -> Iterator[Path]:
    """Yield the configuration and the files of weights of a hub name, a folder or a checkpoint."""
    folder = Path(place)
    if not folder.is_dir():  # it is in the cache, where the run has read it
        folder = Path(str(try_to_load_from_cache(place, "config.json"))).parent
    yield folder / "config.json"
    if (folder / "model").is_dir() and (folder / "trainer.json").is_file():
        yield from sorted((folder / "model").glob("*.safetensors"))
    elif files := find_safetensors(place):
        yield from files
    else:  # pickles
        yield from sorted(folder.glob("*.bin"))


def _hash_of(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with open_regular(file, "put the file back") as opened:
        while part := opened.read(_READ_BYTES):
            digest.update(part)
    return digest.hexdigest()


def _made_of(run: PreparedRun, part: TokenDataset, reference: ReferenceModel) -> dict[str, str]:
    """Return what decides the values of a token dataset, by what messages call it."""
    is_own = run.arguments.preference.reference is None
    adapter = (run if is_own else _reference_run(run, reference.place)).model.adapter
    changes = [adapter.base_weights, adapter.kind if adapter.kind != "lora" else None] if adapter else []
    return {
        "token dataset": part.fingerprint,
        "model": reference.fingerprint,
        "dtype": f"{run.arguments.model.precision}{' float8' if run.arguments.model.float8 else ''}",
        "attention": run.model.config._attn_implementation,
        "kind of weights": " ".join(filter(None, changes)),  # a new adapter of lora changes nothing
    }


def _agree(fabric: Fabric, run: PreparedRun, part: TokenDataset, content: _Content) -> tuple[Path, list[str]]:
    """Return, as rank 0 finds it, the folder of the values and the names of the splits that are still missing there."""
    found: tuple[str, list[str], str] = ("", [], "")
    if fabric.is_global_zero:
        try:
            folder, missing = _look(run, part, content)
            found = str(folder), missing, ""
        except InputError as error:
            found = "", [], str(error)
    folder_name, missing, fault = fabric.broadcast(found)
    if fault:
        raise InputError(fault)
    return Path(folder_name), missing


def _look(run: PreparedRun, part: TokenDataset, content: _Content) -> tuple[Path, list[str]]:
    name = hashlib.sha256(json.dumps(content.made_of, sort_keys=True).encode()).hexdigest()[:16]
    beside = part.folder / REFERENCE / name
    own = run.folder / REFERENCE / name
    splits = _splits(run, part)
    for folder in (beside, own):
        if (folder / _FILE).is_file():
            return folder, _missing(folder, content, splits)
    parent = next(path for path in (part.folder / REFERENCE, part.folder) if path.is_dir())
    return beside if os.access(parent, os.W_OK) else own, list(splits)


def _missing(folder: Path, content: _Content, splits: dict[str, Rows]) -> list[str]:
    """Return the splits without a file; raise an InputError if a file is of something else, or damaged."""
    file = folder / _FILE
    fix = f"remove {folder}, and it is computed again"
    there = read_json(file, _Content, fix)
    other = [what for what, value in content.made_of.items() if there.made_of.get(what) != value]
    if other:
        raise InputError(f"{file}: of another {other[0]} ({there.model}) than {content.model or 'this run'}; {fix}")
    missing = []
    for name, rows in splits.items():
        array = folder / f"{name}.npy"
        if name not in there.files or not array.is_file():
            missing.append(name)
        elif _hash_of(array) != there.files[name] or len(np.load(array, mmap_mode="r")) != _num_pairs(rows):
            raise InputError(f"{array}: damaged, its content has changed since it was written; {fix}")
    return missing


def _num_pairs(rows: Rows) -> int:
    assert rows.index is not None  # every token dataset with pairs has an index
    return int(rows.index.rows["documents"][-1])


def _write(folder: Path, content: _Content, found: dict[str, np.ndarray]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / _FILE
    files = dict(read_json(file, _Content, f"remove {folder}").files) if file.is_file() else {}
    for name, values in found.items():
        array = folder / f"{name}.npy"
        temporary = folder / f".{name}.{os.getpid()}.npy"
        check_no_link(array)
        with temporary.open("xb") as opened:
            np.save(opened, values, allow_pickle=False)
            opened.flush()
            os.fsync(opened.fileno())
        files[name] = _hash_of(temporary)
        temporary.replace(array)
    write_atomically(file, json.dumps(asdict(replace(content, files=files)), indent=2) + "\n")


def _set_up(fabric: Fabric, run: PreparedRun, reference: ReferenceModel, is_new: bool) -> Any:
    """Return the reference model, without dropout; raise an InputError if its weights are others than at the start."""
    reference_run = _reference_run(run, reference.place)
    if not is_new and _fingerprint(fabric, reference_run, reference.place) != reference.fingerprint:
        raise InputError(
            f"the reference model {reference.place} has other weights than when the run began; put them back"
        )
    return set_up_model(fabric, reference_run, shows_notes=False)[0].eval()


@torch.no_grad()
def _of_split(fabric: Fabric, model: Any, run: PreparedRun, name: str, rows: Rows, heartbeat: Heartbeat) -> np.ndarray:
    assert rows.index is not None
    given = run.arguments
    ranks = data_ranks(fabric)
    device = fabric.device
    size = given.training.micro_batch_size
    batches = validation_batches(rows, size, ranks.size, ranks.rank, None, given.data.seed, given.data.num_workers)
    values = torch.zeros(_num_pairs(rows), 2, dtype=torch.float64, device=device)
    for number, batch in enumerate(batches):
        heartbeat.enter(StepPhase.VALIDATION, number)
        progress.info("reference log-probabilities of %s, batch %d of %d", name, number + 1, len(batches))
        of_answers, _ = answers_of(model, place_batch(fabric, batch))
        place = positions(number, size, ranks.size, ranks.rank)
        own = np.arange(place.start, min(place.stop, len(rows)))
        if len(own):
            values[torch.from_numpy(rows.index.pieces(own).documents).to(device)] = of_answers
    if fabric.world_size > 1:
        if fabric.global_rank % ranks.group_size:
            values.zero_()  # the first rank of the group has the same
        dist.all_reduce(values)
    return values.cpu().numpy()
