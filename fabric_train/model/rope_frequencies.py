"""Choose rotary frequencies once for a whole run where transformers would choose them anew for every batch.

``longrope`` (Phi-3.5, Phi-4-mini) has a factor for each frequency, one set for short texts and one for long texts, and
``dynamic`` (NTK scaling) raises the base with the length. transformers decides by the largest position of each batch.
So the loss of a document would depend on the rows beside it, and with that on the micro-batch size and the ranks.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_FIXED = "default"
"""The kind whose stored frequencies transformers uses as they are."""


@dataclass(frozen=True)
class _Frequencies:
    """One set of frequencies of a rotary module: its kind, and the layers that use it (None: all of them)."""

    kind: str
    layer_type: str | None

    @property
    def prefix(self) -> str:
        return "" if self.layer_type is None else f"{self.layer_type}_"


def _depends_on_length(kind: object) -> bool:
    """Return whether transformers chooses the frequencies of a kind by the positions of the batch."""
    return kind == "longrope" or (isinstance(kind, str) and "dynamic" in kind)


def choose_frequencies(model: nn.Module, length: int) -> None:
    """Give a model the frequencies for texts of up to ``length`` tokens, for this batch and all later ones.

    It can be called again with another length. Models whose frequencies do not depend on the length stay as they are.
    """
    for module in model.modules():
        frequencies = _varying_frequencies(module)
        for chosen in frequencies:
            _set_frequencies(module, chosen, length)


def _varying_frequencies(module: Any) -> list[_Frequencies]:
    """Return the sets of frequencies of a module that transformers would choose for every batch."""
    kinds = getattr(module, "kinds_before_choice", None) or getattr(module, "rope_type", None)
    if isinstance(kinds, dict):
        return [_Frequencies(kind, layer_type) for layer_type, kind in kinds.items() if _depends_on_length(kind)]
    if _depends_on_length(kinds):
        return [_Frequencies(str(kinds), None)]
    return []


def _set_frequencies(module: Any, frequencies: _Frequencies, length: int) -> None:
    if not hasattr(module, "kinds_before_choice"):
        kinds = module.rope_type
        module.kinds_before_choice = dict(kinds) if isinstance(kinds, dict) else kinds
    buffer = getattr(module, f"{frequencies.prefix}inv_freq")
    initialize = ROPE_INIT_FUNCTIONS[frequencies.kind]
    more = {} if frequencies.layer_type is None else {"layer_type": frequencies.layer_type}
    values, scaling = initialize(module.config, buffer.device, seq_len=length, **more)
    buffer.data.copy_(values)
    setattr(module, f"{frequencies.prefix}attention_scaling", scaling)
    if frequencies.layer_type is None:
        module.rope_type = _FIXED
    else:
        module.rope_type = {**module.rope_type, frequencies.layer_type: _FIXED}


def note_on_frequencies(config: PretrainedConfig, source: str, length: int) -> str | None:
    """Return a line on the choice for rows of ``length`` tokens; None if there is nothing to choose."""
    parameters = _varying_parameters(config)
    if parameters is None:
        return None
    border = _largest_unscaled_length(config, parameters)
    names = ("short", "long") if parameters["rope_type"] == "longrope" else ("unscaled", "scaled")
    name, comparison = (names[1], "more than") if length > border else (names[0], "at most")
    return (
        f"{source}: the {name} rotary frequencies for every batch, since rows have {length:,} tokens, {comparison} "
        f"{border:,}"
    )


def identify_frequencies(config: PretrainedConfig, length: int) -> str:
    """Return a text that is the same for all lengths with the same frequencies; "" if there is nothing to choose."""
    parameters = _varying_parameters(config)
    if parameters is None:
        return ""
    border = _largest_unscaled_length(config, parameters)
    if length <= border:
        return "unscaled"
    return "long" if parameters["rope_type"] == "longrope" else f"scaled for {length}"


def _varying_parameters(config: PretrainedConfig) -> dict[str, Any] | None:
    """Return the rotary parameters by which transformers would choose frequencies for every batch, if there are any."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return next((each for each in nested or [rope] if _depends_on_length(each.get("rope_type"))), None)


def _largest_unscaled_length(config: PretrainedConfig, parameters: dict[str, Any]) -> int:
    text: Any = config.get_text_config()
    if parameters["rope_type"] == "longrope":
        return _original_positions(text, parameters)
    return int(text.max_position_embeddings)


def _original_positions(text: Any, parameters: dict[str, Any]) -> int:
    stored = parameters.get("original_max_position_embeddings")
    return int(stored or text.original_max_position_embeddings)
