"""Describe this rank's part of the weights and optimizer states and its position in the files, and read it back.

Nothing is gathered or copied. A rank's part of a tensor is always one contiguous range of the flattened tensor: a range
of FSDP1's flat vector, some rows with FSDP2, or all of it.
"""

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
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
from fabric_train.distributed.ranks import exchange_bytes
from fabric_train.distributed.sharded_parameters import (
    FlatShard,
    flat_shards,
    local_part,
    named_parameters,
    original_name,
)
from fabric_train.model.adapter import adapted_layers
from fabric_train.model.load_weights import read_local_part
from fabric_train.model.shard_index import DTYPE_NAMES, NO_ROWS, shard_name
from fabric_train.model.trained_parts import trained_parameters
from fabric_train.model.weight_files import SHARDING_INFO, CheckpointTensors
from fabric_train.optim.states import DeclaredStates, State

_FULL_FILES = {"model": "model.safetensors", "adapter": ADAPTER_WEIGHTS, "optimizer": "optimizer/optimizer.safetensors"}
_ALIGNMENT = 8  # bytes, of the start of the data, as in the safetensors library


@dataclass(frozen=True)
class LocalTensor:
    """A tensor of the checkpoint, and this rank's part of it."""

    name: str
    shape: torch.Size
    """The shape of the full tensor."""
    dtype: torch.dtype
    begin: int
    """The index of the part's first element in the flattened full tensor."""
    segments: tuple[torch.Tensor, ...]
    """Flat tensors that together are this rank's part, in order; empty if the rank has no part."""
    num_copies: int
    """The number of ranks that have the same part."""
    copy: int
    """The index of this rank among the ranks that have the same part."""
    flat_shard: FlatShard | None = None
    """FSDP1's shard, which may begin or end within a row; None for all other tensors."""

    @property
    def numel(self) -> int:
        """The number of elements in this rank's part."""
        return sum(segment.numel() for segment in self.segments)


def local_weights(model: Any) -> list[LocalTensor]:
    """Return this rank's part of the tensors that a checkpoint stores for a model that Fabric has set up.

    With an adapter, these are the parameters that train, under peft's names. Otherwise they are all parameters and
    persistent buffers, with tied weights once.
    """
    has_adapter = next(adapted_layers(model), None) is not None
    if not has_adapter:
        return local_model_weights(model)
    shards = flat_shards(model)
    return [_local_parameter(PREFIX + name, parameter, shards) for name, parameter in trained_parameters(model)]


def local_model_weights(model: Any) -> list[LocalTensor]:
    """Return this rank's part of all parameters and persistent buffers, an adapter's too, with tied weights once."""
    shards = flat_shards(model)
    weights = []
    for name, parameter in named_parameters(model):
        weights.append(_local_parameter(original_name(name), parameter, shards))
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                # a copy, because a forward pass may change the buffer during the save
                weights.append(_whole_tensor(original_name(f"{prefix}.{name}"), buffer.detach().clone()))
    return weights


def local_optimizer_state(model: Any, optimizer: DeclaredStates) -> list[LocalTensor]:
    """Return this rank's part of the states that the optimizer declares, grouped by state.

    The states of a parameter that has not had a gradient are zero.
    """
    shards = flat_shards(model)
    tensors_by_state: dict[str, list[LocalTensor]] = {}
    for name, parameter in trained_parameters(model):
        weight = _local_parameter(name, parameter, shards)
        stored = optimizer.read_states(parameter)
        for state in optimizer.declare_states(parameter):
            tensor = _local_state(state, stored.get(state.name), weight, parameter)
            tensors_by_state.setdefault(state.name, []).append(tensor)
    return list(chain.from_iterable(tensors_by_state.values()))


def _local_state(
    state: State, stored: torch.Tensor | None, weight: LocalTensor, parameter: nn.Parameter
) -> LocalTensor:
    """Describe this rank's part of an optimizer state.

    Args:
        state: The state's name, dtype and, unless it is sharded like the parameter, shape.
        stored: The state's values on this rank, flat; None before the first step.
        weight: This rank's part of the parameter.
        parameter: The parameter.
    """
    name = f"{weight.name}.{state.name}"

    # sharded like the parameter
    if state.shape is None:
        if stored is None:
            stored = torch.zeros(weight.numel, dtype=state.dtype, device=parameter.device)
        else:
            stored = _flat_rows(stored, parameter)
        assert stored.dtype == state.dtype, f"{state.name} is {stored.dtype}, declared as {state.dtype}"
        segments = (stored,) if weight.numel else ()
        return replace(weight, name=name, dtype=state.dtype, segments=segments)

    # whole on every rank; the ranks that have the parameter's first element write it
    if stored is None:
        stored = torch.zeros(state.shape.numel(), dtype=state.dtype, device=parameter.device)
    assert stored.dtype == state.dtype, f"{state.name} is {stored.dtype}, declared as {state.dtype}"
    has_first_element = weight.numel > 0 and weight.begin == 0
    return replace(
        weight,
        name=name,
        shape=state.shape,
        dtype=state.dtype,
        begin=0,
        segments=(stored,) if has_first_element else (),
        flat_shard=None,
    )


@dataclass(frozen=True)
class _MissingElements:
    """Elements that another rank sends to complete the last row of a part."""

    tensor_index: int
    num_elements: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


def align_to_rows(tensors: list[LocalTensor], device: torch.device) -> list[LocalTensor]:
    """Make every part begin and end at a row of its tensor: each row moves to the rank that has its first element.

    The other ranks send it their elements of the row. They send from ``device``, since NCCL does not accept the tensors
    that ``--cpu_offload`` keeps on the host. All ranks call this together.
    """
    outgoing: dict[int, list[torch.Tensor]] = {}  # by receiving rank
    incoming: dict[int, list[_MissingElements]] = {}  # by sending rank
    aligned = list(tensors)
    for index, tensor in enumerate(tensors):
        if tensor.flat_shard is None or not tensor.segments:
            continue
        shard = tensor.flat_shard
        (local,) = tensor.segments
        row_size = tensor.shape[1:].numel()
        begin = tensor.begin
        end = begin + tensor.numel

        # the elements before the first row border belong to the rank where their row begins
        num_sent = min(_elements_to_next_row(begin, row_size), tensor.numel)
        if num_sent:
            first_element_of_row = begin // row_size * row_size
            owner = shard.owner(first_element_of_row)
            outgoing.setdefault(owner, []).append(local[:num_sent])

        # no row begins in this part: this rank keeps nothing of it, and so lacks nothing
        if num_sent == tensor.numel:
            aligned[index] = replace(tensor, begin=end, segments=())
            continue

        # this rank keeps the rest, and receives the end of the last row from the ranks that have it
        aligned[index] = replace(tensor, begin=begin + num_sent, segments=(local[num_sent:],))
        num_missing = _elements_to_next_row(end, row_size)
        for rank, num_elements in _later_owners(shard, num_missing):
            missing = _MissingElements(index, num_elements, tensor.dtype)
            incoming.setdefault(rank, []).append(missing)

    group = next((tensor.flat_shard.group for tensor in tensors if tensor.flat_shard), None)  # all units have the same
    messages = _exchange_elements(outgoing, incoming, group, device)
    for rank, message in messages.items():
        _append_elements(aligned, incoming[rank], message)
    return aligned


def _elements_to_next_row(position: int, row_size: int) -> int:
    """Return the number of elements from a position in a flattened tensor to the next row border; 0 at a border."""
    return -position % row_size


def _append_elements(
    tensors: list[LocalTensor], missing_elements: Sequence[_MissingElements], message: torch.Tensor
) -> None:
    """Append the elements in a message, uint8 [bytes], to the parts that lack them; both are in the same order."""
    for missing in missing_elements:
        segment = message[: missing.num_bytes].clone().view(missing.dtype)  # a copy, since a view needs aligned bytes
        message = message[missing.num_bytes :]
        tensor = tensors[missing.tensor_index]
        tensors[missing.tensor_index] = replace(tensor, segments=(*tensor.segments, segment))


def _later_owners(shard: FlatShard, num_elements: int) -> Iterator[tuple[int, int]]:
    """Yield the ranks after this one that have the next ``num_elements`` elements, and how many each of them has."""
    rank = shard.rank
    while num_elements:
        rank += 1
        begin, end = shard.range(rank)
        num_owned = min(end - begin, num_elements)
        if num_owned:
            yield rank, num_owned
        num_elements -= num_owned


def _exchange_elements(
    outgoing: dict[int, list[torch.Tensor]],
    incoming: dict[int, list[_MissingElements]],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> dict[int, torch.Tensor]:
    """Exchange elements between ranks, one message of bytes per pair of ranks.

    Args:
        outgoing: The elements to send, by receiving rank.
        incoming: The elements to receive, by sending rank.
        group: The ranks that take part; None if this rank has no tensor of FSDP1.
        device: The device that messages are sent from and received on.

    Returns:
        The received messages, uint8 [bytes], by sending rank.
    """
    messages = {}
    for rank, segments in outgoing.items():
        messages[rank] = torch.cat([segment.view(torch.uint8).to(device) for segment in segments])
    message_sizes = {}
    for rank, missing_elements in incoming.items():
        message_sizes[rank] = sum(missing.num_bytes for missing in missing_elements)
    return exchange_bytes(messages, message_sizes, group, device)


def _local_parameter(name: str, parameter: nn.Parameter, shards: dict[int, FlatShard]) -> LocalTensor:
    """Describe this rank's part of a parameter; for ``shards`` see ``flat_shards``."""
    if id(parameter) in shards:
        return _local_range(name, shards[id(parameter)])
    if isinstance(parameter, DTensor):
        return _local_rows(name, parameter)
    return _whole_tensor(name, parameter.detach())


def _local_range(name: str, shard: FlatShard) -> LocalTensor:
    """Describe this rank's part of a parameter of FSDP1: a range of its flattened elements."""
    begin, end = shard.range(shard.rank)
    # where the parameter begins in this rank's part of the flat vector; 0 if it began on an earlier rank
    local_begin = max(shard.start - shard.rank * shard.size, 0)
    local_end = local_begin + end - begin
    # from the flat vector: the parameter itself may be a view of the gathered weights
    local = shard.local[local_begin:local_end].detach().flatten()
    return LocalTensor(
        name=name,
        shape=shard.full_shape,
        dtype=shard.local.dtype,
        begin=begin,
        segments=(local,) if end > begin else (),
        num_copies=dist.get_world_size() // shard.num_ranks,
        copy=dist.get_rank() // shard.num_ranks,  # the groups of HYBRID_SHARD are consecutive ranks
        flat_shard=shard,
    )


def _local_rows(name: str, parameter: DTensor) -> LocalTensor:
    """Describe this rank's rows of a parameter of FSDP2 or tensor parallelism."""
    shape = parameter.shape
    placements = _row_placements(parameter.placements)
    _, offsets = compute_local_shape_and_global_offset(shape, parameter.device_mesh, placements)
    detached: Any = parameter.detach()
    local = _flat_rows(detached.to_local().flatten(), parameter)
    num_copies, copy = _copies(parameter)
    return LocalTensor(
        name=name,
        shape=shape,
        dtype=parameter.dtype,
        begin=offsets[0] * shape[1:].numel() if offsets else 0,
        segments=(local,) if local.numel() else (),
        num_copies=num_copies,
        copy=copy,
    )


def _row_placements(placements: Sequence[Placement]) -> Sequence[Placement]:
    """Return placements that shard by rows, which are contiguous, where tensor parallelism shards by columns."""
    if not any(isinstance(placement, Shard) and placement.dim for placement in placements):
        return placements
    return [Shard(0) if isinstance(placement, Shard) else placement for placement in placements]


def _flat_rows(local: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the rows that this rank saves from a flat tensor that is sharded like ``parameter``.

    If tensor parallelism has sharded it by columns, all ranks of the mesh exchange their parts. Tensors
    that ``--cpu_offload`` keeps in host memory are exchanged on the device, one at a time.
    """
    if not isinstance(parameter, DTensor):
        return local
    mesh = parameter.device_mesh
    placements = parameter.placements
    row_placements = _row_placements(placements)
    if row_placements is placements:  # these are rows already
        return local
    block = local.view(parameter.to_local().shape).to(mesh.device_type)
    sharded = DTensor.from_local(
        block,
        mesh,
        placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    rows = sharded.redistribute(placements=row_placements).to_local()
    return rows.flatten().to(local.device)


def _copies(tensor: DTensor) -> tuple[int, int]:
    """Return how many ranks have the same part of a tensor as this rank, and the index of this rank among them.

    A mesh has the ranks in their order, and the ranks with different parts are ``stride`` apart. Two examples with four
    ranks and two parts, each part with two copies:

    - A mesh [replicate, shard] of [[0, 1], [2, 3]]: the stride is 1. Ranks 0 and 2 are the copies 0 and 1 of the first
      part, ranks 1 and 3 those of the second one.
    - A mesh [shard, tensor] of [[0, 1], [2, 3]], and a tensor that only "shard" divides: the stride is 2. Ranks 0 and 1
      are the copies 0 and 1 of the first part, ranks 2 and 3 those of the second one.
    """
    mesh = tensor.device_mesh
    ranks = mesh.mesh
    sharded_dims = [dim for dim, placement in enumerate(tensor.placements) if not isinstance(placement, Replicate)]
    num_parts = math.prod(mesh.shape[dim] for dim in sharded_dims)
    strides = []  # from a part to the next one, in each dimension
    for dim in sharded_dims:
        if ranks.shape[dim] > 1:
            second_rank = ranks.select(dim, 1).min()
            strides.append(int(second_rank - ranks.min()))
    stride = min(strides, default=1)

    # groups of stride * num_parts consecutive ranks hold all parts, each part stride times
    rank = dist.get_rank()
    num_copies_in_earlier_groups = rank // (stride * num_parts) * stride
    copy = num_copies_in_earlier_groups + rank % stride
    return dist.get_world_size() // num_parts, copy


def _whole_tensor(name: str, tensor: torch.Tensor) -> LocalTensor:
    """Describe a tensor that every rank has in full."""
    return LocalTensor(
        name=name,
        shape=tensor.shape,
        dtype=tensor.dtype,
        begin=0,
        segments=(tensor.flatten(),) if tensor.numel() else (),
        num_copies=dist.get_world_size() if dist.is_initialized() else 1,
        copy=dist.get_rank() if dist.is_initialized() else 0,
    )


def rank_writes(
    part: str, tensors: list[LocalTensor], fabric: Fabric, state_dict_type: str
) -> tuple[list[Write], list[int]]:
    """Return what this rank writes for one part of the checkpoint.

    Args:
        part: "model", "adapter" or "optimizer".
        tensors: This rank's part of each tensor.
        fabric: The run's Fabric; all ranks call this together.
        state_dict_type: "full" or "sharded"; an adapter is always written in full.

    Returns:
        The writes, and the :func:`first_rows` of a sharded part; a full part has none.
    """
    if state_dict_type == "sharded" and part != "adapter":
        aligned = align_to_rows(tensors, fabric.device)
        return sharded_writes(part, aligned, fabric.global_rank), first_rows(aligned)
    return full_writes(part, tensors, fabric.global_rank), []


def full_writes(part: str, tensors: list[LocalTensor], rank: int) -> list[Write]:
    """Return this rank's writes to the only file of ``part``, see :func:`rank_writes`; rank 0 writes the header."""
    file = _FULL_FILES[part]
    entries = [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]
    header, offsets = safetensors_header(entries, {"format": "pt"})
    writes = []
    if rank == 0:
        writes.append(Write(file, 0, torch.frombuffer(bytearray(header), dtype=torch.uint8)))
    for tensor in select_owned(tensors):
        offset = offsets[tensor.name] + tensor.begin * tensor.dtype.itemsize
        writes += _consecutive_writes(file, offset, tensor.segments)
    return writes


def sharded_writes(part: str, tensors: list[LocalTensor], rank: int) -> list[Write]:
    """Return this rank's writes to its own file of ``part``; its parts of ``tensors`` must be whole rows."""
    owned = select_owned(tensors)
    if not owned:
        return []
    file = shard_name(part, rank)
    entries = []
    sharding_info = {}
    for tensor in owned:
        row_offsets, shape = _row_block(tensor)
        entries.append((tensor.name, tensor.dtype, shape))
        sharding_info[tensor.name] = {"saved_offsets": row_offsets}
    metadata = {SHARDING_INFO: json.dumps(sharding_info), "DCP_VERSION": "1.0", "format": "pt"}
    header, byte_offsets = safetensors_header(entries, metadata)
    writes = [Write(file, 0, torch.frombuffer(bytearray(header), dtype=torch.uint8))]
    for tensor in owned:
        writes += _consecutive_writes(file, byte_offsets[tensor.name], tensor.segments)
    return writes


def first_rows(tensors: list[LocalTensor]) -> list[int]:
    """Return the first row that this rank writes of each tensor, for ``write_shard_index``; ``NO_ROWS`` if none."""
    first_row_by_name = {}
    for tensor in select_owned(tensors):
        offsets, _ = _row_block(tensor)
        first_row_by_name[tensor.name] = offsets[0] if offsets else 0
    return [first_row_by_name.get(tensor.name, NO_ROWS) for tensor in tensors]


def select_owned(tensors: Iterable[LocalTensor]) -> list[LocalTensor]:
    """Return the tensors whose parts this rank writes. Ranks that have the same part divide the tensors by bytes."""
    loads_by_num_copies: dict[int, list[int]] = {}  # bytes that each of the copies writes so far
    # every rank computes this for all tensors, in the same order, so all agree without a message
    owned = []
    for tensor in tensors:
        loads = loads_by_num_copies.setdefault(tensor.num_copies, [0] * tensor.num_copies)
        writing_copy = loads.index(min(loads))
        loads[writing_copy] += tensor.numel * tensor.dtype.itemsize
        if tensor.segments and writing_copy == tensor.copy:
            owned.append(tensor)
    return owned


def _consecutive_writes(file: str, offset: int, segments: Sequence[torch.Tensor]) -> list[Write]:
    """Return the writes for tensors that follow one another in a file, beginning at ``offset``."""
    writes = []
    for segment in segments:
        writes.append(Write(file, offset, segment))
        offset += segment.nbytes
    return writes


def _row_block(tensor: LocalTensor) -> tuple[list[int], list[int]]:
    """Return the offsets of this rank's rows in the full tensor, and their shape."""
    if not tensor.shape:
        return [], []
    row_shape = tensor.shape[1:]
    row_size = row_shape.numel()
    first_row = tensor.begin // row_size
    num_rows = tensor.numel // row_size
    offsets_in_row = [0] * len(row_shape)
    return [first_row, *offsets_in_row], [num_rows, *row_shape]


def safetensors_header(
    entries: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """Return the header of a safetensors file, and the offset of each tensor in the file.

    Tensors keep their order, so that a flat vector of FSDP1 is contiguous, except that larger dtypes come first for
    alignment.

    Args:
        entries: Name, dtype and shape of each tensor.
        metadata: Texts for the header.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    begins = {}  # relative to the end of the header, as the format has them
    begin = 0
    largest_dtype_first = sorted(entries, key=lambda entry: entry[1].itemsize, reverse=True)
    for name, dtype, shape in largest_dtype_first:
        end = begin + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begins[name] = begin
        begin = end

    # the length of the JSON in 8 bytes, then the JSON, padded with spaces so that the data are aligned
    text = json.dumps(header, separators=(",", ":")).encode()
    num_spaces = -len(text) % _ALIGNMENT
    text += b" " * num_spaces
    data_start = 8 + len(text)
    offsets = {name: data_start + begin for name, begin in begins.items()}
    return len(text).to_bytes(8, "little") + text, offsets


def restore_optimizer(
    checkpoint: Path, fabric: Fabric, model: Any, optimizer: Any, new_parameters: Collection[str] = ()
) -> None:
    """Restore this rank's optimizer states, and the gradient scaler.

    The checkpoint may have been saved by another number of ranks and with another parallelism.

    Args:
        checkpoint: Folder of the checkpoint.
        fabric: The run's Fabric.
        model: The model that Fabric has set up.
        optimizer: Its optimizer, which Fabric has set up.
        new_parameters: Names of parameters that the checkpoint's step did not train and that have no states yet.

    Raises:
        InputError: a state is missing, or has another shape.
    """
    tensors = CheckpointTensors(sorted((checkpoint / "optimizer").glob("*.safetensors")))
    shards = flat_shards(model)
    declared: DeclaredStates = optimizer.optimizer
    for name, parameter in trained_parameters(model):
        states = {}
        try:
            for state in declared.declare_states(parameter):
                states[state.name] = _read_state(tensors, name, state, parameter, shards)
        except KeyError as error:  # from CheckpointTensors, with the name of the state
            if name in new_parameters:
                continue
            raise InputError(
                f"{checkpoint}: the optimizer's {error.args[0]} is missing; use another checkpoint"
            ) from error
        declared.restore_states(parameter, states)
    fabric.strategy.precision.load_state_dict(read_trainer_json(checkpoint).content["grad_scaler"])


def _read_state(
    tensors: CheckpointTensors, parameter_name: str, state: State, parameter: nn.Parameter, shards: dict[int, FlatShard]
) -> torch.Tensor:
    """Read a parameter's state: this rank's part if it is sharded like the parameter, and otherwise all of it."""
    name = f"{parameter_name}.{state.name}"
    if state.shape is not None:
        expected_shape = state.shape
    elif id(parameter) in shards:  # FSDP1's parameter is flat, and has only this rank's part
        expected_shape = shards[id(parameter)].full_shape
    else:
        expected_shape = parameter.shape
    stored_shape = tensors.shape(name)
    if stored_shape != expected_shape:
        raise InputError(
            f"{name} has shape {tuple(stored_shape)} in the checkpoint, but {tuple(expected_shape)} in the model; "
            "use another checkpoint"
        )
    if state.shape is not None:
        return tensors.read(name).to(parameter.device, state.dtype)
    # on the parameter's device, which is not its mesh's with --cpu_offload
    restored: Any = torch.empty_like(parameter, dtype=state.dtype)
    local_part(restored).copy_(read_local_part(tensors, name, parameter, shards))
    return restored
