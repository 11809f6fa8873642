"""Every causal language model of transformers that can be built small is read and checked, or refused in one line."""

import inspect
from typing import Any

import pytest
import torch
from lightning import Fabric
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PretrainedConfig

from fabric_train.cli.errors import InputError
from fabric_train.model.hf_model import shape_from_config
from fabric_train.training.isolation_check import check_isolation

pytestmark = pytest.mark.matrix

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
}
"""Sizes under all names that families have for them."""
MOST_PARAMETERS = 30_000_000
ROWS_OF_RUN = 200
FAMILIES = {kind.model_type: kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING}
PACKED = ("cohere2", "gemma3_text", "glm4_moe", "gpt_neox", "llama", "mistral", "mixtral", "olmo3", "phi3", "qwen3_moe")
LEAKING = ("falcon_h1", "gpt_oss", "jamba", "lfm3", "minimax", "nemotron_h", "qwen3_next", "recurrent_gemma")


def small_config(family: str) -> PretrainedConfig:
    """Return a small configuration of a family; skip the test if its sizes depend on one another in its own way."""
    kind = FAMILIES[family]
    try:
        known = set(vars(kind())) | set(kind.attribute_map)
        return kind(**{name: value for name, value in SIZES.items() if name in known})
    except Exception as error:  # noqa: BLE001 - a family may check its configuration in any way
        pytest.skip(f"no small configuration: {type(error).__name__}")


def small_model(family: str) -> Any:
    config = small_config(family)
    try:
        with torch.device("meta"):
            outline = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # noqa: BLE001 - or when it is built
        pytest.skip(f"no small model: {type(error).__name__}")
    if sum(parameter.numel() for parameter in outline.parameters()) > MOST_PARAMETERS:
        pytest.skip("not small")
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).float()


@pytest.mark.parametrize("family", FAMILIES)
def test_configuration_of_any_family_is_read_or_refused(family: str) -> None:
    config = small_config(family)
    for attention in ("sdpa", "eager"):
        faults: list[str] = []
        try:
            shape_from_config(config, "model", "LlamaDecoderLayer", attention)
        except InputError as error:
            faults = list(error.faults)
        assert len(faults) < 2
        assert "\n" not in "".join(faults)


@pytest.mark.parametrize("family", [*PACKED, *LEAKING])
def test_documents_of_any_family_are_apart_or_refused(family: str) -> None:
    model = Fabric(accelerator="cpu", devices=1).setup_module(small_model(family)).train()
    assert "position_ids" in inspect.signature(model.module.forward).parameters
    if family in PACKED:
        check_isolation(Fabric(accelerator="cpu", devices=1), model, "model", ROWS_OF_RUN, torch.float32)
        return
    with pytest.raises(InputError, match="depends on the document before it"):
        check_isolation(Fabric(accelerator="cpu", devices=1), model, "model", ROWS_OF_RUN, torch.float32)
