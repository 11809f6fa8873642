"""AdamW (arXiv:1711.05101): torch's own, and one that stores weights or moments in bfloat16 or 8 bits.

The second computes in fp32. On a GPU, one Triton kernel updates all parameters (``triton_adamw``), if it works there.
Otherwise a parameter is updated in chunks with torch's fused kernel, or in one compiled kernel, and the results are
rounded: no fp32 copy of a full parameter exists. torchao's AdamW compiles for every shape of a parameter and draws from
the rank's stream of random numbers, so its replicas would drift apart, and a resumed run would draw other numbers.
"""

import functools
import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim.adamw import adamw

from fabric_train.distributed.ranks import to_device_async
from fabric_train.distributed.sharded_parameters import FlatShard, local_part
from fabric_train.optim.states import (
    BLOCK,
    Blockwise8Bit,
    DeclaredStates,
    Row,
    State,
    Storage,
    TensorTable,
    flat_local,
    is_aligned,
    tensor_table,
)

# elements per chunk: in fp32 they fit a core's cache, or take little of a GPU's memory
_CHUNK = {"cpu": 2**16, "cuda": 2**24}
assert not any(size % BLOCK for size in _CHUNK.values())
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class LocalElements:
    """The elements of a tensor that a rank has: runs of ``width``, ``stride`` apart, the first at ``begin``."""

    begin: int
    width: int
    stride: int

    def indices(self, first: int, count: int, device: torch.device) -> torch.Tensor:
        """Return the indices modulo 2³² of ``count`` local elements from number ``first`` on: int32 [count]."""
        if self.width == self.stride:
            return torch.arange(count, dtype=torch.int32, device=device).add_(_wrapped(self.begin + first))
        local = torch.arange(first, first + count, device=device)
        indices = local // self.width * (self.stride - self.width) + local + self.begin
        return indices.to(torch.int32)


def local_elements(parameter: nn.Parameter, cuts: Mapping[int, FlatShard]) -> LocalElements:
    """Return the elements of a parameter that this rank has; ``cuts`` are FSDP1's, from ``flat_shards``."""
    if id(parameter) in cuts:
        cut = cuts[id(parameter)]
        begin, end = cut.range(cut.rank)
        return LocalElements(begin, max(end - begin, 1), max(end - begin, 1))
    full = parameter.shape
    if not isinstance(parameter, DTensor):
        return LocalElements(0, full.numel(), full.numel())
    shape, offsets = compute_local_shape_and_global_offset(full, parameter.device_mesh, parameter.placements)
    begin = sum(offset * math.prod(full[axis + 1 :]) for axis, offset in enumerate(offsets))
    sharded_dims = [dim for dim, (local, size) in enumerate(zip(shape, full, strict=True)) if dim and local != size]
    dim = sharded_dims[-1] if sharded_dims else 0
    assert len(sharded_dims) < 2, f"a parameter is sharded along {len(sharded_dims)} dimensions besides its first"
    width = math.prod(shape[dim:])
    return LocalElements(begin, width, math.prod(full[dim:]) if sharded_dims else width)


def salt(seed: int, name: str) -> int:
    """Return a hash of a seed and a parameter's name, in the range of int32."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little", signed=True)


def random_bits(indices: torch.Tensor, key: torch.Tensor | int) -> torch.Tensor:
    """Return 32 random bits for each of the int32 ``indices``, with the same shape and dtype.

    The hash is Chris Wellons' lowbias32 (https://nullprogram.com/blog/2018/07/31). int32 products wrap. Right shifts
    copy the sign bit, so the result is masked.
    """
    bits = indices ^ key
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    bits *= 0x7FEB352D
    bits ^= (bits >> 15).bitwise_and_(0x1FFFF)
    bits *= _wrapped(0x846CA68B)
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    return bits


def round_stochastically(values: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Round finite fp32 ``values`` in place to one of the two nearest bfloat16 numbers, and return them.

    The mean of many roundings is the value. bfloat16 keeps the upper 16 of the 32 bits; the lower 16 bits, divided by
    2¹⁶, are the probability of rounding away from zero. ``random`` is int32, uniform from 0 to 2¹⁶ - 1.
    """
    return values.view(torch.int32).add_(random).bitwise_and_(-0x10000).view(torch.float32)


def _wrapped(number: int) -> int:
    """Return the int32 that is equal to ``number`` modulo 2³²."""
    return (number + 2**31) % 2**32 - 2**31


class AdamW(DeclaredStates, torch.optim.AdamW):
    """torch's AdamW, whose moments have the dtype of the weights."""

    def declare_states(self, parameter: nn.Parameter) -> tuple[State, ...]:
        """Return both moments and the number of steps."""
        return _declared(parameter.dtype)

    def restore_states(self, parameter: nn.Parameter, states: Mapping[str, torch.Tensor]) -> None:
        """Set a parameter's moments, each sharded like the parameter, and its number of steps."""
        super().restore_states(parameter, states)
        if not self.defaults["fused"]:  # it counts on the host: it would read a count from the device in every step
            self.state[parameter]["step"] = states["step"].cpu()


def _declared(dtype: torch.dtype, held_bytes: int | None = None) -> tuple[State, ...]:
    moments = (State(name, dtype, held_bytes=held_bytes) for name in MOMENTS)
    return *moments, State("step", torch.float32, torch.Size())


def step_factors(step: int, lr: float, weight_decay: float, betas: tuple[float, float], eps: float) -> list[float]:
    """Return the factors of ``adamw_step`` in step ``step``, counted from 1 (arXiv:1711.05101).

    These are: decay of the weights, gain of the first moment, decay and gain of the second moment, bias-corrected
    learning rate, bias correction of the second moment's root, and epsilon.
    """
    beta1, beta2 = betas
    root_scale = (1 - beta2**step) ** -0.5
    return [1 - lr * weight_decay, 1 - beta1, beta2, 1 - beta2, lr / (1 - beta1**step), root_scale, eps]


@functools.cache
def compiled_adamw_step() -> Callable[..., None]:
    """Return :func:`adamw_step`, compiled at its first call, for any length."""
    return torch.compile(adamw_step, dynamic=True)


def adamw_step(
    tensors: Sequence[torch.Tensor],
    gradient: torch.Tensor,
    factors: torch.Tensor,
    indices: torch.Tensor | None,
    key: torch.Tensor,
) -> None:
    """Update weights, first and second moment (``tensors``, flat, fp32 or bfloat16) in place, computing in fp32.

    ``factors`` are fp32 [7], from :func:`step_factors`. ``indices``, int32, of the elements in the full tensor are for
    stochastic rounding; None rounds to the nearest. ``key``, 0-dim int32, belongs to this step and parameter.
    """
    decay, first_gain, second_decay, second_gain, rate, root_scale, eps = factors.unbind()
    weights, first, second = (tensor.float() for tensor in tensors)
    gradient = gradient.float()
    first = first + (gradient - first) * first_gain
    second = second * second_decay + gradient * gradient * second_gain
    weights = weights * decay - rate * first / (second.sqrt() * root_scale + eps)
    bits = None if indices is None else random_bits(indices, key)
    for tensor, values, shift in zip(tensors, (weights, first, second), (16, 0, 0), strict=True):
        if bits is not None and tensor.dtype != torch.float32:
            values = round_stochastically(values, (bits >> shift) & 0xFFFF)
        tensor.copy_(values)


class LowPrecisionAdamW(DeclaredStates, torch.optim.AdamW):
    """AdamW whose moments have a dtype of their own, and which may round stochastically."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        moments_dtype: torch.dtype,
        in_8bit: Collection[nn.Parameter] = (),
        stochastic_rounding: bool,
        names: Mapping[nn.Parameter, str],
        elements: Mapping[nn.Parameter, LocalElements],
        seed: int,
        compiles: bool = False,
    ) -> None:
        """Set up the optimizer with parameter groups, each with its weight decay.

        ``moments_dtype`` is float32 or bfloat16; the moments of ``in_8bit`` are stored in 8 bits instead.
        ``stochastic_rounding`` rounds to bfloat16, with ``seed``. ``names`` are the parameters' names before anything
        wrapped the model, ``elements`` the elements of each parameter that this rank has. ``compiles``: parameters are
        updated in one compiled kernel, except parameters in 8 bits.
        """
        super().__init__(groups, lr=lr, betas=betas)
        self.launch: Callable[[TensorTable], None] | None = None
        """A function that updates all parameters of a table in one kernel launch; None updates them one by one."""
        self.moments_dtype = moments_dtype
        self.rounds_stochastically = stochastic_rounding
        self.in_8bit = {id(each) for each in in_8bit}
        self._elements = elements
        self._compiles = compiles
        self._salts = {parameter: salt(seed, name) for parameter, name in names.items()}
        self._counts: dict[nn.Parameter, int] = {}  # of steps, on the host, so that no step waits for the device

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        updated = [(each, group) for group in self.param_groups for each in group["params"] if each.grad is not None]
        if not updated:
            return
        for parameter, _ in updated:
            if not self.state[parameter]:
                self.state[parameter] = self._new_state(parameter)
        (self._update_one_by_one if self.launch is None else self._update_together)(updated)
        torch._foreach_add_([self.state[parameter]["step"] for parameter, _ in updated], 1)
        for parameter, _ in updated:
            self._counts[parameter] = self._counts.get(parameter, 0) + 1

    def declare_states(self, parameter: nn.Parameter) -> tuple[State, ...]:
        """Return both moments and the number of steps. A checkpoint holds moments in 8 bits as fp32."""
        return _declared(self.moments_dtype, 1 if id(parameter) in self.in_8bit else None)

    def read_states(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Return this rank's part of a parameter's states, flat; moments in 8 bits are fp32 copies on the CPU."""
        kept = self.state.get(parameter, {})
        return {
            name: stored.read(0, len(stored)).cpu() if isinstance(stored, Blockwise8Bit) else flat_local(stored)
            for name, stored in kept.items()
        }

    def restore_states(self, parameter: nn.Parameter, states: Mapping[str, torch.Tensor]) -> None:
        """Set a parameter's moments, each sharded like the parameter, and its number of steps."""
        super().restore_states(parameter, states)
        if id(parameter) in self.in_8bit:
            for name, stored in self._new_state(parameter).items():
                if isinstance(stored, Blockwise8Bit):
                    stored.write(0, flat_local(states[name]).float())
                    self.state[parameter][name] = stored
        self._counts[parameter] = int(states["step"])

    def _keys(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """Return the random key of each parameter's next step: int32 [parameters], on the CPU."""
        counts = torch.tensor([self._counts.get(parameter, 0) for parameter in parameters], dtype=torch.int32)
        salts = torch.tensor([self._salts[parameter] for parameter in parameters], dtype=torch.int32)
        return random_bits(counts, salts)

    def _factors(self, parameter: nn.Parameter, group: dict[str, Any]) -> list[float]:
        step = self._counts.get(parameter, 0) + 1
        return step_factors(step, group["lr"], group["weight_decay"], group["betas"], group["eps"])

    def _new_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        state: dict[str, Any] = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)}
        for key in MOMENTS:
            if id(parameter) in self.in_8bit:
                local = local_part(parameter)
                state[key] = Blockwise8Bit(local.numel(), signed=key == "exp_avg", device=local.device)
            else:
                state[key] = torch.zeros_like(parameter, dtype=self.moments_dtype)
        return state

    def _update_together(self, updated: Sequence[tuple[nn.Parameter, dict[str, Any]]]) -> None:
        """Update parameters with one launch for all that are stored in the same way."""
        assert self.launch is not None
        tables: dict[Storage, list[tuple[Row, list[float]]]] = {}
        gradients = []  # a contiguous copy of a gradient must exist until its launch
        keys = self._keys([parameter for parameter, _ in updated]).tolist()
        for (parameter, group), key in zip(updated, keys, strict=True):
            gradients.append(local_part(parameter.grad).contiguous())
            if gradients[-1].numel():
                row, storage = self._row(parameter, gradients[-1], key)
                tables.setdefault(storage, []).append((row, self._factors(parameter, group)))
        for storage, rows in tables.items():
            self.launch(tensor_table(storage, rows, gradients[0].device))

    def _row(self, parameter: nn.Parameter, gradient: torch.Tensor, key: int) -> tuple[Row, Storage]:
        weights = local_part(parameter)
        elements = self._elements[parameter]
        moments = [self.state[parameter][each] for each in MOMENTS]
        if isinstance(moments[0], Blockwise8Bit):
            stored = [each.codes for each in moments]
            scales = [each.scales.data_ptr() for each in moments]
        else:
            stored = [local_part(each) for each in moments]
            scales = [0, 0]
        tensors = [weights, gradient, *stored]
        assert all(each.is_contiguous() for each in tensors)
        addresses = [each.data_ptr() for each in tensors]
        place = [elements.begin, elements.width, elements.stride - elements.width]
        row = Row._make([*addresses, *scales, weights.numel(), 0, *place, key])
        dtypes = (weights.dtype, gradient.dtype, stored[0].dtype)
        return row, Storage(*dtypes, self.rounds_stochastically, is_aligned(addresses))

    def _update_one_by_one(self, updated: Sequence[tuple[nn.Parameter, dict[str, Any]]]) -> None:
        device = local_part(updated[0][0]).device
        keys = to_device_async(self._keys([parameter for parameter, _ in updated]), device).unbind()
        factors: dict[tuple[float, ...], torch.Tensor] = {}
        for (parameter, group), key in zip(updated, keys, strict=True):
            if self._compiles and id(parameter) not in self.in_8bit:
                numbers = tuple(self._factors(parameter, group))
                if numbers not in factors:
                    factors[numbers] = to_device_async(torch.tensor(numbers), device)
                self._update_compiled(parameter, factors[numbers], key)
            else:
                self._update(parameter, group, key)

    def _update_compiled(self, parameter: nn.Parameter, factors: torch.Tensor, key: torch.Tensor) -> None:
        state = self.state[parameter]
        stored = (flat_local(parameter), *(flat_local(state[each]) for each in MOMENTS))
        gradient = local_part(parameter.grad).reshape(-1)
        for begin in range(0, len(gradient), _CHUNK["cuda"]):  # in chunks, because the elements' indices take memory
            chunk = slice(begin, begin + _CHUNK["cuda"])
            part = gradient[chunk]
            indices = None
            if self.rounds_stochastically:
                indices = self._elements[parameter].indices(begin, len(part), part.device)
            compiled_adamw_step()([each[chunk] for each in stored], part, factors, indices, key)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any], key: torch.Tensor) -> None:
        state = self.state[parameter]
        weights = flat_local(parameter)
        gradient = local_part(parameter.grad).reshape(-1)
        moments = [state[key] if isinstance(state[key], Blockwise8Bit) else flat_local(state[key]) for key in MOMENTS]
        size = _CHUNK[weights.device.type]
        for begin in range(0, weights.numel(), size):
            count = min(size, weights.numel() - begin)
            computed = [_read(each, begin, count) for each in (weights, *moments)]
            _adamw(computed, gradient[begin : begin + count].float(), state["step"], group)
            random: tuple[torch.Tensor | None, ...] = (None, None, None)
            if self.rounds_stochastically:
                bits = random_bits(self._elements[parameter].indices(begin, count, weights.device), key)
                lower = bits & 0xFFFF
                random = ((bits >> 16).bitwise_and_(0xFFFF), lower, lower)
            for stored, values, bits_of_each in zip((weights, *moments), computed, random, strict=True):
                _write(stored, begin, values, bits_of_each)


def _read(stored: torch.Tensor | Blockwise8Bit, begin: int, count: int) -> torch.Tensor:
    """Return ``count`` elements in fp32. If they are stored in fp32, it is a view of the storage."""
    return stored.read(begin, count) if isinstance(stored, Blockwise8Bit) else stored[begin : begin + count].float()


def _write(stored: torch.Tensor | Blockwise8Bit, begin: int, values: torch.Tensor, random: torch.Tensor | None) -> None:
    """Store the fp32 values that ``_read`` returned. With ``random``, round to bfloat16 stochastically."""
    if isinstance(stored, Blockwise8Bit):
        stored.write(begin, values)
    elif stored.dtype != torch.float32:
        if random is not None:
            round_stochastically(values, random)
        stored[begin : begin + len(values)] = values


def _adamw(tensors: list[torch.Tensor], gradient: torch.Tensor, num_steps: torch.Tensor, group: dict[str, Any]) -> None:
    beta1, beta2 = group["betas"]
    weights, first, second = tensors
    steps = [num_steps.clone()]  # the kernel adds 1 to it
    given = {name: group[name] for name in ("lr", "weight_decay", "eps")}
    given |= {"beta1": beta1, "beta2": beta2, "fused": True, "amsgrad": False, "maximize": False}
    adamw([weights], [gradient], [first], [second], [], steps, **given)
