"""What ``--cpu_offload`` keeps in host memory stays there: at a save and at a resume.

The ranks' devices are ``meta`` here: a tensor that is moved there has no content left.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

from fabric_train.checkpoint.tensors import _read_state, local_optimizer_state, local_weights
from fabric_train.model.weight_files import CheckpointTensors
from fabric_train.optim.adamw import AdamW
from fabric_train.optim.states import State

FULL = torch.arange(48.0).view(8, 6)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """The devices of two ranks; this process is the first."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("meta", (2,), mesh_dim_names=("shard",))
    dist.destroy_process_group()


@pytest.fixture
def model(mesh: DeviceMesh) -> Any:
    """A model with one weight; this rank has its upper half in host memory, as FSDP2 offloads it."""
    tensor_meta = TensorMeta(FULL.shape, FULL.stride(), FULL.dtype)
    spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=tensor_meta)
    model: Any = nn.Module()
    # not from_local, which moves its tensor to the mesh's device
    model.weight = nn.Parameter(DTensor(FULL[:4].clone(), spec, requires_grad=True))
    return model


def test_moments_are_restored_to_where_the_weights_are(model: Any, tmp_path: Path) -> None:
    save_file({"weight.exp_avg": FULL}, tmp_path / "optimizer.safetensors")
    tensors = CheckpointTensors([tmp_path / "optimizer.safetensors"])
    restored = _read_state(tensors, "weight", State("exp_avg", torch.float32), model.weight, {})
    assert isinstance(restored, DTensor)
    assert torch.equal(restored.to_local(), FULL[:4])


def test_a_save_reads_weights_and_moments_where_they_are(model: Any) -> None:
    weight = model.weight
    optimizer = AdamW([weight])
    moments = {key: torch.empty_like(weight) for key in ("exp_avg", "exp_avg_sq")}
    optimizer.state[weight] = {"step": torch.ones(()), **moments}
    saved = {tensor.name: tensor for tensor in (*local_weights(model), *local_optimizer_state(model, optimizer))}
    for name, held in {"weight": weight, **{f"weight.{key}": moment for key, moment in moments.items()}}.items():
        (part,) = saved[name].segments
        assert part.data_ptr() == held.to_local().data_ptr()
