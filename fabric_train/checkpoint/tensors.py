"""Describe this rank's part of weights and optimizer states, where it lies in the files, and read it back.

Nothing is gathered or copied. A rank's part of a tensor is always one contiguous range of the flattened tensor: of a
flat vector of FSDP1, some rows of FSDP2, or all of it.
"""

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning import Fabric
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fabric_train.checkpoint.adapter_folder import PREFIX
from fabric_train.checkpoint.adapter_folder import WEIGHTS as ADAPTER_WEIGHTS
from fabric_train.checkpoint.rank_writer import Write
from fabric_train.checkpoint.trainer_json import read_trainer_json
from fabric_train.cli.errors import InputError
from fabric_train.distributed.ranks import (
    FlatShard,
    exchange_bytes,
    flat_shards,
    local_part,
    named_parameters,
    original_name,
)
from fabric_train.model.adapter import adapted_layers
from fabric_train.model.load_weights import read_local_part
from fabric_train.model.trained_parts import trained_parameters
from fabric_train.model.weight_files import DTYPE_NAMES, NO_ROWS, SHARDING_INFO, CheckpointTensors, shard_name
from fabric_train.optim.states import DeclaredStates, State

_FULL = {"model": "model.safetensors", "adapter": ADAPTER_WEIGHTS, "optimizer": "optimizer/optimizer.safetensors"}
_ALIGNMENT = 8  # of the start of the data, as in the safetensors library


@dataclass(frozen=True)
class LocalTensor:
    """A tensor of the checkpoint, and this rank's part of it.

    ``shape`` is the full tensor's. ``parts`` are flat tensors; joined, they are the elements of the flattened
    full tensor from ``begin``. They are empty if the rank has no part. ``num_copies`` ranks have the same part, and
    this rank is number ``copy`` of them. ``cut`` is set if the part may begin or end within a row (FSDP1).
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    begin: int
    parts: tuple[torch.Tensor, ...]
    num_copies: int
    copy: int
    cut: FlatShard | None = None

    @property
    def numel(self) -> int:
        return sum(part.numel() for part in self.parts)


def local_weights(model: Any) -> list[LocalTensor]:
    """Return parameters and persistent buffers, tied weights once; with an adapter what trains, under peft's names."""
    cuts = flat_shards(model)
    if next(adapted_layers(model), None):
        return [_local(PREFIX + name, parameter, cuts) for name, parameter in trained_parameters(model)]
    weights = [_local(original_name(name), parameter, cuts) for name, parameter in named_parameters(model)]
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                # a copy, because a forward pass may change the buffer during the save
                weights.append(_replicated(original_name(f"{prefix}.{name}"), buffer.detach().clone()))
    return weights


def local_optimizer_state(model: Any, optimizer: DeclaredStates) -> list[LocalTensor]:
    """Return the states that the optimizer declares. They are zero for a parameter that has not had a gradient."""
    cuts = flat_shards(model)
    by_state: dict[str, list[LocalTensor]] = {}
    for name, parameter in trained_parameters(model):
        weight = _local(name, parameter, cuts)
        stored = optimizer.read_states(parameter)
        for state in optimizer.declare_states(parameter):
            tensor = _local_state(state, stored.get(state.name), weight, parameter)
            by_state.setdefault(state.name, []).append(tensor)
    return [tensor for of_state in by_state.values() for tensor in of_state]


def _local_state(
    state: State, stored: torch.Tensor | None, weight: LocalTensor, parameter: nn.Parameter
) -> LocalTensor:
    """Describe this rank's part of a state; ``stored`` is flat, or None before the first step."""
    has_part = weight.numel > 0
    shape = weight.shape
    begin = weight.begin
    cut = weight.cut
    if state.shape is not None:  # all ranks have it, and the one with the parameter's first element writes it
        has_part = has_part and begin == 0
        shape = state.shape
        begin = 0
        cut = None
    if stored is None:
        numel = weight.numel if state.shape is None else shape.numel()
        stored = torch.zeros(numel, dtype=state.dtype, device=parameter.device)
    elif state.shape is None:
        stored = _flat_rows(stored, parameter)
    assert stored.dtype == state.dtype, f"{state.name} is {stored.dtype}, declared as {state.dtype}"
    return replace(
        weight,
        name=f"{weight.name}.{state.name}",
        shape=shape,
        dtype=state.dtype,
        begin=begin,
        parts=(stored,) if has_part else (),
        cut=cut,
    )


def align_to_rows(tensors: list[LocalTensor], device: torch.device) -> list[LocalTensor]:
    """Make every part begin and end at a row of its tensor, which belongs to the rank of its first element.

    The others send their elements of it, over ``device``: NCCL does not take what ``--cpu_offload`` keeps on the host.
    """
    outgoing: dict[int, list[torch.Tensor]] = {}
    incoming: dict[int, list[tuple[int, int]]] = {}  # rank → (index of the tensor, number of elements)
    completed = list(tensors)
    for index, tensor in enumerate(tensors):
        if tensor.cut is None or not tensor.parts:
            continue
        cut = tensor.cut
        row = tensor.shape[1:].numel()
        (local,), begin, end = tensor.parts, tensor.begin, tensor.begin + tensor.numel
        num_sent = min(-begin % row, end - begin)
        if num_sent:
            outgoing.setdefault(cut.owner(begin // row * row), []).append(local[:num_sent])
        kept = (local[num_sent:],) if num_sent < end - begin else ()
        completed[index] = replace(tensor, begin=begin + num_sent, parts=kept)
        for rank, count in _owners(cut, -end % row if kept else 0):
            incoming.setdefault(rank, []).append((index, count))
    for rank, message in _exchange(outgoing, incoming, tensors, device).items():
        for index, count in incoming[rank]:
            num_bytes = count * tensors[index].dtype.itemsize
            part = message[:num_bytes].clone().view(tensors[index].dtype)
            message = message[num_bytes:]
            completed[index] = replace(completed[index], parts=(*completed[index].parts, part))
    return completed


def _owners(cut: FlatShard, count: int) -> Iterator[tuple[int, int]]:
    """Yield the ranks after this one that have the next ``count`` elements, each with its number of them."""
    rank = cut.rank
    while count:
        rank += 1
        first, last = cut.range(rank)
        num_owned = min(last - first, count)
        if num_owned:
            yield rank, num_owned
        count -= num_owned


def _exchange(
    outgoing: dict[int, list[torch.Tensor]],
    incoming: dict[int, list[tuple[int, int]]],
    tensors: list[LocalTensor],
    device: torch.device,
) -> dict[int, torch.Tensor]:
    """Exchange elements between ranks, one message of bytes per pair of ranks, and return the received messages."""
    group = next((tensor.cut.group for tensor in tensors if tensor.cut), None)  # the same for all units
    messages = {to: torch.cat([part.view(torch.uint8).to(device) for part in parts]) for to, parts in outgoing.items()}
    sizes = {rank: sum(size * tensors[one].dtype.itemsize for one, size in places) for rank, places in incoming.items()}
    return exchange_bytes(messages, sizes, group, device)


def _local(name: str, parameter: nn.Parameter, cuts: dict[int, FlatShard]) -> LocalTensor:
    if id(parameter) in cuts:
        cut = cuts[id(parameter)]
        begin, end = cut.range(cut.rank)
        first = max(cut.start - cut.rank * cut.size, 0)
        local = cut.local[first : first + end - begin]  # the parameter itself may be a view of the gathered weights
        num_copies = dist.get_world_size() // cut.num_ranks
        parts = (local.detach().flatten(),) if end > begin else ()
        copy = dist.get_rank() // cut.num_ranks  # the groups of HYBRID_SHARD are consecutive ranks
        return LocalTensor(name, cut.shape, cut.local.dtype, begin, parts, num_copies, copy, cut)
    if isinstance(parameter, DTensor):
        shape = parameter.shape
        mesh = parameter.device_mesh
        _, offsets = compute_local_shape_and_global_offset(shape, mesh, _by_rows(parameter.placements))
        full: Any = parameter.detach()
        local = _flat_rows(full.to_local().flatten(), parameter)
        begin = offsets[0] * shape[1:].numel() if offsets else 0
        return LocalTensor(name, shape, parameter.dtype, begin, (local,) if local.numel() else (), *_copies(parameter))
    return _replicated(name, parameter.detach())


def _by_rows(placements: Sequence[Placement]) -> Sequence[Placement]:
    """Return placements that shard by rows, which are contiguous, where tensor parallelism shards by columns."""
    if not any(isinstance(placement, Shard) and placement.dim for placement in placements):
        return placements
    return [Shard(0) if isinstance(placement, Shard) else placement for placement in placements]


def _flat_rows(local: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Return a flat tensor, sharded like ``parameter``, as the rows that this rank saves.

    If tensor parallelism has sharded it by columns, the ranks of the mesh exchange their parts, all together. What
    ``--cpu_offload`` keeps in host memory is exchanged on the device, one tensor at a time.
    """
    if not isinstance(parameter, DTensor):
        return local
    mesh = parameter.device_mesh
    placements = parameter.placements
    rows = _by_rows(parameter.placements)
    if rows is placements:
        return local
    block = local.view(parameter.to_local().shape).to(mesh.device_type)
    shape = parameter.shape
    stride = parameter.stride()
    full = DTensor.from_local(block, mesh, placements, run_check=False, shape=shape, stride=stride)
    return full.redistribute(placements=rows).to_local().flatten().to(local.device)


def _copies(tensor: DTensor) -> tuple[int, int]:
    """Return how many ranks, ``stride`` apart, have the same part, and the number of this rank among them."""
    sharded = [dim for dim, placement in enumerate(tensor.placements) if not isinstance(placement, Replicate)]
    ranks = tensor.device_mesh.mesh
    num_parts = math.prod(tensor.device_mesh.shape[dim] for dim in sharded)
    strides = [int(ranks.select(dim, 1).min() - ranks.min()) for dim in sharded if ranks.shape[dim] > 1]
    stride = min(strides, default=1)
    rank = dist.get_rank()
    return dist.get_world_size() // num_parts, rank // (stride * num_parts) * stride + rank % stride


def _replicated(name: str, tensor: torch.Tensor) -> LocalTensor:
    ranks = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    return LocalTensor(name, tensor.shape, tensor.dtype, 0, (tensor.flatten(),) if tensor.numel() else (), *ranks)


def rank_writes(
    part: str, tensors: list[LocalTensor], fabric: Fabric, state_dict_type: str
) -> tuple[list[Write], list[int]]:
    """Return this rank's writes of ``part`` (model, adapter, optimizer), "full" or "sharded"; adapters are full.

    Sharded ones come with the :func:`first_rows`, the others with none.
    """
    if state_dict_type == "sharded" and part != "adapter":
        aligned = align_to_rows(tensors, fabric.device)
        return sharded_writes(part, aligned, fabric.global_rank), first_rows(aligned)
    return full_writes(part, tensors, fabric.global_rank), []


def full_writes(part: str, tensors: list[LocalTensor], rank: int) -> list[Write]:
    """Return this rank's writes into the file of ``part``, see ``rank_writes``. Rank 0 also writes the header."""
    file = _FULL[part]
    entries = [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]
    header, offsets = safetensors_header(entries, {"format": "pt"})
    writes = [Write(file, 0, torch.frombuffer(bytearray(header), dtype=torch.uint8))] if rank == 0 else []
    for tensor in select_owned(tensors):
        writes += _consecutive(file, offsets[tensor.name] + tensor.begin * tensor.dtype.itemsize, tensor.parts)
    return writes


def sharded_writes(part: str, tensors: list[LocalTensor], rank: int) -> list[Write]:
    """Return this rank's writes into its own file of ``part``; its parts of ``tensors`` are whole rows."""
    blocks = {tensor.name: tensor for tensor in select_owned(tensors)}
    if not blocks:
        return []
    file = shard_name(part, rank)
    begins = {name: {"saved_offsets": _block(tensor)[0]} for name, tensor in blocks.items()}
    entries = [(name, tensor.dtype, _block(tensor)[1]) for name, tensor in blocks.items()]
    metadata = {SHARDING_INFO: json.dumps(begins), "DCP_VERSION": "1.0", "format": "pt"}
    header, offsets = safetensors_header(entries, metadata)
    writes = [Write(file, 0, torch.frombuffer(bytearray(header), dtype=torch.uint8))]
    for name, tensor in blocks.items():
        writes += _consecutive(file, offsets[name], tensor.parts)
    return writes


def first_rows(tensors: list[LocalTensor]) -> list[int]:
    """Return the first row of what this rank writes of each tensor, for ``write_shard_index``."""
    owned = {tensor.name: next(iter(_block(tensor)[0]), 0) for tensor in select_owned(tensors)}
    return [owned.get(tensor.name, NO_ROWS) for tensor in tensors]


def select_owned(tensors: Iterable[LocalTensor]) -> list[LocalTensor]:
    """Return the tensors whose parts this rank writes; ranks that have the same part share the bytes evenly."""
    written: dict[int, list[int]] = {}  # number of copies → bytes assigned to each copy
    owned = []
    for tensor in tensors:
        loads = written.setdefault(tensor.num_copies, [0] * tensor.num_copies)
        chosen = loads.index(min(loads))
        loads[chosen] += tensor.numel * tensor.dtype.itemsize
        if tensor.parts and chosen == tensor.copy:
            owned.append(tensor)
    return owned


def _consecutive(file: str, offset: int, parts: Sequence[torch.Tensor]) -> list[Write]:
    offsets = accumulate((part.nbytes for part in parts), initial=offset)
    return [Write(file, begin, part) for begin, part in zip(offsets, parts, strict=False)]


def _block(tensor: LocalTensor) -> tuple[list[int], list[int]]:
    """Return the offsets in the full tensor of this rank's rows, and their shape."""
    if not tensor.shape:
        return [], []
    row = tensor.shape[1:].numel()
    return [tensor.begin // row, *[0] * (len(tensor.shape) - 1)], [tensor.numel // row, *tensor.shape[1:]]


def safetensors_header(
    entries: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """Return the header of a safetensors file and the offset of each tensor in the file.

    Tensors keep their order, so that a flat vector of FSDP1 is contiguous; but larger dtypes come first, to be aligned.
    """
    content: dict[str, object] = {"__metadata__": dict(metadata)}
    begins = {}
    begin = 0
    for name, dtype, shape in sorted(entries, key=lambda entry: -entry[1].itemsize):
        end = begin + math.prod(shape) * dtype.itemsize
        content[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begins[name] = begin
        begin = end
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: start + begin for name, begin in begins.items()}


def restore_optimizer(checkpoint: Path, fabric: Fabric, model: Any, optimizer: Any, new: Collection[str] = ()) -> None:
    """Restore this rank's states of the optimizer, and the gradient scaler, also after other ranks or parallelism.

    ``new`` are the parameters that the checkpoint's step did not train: they have no states yet.
    """
    tensors = CheckpointTensors(sorted((checkpoint / "optimizer").glob("*.safetensors")))
    cuts = flat_shards(model)
    declaring = optimizer.optimizer
    for name, parameter in trained_parameters(model):
        try:
            states = {
                state.name: _read_state(tensors, name, state, parameter, cuts)
                for state in declaring.declare_states(parameter)
            }
        except KeyError as error:
            if name in new:
                continue
            raise InputError(
                f"{checkpoint}: the optimizer's {error.args[0]} is missing; use another checkpoint"
            ) from error
        declaring.restore_states(parameter, states)
    fabric.strategy.precision.load_state_dict(read_trainer_json(checkpoint).content["grad_scaler"])


def _read_state(
    tensors: CheckpointTensors, of_parameter: str, state: State, parameter: nn.Parameter, cuts: dict[int, FlatShard]
) -> torch.Tensor:
    """Read a state of a parameter: this rank's part if it is sharded like the parameter, else all of it."""
    name = f"{of_parameter}.{state.name}"
    full = cuts[id(parameter)].shape if id(parameter) in cuts else parameter.shape
    stored = tensors.shape(name)
    expected = full if state.shape is None else state.shape
    if stored != expected:
        raise InputError(
            f"the checkpoint's {name} has shape {tuple(stored)}, the model's {tuple(expected)}; use another checkpoint"
        )
    if state.shape is not None:
        return tensors.read(name).to(parameter.device, state.dtype)
    # on the parameter's device, which is not its mesh's with --cpu_offload
    restored: Any = torch.empty_like(parameter, dtype=state.dtype)
    local_part(restored).copy_(read_local_part(tensors, name, parameter, cuts))
    return restored
