"""Choose rotary frequencies once for the entire run, where transformers would choose them for every batch.

``longrope`` (Phi-3.5, Phi-4-mini) has a factor for each frequency, one set for short texts and one for long texts, and
``dynamic`` (NTK scaling) raises the base with the length. transformers decides by the largest position of each batch.
So the loss of a document would depend on the other rows of its batch, and therefore on the micro-batch size and the
ranks.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_FIXED = "default"
"""The kind whose stored frequencies transformers uses unchanged."""


@dataclass(frozen=True)
class _Frequencies:
    """A set of frequencies of a rotary module: its kind, and the type of layers that use it, which is None for all."""

    kind: str
    layer_type: str | None

    @property
    def prefix(self) -> str:
        """The prefix of the module's attributes for this set."""
        return "" if self.layer_type is None else f"{self.layer_type}_"


def _depends_on_length(kind: object) -> bool:
    """Return whether transformers chooses the frequencies of a kind by the positions of the batch."""
    return kind == "longrope" or (isinstance(kind, str) and "dynamic" in kind)


def choose_frequencies(model: nn.Module, length: int) -> None:
    """Give a model the frequencies for texts of up to ``length`` tokens, for this batch and all later ones.

    It can be called again with another length. Models whose frequencies do not depend on the length are not changed.
    """
    for module in model.modules():
        for frequencies in _length_dependent_frequencies(module):
            _set_frequencies(module, frequencies, length)


def _length_dependent_frequencies(module: Any) -> list[_Frequencies]:
    """Return the sets of frequencies of a module that transformers would choose for every batch."""
    # ``_set_frequencies`` changes rope_type, so a second call needs the kinds from before
    kinds = getattr(module, "kinds_before_choice", None) or getattr(module, "rope_type", None)
    if isinstance(kinds, dict):  # by type of layer
        return [_Frequencies(kind, layer_type) for layer_type, kind in kinds.items() if _depends_on_length(kind)]
    if _depends_on_length(kinds):
        return [_Frequencies(str(kinds), None)]
    return []


def _set_frequencies(module: Any, frequencies: _Frequencies, length: int) -> None:
    """Compute a set of frequencies of a rotary module for ``length`` tokens, and let transformers keep them."""
    # transformers chooses again for every batch only by these kinds; the copy is for a later call
    if not hasattr(module, "kinds_before_choice"):
        kinds = module.rope_type
        module.kinds_before_choice = dict(kinds) if isinstance(kinds, dict) else kinds
    buffer = getattr(module, f"{frequencies.prefix}inv_freq")  # fp32 [D / 2]
    compute = ROPE_INIT_FUNCTIONS[frequencies.kind]
    if frequencies.layer_type is None:
        values, scaling = compute(module.config, buffer.device, seq_len=length)
        module.rope_type = _FIXED
    else:
        values, scaling = compute(module.config, buffer.device, seq_len=length, layer_type=frequencies.layer_type)
        module.rope_type = {**module.rope_type, frequencies.layer_type: _FIXED}
    buffer.data.copy_(values)
    setattr(module, f"{frequencies.prefix}attention_scaling", scaling)


def note_on_frequencies(config: PretrainedConfig, source: str, length: int) -> str | None:
    """Return a line about the choice for rows of ``length`` tokens; None if there is nothing to choose."""
    parameters = _length_dependent_parameters(config)
    if parameters is None:
        return None
    border = _largest_unscaled_length(config, parameters)
    is_longrope = parameters["rope_type"] == "longrope"
    if length > border:
        name = "long" if is_longrope else "scaled"
        comparison = "more than"
    else:
        name = "short" if is_longrope else "unscaled"
        comparison = "at most"
    return (
        f"{source}: every batch uses the {name} rotary frequencies, since rows have {length:,} tokens, {comparison} "
        f"{border:,}"
    )


def identify_frequencies(config: PretrainedConfig, length: int) -> str:
    """Return a text that is the same for all lengths with the same frequencies; "" if there is nothing to choose."""
    parameters = _length_dependent_parameters(config)
    if parameters is None:
        return ""
    if length <= _largest_unscaled_length(config, parameters):
        return "unscaled"
    return "long" if parameters["rope_type"] == "longrope" else f"scaled for {length}"


def _length_dependent_parameters(config: PretrainedConfig) -> dict[str, Any] | None:
    """Return the rotary parameters by which transformers would choose frequencies for every batch, if there are any."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    candidates = [value for value in rope.values() if isinstance(value, dict)]  # by type of layer
    if not candidates:
        candidates = [rope]
    for parameters in candidates:
        if _depends_on_length(parameters.get("rope_type")):
            return parameters
    return None


def _largest_unscaled_length(config: PretrainedConfig, parameters: dict[str, Any]) -> int:
    """Return the length of the longest text that uses the frequencies for short texts."""
    text_config: Any = config.get_text_config()
    if parameters["rope_type"] == "longrope":
        stored = parameters.get("original_max_position_embeddings")
        return int(stored or text_config.original_max_position_embeddings)
    return int(text_config.max_position_embeddings)
