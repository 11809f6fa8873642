"""Extend the positions of a model by its rotary embedding (RoPE): scaled frequencies, another base, or plain ones.

RoPE turns each pair of a head's dimensions by position × frequency. A model has only learnt the angles up to its number
of positions. ``linear`` divides all frequencies by the factor (arXiv:2306.15595), ``yarn`` only the low ones, and it
scales the attention too (arXiv:2309.00071), ``llama3`` does so between two borders without the latter
(arXiv:2407.21783). A higher base, ``rope_theta``, lowers all frequencies but the first, the low ones most.
transformers computes them in fp32 from ``rope_parameters`` in config.json, for the run and for its export.
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
_KEPT = ("rope_theta", "partial_rotary_factor")
_KNOWN_ORIGINAL = ("llama3", "yarn", "longrope")
"""Kinds whose configuration has the number of positions before they were extended."""


@dataclass(frozen=True)
class RopeChange:
    """What ``--rope_scaling``, as (kind, factor), and ``--rope_theta`` say; ``where`` is their place, for messages.

    ``forces``: rows longer than the model's positions are allowed although neither is given.
    """

    scaling: tuple[str, float] | None
    theta: float | None
    where: str = "--"
    forces: bool = False

    def apply(self, shape: ModelShape, longest_row: int) -> ModelShape:
        """Return the shape with another RoPE and number of positions in its configuration.

        To apply it again changes nothing, so a resumed run may give the same arguments. With a scaling, there are
        ``original × factor`` positions, or as many as the model has if that is more; without one, at least
        ``longest_row``, the tokens of a row. ``none`` goes back to the original positions.

        Raises:
            InputError: the model has no rotary positions, or the scaled ones are fewer than ``longest_row``.
        """
        is_given = self.scaling is not None or self.theta is not None
        rope = rotary_parameters(shape.config)
        if not is_given and not (self.forces and rope and longest_row > (shape.max_positions or longest_row)):
            return shape
        if rope is None or shape.max_positions is None:
            given = f"{self.where}rope_{'scaling' if self.scaling else 'theta'}"
            raise InputError(
                f"{given}: {shape.source} ({shape.config.model_type}) has no rotary positions that could change, or "
                "several kinds of them; leave it out"
            )
        original = original_positions(shape.config)
        positions = max(shape.max_positions, longest_row)
        if self.theta is not None:
            rope = {**rope, "rope_theta": self.theta}
        if self.scaling is not None:
            kind, factor = self.scaling
            rope = _scaled({name: rope[name] for name in _KEPT if name in rope}, kind, factor, original)
            extended = max(math.floor(original * factor), shape.max_positions)
            positions = max(original, longest_row) if kind == "none" else extended
            if longest_row > positions:
                enough = f"{kind}:{-(-longest_row // original)}"
                raise InputError(
                    f"{self.where}rope_scaling {kind}:{factor:g}: {shape.source} had {original:,} positions, so it "
                    f"takes {positions:,}, and rows have {longest_row:,} tokens; give {enough}"
                )
        config: Any = copy.deepcopy(shape.config)
        text = config.get_text_config()
        text.rope_parameters = rope
        text.max_position_embeddings = positions
        return replace(shape, config=config, max_positions=positions)


def _scaled(kept: Mapping[str, Any], kind: str, factor: float, original: int) -> dict[str, Any]:
    if kind == "none":
        return {**kept, "rope_type": "default"}
    scaled = {**kept, "rope_type": kind, "factor": factor}
    if kind in _KNOWN_ORIGINAL:
        scaled["original_max_position_embeddings"] = original
    return scaled | (_LLAMA_3 if kind == "llama3" else {})


def rotary_parameters(config: PretrainedConfig) -> dict[str, Any] | None:
    """Return ``rope_parameters`` of a model whose layers all have the same plain RoPE; None for another model."""
    text: Any = config.get_text_config()
    rope = getattr(text, "rope_parameters", None)
    if not isinstance(rope, dict) or "rope_type" not in rope or getattr(text, "default_rope_type", "") != "default":
        return None
    return None if any(isinstance(value, dict) for value in rope.values()) else rope


def original_positions(config: PretrainedConfig) -> int:
    """Return a model's number of positions before they were extended.

    A configuration with ``linear`` scaling does not have it: it is ``max_position_embeddings`` divided by the factor.
    """
    text: Any = config.get_text_config()
    rope = rotary_parameters(config) or {}
    if rope.get("rope_type") in _KNOWN_ORIGINAL:
        outside = getattr(text, "original_max_position_embeddings", None)  # Phi-3 has it beside rope_parameters
        return int(outside or rope["original_max_position_embeddings"])
    if rope.get("rope_type") == "linear":
        return round(text.max_position_embeddings / rope["factor"])
    return int(text.max_position_embeddings)


def note_on_rope(stored: ModelShape, used: ModelShape) -> str | None:
    """Return a line on what a run changes of a stored model's positions; None if nothing."""
    there = _describe(stored.config)
    here = _describe(used.config)
    return f"{stored.source}: {there} -> {here}" if there != here else None


def _describe(config: PretrainedConfig) -> str:
    """Return positions and RoPE in words: ``2,048 positions, llama3 factor 8 from 256 positions, theta 10,000``."""
    rope = rotary_parameters(config)
    words = []
    if rope is None:
        return ""
    text: Any = config.get_text_config()
    if rope.get("factor") is not None:
        words.append(f"{rope['rope_type']} factor {rope['factor']:g} from {original_positions(config):,} positions")
    theta = rope.get("rope_theta")
    return ", ".join([f"{text.max_position_embeddings:,} positions", *words, *([f"theta {theta:,g}"] if theta else [])])


def how_to_extend(shape: ModelShape, longest_row: int) -> str:
    """Return the arguments that let a model take rows of ``longest_row`` tokens; empty if its positions are fixed."""
    if rotary_parameters(shape.config) is None:
        return ""
    factor = -(-longest_row // original_positions(shape.config))
    return f", or extend the positions: --rope_scaling llama3:{factor} (docs/long_rows.md)"
