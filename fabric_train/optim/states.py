"""What an optimizer declares of its states; saving, restoring, resharding and the memory plan read nothing else."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from fabric_train.distributed.ranks import local_part


@dataclass(frozen=True)
class State:
    """A tensor that an optimizer keeps for each parameter that it updates.

    ``name`` is its key in ``optimizer.state[parameter]``, and the end of its name in a checkpoint, where it has
    ``dtype``. Without a ``shape``, it has the parameter's: then it is sharded like the parameter, and starts with
    zeros; a state of another shape is the same on all ranks. ``held_bytes``: of an element in memory.
    """

    name: str
    dtype: torch.dtype
    shape: torch.Size | None = None
    held_bytes: int | None = None


class DeclaredStates(torch.optim.Optimizer):
    """An optimizer whose states can be saved, resharded and planned; mix it in before a class of ``torch.optim``."""

    def declare_states(self, parameter: nn.Parameter) -> tuple[State, ...]:
        """Return the states that the optimizer keeps for a parameter, which may be on the meta device."""
        raise NotImplementedError(f"{type(self).__name__} does not declare its states")

    def read_states(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Return this rank's part of a parameter's states by name, flat. Before the first step there are none."""
        kept = self.state.get(parameter, {})
        return {each.name: flat_local(kept[each.name]) for each in self.declare_states(parameter) if each.name in kept}

    def restore_states(self, parameter: nn.Parameter, states: Mapping[str, torch.Tensor]) -> None:
        """Set a parameter's states, on its device; states of its shape are sharded like it."""
        self.state[parameter] = dict(states)


def flat_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor as a vector over the same memory."""
    return local_part(tensor.detach()).view(-1)
