"""Muon for the matrices of the decoder layers, and AdamW for all other parameters.

The update is that of ``torch.optim.Muon``, with Nesterov momentum. The moving average of the gradient is mixed with the
gradient once more and orthogonalized by five quintic Newton–Schulz steps in bfloat16. Weight decay is decoupled. The
size of the update is one of two: Keller Jordan (2024, https://kellerjordan.github.io/posts/muon) multiplies it by the
square root of rows / columns, or by 1 for a wide matrix. arXiv:2502.16982 multiplies it by 0.2 times the square root of
the longer side: an element then changes as much as with AdamW, whose learning rates and weight decay apply.

FSDP2 divides the rows of a matrix among the ranks. One rank collects them, orthogonalizes the matrix and sends the rows
back, as in that paper; meanwhile the other ranks do the same for other matrices.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from fabric_train.distributed.sharded_parameters import IN_LAYER, local_part
from fabric_train.optim.optimizer import OptimizedParameters, build_adamw
from fabric_train.optim.states import DeclaredStates, State
from fabric_train.optim.stochastic_rounding import (
    LocalElements,
    local_elements,
    random_bits,
    round_stochastically,
    salt,
    upper_half,
)

_ROUNDED_AT_ONCE = 2**22
"""The number of elements that are rounded together: their fp32 copy and random numbers take 64 MiB."""
_ITERATED_ITEMSIZE = 2
"""The bytes of an element in the Newton–Schulz steps, which compute in bfloat16."""


def build_muon(parameters: OptimizedParameters) -> DeclaredStates:
    """Build Muon over the matrices of the decoder layers, joined with AdamW over the other parameters."""
    arguments = parameters.arguments
    muon_lr = arguments.lr if arguments.muon_lr is None else arguments.muon_lr

    # Divide each group: --lr_of decides the rate of a matrix before --muon_lr does.
    muon_groups: list[dict[str, Any]] = []
    adamw_groups: list[dict[str, Any]] = []
    for group in parameters.groups:
        adamw_parameters = []
        matrices_by_rate: dict[float, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in group["params"]:
            if is_layer_matrix(name, parameter):
                rate = parameters.rates.get(name, muon_lr)
                matrices_by_rate.setdefault(rate, []).append((name, parameter))
            else:
                adamw_parameters.append((name, parameter))
        for rate, matrices in matrices_by_rate.items():
            muon_groups.append({**group, "params": matrices, "lr": rate, "lr_ratio": rate / arguments.lr})
        if adamw_parameters:
            adamw_groups.append({**group, "params": adamw_parameters})

    # One of the two may have nothing to update, if only parts of the model train.
    optimizers: list[DeclaredStates] = []
    if muon_groups:
        optimizers.append(_build_muon_alone(replace(parameters, groups=muon_groups)))
    if adamw_groups:
        optimizers.append(build_adamw(replace(parameters, groups=adamw_groups)))
    return JoinedOptimizer(optimizers)


def is_layer_matrix(name: str, parameter: torch.Tensor) -> bool:
    """Return whether a parameter, by its original name, is a matrix of a decoder layer."""
    return parameter.dim() == 2 and IN_LAYER.fullmatch(name) is not None


def _build_muon_alone(parameters: OptimizedParameters) -> "Muon":
    """Build Muon over parameters, all of which are matrices."""
    arguments = parameters.arguments
    names = parameters.names
    roundings = {}
    if arguments.stochastic_rounding:
        for parameter, name in names.items():
            if parameter.dtype == torch.bfloat16:
                elements = local_elements(parameter, parameters.flat_shards)
                roundings[parameter] = Rounding(elements, salt(parameters.seed, name))
    return Muon(
        parameters.groups,
        lr=arguments.lr,
        momentum=arguments.muon_momentum,
        adjust_lr_fn=arguments.muon_adjust_lr,
        roundings=roundings,
    )


@dataclass(frozen=True)
class Rounding:
    """The stochastic rounding of a parameter to bfloat16."""

    elements: LocalElements
    """The elements of the parameter that this rank has."""
    salt: int
    """The salt of the random bits, from the seed and the parameter's name."""


@dataclass(frozen=True)
class RowRanks:
    """The ranks among which the rows of matrices are divided; this process is rank ``rank`` of ``size``."""

    group: dist.ProcessGroup | None
    """None if each rank has full matrices."""
    rank: int
    size: int

    def num_rows(self, matrix: torch.Tensor, rank: int) -> int:
        """Return how many rows of a matrix a rank of the group has; the last ranks may have fewer, or none."""
        num_rows, _ = Shard.local_shard_size_and_offset(matrix.shape[0], self.size, rank)
        return num_rows


def ranks_of_rows(matrix: torch.Tensor) -> RowRanks:
    """Return the ranks among which the rows of a parameter are divided."""
    if not isinstance(matrix, DTensor):
        return RowRanks(None, 0, 1)
    sharded_dims = [dim for dim, placement in enumerate(matrix.placements) if not placement.is_replicate()]
    (dim,) = sharded_dims
    assert matrix.placements[dim].is_shard(0), f"{matrix.placements} does not divide whole rows"
    mesh = matrix.device_mesh
    return RowRanks(mesh.get_group(dim), mesh.get_local_rank(dim), mesh.size(dim))


class Muon(DeclaredStates, torch.optim.Muon):
    """torch's Muon, also for matrices whose rows are divided among ranks and for bf16 with stochastic rounding."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        momentum: float,
        adjust_lr_fn: str,
        roundings: Mapping[nn.Parameter, Rounding],
    ) -> None:
        """Set up the optimizer.

        Args:
            groups: Parameter groups of matrices, each with its weight decay; the matrices of a group are on one mesh.
            lr: Learning rate of groups that do not set one.
            momentum: Share of the earlier average that a step keeps.
            adjust_lr_fn: As for ``torch.optim.Muon``.
            roundings: The stochastic rounding of bf16 matrices; without one, a matrix is rounded to the nearest.
        """
        super().__init__(groups, lr=lr, momentum=momentum, adjust_lr_fn=adjust_lr_fn)
        self._roundings = roundings

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            updated = [matrix for matrix in group["params"] if matrix.grad is not None]
            for matrix in updated:
                if not self.state[matrix]:
                    # the count is on the host, so that no step waits for the device
                    self.state[matrix] = {"momentum_buffer": torch.zeros_like(matrix), "step": torch.zeros(())}
            if updated:
                self._update(updated, group)
            for matrix in updated:
                self.state[matrix]["step"] += 1

    def declare_states(self, parameter: nn.Parameter) -> tuple[State, ...]:
        """Return the momentum and the number of steps."""
        return State("momentum_buffer", parameter.dtype), State("step", torch.float32, torch.Size())

    def restore_states(self, parameter: nn.Parameter, states: Mapping[str, torch.Tensor]) -> None:
        """Set a matrix's momentum, sharded like the matrix, and its number of steps, on the host."""
        super().restore_states(parameter, states)
        self.state[parameter]["step"] = states["step"].cpu()

    def working_bytes(self, parameter: nn.Parameter) -> int:
        """Return the bytes that the largest Newton–Schulz step needs, including the rows that ranks exchange.

        These are four tensors of the matrix's size (sent and received rows, the matrix before and after the step) and
        two products of its shorter side with itself.
        """
        shorter_side = min(parameter.shape)
        return _ITERATED_ITEMSIZE * (4 * parameter.numel() + 2 * shorter_side**2)

    def exchanged_bytes(self, parameter: nn.Parameter) -> int:
        """Return the bytes of the rows that ranks send to the rank that orthogonalizes them, and back."""
        return 2 * _ITERATED_ITEMSIZE * parameter.numel()

    def _update(self, matrices: Sequence[nn.Parameter], group: dict[str, Any]) -> None:
        """Update the matrices of a group, as many at a time as there are ranks with rows of them."""
        ranks = ranks_of_rows(matrices[0])
        # Matrices of one size together, so that the ranks have equally much to compute.
        by_size = sorted(matrices, key=lambda matrix: matrix.numel(), reverse=True)
        for begin in range(0, len(by_size), ranks.size):
            batch = by_size[begin : begin + ranks.size]
            rows = [self._update_momentum(matrix, group) for matrix in batch]
            if ranks.group is None:
                orthogonal_rows = [_orthogonalize(rows[0], group)]
            else:
                orthogonal_rows = _orthogonalize_divided(batch, rows, ranks, group)
            for matrix, orthogonal in zip(batch, orthogonal_rows, strict=True):
                self._update_weights(matrix, orthogonal, group)

    def _update_momentum(self, matrix: nn.Parameter, group: dict[str, Any]) -> torch.Tensor:
        """Add the gradient to the momentum; return this rank's rows of the step's direction, in bf16."""
        gradient = local_part(matrix.grad)
        momentum = local_part(self.state[matrix]["momentum_buffer"])
        momentum.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(momentum, group["momentum"]).bfloat16()  # Nesterov's

    def _update_weights(self, matrix: nn.Parameter, orthogonal: torch.Tensor, group: dict[str, Any]) -> None:
        """Decay this rank's rows of a matrix and subtract the orthogonalized update, bf16 [rows, columns]."""
        weight_factor = 1 - group["lr"] * group["weight_decay"]
        rate = _adjust_lr(group["lr"], group["adjust_lr_fn"], matrix.shape)
        weights = local_part(matrix)
        rounding = self._roundings.get(matrix)
        if rounding is None:
            weights.mul_(weight_factor)
            weights.add_(orthogonal, alpha=-rate)
            return

        # In fp32 and in chunks, then rounded with the random bits of this step and of these elements.
        step = self.state[matrix]["step"].int()
        key = int(random_bits(step, rounding.salt))
        flat_weights = weights.view(-1)
        flat_update = orthogonal.reshape(-1)
        for begin in range(0, flat_weights.numel(), _ROUNDED_AT_ONCE):
            chunk = slice(begin, begin + _ROUNDED_AT_ONCE)
            values = flat_weights[chunk].float()
            values.mul_(weight_factor)
            values.add_(flat_update[chunk], alpha=-rate)
            indices = rounding.elements.indices(begin, len(values), values.device)
            flat_weights[chunk] = round_stochastically(values, upper_half(random_bits(indices, key)))


def _orthogonalize(matrix: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """Return about the nearest matrix with orthogonal rows or columns, in bf16; overwrites a bf16 ``matrix``."""
    return _zeropower_via_newtonschulz(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])


def _orthogonalize_divided(
    matrices: Sequence[torch.Tensor], rows: Sequence[torch.Tensor], ranks: RowRanks, group: dict[str, Any]
) -> list[torch.Tensor]:
    """Orthogonalize up to one matrix per rank: rank r collects all rows of matrix r and sends them back.

    Args:
        matrices: The matrices, with their full shapes.
        rows: This rank's rows of each matrix, bf16.
        ranks: The ranks that have the rows; all of them call this together.
        group: The parameter group with the settings of the Newton–Schulz steps.

    Returns:
        This rank's rows of each orthogonalized matrix, bf16.
    """
    # How many elements this rank has of each matrix, and how many each rank has of the matrix that this rank collects.
    sizes_of_shards = [0] * ranks.size
    for rank, shard in enumerate(rows):
        sizes_of_shards[rank] = shard.numel()
    sizes_of_collected = [0] * ranks.size
    collected_matrix = matrices[ranks.rank] if ranks.rank < len(matrices) else None
    if collected_matrix is not None:
        num_columns = collected_matrix.shape[1]
        sizes_of_collected = [ranks.num_rows(collected_matrix, rank) * num_columns for rank in range(ranks.size)]

    # Rows to the rank that collects their matrix.
    shards = torch.cat([shard.flatten() for shard in rows])
    collected = shards.new_empty(sum(sizes_of_collected))
    dist.all_to_all_single(collected, shards, sizes_of_collected, sizes_of_shards, ranks.group)
    if collected_matrix is not None:
        collected = _orthogonalize(collected.view(collected_matrix.shape), group).flatten()

    # Orthogonalized rows back.
    orthogonal_shards = torch.empty_like(shards)
    dist.all_to_all_single(orthogonal_shards, collected, sizes_of_shards, sizes_of_collected, ranks.group)
    split = orthogonal_shards.split(sizes_of_shards[: len(rows)])
    return [orthogonal.view_as(shard) for orthogonal, shard in zip(split, rows, strict=True)]


class JoinedOptimizer(DeclaredStates):
    """Several optimizers of different parameters that act as one optimizer."""

    def __init__(self, optimizers: Sequence[DeclaredStates]) -> None:
        """Set up the optimizer with the parameter groups of ``optimizers``, which it shares with them."""
        groups: list[dict[str, Any]] = []
        for optimizer in optimizers:
            groups.extend(optimizer.param_groups)
        super().__init__(groups, {})
        self._optimizers = tuple(optimizers)
        self._optimizer_of: dict[nn.Parameter, DeclaredStates] = {}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                self._optimizer_of.update(dict.fromkeys(group["params"], optimizer))

    @property
    def joined(self) -> tuple[DeclaredStates, ...]:
        """The optimizers."""
        return self._optimizers

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step of each optimizer."""
        for optimizer in self._optimizers:
            optimizer.step()

    def declare_states(self, parameter: nn.Parameter) -> tuple[State, ...]:
        """Return the states of the optimizer that updates the parameter."""
        return self._optimizer_of[parameter].declare_states(parameter)

    def read_states(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Return this rank's shard of the states of the optimizer that updates the parameter."""
        return self._optimizer_of[parameter].read_states(parameter)

    def restore_states(self, parameter: nn.Parameter, states: Mapping[str, torch.Tensor]) -> None:
        """Set the states of the optimizer that updates the parameter."""
        self._optimizer_of[parameter].restore_states(parameter, states)

    def working_bytes(self, parameter: nn.Parameter) -> int:
        """Return the bytes that the optimizer that updates the parameter needs for it in a step."""
        return self._optimizer_of[parameter].working_bytes(parameter)

    def exchanged_bytes(self, parameter: nn.Parameter) -> int:
        """Return the bytes that ranks exchange for the parameter in a step."""
        return self._optimizer_of[parameter].exchanged_bytes(parameter)
