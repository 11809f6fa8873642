"""Extend the positions of a model by its rotary embedding (RoPE): scaled frequencies, another base, or plain ones.

RoPE rotates each pair of a head's dimensions by position × frequency. A model has only learnt the angles up to its
number of positions. ``linear`` divides all frequencies by the factor (arXiv:2306.15595). ``yarn`` divides only the low
ones, and also scales the attention (arXiv:2309.00071). ``llama3`` divides the low ones between two borders and leaves
the attention unscaled (arXiv:2407.21783). A higher base, ``rope_theta``, lowers all frequencies but the first, and the
low ones most. transformers computes them in fp32 from ``rope_parameters`` in config.json, for the run and for its
export.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import PretrainedConfig

from fabric_train.cli.errors import InputError
from fabric_train.model.hf_model import ModelShape

_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""The borders between kept, mixed and divided frequencies, in turns within the original positions, as in Llama 3.1."""
_UNSCALED_SETTINGS = ("rope_theta", "partial_rotary_factor")
"""Settings that are kept when the scaling changes."""
_KINDS_WITH_ORIGINAL = ("llama3", "yarn", "longrope")
"""The kinds whose configuration has the original number of positions."""


@dataclass(frozen=True)
class RopeChange:
    """What ``--rope_scaling`` and ``--rope_theta`` ask for."""

    scaling: tuple[str, float] | None
    """The kind and the factor."""
    theta: float | None
    option_prefix: str = "--"
    """The prefix of the arguments' names in messages, which is another one if they are given in a file."""
    allows_longer_rows: bool = False
    """Whether rows longer than the model's positions are allowed although neither argument is given."""

    def apply(self, shape: ModelShape, longest_row: int) -> ModelShape:
        """Return the shape with another RoPE and number of positions in its configuration.

        Applying it again changes nothing, so a resumed run may give the same arguments. With a scaling, there are
        ``original × factor`` positions, or as many as the model has if that is more; without one, at least
        ``longest_row``, the tokens of a row. ``none`` restores the original positions.

        Raises:
            InputError: the model has no rotary positions, or the scaled ones are fewer than ``longest_row``.
        """
        rope = rotary_parameters(shape.config)
        is_requested = self.scaling is not None or self.theta is not None
        if not is_requested:
            has_longer_rows = shape.max_positions is not None and longest_row > shape.max_positions
            if rope is None or not has_longer_rows or not self.allows_longer_rows:
                return shape
        if rope is None or shape.max_positions is None:
            argument = "rope_scaling" if self.scaling else "rope_theta"
            raise InputError(
                f"{self.option_prefix}{argument}: {shape.source} ({shape.config.model_type}) has no rotary "
                "positions, or several kinds of them; leave out {argument}"
            )
        positions = max(shape.max_positions, longest_row)
        if self.theta is not None:
            rope = {**rope, "rope_theta": self.theta}
        if self.scaling is not None:
            kind, factor = self.scaling
            original = original_positions(shape.config)
            rope = _scaled_parameters(rope, kind, factor, original)
            if kind == "none":
                positions = max(original, longest_row)
            else:
                positions = max(math.floor(original * factor), shape.max_positions)
            if longest_row > positions:
                sufficient_factor = -(-longest_row // original)
                raise InputError(
                    f"{self.option_prefix}rope_scaling {kind}:{factor:g}: {shape.source} originally had {original:,} "
                    f"positions, so this gives {positions:,}, but rows have {longest_row:,} tokens; give "
                    f"{kind}:{sufficient_factor}"
                )
        config: Any = copy.deepcopy(shape.config)
        text_config = config.get_text_config()
        text_config.rope_parameters = rope
        text_config.max_position_embeddings = positions
        return replace(shape, config=config, max_positions=positions)


def _scaled_parameters(rope: Mapping[str, Any], kind: str, factor: float, original: int) -> dict[str, Any]:
    """Return ``rope_parameters`` with another scaling of the ``original`` number of positions."""
    parameters = {name: rope[name] for name in _UNSCALED_SETTINGS if name in rope}
    if kind == "none":
        return {**parameters, "rope_type": "default"}
    parameters |= {"rope_type": kind, "factor": factor}
    if kind in _KINDS_WITH_ORIGINAL:
        parameters["original_max_position_embeddings"] = original
    if kind == "llama3":
        parameters |= _LLAMA_3
    return parameters


def rotary_parameters(config: PretrainedConfig) -> dict[str, Any] | None:
    """Return ``rope_parameters`` of a model whose layers all have the same plain RoPE; None for any other model."""
    text_config: Any = config.get_text_config()
    rope = getattr(text_config, "rope_parameters", None)
    if not isinstance(rope, dict) or "rope_type" not in rope:
        return None
    if getattr(text_config, "default_rope_type", "") != "default":
        return None
    has_several_kinds = any(isinstance(value, dict) for value in rope.values())  # by type of layer
    return None if has_several_kinds else rope


def original_positions(config: PretrainedConfig) -> int:
    """Return a model's original number of positions, before they were extended.

    A configuration with ``linear`` scaling does not store it: it is ``max_position_embeddings`` divided by the factor.
    """
    text_config: Any = config.get_text_config()
    rope = rotary_parameters(config) or {}
    if rope.get("rope_type") in _KINDS_WITH_ORIGINAL:
        # Phi-3 has it beside rope_parameters
        outside = getattr(text_config, "original_max_position_embeddings", None)
        return int(outside or rope["original_max_position_embeddings"])
    if rope.get("rope_type") == "linear":
        return round(text_config.max_position_embeddings / rope["factor"])
    return int(text_config.max_position_embeddings)


def note_on_rope(stored: ModelShape, used: ModelShape) -> str | None:
    """Return a line about the changes that a run makes to a stored model's positions; None if there are none."""
    stored_positions = _describe(stored.config)
    used_positions = _describe(used.config)
    if stored_positions == used_positions:
        return None
    return f"{stored.source}: {stored_positions} -> {used_positions}"


def _describe(config: PretrainedConfig) -> str:
    """Return positions and RoPE in words: ``2,048 positions, llama3 factor 8 from 256 positions, theta 10,000``."""
    rope = rotary_parameters(config)
    if rope is None:
        return ""
    text_config: Any = config.get_text_config()
    words = [f"{text_config.max_position_embeddings:,} positions"]
    if rope.get("factor") is not None:
        words.append(f"{rope['rope_type']} factor {rope['factor']:g} from {original_positions(config):,} positions")
    theta = rope.get("rope_theta")
    if theta:
        words.append(f"theta {theta:,g}")
    return ", ".join(words)


def how_to_extend(shape: ModelShape, longest_row: int) -> str:
    """Return the arguments that let a model take rows of ``longest_row`` tokens; empty if its positions are fixed."""
    if rotary_parameters(shape.config) is None:
        return ""
    factor = -(-longest_row // original_positions(shape.config))
    return f", or extend the positions: --rope_scaling llama3:{factor} (docs/long_rows.md)"
