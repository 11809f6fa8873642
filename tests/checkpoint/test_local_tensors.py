"""The parts of a parameter that each rank holds, where ranks share parts."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fabric_train.checkpoint.tensors import local_weights


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """A rank of eight, in torch's process group without communication."""
    dist.init_process_group("fake", rank=request.param, world_size=8, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize("rank", range(8), indirect=True)
def test_copies_of_a_part_are_numbered_over_machines_and_tensor_groups(rank: int) -> None:
    """2 machines × 2 shards × 2 ranks of a tensor group; the parameter is split over the shards alone."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    placements = (Replicate(), Shard(0), Replicate())
    full = torch.arange(12.0).reshape(4, 3)
    parameter = DTensor.from_local(full.chunk(2)[rank // 2 % 2], mesh, placements, run_check=False)
    model = nn.Module()
    model.weight = nn.Parameter(parameter)
    (part,) = local_weights(model)
    assert (part.num_copies, part.copy) == (4, {0: 0, 1: 1, 4: 2, 5: 3}[rank - rank // 2 % 2 * 2])
    assert torch.equal(torch.cat(part.segments), full.chunk(2)[rank // 2 % 2].flatten())
