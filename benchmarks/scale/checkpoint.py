"""Measure what one process does alone for checkpoints of a 70B that up to 512 ranks save, and 384 ranks open."""

import math
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.measure import ROOT
from benchmarks.scale.series import Point, Series
from fabric_train.arguments import TrainArguments, parse
from fabric_train.checkpoint.discovery import (
    lowest_loss,
    newest_checkpoint,
    prune,
    replace_checkpoint,
    saved_checkpoints,
)
from fabric_train.checkpoint.files import CHECKSUMS, find_damage
from fabric_train.checkpoint.rank_writer import join_rank_hashes
from fabric_train.model.init_weights import new_shape
from fabric_train.model.shard_index import SHARD_INDEX
from fabric_train.model.weight_files import CheckpointTensors
from tests.support.sparse_checkpoints import Shapes, entries, link_checkpoint, write_parts

_SIZES = (32, 128, 512)
_NUMBER = 50
_KEPT = 10
_SIMULATED = (
    "one process plays all ranks one after another; tensors are holes in files and their hashes are made up; 49 of the "
    "50 checkpoints are links to one; the disk is this machine's, not one that all ranks share"
)
_REAL = "headers, checksums.json and shards.json, and the functions of fabric_train that write and read them"


def measure(work: Path) -> list[Series]:
    """Return the figures of saves by 32, 128 and 512 ranks."""
    shapes = _shapes()
    found: dict[tuple[str, str, float | None], list[Point]] = {}
    for size in _SIZES:
        for quantity, unit, limit, value in _of_size(work / "run", shapes, size):
            found.setdefault((quantity, unit, limit), []).append(Point(size, value))
        shutil.rmtree(work / "run")
    series = partial(Series, part="checkpoint", sizes_of="ranks that save", simulated=_SIMULATED, real=_REAL)
    return [
        series(quantity=quantity, unit=unit, limit=limit, points=tuple(points))
        for (quantity, unit, limit), points in found.items()
    ]


def _of_size(run: Path, shapes: Shapes, num_ranks: int) -> Iterator[tuple[str, str, float | None, float]]:
    """Yield quantity, unit, limit and value of one number of ranks."""
    target = run / "checkpoints" / f"step-{_NUMBER:08d}"
    temporary = target.with_name(f".{target.name}.incomplete-benchmark")
    of_part = entries(shapes)
    write_parts(temporary, shapes, num_ranks, _NUMBER)
    joined = _seconds(lambda: join_rank_hashes(temporary, of_part))
    for step in range(_NUMBER - _KEPT, _NUMBER):
        link_checkpoint(temporary, target.with_name(f"step-{step:08d}"), step)
    renamed = _seconds(lambda: replace_checkpoint(temporary, target))
    whole = set[Path]()
    first_pruned = _seconds(lambda: prune(target, _KEPT, whole))
    later = target.with_name(f"step-{_NUMBER + 1:08d}")
    link_checkpoint(target, later, _NUMBER + 1)
    pruned = _seconds(lambda: prune(later, _KEPT, whole))
    assert len(saved_checkpoints(run)) == _KEPT
    for step in range(1, _NUMBER - _KEPT + 1):
        link_checkpoint(target, target.with_name(f"step-{step:08d}"), step)
    assert len(saved_checkpoints(run)) == _NUMBER
    num_thousands = sum(map(len, of_part.values())) / 1000
    described = [target / CHECKSUMS, *(target / part / SHARD_INDEX for part in of_part)]
    metadata = sum(file.stat().st_size for file in described)
    files = [file for file in target.rglob("*") if file.is_file()]
    yield "files of a checkpoint", "files", None, len(files)
    yield "metadata for all ranks, per thousand tensors", "MB", 1.0, metadata / 1e6 / num_thousands
    headers = [_header_bytes(file) for file in files if file.suffix == ".safetensors"]
    yield "headers of all files", "MB", None, sum(headers) / 1e6
    completed = joined + renamed
    yield f"rank 0 alone: complete the first checkpoint, remove one of {_KEPT + 1}", "s", 5.0, completed + first_pruned
    yield f"rank 0 alone: complete a later checkpoint, remove one of {_KEPT + 1}", "s", 5.0, completed + pruned
    yield (
        "rank 0 alone: lowest loss of 50 at the start",
        "s",
        5.0,
        _seconds(lambda: lowest_loss(run, "all", _NUMBER + 1)),
    )
    yield "find the newest complete of 50", "s", None, _seconds(lambda: newest_checkpoint(run))
    yield "check one, without its tensors' content", "s", None, _seconds(lambda: find_damage(target))
    seconds, num_opened, num_bytes = _open_as_one_of_384(target)
    yield "open as one of 384 ranks, up to the first byte of each tensor", "s", None, seconds
    yield "files opened by one of 384 ranks", "files", None, num_opened
    yield "index and headers read by one of 384 ranks", "MB", None, num_bytes / 1e6


def _open_as_one_of_384(checkpoint: Path) -> tuple[float, int, int]:
    """Read an element of each row range that one of 384 ranks has; return seconds, files opened, bytes of metadata."""
    rank = 200
    num_ranks = 384
    opened = set[Path]()
    num_bytes = 0
    began_at = time.process_time()
    for part in ("model", "optimizer"):
        folder = checkpoint / part
        tensors = CheckpointTensors(sorted(folder.glob("*.safetensors")))
        for name in tensors:
            shape = tensors.shape(name)
            if not shape:
                tensors.read(name)
                continue
            chunk = math.ceil(shape[0] / num_ranks)
            first, last = (min(number * chunk, shape[0]) for number in (rank, rank + 1))
            for row in {first, last - 1} if first < last else ():
                tensors.read_block(name, (row, *[0] * (len(shape) - 1)), (1, *shape[1:]))
        num_bytes += (folder / SHARD_INDEX).stat().st_size + sum(map(_header_bytes, tensors._headers))
        opened |= set(tensors._headers)
    return time.process_time() - began_at, len(opened), num_bytes


def _header_bytes(file: Path) -> int:
    with file.open("rb") as opened:
        return 8 + int.from_bytes(opened.read(8), "little")


def _seconds(act: Callable[[], object]) -> float:
    """Return the CPU seconds of this process, and the seconds that the kernel works for it."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    act()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _shapes() -> Shapes:
    argv = ["--config", str(ROOT / "configs/llama-3-70b.yaml"), "--train_data_dir", "none", "--output_dir", "none"]
    arguments = parse(TrainArguments, argv)
    config = new_shape(arguments.model, arguments.fsdp.auto_wrap_policy).config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: parameter.shape for name, parameter in model.named_parameters()}
