"""Sharded checkpoints of many ranks in the shape of large models: headers and descriptions are real, tensors are holes.

One process plays all ranks. A rank has the rows of each tensor that FSDP2 gives it, and writes what it would write,
but for the tensors' content and hashes.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from fabric_train.checkpoint.files import CHECKSUMS, FilePiece, hash_file
from fabric_train.checkpoint.rank_writer import write_part
from fabric_train.checkpoint.tensors import LocalTensor, first_rows, sharded_writes
from fabric_train.checkpoint.trainer_json import FORMAT, TrainerState
from fabric_train.model.origin import ModelOrigin
from fabric_train.model.shard_index import Entry

_PIECE_BYTES = 64 << 20  # as RankWriter hashes them
_MOMENTS = ("exp_avg", "exp_avg_sq")
_NO_HASH = "0123456789abcdef" * 2
Shapes = Mapping[str, torch.Size]


def write_parts(folder: Path, shapes: Shapes, num_ranks: int, step: int) -> None:
    """Write what the ranks of a save have written when rank 0 begins to complete it."""
    folder.mkdir(parents=True)
    (folder / "trainer.json").write_text(json.dumps(_trainer(step)))
    for rank in range(num_ranks):
        weights = local_rows(shapes, rank, num_ranks)
        hashes: dict[str, list[FilePiece]] = {}
        rows: dict[str, list[int]] = {}
        if rank == 0:
            hashes["trainer.json"] = hash_file(folder / "trainer.json")
        for part, tensors in (("model", weights), ("optimizer", _states(weights))):
            writes = sharded_writes(part, tensors, rank)
            rows[part] = first_rows(tensors)
            if not writes:
                continue
            header = writes[0]
            size = max(write.offset + write.data.nbytes for write in writes)
            path = folder / header.file
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(header.data.numpy().tobytes())
            os.truncate(path, size)
            begins = range(0, size, _PIECE_BYTES)
            hashes[header.file] = [FilePiece(begin, min(begin + _PIECE_BYTES, size), _NO_HASH) for begin in begins]
        write_part(folder, rank, hashes, rows)


def local_rows(shapes: Shapes, rank: int, num_ranks: int) -> list[LocalTensor]:
    """Return a rank's rows of all tensors as FSDP2 shards them, in bf16 without content."""
    tensors = []
    for name, shape in shapes.items():
        row = shape[1:].numel()
        chunk = -(-shape[0] // num_ranks)
        first, last = (min(number * chunk, shape[0]) for number in (rank, rank + 1))
        parts = (torch.empty((last - first) * row, dtype=torch.bfloat16, device="meta"),) if first < last else ()
        tensors.append(LocalTensor(name, shape, torch.bfloat16, first * row, parts, 1, 0))
    return tensors


def entries(shapes: Shapes) -> dict[str, list[Entry]]:
    """Return the tensors of both parts, which rank 0 needs to complete the checkpoint."""
    weights = local_rows(shapes, 0, 1)
    parts = {"model": weights, "optimizer": _states(weights)}
    return {name: [(each.name, each.dtype, each.shape) for each in part] for name, part in parts.items()}


def _states(weights: list[LocalTensor]) -> list[LocalTensor]:
    """Return the states of AdamW, as ``local_optimizer_state`` orders them."""
    states = []
    for moment in _MOMENTS:
        for each in weights:
            states.append(LocalTensor(f"{each.name}.{moment}", each.shape, each.dtype, each.begin, each.segments, 1, 0))
    for each in weights:
        parts = (torch.empty(1, device="meta"),) if each.begin == 0 and each.segments else ()
        states.append(LocalTensor(f"{each.name}.step", torch.Size(), torch.float32, 0, parts, 1, 0))
    return states


def link_checkpoint(source: Path, target: Path, step: int) -> None:
    """Make a checkpoint of another step that shares the large files with ``source``."""
    for file in source.rglob("*.*"):
        if file.is_dir():
            continue
        copy = target / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        os.link(file, copy)
    (target / "trainer.json").unlink()
    (target / "trainer.json").write_text(json.dumps(_trainer(step)))
    content = json.loads((target / CHECKSUMS).read_text())
    pieces = hash_file(target / "trainer.json")
    content["files"]["trainer.json"] = {"size": pieces[-1].end, "pieces": pieces}
    (target / CHECKSUMS).unlink()
    (target / CHECKSUMS).write_text(json.dumps(content) + "\n")


def _trainer(step: int) -> dict[str, object]:
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
