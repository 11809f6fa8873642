"""Find the settings in a config.json that this program does not compute.

These are quantized weights, a router's loss, tokens that see later ones, Python code, and settings of another model.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import MODEL_FOR_MASKED_LM_MAPPING, PretrainedConfig

_QUANTIZATION = ("quantization_config", "compression_config", "quantization")
"""The settings that describe quantized weights: transformers', an older one of compressed-tensors, and MLX's."""
_ROUTER_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight")
"""The settings with the factor of the term that balances a router's experts, as model families name it."""
_UNCONDITIONAL_COEFFICIENTS = ("z_loss_coefficient",)
"""The settings with the factors of terms that are always on."""
_BIDIRECTIONAL: Mapping[str, tuple[Any, ...]] = {
    "is_causal": (False,),  # of any family: LLM2Vec and other models for embeddings
    "use_bidirectional_attention": (True, "all"),  # Gemma; "vision" is only for images
    "causal": (False,),  # XLM, FlauBERT
}
"""Settings, with the values that let a token see the tokens after it, which it is trained to predict."""
_CODE = "auto_map"
"""The setting that names Python code next to the config.json."""
_WITHOUT_EFFECT = ("_", "unsloth_", "transformers", "tokenizer_", "task_specific_params", "is_llama_config")
"""The beginnings of names of settings that programs write into a config.json and that do not change the model."""
_CONTROL_TOKEN = "_token_id"
"""The ending of control tokens' settings, such as ``unk_token_id``."""
_MAX_SHOWN = 10  # settings in a note
_MAX_CHARACTERS = 40  # of a setting's value in a note


def fault_of_quantization(config: PretrainedConfig) -> str | None:
    """Return what is wrong with a model whose weights are quantized, and the remedy; None for other models."""
    for name, value in _iterate_settings(config.to_dict()):
        if name in _QUANTIZATION and value is not None:
            return (
                f"its weights are quantized ({name} in config.json: {_method(value)}), which is not supported; give "
                "the original model, or load this model in transformers, call dequantize() and save it again"
            )
    return None


def terms_left_out(config: PretrainedConfig) -> str | None:
    """Return the settings that add a term to the loss in transformers, but not here; None if there are none.

    The term that balances experts is computed over all tokens of a batch, so it would depend on how a window is cut
    into micro-batches and ranks.
    """
    settings = list(_iterate_settings(config.to_dict()))
    router_terms: list[str] = []
    unconditional_terms: list[str] = []
    has_router_logits = False
    for name, value in settings:
        if name == "output_router_logits" and value:
            has_router_logits = True
        elif name in _ROUTER_COEFFICIENTS and _is_positive(value):
            router_terms.append(f"output_router_logits with {name} {value:g}")
        elif name in _UNCONDITIONAL_COEFFICIENTS and _is_positive(value):
            unconditional_terms.append(f"{name} {value:g}")
    terms = unconditional_terms
    if has_router_logits:  # transformers adds these terms only then
        terms = router_terms + unconditional_terms
    return ", ".join(terms) or None


def bidirectional_setting(config: PretrainedConfig) -> str | None:
    """Return the setting that lets a model's tokens see the tokens after them; None if they do not see them."""
    for name, value in _iterate_settings(config.to_dict()):
        for bidirectional_value in _BIDIRECTIONAL.get(name, ()):
            has_same_type = type(value) is type(bidirectional_value)  # 0 is not false in JSON
            if has_same_type and value == bidirectional_value:
                return f"{name} {_in_json(value)}"
    # an encoder that is used without its decoder
    is_encoder = type(config) in MODEL_FOR_MASKED_LM_MAPPING or config.model_type == "bert-generation"
    has_decoder = getattr(config, "is_encoder_decoder", False)
    if is_encoder and not has_decoder and getattr(config, "is_decoder", True) is False:
        return "is_decoder false"
    return None


def leave_code_out(config: PretrainedConfig) -> bool:
    """Remove the names of Python code from a configuration, because a copy has no code; return whether it had any.

    This code is never run. transformers' class of the same name may compute something else.
    """
    return config.__dict__.pop(_CODE, None) is not None


def describe_unknown(config: PretrainedConfig) -> str | None:
    """Return the settings that transformers' class does not have, with their values; None if there are none.

    transformers silently keeps them. They may belong to a model that another program computes.
    """
    model_configs = [config]
    with suppress(ValueError):  # it has several models of text, and is refused elsewhere
        text_config = config.get_text_config()
        if text_config is not config:
            model_configs.append(text_config)
    settings = []
    for model_config in model_configs:
        for name, value in model_config.to_dict().items():
            if not has_setting(model_config, name) and not _is_without_effect(name, value):
                settings.append(f"{name} {_in_json(value)[:_MAX_CHARACTERS]}")
    if not settings:
        return None
    shown = ", ".join(settings[:_MAX_SHOWN])
    num_more = len(settings) - _MAX_SHOWN
    return f"{shown} and {num_more} more" if num_more > 0 else shown


def has_setting(config: PretrainedConfig, name: str) -> bool:
    """Return whether the class of a configuration has a setting, and not only its config.json."""
    config_class: Any = type(config)
    return hasattr(config_class, name) or name in config.attribute_map or name in _own_settings(config_class)


@cache
def _own_settings(config_class: type[PretrainedConfig]) -> frozenset[str]:
    """Return the settings that every configuration of a class has, including those computed from others."""
    default: PretrainedConfig
    try:
        default = config_class()
    except (ArithmeticError, AttributeError, LookupError, StrictDataclassError, TypeError, ValueError):
        default = PretrainedConfig()  # it needs arguments
    return frozenset(default.to_dict())


def _is_without_effect(name: str, value: Any) -> bool:
    """Return whether an unknown setting is off, or has a name of a setting that does not change the model."""
    is_off = value is None or value is False or value in ("", [], {})
    return is_off or name.startswith(_WITHOUT_EFFECT) or name.endswith(_CONTROL_TOKEN)


def _in_json(value: Any) -> str:
    """Return a value as JSON writes it, without quotes: ``true`` or ``all``."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _iterate_settings(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a configuration and of those within it, such as ``text_config``."""
    for name, value in config.items():
        yield name, value
        if isinstance(value, Mapping):
            yield from _iterate_settings(value)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0


def _method(value: Any) -> str:
    """Return the method of a quantization and its bits: ``gptq, 4 bits``."""
    if not isinstance(value, Mapping):
        return "an unknown method"
    method = str(value.get("quant_method") or value.get("quantization_method") or "an unnamed method")[:40]
    num_bits = value.get("bits", value.get("w_bit"))
    for flagged_bits in (4, 8):  # bitsandbytes has flags instead; the one for 8 bits takes precedence
        if value.get(f"load_in_{flagged_bits}bit") or value.get(f"_load_in_{flagged_bits}bit"):
            num_bits = flagged_bits
    if isinstance(num_bits, int):
        return f"{method}, {num_bits} bits"
    return method
