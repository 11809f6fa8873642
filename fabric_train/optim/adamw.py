"""AdamW (arXiv:1711.05101): torch's own, and one that stores weights or moments in bfloat16 or 8 bits.

The second computes in fp32. On a GPU, one Triton kernel updates all parameters (``triton_adamw``), if it works there.
Otherwise a parameter is updated in chunks with torch's fused kernel, or in one compiled kernel, and the results are
rounded: no fp32 copy of a full parameter exists. torchao's AdamW compiles for every shape of a parameter and draws from
the rank's stream of random numbers, so its replicas would drift apart, and a resumed run would draw other numbers.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.adamw import adamw

from fabric_train.distributed.ranks import to_device_async
from fabric_train.distributed.sharded_parameters import local_part
from fabric_train.optim.blockwise_8bit import BLOCK, Blockwise8Bit
from fabric_train.optim.states import DeclaredStates, State, flat_local
from fabric_train.optim.stochastic_rounding import (
    LocalElements,
    lower_half,
    random_bits,
    round_stochastically,
    salt,
    upper_half,
)
from fabric_train.optim.tensor_table import Row, StepFactors, Storage, TensorTable, are_aligned, tensor_table

# elements per chunk: in fp32 they fit a core's cache, or take little of a GPU's memory
_CHUNK = {"cpu": 2**16, "cuda": 2**24}
assert all(size % BLOCK == 0 for size in _CHUNK.values())
MOMENTS = ("exp_avg", "exp_avg_sq")

ParameterInGroup = tuple[nn.Parameter, dict[str, Any]]
"""A parameter and its parameter group of ``torch.optim``."""


class AdamW(DeclaredStates, torch.optim.AdamW):
    """torch's AdamW, whose moments have the dtype of the weights."""

    def declare_states(self, parameter: nn.Parameter) -> tuple[State, ...]:
        """Return both moments and the number of steps."""
        return _declare_adamw_states(parameter.dtype)

    def restore_states(self, parameter: nn.Parameter, states: Mapping[str, torch.Tensor]) -> None:
        """Set a parameter's moments, each sharded like the parameter, and its number of steps."""
        super().restore_states(parameter, states)
        if not self.defaults["fused"]:  # it counts on the host: it would read a count from the device in every step
            self.state[parameter]["step"] = states["step"].cpu()


def _declare_adamw_states(moments_dtype: torch.dtype, held_bytes: int | None = None) -> tuple[State, ...]:
    """Return both moments and the number of steps; ``held_bytes`` is as in ``State``."""
    moments = [State(name, moments_dtype, held_bytes=held_bytes) for name in MOMENTS]
    num_steps = State("step", torch.float32, torch.Size())
    return (*moments, num_steps)


def step_factors(step: int, lr: float, weight_decay: float, betas: tuple[float, float], eps: float) -> StepFactors:
    """Return the factors of ``adamw_step`` in step ``step``, counted from 1 (arXiv:1711.05101)."""
    beta1, beta2 = betas
    return StepFactors(
        weight_factor=1 - lr * weight_decay,
        first_gain=1 - beta1,
        second_decay=beta2,
        second_gain=1 - beta2,
        rate=lr / (1 - beta1**step),
        root_factor=(1 - beta2**step) ** -0.5,
        eps=eps,
    )


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
    """Update weights, first and second moment in place, computing in fp32.

    Args:
        tensors: These three, flat, fp32 or bfloat16.
        gradient: Flat.
        factors: fp32 [7], from :func:`step_factors`.
        indices: Indices of the elements in the full tensor, int32, for stochastic rounding; None rounds to the nearest.
        key: Key of the random bits of this step and parameter, int32 [].
    """
    weight_factor, first_gain, second_decay, second_gain, rate, root_factor, eps = factors.unbind()
    # the update of arXiv:1711.05101, algorithm 2, in fp32
    weights, exp_avg, exp_avg_sq = (tensor.float() for tensor in tensors)
    gradient = gradient.float()
    exp_avg = exp_avg + (gradient - exp_avg) * first_gain
    exp_avg_sq = exp_avg_sq * second_decay + gradient * gradient * second_gain
    weights = weights * weight_factor - rate * exp_avg / (exp_avg_sq.sqrt() * root_factor + eps)

    # round to the dtype of each tensor
    random: tuple[torch.Tensor | None, ...] = (None, None, None)
    if indices is not None:
        random = _split_random_bits(random_bits(indices, key))
    for tensor, values, random_16_bits in zip(tensors, (weights, exp_avg, exp_avg_sq), random, strict=True):
        if random_16_bits is not None and tensor.dtype != torch.float32:
            values = round_stochastically(values, random_16_bits)
        tensor.copy_(values)


def _split_random_bits(bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the random bits for the rounding of weights, first and second moment.

    Both moments have the same bits: each rounding is unbiased on its own.
    """
    lower = lower_half(bits)
    return upper_half(bits), lower, lower


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
        """Set up the optimizer.

        Args:
            groups: Parameter groups, each with its weight decay.
            lr: Learning rate of groups without one.
            betas: Decay rates of the moments.
            moments_dtype: float32 or bfloat16.
            in_8bit: Parameters whose moments are stored in 8 bits instead.
            stochastic_rounding: Round to bfloat16 stochastically.
            names: The parameters' names before anything wrapped the model.
            elements: The elements of each parameter that this rank has.
            seed: Of the stochastic rounding.
            compiles: Update each parameter in one compiled kernel, except parameters in 8 bits.
        """
        super().__init__(groups, lr=lr, betas=betas)
        self.launch: Callable[[TensorTable], None] | None = None
        """A function that updates all parameters of a table in one kernel launch; None updates them one by one."""
        self.moments_dtype = moments_dtype
        self.rounds_stochastically = stochastic_rounding
        self.in_8bit = {id(parameter) for parameter in in_8bit}
        self._elements = elements
        self._compiles = compiles
        self._salts = {parameter: salt(seed, name) for parameter, name in names.items()}
        self._num_steps: dict[nn.Parameter, int] = {}  # on the host, so that no step waits for the device

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        updated: list[ParameterInGroup] = []
        for group in self.param_groups:
            updated.extend((parameter, group) for parameter in group["params"] if parameter.grad is not None)
        if not updated:
            return
        for parameter, _ in updated:
            if not self.state[parameter]:
                self.state[parameter] = self._create_state(parameter)

        if self.launch is None:
            self._update_one_by_one(updated)
        else:
            self._update_together(updated, self.launch)

        torch._foreach_add_([self.state[parameter]["step"] for parameter, _ in updated], 1)
        for parameter, _ in updated:
            self._num_steps[parameter] = self._num_steps.get(parameter, 0) + 1

    def declare_states(self, parameter: nn.Parameter) -> tuple[State, ...]:
        """Return both moments and the number of steps. A checkpoint holds moments in 8 bits as fp32."""
        held_bytes = 1 if id(parameter) in self.in_8bit else None
        return _declare_adamw_states(self.moments_dtype, held_bytes)

    def read_states(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Return this rank's shard of a parameter's states, flat; moments in 8 bits are fp32 copies on the CPU."""
        states = {}
        for name, stored in self.state.get(parameter, {}).items():
            if isinstance(stored, Blockwise8Bit):
                states[name] = stored.read(0, len(stored)).cpu()
            else:
                states[name] = flat_local(stored)
        return states

    def restore_states(self, parameter: nn.Parameter, states: Mapping[str, torch.Tensor]) -> None:
        """Set a parameter's moments, each sharded like the parameter, and its number of steps."""
        super().restore_states(parameter, states)
        if id(parameter) in self.in_8bit:
            for name, stored in self._create_state(parameter).items():
                if isinstance(stored, Blockwise8Bit):
                    stored.write(0, flat_local(states[name]).float())
                    self.state[parameter][name] = stored
        self._num_steps[parameter] = int(states["step"])

    def _create_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the state of a parameter before its first step."""
        state: dict[str, Any] = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)}
        for name in MOMENTS:
            if id(parameter) in self.in_8bit:
                local = local_part(parameter)
                is_signed = name == "exp_avg"  # the second moment is a mean of squares
                state[name] = Blockwise8Bit(local.numel(), signed=is_signed, device=local.device)
            else:
                state[name] = torch.zeros_like(parameter, dtype=self.moments_dtype)
        return state

    def _random_keys(self, updated: Sequence[ParameterInGroup]) -> torch.Tensor:
        """Return the random key of each parameter's next step: int32 [parameters], on the CPU."""
        num_steps = [self._num_steps.get(parameter, 0) for parameter, _ in updated]
        salts = [self._salts[parameter] for parameter, _ in updated]
        return random_bits(torch.tensor(num_steps, dtype=torch.int32), torch.tensor(salts, dtype=torch.int32))

    def _step_factors(self, parameter: nn.Parameter, group: dict[str, Any]) -> StepFactors:
        step = self._num_steps.get(parameter, 0) + 1
        return step_factors(step, group["lr"], group["weight_decay"], group["betas"], group["eps"])

    def _update_together(self, updated: Sequence[ParameterInGroup], launch: Callable[[TensorTable], None]) -> None:
        """Update parameters with one launch for all that are stored in the same way."""
        tables: dict[Storage, list[tuple[Row, StepFactors]]] = {}
        gradients = []  # a contiguous copy of a gradient must exist until its launch
        keys = self._random_keys(updated).tolist()
        for (parameter, group), key in zip(updated, keys, strict=True):
            gradient = local_part(parameter.grad).contiguous()
            gradients.append(gradient)
            if gradient.numel():
                row, storage = self._table_row(parameter, gradient, key)
                tables.setdefault(storage, []).append((row, self._step_factors(parameter, group)))
        for storage, rows in tables.items():
            launch(tensor_table(storage, rows, gradients[0].device))

    def _table_row(self, parameter: nn.Parameter, gradient: torch.Tensor, key: int) -> tuple[Row, Storage]:
        """Return the row of a parameter, without its first program, and how it is stored."""
        # The tensors of the parameter on this rank; numbers in 8 bits have scales besides their codes.
        weights = local_part(parameter)
        exp_avg, exp_avg_sq = (self.state[parameter][name] for name in MOMENTS)
        exp_avg_scales = 0
        exp_avg_sq_scales = 0
        if isinstance(exp_avg, Blockwise8Bit):
            exp_avg_scales = exp_avg.scales.data_ptr()
            exp_avg_sq_scales = exp_avg_sq.scales.data_ptr()
            exp_avg = exp_avg.codes
            exp_avg_sq = exp_avg_sq.codes
        else:
            exp_avg = local_part(exp_avg)
            exp_avg_sq = local_part(exp_avg_sq)

        # The kernel gets addresses, so the tensors must be contiguous.
        tensors = [weights, gradient, exp_avg, exp_avg_sq]
        assert all(tensor.is_contiguous() for tensor in tensors)
        elements = self._elements[parameter]
        row = Row(
            weights=weights.data_ptr(),
            gradient=gradient.data_ptr(),
            exp_avg=exp_avg.data_ptr(),
            exp_avg_sq=exp_avg_sq.data_ptr(),
            exp_avg_scales=exp_avg_scales,
            exp_avg_sq_scales=exp_avg_sq_scales,
            numel=weights.numel(),
            first_program=0,  # ``tensor_table`` sets it
            begin=elements.begin,
            width=elements.width,
            gap=elements.stride - elements.width,
            key=key,
        )
        storage = Storage(
            weights=weights.dtype,
            gradient=gradient.dtype,
            moments=exp_avg.dtype,
            rounds_stochastically=self.rounds_stochastically,
            is_aligned=are_aligned([tensor.data_ptr() for tensor in tensors]),
        )
        return row, storage

    def _update_one_by_one(self, updated: Sequence[ParameterInGroup]) -> None:
        """Update parameters one after another, each in chunks."""
        device = local_part(updated[0][0]).device
        keys = to_device_async(self._random_keys(updated), device).unbind()
        factors_on_device: dict[StepFactors, torch.Tensor] = {}  # most parameters have the same
        for (parameter, group), key in zip(updated, keys, strict=True):
            if self._compiles and id(parameter) not in self.in_8bit:
                factors = self._step_factors(parameter, group)
                if factors not in factors_on_device:
                    factors_on_device[factors] = to_device_async(torch.tensor(factors), device)
                self._update_compiled(parameter, factors_on_device[factors], key)
            else:
                self._update_by_torch(parameter, group, key)

    def _update_compiled(self, parameter: nn.Parameter, factors: torch.Tensor, key: torch.Tensor) -> None:
        """Update a parameter with one compiled kernel for each chunk."""
        state = self.state[parameter]
        tensors = [flat_local(parameter), flat_local(state["exp_avg"]), flat_local(state["exp_avg_sq"])]
        gradient = local_part(parameter.grad).reshape(-1)
        size = _CHUNK["cuda"]
        for begin in range(0, len(gradient), size):  # in chunks, because the elements' indices take memory
            gradient_chunk = gradient[begin : begin + size]
            chunks = [tensor[begin : begin + size] for tensor in tensors]
            indices = None
            if self.rounds_stochastically:
                indices = self._elements[parameter].indices(begin, len(gradient_chunk), gradient_chunk.device)
            compiled_adamw_step()(chunks, gradient_chunk, factors, indices, key)

    def _update_by_torch(self, parameter: nn.Parameter, group: dict[str, Any], key: torch.Tensor) -> None:
        """Update a parameter with torch's fused kernel, in fp32 copies of its chunks."""
        state = self.state[parameter]
        tensors: list[torch.Tensor | Blockwise8Bit] = [flat_local(parameter)]  # weights, first and second moment
        for name in MOMENTS:
            moment = state[name]
            tensors.append(moment if isinstance(moment, Blockwise8Bit) else flat_local(moment))
        gradient = local_part(parameter.grad).reshape(-1)
        device = gradient.device
        size = _CHUNK[device.type]
        for begin in range(0, len(gradient), size):
            gradient_chunk = gradient[begin : begin + size].float()
            count = len(gradient_chunk)
            chunks = [_read_fp32(tensor, begin, count) for tensor in tensors]
            _fused_adamw_step(chunks, gradient_chunk, state["step"], group)
            random: tuple[torch.Tensor | None, ...] = (None, None, None)
            if self.rounds_stochastically:
                indices = self._elements[parameter].indices(begin, count, device)
                random = _split_random_bits(random_bits(indices, key))
            for tensor, values, random_16_bits in zip(tensors, chunks, random, strict=True):
                _write_fp32(tensor, begin, values, random_16_bits)


def _read_fp32(stored: torch.Tensor | Blockwise8Bit, begin: int, count: int) -> torch.Tensor:
    """Return ``count`` elements in fp32. If they are stored in fp32, it is a view of the storage."""
    if isinstance(stored, Blockwise8Bit):
        return stored.read(begin, count)
    return stored[begin : begin + count].float()


def _write_fp32(
    stored: torch.Tensor | Blockwise8Bit, begin: int, values: torch.Tensor, random: torch.Tensor | None
) -> None:
    """Store the fp32 values that ``_read_fp32`` returned. With ``random``, round to bfloat16 stochastically."""
    if isinstance(stored, Blockwise8Bit):
        stored.write(begin, values)
    elif stored.dtype != torch.float32:  # in fp32 the values are a view of the storage already
        if random is not None:
            round_stochastically(values, random)
        stored[begin : begin + len(values)] = values


def _fused_adamw_step(
    tensors: Sequence[torch.Tensor], gradient: torch.Tensor, num_steps: torch.Tensor, group: dict[str, Any]
) -> None:
    """Update fp32 weights, first and second moment in place with torch's fused kernel."""
    weights, exp_avg, exp_avg_sq = tensors
    beta1, beta2 = group["betas"]
    adamw(
        [weights],
        [gradient],
        [exp_avg],
        [exp_avg_sq],
        [],  # maxima of the second moment, of amsgrad
        [num_steps.clone()],  # the kernel adds 1 to it
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
