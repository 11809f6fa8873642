"""Checkpoints: save, find, restore, prune. A folder under its final name is complete; everything else is a function
of the step.

step-00000500/
  trainer.json                          counters, losses, the data order's identity, arguments, versions
  config.json  generation_config.json   of the model
  tokenizer/  manifest.json             of the token dataset; of a stream only the tokenizer
  stream.json                           where every lane of a stream goes on
  model.safetensors  optimizer/         full: gathered on rank 0
  model/  optimizer/                    sharded: one safetensors file a rank, each knowing its offsets
"""

import contextlib
import json
import re
import shutil
from dataclasses import asdict, dataclass, fields
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from lightning import Fabric
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fabric_train.complete_folder import complete_folder
from fabric_train.corpus.lanes import Cursor
from fabric_train.errors import InputError
from fabric_train.optimizer import original_name
from fabric_train.weights import CheckpointTensors

FORMAT = 1
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class DataOrder:
    """What fixes which rows a step consumes; a run is resumed only where all of it is the same."""

    fingerprint: str
    num_rows: int
    rows_per_window: int
    seed: int


@dataclass(frozen=True)
class StreamOrder:
    """What fixes, beside the cursors, which rows of a stream a step consumes; a run is resumed only where all of it is
    the same.
    """

    sources: list[str]
    text_column: str
    max_length: int
    tokenizer: str
    special_text_is_plain: bool
    rows_per_window: int


@dataclass(frozen=True)
class TrainerState:
    """Where a run stands after ``step`` optimizer steps; ``epoch`` is that of the last one. Losses are of that very
    step.
    """

    step: int = 0
    epoch: int = 0
    num_tokens: int = 0
    num_samples: int = 0
    train_loss: float | None = None
    val_loss: float | None = None


@dataclass(frozen=True)
class Description:
    """What every checkpoint of a run says of it: enough to export, generate or resume with no other argument.

    ``attachments`` are files and folders copied into each: the tokenizer, and the token dataset's manifest.
    """

    state_dict_type: str
    weights_dtype: str
    data: DataOrder | StreamOrder
    arguments: dict[str, Any]
    versions: dict[str, str]
    attachments: tuple[Path, ...]


class Checkpoints:
    """Writes the checkpoints of one run. All ranks call it together."""

    def __init__(
        self,
        folder: Path,
        fabric: Fabric,
        model: Any,
        optimizer: Any,
        tied: set[str],
        description: Description,
        keep: int | None,
    ) -> None:
        """``tied`` names the weights that are another one under a second name, which are not written twice."""
        self.folder, self._tied, self._keep = folder, tied, keep
        self._fabric, self._model, self._optimizer = fabric, model, optimizer
        self._description = description

    def path(self, state: TrainerState) -> Path:
        """Return where the checkpoint of this state lies, or will."""
        return self.folder / f"step-{state.step:08d}"

    def save(self, state: TrainerState, cursors: np.ndarray | None = None) -> Path:
        """Write a checkpoint, then prune: the newest stay, and the best by validation loss.

        ``cursors``, int64 [lanes of this rank, 4], are lane, epoch, document and offset where a stream is read.
        """
        target = self.path(state)
        with contextlib.ExitStack() as stack:
            temporary = stack.enter_context(complete_folder(target)) if self._fabric.is_global_zero else None
            folder = Path(self._fabric.broadcast(str(temporary)))
            self._write_tensors(folder)
            if cursors is not None:
                self._write_cursors(folder, cursors)
            if self._fabric.is_global_zero:
                self._write_description(folder, state)
            self._fabric.barrier()  # every rank's shard is written before the folder gets its name
            if self._fabric.is_global_zero:
                for file in folder.rglob("*.safetensors"):  # safetensors lets nobody but the owner read what it writes
                    shutil.copymode(folder / "trainer.json", file)
        if self._fabric.is_global_zero and self._keep is not None:
            prune(self.folder, self._keep)
        self._fabric.barrier()
        return target

    def _write_tensors(self, folder: Path) -> None:
        weights = get_model_state_dict(self._model._forward_module)
        weights = {name: tensor for name, tensor in weights.items() if name not in self._tied}
        states = get_optimizer_state_dict(self._model._forward_module, self._optimizer.optimizer)["state"]
        moments = {f"{name}.{key}": value for name, state in states.items() for key, value in state.items()}  # type: ignore[union-attr]
        if self._description.state_dict_type == "sharded":
            for name, tensors in (("model", weights), ("optimizer", moments)):
                writer = HuggingFaceStorageWriter(str(folder / name), save_distributed=True)
                dcp.save(tensors, storage_writer=writer, no_dist=self._fabric.world_size == 1)
            return
        for path, tensors in ((folder / "model", weights), (folder / "optimizer" / "optimizer", moments)):
            whole = _gather(tensors, keep=self._fabric.is_global_zero)
            if self._fabric.is_global_zero:
                path.parent.mkdir(exist_ok=True)
                save_file(whole, path.with_suffix(".safetensors"), metadata={"format": "pt"})

    def _write_cursors(self, folder: Path, cursors: np.ndarray) -> None:
        gathered: Any = self._fabric.all_gather(torch.from_numpy(cursors).to(self._fabric.device))
        if self._fabric.is_global_zero:
            in_order = sorted(gathered.reshape(-1, 4).tolist())
            content = {"cursors": [cursor for _, *cursor in in_order]}
            (folder / "stream.json").write_text(json.dumps(content) + "\n", encoding="utf-8")

    def _write_description(self, folder: Path, state: TrainerState) -> None:
        model = self._model.module
        model.config.save_pretrained(folder)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(folder)
        for path in self._description.attachments:
            if path.is_dir():
                shutil.copytree(path, folder / path.name)
            elif path.is_file():
                shutil.copy2(path, folder / path.name)
        description = asdict(self._description)
        del description["attachments"]
        scaler = self._fabric.strategy.precision.state_dict()
        content = {"format": FORMAT, **asdict(state), **description, "grad_scaler": scaler}
        (folder / "trainer.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def find_checkpoint(path: Path) -> Path:
    """Return ``path`` itself where it is a checkpoint, else the newest of the run folder ``path``.

    Raises:
        InputError: where there is none.
    """
    if is_complete(path):
        return path
    newest = newest_checkpoint(path)
    if newest is None:
        there = "no such folder" if not path.is_dir() else "neither a complete checkpoint nor a run folder with one"
        raise InputError(f"{path}: {there}; checkpoints are RUN/checkpoints/step-...")
    return newest


def choose_checkpoint(run: Path, given: str | None, resume: bool, anew: bool, only_reads: bool) -> Path | None:
    """Return the checkpoint that a run into ``run`` starts from, None for the pretrained weights.

    Args:
        run: the run's folder.
        given: the checkpoint or run folder that the user named.
        resume: whether to go on from the newest in ``run`` where none is named.
        anew: whether the run takes weights only and counts from 0.
        only_reads: whether nothing will be written beside what is there.

    Raises:
        InputError: where there is no such checkpoint, or the run would write over another's metrics and checkpoints.
    """
    newest = newest_checkpoint(run)
    chosen = find_checkpoint(Path(given)) if given else (newest if resume else None)
    if only_reads:
        return chosen
    goes_on = chosen is not None and not anew and newest is not None and chosen.resolve() == newest.resolve()
    if newest is not None and not goes_on:
        raise InputError(
            f"--output_dir {run} holds a run up to {newest.name}: --resume true goes on from there; "
            "else give another --output_dir"
        )
    if newest is None and (run / "metrics.csv").exists() and not resume:
        raise InputError(
            f"--output_dir {run} holds a run that has saved nothing yet: --resume true begins it again; "
            "else give another --output_dir"
        )
    return chosen


def newest_checkpoint(run: Path) -> Path | None:
    """Return the complete checkpoint of a run folder (or of its ``checkpoints/``) with the highest step."""
    folder = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    return max(_complete_in(folder), default=None, key=lambda checkpoint: checkpoint.name)


def is_complete(folder: Path) -> bool:
    """Whether this is a checkpoint with all its parts; one in the making has another name and no trainer.json."""
    weights = (folder / "model.safetensors", folder / "model")
    return (folder / "trainer.json").is_file() and (folder / "optimizer").is_dir() and any(w.exists() for w in weights)


def prune(folder: Path, keep: int) -> None:
    """Remove all checkpoints of a folder but the ``keep`` newest and the one with the lowest validation loss."""
    checkpoints = sorted(_complete_in(folder), key=lambda checkpoint: checkpoint.name)
    losses = {checkpoint: read_trainer_state(checkpoint).val_loss for checkpoint in checkpoints}
    evaluated = {checkpoint: loss for checkpoint, loss in losses.items() if loss is not None}
    best = min(evaluated, key=lambda checkpoint: evaluated[checkpoint]) if evaluated else None
    for checkpoint in checkpoints[:-keep]:
        if checkpoint != best:
            doomed = checkpoint.with_name(f".{checkpoint.name}.removed")
            checkpoint.rename(doomed)  # at no moment is there half a checkpoint under a checkpoint's name
            shutil.rmtree(doomed)


def read_trainer_json(checkpoint: Path) -> dict[str, Any]:
    """Return what trainer.json says.

    Raises:
        InputError: where it is damaged or of a format this version does not know.
    """
    try:
        content = json.loads((checkpoint / "trainer.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{checkpoint / 'trainer.json'}: cannot be read ({error}); use another checkpoint") from error
    if content.get("format") != FORMAT:
        raise InputError(
            f"{checkpoint}: format {content.get('format')} is not format {FORMAT}, which this version reads"
        )
    return content


def read_trainer_state(checkpoint: Path) -> TrainerState:
    """Return where the checkpoint's run stood.

    Raises:
        InputError: where trainer.json is damaged.
    """
    content = read_trainer_json(checkpoint)
    return TrainerState(**{field.name: content[field.name] for field in fields(TrainerState)})


def read_stream_order(checkpoint: Path) -> StreamOrder | None:
    """Return what the checkpoint's run streamed, None where it read a token dataset.

    Raises:
        InputError: where trainer.json is damaged.
    """
    saved = read_trainer_json(checkpoint)["data"]
    return StreamOrder(**saved) if "sources" in saved else None


def read_cursors(checkpoint: Path) -> list[Cursor]:
    """Return where every lane of the checkpoint's stream goes on.

    Raises:
        InputError: where stream.json is damaged.
    """
    file = checkpoint / "stream.json"
    try:
        return [Cursor(*map(int, cursor)) for cursor in json.loads(file.read_text(encoding="utf-8"))["cursors"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file}: cannot be read ({error}); use another checkpoint") from error


def refuse_other_data(checkpoint: Path, data: DataOrder | StreamOrder) -> None:
    """Refuse to resume where the steps to come would not consume the rows they would have consumed.

    Raises:
        InputError: naming what differs.
    """
    saved = read_trainer_json(checkpoint)["data"]
    here = asdict(data)
    mend = "resume with the same, or take its weights alone with --weights_only true"
    if saved.keys() != here.keys():
        options = ("--streaming_dataset", "--train_data_dir")
        there, other = options if "sources" in saved else reversed(options)
        raise InputError(f"{checkpoint}: its run read {there}, not {other}; {mend}")
    advice = {
        "sources": "--streaming_dataset reads other files, or they have changed",
        "text_column": "--text_column differs",
        "max_length": "--max_length differs",
        "tokenizer": "the tokenizer is another one",
        "special_text_is_plain": "the tokenizer is of another kind",
        "fingerprint": "--train_data_dir is another token dataset",
        "num_rows": "--train_data_dir has another number of rows",
        "rows_per_window": "the rows of one optimizer step differ (--total_batch_size keeps them)",
        "seed": "--seed differs",
    }
    faults = [
        f"{checkpoint}: {advice[name]}: {_difference(saved[name], value)}; {mend}"
        for name, value in here.items()
        if saved[name] != value
    ]
    if faults:
        raise InputError(*faults)


def _difference(saved: Any, here: Any) -> str:
    """Say both values; of lists the first elements that differ."""
    if isinstance(here, list):
        saved, here = next(pair for pair in zip_longest(saved, here, fillvalue="nothing") if pair[0] != pair[1])
    return f"{saved} there, {here} here"


def restore_optimizer(checkpoint: Path, fabric: Fabric, model: Any, optimizer: Any) -> None:
    """Give each rank its part of AdamW's state, whatever the ranks and the parallelism were that wrote it.

    One tensor is held at a time.

    Raises:
        InputError: where a tensor is missing or of another shape.
    """
    tensors = CheckpointTensors(sorted((checkpoint / "optimizer").glob("*.safetensors")))
    cuts = _flat_shards(model._forward_module)
    for name, parameter in model.named_parameters():
        name = original_name(name)
        try:
            state = {key: _local_part(tensors, f"{name}.{key}", parameter, cuts) for key in _MOMENTS}
            count = tensors.read(f"{name}.step")
        except KeyError as error:
            raise InputError(
                f"{checkpoint}: the optimizer's {error.args[0]} is missing; use another checkpoint"
            ) from error
        optimizer.optimizer.state[parameter] = {"step": count.to(parameter.device), **state}
    fabric.strategy.precision.load_state_dict(read_trainer_json(checkpoint)["grad_scaler"])


def _complete_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [entry for entry in folder.iterdir() if re.fullmatch(r"step-\d{8,}", entry.name) and is_complete(entry)]


def _gather(tensors: dict[str, Any], keep: bool) -> dict[str, torch.Tensor]:
    """Join sharded tensors, one at a time, on all ranks; those that ``keep`` hold them on the CPU."""
    whole = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            joined: Any = tensor.to(tensor.device_mesh.device_type)  # offloaded shards travel by way of the device
            tensor = joined.full_tensor()
        if keep:
            whole[name] = tensor.detach().cpu().contiguous()
    return whole


def _flat_shards(module: nn.Module) -> dict[int, tuple[int, int]]:
    """For FSDP1's parameters, each a flat cut of the original: where the cut begins and ends in the flattened
    original.
    """
    cuts = {}
    for unit in FullyShardedDataParallel.fsdp_modules(module):
        if unit._handle is None:  # a unit without parameters of its own
            continue
        flat: Any = unit._handle.flat_param
        for parameter, info in zip(flat._params, flat._shard_param_infos, strict=True):
            begin, end = (info.intra_param_start_idx, info.intra_param_end_idx + 1) if info.in_shard else (0, 0)
            cuts[id(parameter)] = (begin, end)
    return cuts


def _local_part(
    tensors: CheckpointTensors, name: str, parameter: nn.Parameter, cuts: dict[int, tuple[int, int]]
) -> torch.Tensor:
    """Read of a stored tensor what ``parameter`` holds on this rank."""
    if isinstance(parameter, DTensor):
        _expect_same(tensors.shape(name), parameter.shape, name)
        mesh, placements = parameter.device_mesh, parameter.placements
        shape, offsets = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
        local = tensors.read_block(name, offsets, shape).to(parameter.to_local().device)
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
    whole = tensors.read(name)
    if id(parameter) in cuts:
        begin, end = cuts[id(parameter)]
        whole = whole.flatten()[begin:end].reshape(parameter.shape)
    _expect_same(whole.shape, parameter.shape, name)
    return whole.to(parameter.device, copy=True)


def _expect_same(stored: torch.Size, wanted: torch.Size, name: str) -> None:
    if stored != wanted:
        raise InputError(
            f"the checkpoint's {name} has shape {tuple(stored)}, the model's {tuple(wanted)}; use another checkpoint"
        )
