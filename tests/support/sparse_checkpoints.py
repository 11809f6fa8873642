"""Sharded checkpoints of many ranks in the shape of large models: headers and descriptions are real, tensors are holes.

One process plays all ranks. A rank has the rows of each tensor that FSDP2 gives it, and writes what it would write,
except the content of the tensors and its hashes. A hole in a sparse file takes no space on disk.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from fabric_train.checkpoint.files import CHECKSUMS, FilePiece, hash_file
from fabric_train.checkpoint.rank_writer import write_rank_hashes
from fabric_train.checkpoint.tensors import LocalTensor, first_rows, sharded_writes
from fabric_train.checkpoint.trainer_json import FORMAT, TrainerState
from fabric_train.model.origin import ModelOrigin
from fabric_train.model.shard_index import Entry

_PIECE_BYTES = 64 << 20  # as RankWriter hashes them
_MOMENTS = ("exp_avg", "exp_avg_sq")
_HASH_OF_HOLES = "0123456789abcdef" * 2
Shapes = Mapping[str, torch.Size]
"""The shape of each parameter by its name."""


def write_parts(folder: Path, shapes: Shapes, num_ranks: int, step: int) -> None:
    """Write what the ranks of a save have written when rank 0 begins to complete it."""
    folder.mkdir(parents=True)
    trainer_json = folder / "trainer.json"
    trainer_json.write_text(json.dumps(_trainer_json(step)))
    for rank in range(num_ranks):
        hashes: dict[str, list[FilePiece]] = {}
        if rank == 0:
            hashes["trainer.json"] = hash_file(trainer_json)
        rows_by_part: dict[str, list[int]] = {}
        weights = local_rows(shapes, rank, num_ranks)
        for part, tensors in (("model", weights), ("optimizer", _adamw_states(weights))):
            rows_by_part[part] = first_rows(tensors)
            hashes |= _write_shard(folder, part, tensors, rank)
        write_rank_hashes(folder, rank, hashes, rows_by_part)


def _write_shard(folder: Path, part: str, tensors: list[LocalTensor], rank: int) -> dict[str, list[FilePiece]]:
    """Write a rank's file of a part of the checkpoint; return hashes by its name, none if the rank has no tensors."""
    writes = sharded_writes(part, tensors, rank)
    if not writes:
        return {}
    header = writes[0]
    file = folder / header.file
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(header.data.numpy().tobytes())
    size = max(write.offset + write.data.nbytes for write in writes)
    os.truncate(file, size)  # what is after the header becomes a hole
    pieces = []
    for begin in range(0, size, _PIECE_BYTES):
        pieces.append(FilePiece(begin, min(begin + _PIECE_BYTES, size), _HASH_OF_HOLES))
    return {header.file: pieces}


def local_rows(shapes: Shapes, rank: int, num_ranks: int) -> list[LocalTensor]:
    """Return a rank's rows of all tensors as FSDP2 shards them, in bf16 without content.

    FSDP2 gives each rank the same number of rows, rounded up, so the last ranks may have fewer or none.
    """
    tensors = []
    for name, shape in shapes.items():
        num_rows = shape[0]
        row_numel = shape[1:].numel()
        rows_per_rank = -(-num_rows // num_ranks)
        first_row = min(rank * rows_per_rank, num_rows)
        end_row = min(first_row + rows_per_rank, num_rows)
        segments: tuple[torch.Tensor, ...] = ()
        if first_row < end_row:
            segments = (torch.empty((end_row - first_row) * row_numel, dtype=torch.bfloat16, device="meta"),)
        tensors.append(_only_copy(name, shape, torch.bfloat16, first_row * row_numel, segments))
    return tensors


def entries(shapes: Shapes) -> dict[str, list[Entry]]:
    """Return the tensors of both parts, "model" and "optimizer", which rank 0 needs to complete the checkpoint."""
    weights = local_rows(shapes, 0, 1)
    states = _adamw_states(weights)
    return {
        "model": [(tensor.name, tensor.dtype, tensor.shape) for tensor in weights],
        "optimizer": [(tensor.name, tensor.dtype, tensor.shape) for tensor in states],
    }


def link_checkpoint(source: Path, target: Path, step: int) -> None:
    """Make a checkpoint of another step that shares the large files with ``source``."""
    for file in source.rglob("*.*"):
        if file.is_dir():
            continue
        link = target / file.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        os.link(file, link)
    # these two files differ; to write into a link would change the file of the source
    trainer_json = target / "trainer.json"
    trainer_json.unlink()
    trainer_json.write_text(json.dumps(_trainer_json(step)))
    checksums_json = target / CHECKSUMS
    checksums = json.loads(checksums_json.read_text())
    pieces = hash_file(trainer_json)
    checksums["files"]["trainer.json"] = {"size": pieces[-1].end, "pieces": pieces}
    checksums_json.unlink()
    checksums_json.write_text(json.dumps(checksums) + "\n")


def _adamw_states(weights: list[LocalTensor]) -> list[LocalTensor]:
    """Return the states of AdamW in the order of ``local_optimizer_state``: first moments, second moments, steps."""
    states = []
    for moment in _MOMENTS:
        for weight in weights:
            states.append(
                _only_copy(f"{weight.name}.{moment}", weight.shape, weight.dtype, weight.begin, weight.segments)
            )
    for weight in weights:
        # the count of steps has no rows: the rank with the first row of the parameter has it
        has_first_row = weight.begin == 0 and bool(weight.segments)
        segments = (torch.empty(1, device="meta"),) if has_first_row else ()
        states.append(_only_copy(f"{weight.name}.step", torch.Size(), torch.float32, 0, segments))
    return states


def _only_copy(
    name: str, shape: torch.Size, dtype: torch.dtype, begin: int, segments: tuple[torch.Tensor, ...]
) -> LocalTensor:
    """Return a part of a tensor that no other rank has."""
    return LocalTensor(name, shape, dtype, begin, segments, num_copies=1, copy=0)


def _trainer_json(step: int) -> dict[str, object]:
    state = TrainerState(step=step, num_tokens=step, num_samples=step, train_loss=1.0, val_loss=1 / step)
    return {
        "format": FORMAT,
        **asdict(state),
        "state_dict_type": "sharded",
        "weights_dtype": "bfloat16",
        "data": {"fingerprint": "0", "num_rows": 10**9, "rows_per_window": 1, "seed": 0},
        "arguments": {"model_name": "random"},
        "versions": {"torch": torch.__version__},
        "base_model": asdict(ModelOrigin("random")),
    }
