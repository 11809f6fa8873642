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
_KEYS = 1024
_INNER = 14336
_VOCABULARY = 128256
_LAYERS = 32
_LAYER = {
    "input_layernorm": (_WIDTH,),
    "self_attn.q_proj": (_WIDTH, _WIDTH),
    "self_attn.k_proj": (_KEYS, _WIDTH),
    "self_attn.v_proj": (_KEYS, _WIDTH),
    "self_attn.o_proj": (_WIDTH, _WIDTH),
    "post_attention_layernorm": (_WIDTH,),
    "mlp.gate_proj": (_INNER, _WIDTH),
    "mlp.up_proj": (_INNER, _WIDTH),
    "mlp.down_proj": (_WIDTH, _INNER),
}
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (_VOCABULARY, _WIDTH),
    **{f"model.layers.{n}.{name}.weight": shape for n in range(_LAYERS) for name, shape in _LAYER.items()},
    "model.norm.weight": (_WIDTH,),
    "lm_head.weight": (_VOCABULARY, _WIDTH),
}
"""By parameter: there are 291."""

RANKS = 8
NUM_ELEMENTS = sum(torch.Size(shape).numel() for shape in SHAPES.values()) // RANKS
"""Of this rank."""


@contextmanager
def eight_ranks() -> Iterator[None]:
    """Make this process rank 0 of a process group whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


def sharded_parameters(fsdp2: bool) -> dict[str, nn.Parameter]:
    """Return this rank's bf16 parameters, with gradients: vectors as FSDP1 has them, or DTensors."""
    mesh = init_device_mesh("cpu", (RANKS,)) if fsdp2 else None
    parameters = {}
    for name, shape in SHAPES.items():
        local = torch.empty(shape[0] // RANKS, *shape[1:], dtype=torch.bfloat16, device="meta")
        shard = DTensor.from_local(local, mesh, [Shard(0)], run_check=False) if mesh else local.flatten()
        parameters[name] = nn.Parameter(shard)
        parameters[name].grad = torch.empty_like(shard)
    return parameters
