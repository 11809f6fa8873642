"""AdamW whose weights or moments are kept in fewer bits than it computes in.

It computes in fp32, piece by piece with torch's fused kernel, and rounds what it keeps. torchao's AdamW does the same,
but compiles itself for every shape of a parameter, and draws from the rank's stream of random numbers: replicas would
drift apart, and a resumed or otherwise cut run would draw others.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from fabric_train.distributed.host_memory import to_device_async
from fabric_train.optim.blockwise_8bit import BLOCK, EightBits
from fabric_train.optim.compiled_adamw import compiled_step, factors
from fabric_train.optim.stochastic_rounding import Place, random_bits, round_by_chance, salt

# elements computed at a time: what they take in fp32 fits a core's cache, or is little of a GPU's memory
_PIECE = {"cpu": 2**16, "cuda": 2**24}
assert not any(size % BLOCK for size in _PIECE.values())

MOMENTS = ("exp_avg", "exp_avg_sq")


class LowPrecisionAdamW(torch.optim.AdamW):
    """AdamW (arXiv:1711.05101) that keeps its moments in a type of their own."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        moments_dtype: torch.dtype,
        in_eight_bits: Collection[nn.Parameter] = (),
        rounds_by_chance: bool,
        names: Mapping[nn.Parameter, str],
        places: Mapping[nn.Parameter, Place],
        seed: int,
        compiles: bool = False,
    ) -> None:
        """Take parameter groups as torch's AdamW does.

        Args:
            groups: of parameters, with their weight decay.
            lr: learning rate.
            betas: decay of both moments.
            moments_dtype: float32 or bfloat16.
            in_eight_bits: parameters whose moments are kept in 8 bits instead.
            rounds_by_chance: whether what is kept in bfloat16 is rounded stochastically, instead of to the nearest.
            names: of the parameters, before anything wrapped them.
            places: which part of a parameter this rank has.
            seed: of the rounding.
            compiles: take the step of what is not kept in 8 bits in one compiled kernel.
        """
        super().__init__(groups, lr=lr, betas=betas)
        self.moments_dtype = moments_dtype
        self._in_eight_bits = {id(parameter) for parameter in in_eight_bits}
        self._rounds_by_chance = rounds_by_chance
        self._places = places
        self._salts = {parameter: salt(seed, name) for parameter, name in names.items()}
        self._counts: dict[nn.Parameter, int] = {}  # of steps; known to the host without asking the device
        self._compiles = compiles

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Change every parameter that has a gradient."""
        changing = [(each, group) for group in self.param_groups for each in group["params"] if each.grad is not None]
        keys = self._keys([parameter for parameter, _ in changing])
        by: dict[tuple[int, int], torch.Tensor] = {}
        for (parameter, group), key in zip(changing, keys, strict=True):
            if not self.state[parameter]:
                self.state[parameter] = self._new_state(parameter)
            if self._compiles and id(parameter) not in self._in_eight_bits:
                step = self._counts.get(parameter, 0) + 1
                if (id(group), step) not in by:
                    of_step = factors(step, group["lr"], group["weight_decay"], group["betas"], group["eps"])
                    by[id(group), step] = to_device_async(torch.tensor(of_step), key.device)
                self._update_compiled(parameter, by[id(group), step], key)
            else:
                self._update(parameter, group, key)
            self.state[parameter]["step"] += 1
            self._counts[parameter] = self._counts.get(parameter, 0) + 1

    def moments(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Return this rank's part of a parameter's moments, flat; those in 8 bits as fp32 copies in host memory. There
        are none before the first step.
        """
        kept = {key: self.state[parameter][key] for key in MOMENTS if key in self.state[parameter]}
        return {
            key: moment.read(0, len(moment)).cpu() if isinstance(moment, EightBits) else _flat(moment)
            for key, moment in kept.items()
        }

    def adopt(self, parameter: nn.Parameter, count: torch.Tensor, moments: Mapping[str, torch.Tensor]) -> None:
        """Go on from moments, each cut as the parameter is, after ``count`` steps."""
        state = self._new_state(parameter)
        state["step"].copy_(count)
        for key, moment in moments.items():
            kept = state[key]
            if isinstance(kept, EightBits):
                kept.write(0, _flat(moment).float())
            else:
                kept.copy_(moment)
        self.state[parameter] = state
        self._counts[parameter] = int(count)

    def _keys(self, parameters: Sequence[nn.Parameter]) -> Sequence[torch.Tensor]:
        """Return what the next step's chance of each parameter hangs on: 0-dim int32 tensors."""
        if not parameters:
            return ()
        counts = torch.tensor([self._counts.get(parameter, 0) for parameter in parameters], dtype=torch.int32)
        salts = torch.tensor([self._salts[parameter] for parameter in parameters], dtype=torch.int32)
        return to_device_async(random_bits(counts, salts), _local(parameters[0]).device).unbind()

    def _new_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        state: dict[str, Any] = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)}
        for key in MOMENTS:
            if id(parameter) in self._in_eight_bits:
                local = _local(parameter)
                state[key] = EightBits(local.numel(), signed=key == "exp_avg", device=local.device)
            else:
                state[key] = torch.zeros_like(parameter, dtype=self.moments_dtype)
        return state

    def _update_compiled(self, parameter: nn.Parameter, by: torch.Tensor, key: torch.Tensor) -> None:
        state = self.state[parameter]
        kept = (_flat(parameter), *(_flat(state[each]) for each in MOMENTS))
        gradient = _local(parameter.grad).reshape(-1)
        for begin in range(0, len(gradient), _PIECE["cuda"]):  # the numbers of the elements are written out
            piece = slice(begin, begin + _PIECE["cuda"])
            part, numbers = gradient[piece], None
            if self._rounds_by_chance:
                numbers = self._places[parameter].numbers(begin, len(part), part.device)
            compiled_step()([each[piece] for each in kept], part, by, numbers, key)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any], key: torch.Tensor) -> None:
        state = self.state[parameter]
        weights, gradient = _flat(parameter), _local(parameter.grad).reshape(-1)
        kept = (weights, *(state[key] if isinstance(state[key], EightBits) else _flat(state[key]) for key in MOMENTS))
        size = _PIECE[weights.device.type]
        for begin in range(0, weights.numel(), size):
            count = min(size, weights.numel() - begin)
            computed = [_read(each, begin, count) for each in kept]
            _adamw(computed, gradient[begin : begin + count].float(), state["step"], group)
            chances: tuple[torch.Tensor | None, ...] = (None, None, None)
            if self._rounds_by_chance:
                bits = random_bits(self._places[parameter].numbers(begin, count, weights.device), key)
                lower = bits & 0xFFFF
                chances = ((bits >> 16).bitwise_and_(0xFFFF), lower, lower)
            for each, values, chance in zip(kept, computed, chances, strict=True):
                _write(each, begin, values, chance)


def _read(kept: torch.Tensor | EightBits, begin: int, count: int) -> torch.Tensor:
    """Return ``count`` elements in fp32: the very memory that they are kept in, if that is fp32."""
    return kept.read(begin, count) if isinstance(kept, EightBits) else kept[begin : begin + count].float()


def _write(kept: torch.Tensor | EightBits, begin: int, values: torch.Tensor, chance: torch.Tensor | None) -> None:
    """Keep what ``_read`` has returned; in bfloat16 rounded by chance, if it is given."""
    if isinstance(kept, EightBits):
        kept.write(begin, values)
    elif kept.dtype != torch.float32:
        if chance is not None:
            round_by_chance(values, chance)
        kept[begin : begin + len(values)] = values


def moments_dtype(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> torch.dtype:
    """Return the type that AdamW's moments of a parameter are saved in."""
    return optimizer.moments_dtype if isinstance(optimizer, LowPrecisionAdamW) else parameter.dtype


def local_moments(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    """Return this rank's part of a parameter's moments, flat; there are none before the first step."""
    if isinstance(optimizer, LowPrecisionAdamW):
        return optimizer.moments(parameter)
    state = optimizer.state.get(parameter, {})
    return {key: _flat(state[key]) for key in MOMENTS if key in state}


def restore_moments(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, count: torch.Tensor, moments: dict[str, torch.Tensor]
) -> None:
    """Let AdamW go on from moments, each cut as the parameter is, after ``count`` steps."""
    if isinstance(optimizer, LowPrecisionAdamW):
        optimizer.adopt(parameter, count, moments)
        return
    kept = {key: moment.to(parameter.dtype) for key, moment in moments.items()}
    optimizer.state[parameter] = {"step": count.to(parameter.device), **kept}


def _adamw(
    computed: list[torch.Tensor],
    gradient: torch.Tensor,
    steps_before: torch.Tensor,
    group: dict[str, Any],
) -> None:
    """Take the step in fp32, in place; ``computed`` are weights, first and second moment."""
    beta1, beta2 = group["betas"]
    weights, first, second = computed
    adamw(
        [weights],
        [gradient],
        [first],
        [second],
        [],
        [steps_before.clone()],  # which it counts up
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def _local(tensor: Any) -> torch.Tensor:
    """Return what of a tensor is on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor as a vector over the same memory."""
    return _local(tensor.detach()).view(-1)
