"""Declare the states of an optimizer: the tensors that it keeps for each parameter.

Saving, restoring, resharding and the memory plan read nothing of an optimizer but its declared states.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from fabric_train.distributed.sharded_parameters import local_part


@dataclass(frozen=True)
class State:
    """A tensor that an optimizer keeps for each parameter that it updates."""

    name: str
    """The key in ``optimizer.state[parameter]``, and the end of the state's name in a checkpoint."""
    dtype: torch.dtype
    """The dtype in a checkpoint."""
    shape: torch.Size | None = None
    """None means that the state has the parameter's shape, is sharded like it, and starts at zero. A state of another
    shape is the same on all ranks.
    """
    held_bytes: int | None = None
    """The bytes of an element in memory; None means as many as ``dtype`` has."""


class DeclaredStates(torch.optim.Optimizer):
    """An optimizer whose states can be saved, resharded and planned; mix it in before a class of ``torch.optim``."""

    def declare_states(self, parameter: nn.Parameter) -> tuple[State, ...]:
        """Return the states that the optimizer keeps for a parameter, which may be on the meta device."""
        raise NotImplementedError(f"{type(self).__name__} does not declare its states")

    def read_states(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Return this rank's shard of a parameter's states by name, flat; empty before the first step."""
        tensors = self.state.get(parameter, {})
        states = {}
        for state in self.declare_states(parameter):
            if state.name in tensors:
                states[state.name] = flat_local(tensors[state.name])
        return states

    def restore_states(self, parameter: nn.Parameter, states: Mapping[str, torch.Tensor]) -> None:
        """Set a parameter's states, on its device; states of the parameter's shape are sharded like it."""
        self.state[parameter] = dict(states)

    def working_bytes(self, parameter: nn.Parameter) -> int:
        """Return the bytes that a step needs for a parameter besides its states, until it comes to the next one."""
        return 0

    def exchanged_bytes(self, parameter: nn.Parameter) -> int:
        """Return the bytes that ranks send one another for a parameter in a step, if it is divided among them."""
        return 0

    @property
    def joined(self) -> tuple["DeclaredStates", ...]:
        """The optimizers that this one joins; only itself unless it joins several."""
        return (self,)


def flat_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor as a vector over the same memory."""
    return local_part(tensor.detach()).view(-1)
