"""Llama-3-8B (configs/llama-3-8b.yaml) as rank 0 of 8 has it: parameters and gradients on meta tensors."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

_WIDTH = 4096
_KEY_WIDTH = 1024
_MLP_WIDTH = 14336
_VOCABULARY = 128256
_NUM_LAYERS = 32
_LAYER_SHAPES = {
    "input_layernorm": (_WIDTH,),
    "self_attn.q_proj": (_WIDTH, _WIDTH),
    "self_attn.k_proj": (_KEY_WIDTH, _WIDTH),
    "self_attn.v_proj": (_KEY_WIDTH, _WIDTH),
    "self_attn.o_proj": (_WIDTH, _WIDTH),
    "post_attention_layernorm": (_WIDTH,),
    "mlp.gate_proj": (_MLP_WIDTH, _WIDTH),
    "mlp.up_proj": (_MLP_WIDTH, _WIDTH),
    "mlp.down_proj": (_WIDTH, _MLP_WIDTH),
}


def _parameter_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (_VOCABULARY, _WIDTH)}
    for layer in range(_NUM_LAYERS):
        for name, shape in _LAYER_SHAPES.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    shapes["model.norm.weight"] = (_WIDTH,)
    shapes["lm_head.weight"] = (_VOCABULARY, _WIDTH)
    return shapes


SHAPES = _parameter_shapes()
"""The full shape of each of the 291 parameters."""

RANKS = 8
NUM_ELEMENTS = sum(torch.Size(shape).numel() for shape in SHAPES.values()) // RANKS
"""Of all parameters of this rank: every number of rows is a multiple of 8."""


@contextmanager
def eight_ranks() -> Iterator[None]:
    """Make this process rank 0 of a process group whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


def sharded_parameters(fsdp2: bool) -> dict[str, nn.Parameter]:
    """Return this rank's bf16 parameters by name, with gradients: vectors as FSDP1 has them, or DTensors of FSDP2."""
    mesh = init_device_mesh("cpu", (RANKS,)) if fsdp2 else None
    parameters = {}
    for name, shape in SHAPES.items():
        local_shard = torch.empty(shape[0] // RANKS, *shape[1:], dtype=torch.bfloat16, device="meta")
        if mesh:
            parameter = nn.Parameter(DTensor.from_local(local_shard, mesh, [Shard(0)], run_check=False))
        else:
            parameter = nn.Parameter(local_shard.flatten())
        parameter.grad = torch.empty_like(parameter)
        parameters[name] = parameter
    return parameters
