"""Small models of the families of causal language models that transformers has."""

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 256,
    "d_model": 32,
    "n_inner": 48,
    "ffn_dim": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "sliding_window": 8,
    "mamba_d_ssm": 32,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "rotary_dim": 8,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "expert_ffn_hidden_size": 24,
    "shared_expert_intermediate_size": 24,
    "n_shared_experts": 1,
    "moe_topk": 2,
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "global_head_dim": 8,
    "index_n_heads": 4,
    "index_head_dim": 8,
    "index_topk": 16,
    "ffn_hidden_size": 48,
    "num_layers": 4,
    "intermediate_size_mlp": 48,
}
"""Sizes under all names that families have for them."""
SETTINGS_OF_FAMILY: dict[str, dict[str, Any]] = {
    # released models have convolutions between their layers of attention, the default configuration has none
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
}
MOST_PARAMETERS = 30_000_000
# of two names with one class of configurations, the second is the family's
FAMILIES = tuple({CONFIG_MAPPING_NAMES[name]: name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}.values())
"""The names of all families; their modules are not imported, which takes a second."""


class NotSmallError(Exception):
    """A family's sizes depend on one another in its own way, so it has no small model here."""


def small_config(family: str, **sizes: Any) -> PretrainedConfig:
    """Return a small configuration of a family; ``sizes`` replace those of :data:`SIZES`.

    Raises:
        NotSmallError: the family refuses the sizes.
    """
    config_class = CONFIG_MAPPING[family]
    try:
        settings = SETTINGS_OF_FAMILY.get(family, {})
        return config_class(**_known_sizes(config_class, SIZES | sizes), **settings)
    except Exception as error:  # a family may check its configuration in any way
        raise NotSmallError(f"no small configuration: {type(error).__name__}") from error


def _known_sizes(config_class: type[PretrainedConfig], sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes that a class of configurations has, also those of its text and vision configurations."""
    names = set(vars(config_class())) | set(config_class.attribute_map)
    known_sizes = {name: value for name, value in sizes.items() if name in names}
    if "kv_lora_rank" in names:  # latent attention has as many keys as queries
        known_sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    for name, inner_class in (config_class.sub_configs or {}).items():
        if name in names and inner_class.model_type:
            known_sizes[name] = _known_sizes(inner_class, sizes)
    return known_sizes


def small_model(config: PretrainedConfig) -> Any:
    """Return the model of a small configuration with seeded fp32 weights."""
    try:
        with torch.device("meta"):
            outline = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # or when it is built
        raise NotSmallError(f"no small model: {type(error).__name__}") from error
    if sum(parameter.numel() for parameter in outline.parameters()) > MOST_PARAMETERS:
        raise NotSmallError("not small")
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).float()
