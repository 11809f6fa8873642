"""Weights are written in blocks, so that memory does not depend on their size, and in the format's layout."""

import json
import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fabric_train.export import hub_format
from fabric_train.export.hub_format import write_weights
from fabric_train.model.weight_files import CheckpointTensors

SHAPES = {"embed": (700, 64), "bias": (3000,), "experts": (3, 40, 64), "scale": (), "empty": (0, 4), "last": (5, 1)}


class WatchedTensors(CheckpointTensors):
    """Tensors of a file that remember the largest block that was read, and refuse to be read in full."""

    largest = 0

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        block = super().read_block(name, offsets, shape)
        self.largest = max(self.largest, block.nbytes)
        return block

    def read(self, name: str) -> torch.Tensor:
        raise AssertionError("a tensor was read in full")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("max_shard_size", ["1GB", "60KB"])
def test_blocks_of_rows_become_the_whole_tensors(
    dtype: torch.dtype, max_shard_size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_format, "BLOCK_BYTES", 12_000)
    tensors = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    save_file(tensors, tmp_path / "stored.safetensors")
    stored = WatchedTensors([tmp_path / "stored.safetensors"])
    folder = tmp_path / "written"
    folder.mkdir()
    write_weights(stored, folder, dtype, max_shard_size, "writing")
    files = sorted(folder.glob("*.safetensors"))
    assert (len(files) > 1) == (folder / "model.safetensors.index.json").is_file() == (max_shard_size == "60KB")
    written = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name].to(dtype)) for name in tensors)
    assert 10_000 < stored.largest <= 12_000  # a row of the experts has 10,240 bytes


def test_tensors_follow_each_other_from_an_aligned_start(tmp_path: Path) -> None:
    save_file({name: torch.randn(shape) for name, shape in SHAPES.items()}, tmp_path / "stored.safetensors")
    stored = CheckpointTensors([tmp_path / "stored.safetensors"])
    (tmp_path / "written").mkdir()
    write_weights(stored, tmp_path / "written", torch.bfloat16, "1GB", "writing")
    content = (tmp_path / "written" / "model.safetensors").read_bytes()
    (header_bytes,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + header_bytes])
    assert header.pop("__metadata__") == {"format": "pt"}
    offsets = [entry["data_offsets"] for entry in header.values()]
    assert offsets[0][0] == 0
    assert all(one[1] == other[0] for one, other in pairwise(offsets))
    assert 8 + header_bytes + offsets[-1][1] == len(content)
    assert (8 + header_bytes) % 8 == 0
