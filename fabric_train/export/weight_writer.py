"""Write tensors into safetensors files block by block, so that memory does not depend on the size of the model."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from fabric_train.checkpoint.file_layout import safetensors_header
from fabric_train.cli.output import open_console
from fabric_train.model.weight_files import StoredTensors, Weights

INDEX_NAME = "model.safetensors.index.json"
BLOCK_BYTES = 4 << 20


def write_weights(tensors: StoredTensors, folder: Path, dtype: torch.dtype, max_shard_size: str, title: str) -> None:
    """Write ``model.safetensors``, or shards with an index. One block of rows of one tensor is in memory at a time.

    Args:
        tensors: The weights by the names of the model's parameters.
        folder: An existing folder.
        dtype: Dtype of the written weights.
        max_shard_size: Largest file, such as 5GB; a larger tensor gets a file of its own.
        title: What the progress bar says.
    """
    outline = {name: torch.empty(tensors.shape(name), dtype=dtype, device="meta") for name in tensors}
    plan = split_torch_state_dict_into_shards(outline, max_shard_size=max_shard_size)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=open_console(stderr=True)) as progress:
        task = progress.add_task(title, total=plan.metadata["total_size"])
        for filename, names in plan.filename_to_tensors.items():
            header, _ = safetensors_header([(name, dtype, tensors.shape(name)) for name in names], {"format": "pt"})
            with (folder / filename).open("wb", buffering=0) as file:
                _write(file, memoryview(header))
                for name in names:
                    for block in blocks(tensors, name, tensors.shape(name)):
                        values = block.to(dtype).contiguous().reshape(-1)
                        progress.advance(task, values.nbytes)
                        _write(file, values.view(torch.uint8).numpy().data)
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def blocks(weights: Weights, name: str, shape: torch.Size) -> Iterator[torch.Tensor]:
    """Yield the blocks of consecutive rows that make up a tensor, each of about ``BLOCK_BYTES``, or of one row."""
    if not shape:
        yield weights.read_block(name, (), ())
        return
    rest = shape[1:]
    num_rows = max(1, BLOCK_BYTES // max(1, math.prod(rest) * 4))  # in fp32
    for begin in range(0, shape[0], num_rows):
        rows = min(num_rows, shape[0] - begin)
        yield weights.read_block(name, (begin, *(0 for _ in rest)), (rows, *rest))


def _write(file: BinaryIO, content: memoryview) -> None:
    """Write all bytes; one call to the kernel writes 2 GiB at most."""
    while content:
        content = content[file.write(content) :]
