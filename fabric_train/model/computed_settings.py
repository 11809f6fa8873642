"""What a config.json asks for and this program does not compute: quantized weights, a router's loss, later tokens."""

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import MODEL_FOR_MASKED_LM_MAPPING, PretrainedConfig

_QUANTIZATION = ("quantization_config", "compression_config", "quantization")
"""The settings that describe quantized weights: transformers' own, an older one of compressed-tensors, and MLX's."""
_ROUTER_SHARES = ("router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight")
"""The factors of the term that balances a router's experts, by the names that model families give them."""
_OTHER_TERMS = ("z_loss_coefficient",)
_BIDIRECTIONAL: Mapping[str, tuple[Any, ...]] = {
    "is_causal": (False,),  # of any family: LLM2Vec and other models for embeddings
    "use_bidirectional_attention": (True, "all"),  # Gemma; "vision" is of images alone
    "causal": (False,),  # XLM, FlauBERT
}
"""Settings with the values by which a token sees the tokens after it, which it is trained to predict."""


def fault_of_quantization(config: PretrainedConfig) -> str | None:
    """Return what is wrong with a model whose weights are quantized, and the remedy; None for other models."""
    for name, value in _settings(config.to_dict()):
        if name in _QUANTIZATION and value is not None:
            return (
                f"its weights are quantized ({name} in config.json: {_method(value)}), which is not computed here; "
                "give the original model, or load this one in transformers, call dequantize() and save it again"
            )
    return None


def terms_left_out(config: PretrainedConfig) -> str | None:
    """Return the settings that add a term to the loss in transformers and not here; None if there are none.

    The term that balances experts is computed over all tokens of a batch, so it would depend on how a window is cut
    into micro-batches and ranks.
    """
    settings = [*_settings(config.to_dict())]
    factors = [(name, value) for name, value in settings if name in _ROUTER_SHARES and _is_positive(value)]
    wants_router = any(name == "output_router_logits" and value for name, value in settings)
    terms = [f"output_router_logits with {name} {value:g}" for name, value in factors if wants_router]
    terms += [f"{name} {value:g}" for name, value in settings if name in _OTHER_TERMS and _is_positive(value)]
    return ", ".join(terms) or None


def bidirectional_setting(config: PretrainedConfig) -> str | None:
    """Return the setting by which a model's tokens see the tokens after them; None if they do not."""
    for name, value in _settings(config.to_dict()):
        # 0 is not false in JSON
        if any(type(value) is type(seen) and value == seen for seen in _BIDIRECTIONAL.get(name, ())):
            return f"{name} {_in_json(value)}"
    is_encoder = type(config) in MODEL_FOR_MASKED_LM_MAPPING or config.model_type == "bert-generation"
    has_decoder = getattr(config, "is_encoder_decoder", False)
    if is_encoder and not has_decoder and getattr(config, "is_decoder", True) is False:
        return "is_decoder false"
    return None


def _in_json(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _settings(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a configuration and of those within it, such as ``text_config``."""
    for name, value in config.items():
        yield name, value
        if isinstance(value, Mapping):
            yield from _settings(value)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0


def _method(value: Any) -> str:
    if not isinstance(value, Mapping):
        return "an unknown method"
    method = str(value.get("quant_method") or value.get("quantization_method") or "an unnamed method")
    bits = [number for number in (8, 4) if value.get(f"load_in_{number}bit") or value.get(f"_load_in_{number}bit")]
    number_of_bits = bits[0] if bits else value.get("bits", value.get("w_bit"))
    return f"{method[:40]}, {number_of_bits} bits" if isinstance(number_of_bits, int) else method[:40]
