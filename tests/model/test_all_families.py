"""Every causal language model of transformers that can be built small is read and checked, or refused in one line."""

import inspect

import pytest
import torch
from lightning import Fabric

from fabric_train.cli.errors import InputError
from fabric_train.model.hf_model import shape_from_config
from fabric_train.training.isolation_check import check_isolation
from tests.support.small_families import FAMILIES, NotSmallError, small_config, small_model

pytestmark = pytest.mark.matrix

ROWS_OF_RUN = 200
PACKED = ("cohere2", "gemma3_text", "glm4_moe", "gpt_neox", "llama", "mistral", "mixtral", "olmo3", "phi3", "qwen3_moe")
LEAKING = ("falcon_h1", "gpt_oss", "jamba", "lfm3", "minimax", "nemotron_h", "qwen3_next", "recurrent_gemma")


@pytest.mark.parametrize("family", FAMILIES)
def test_configuration_of_any_family_is_read_or_refused(family: str) -> None:
    try:
        config = small_config(family)
    except NotSmallError as error:
        pytest.skip(str(error))
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
    model = Fabric(accelerator="cpu", devices=1).setup_module(small_model(small_config(family))).train()
    assert "position_ids" in inspect.signature(model.module.forward).parameters
    if family in PACKED:
        check_isolation(Fabric(accelerator="cpu", devices=1), model, "model", ROWS_OF_RUN, torch.float32)
        return
    with pytest.raises(InputError, match="depends on the document before it"):
        check_isolation(Fabric(accelerator="cpu", devices=1), model, "model", ROWS_OF_RUN, torch.float32)
