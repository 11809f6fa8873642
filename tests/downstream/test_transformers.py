"""transformers 5 and the last release of transformers 4 use an export through ``pipeline``, for text and for chats."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fabric_train.model.load_weights import tied_weight_names
from tests.support.checkpoint_examples import TOKENIZER_FILES, write_full
from tests.support.downstream_uses import Checked, ModelOutputs, assert_same, use_in_transformers
from tests.support.environments import downstream_environment, run_inside
from tests.support.exports import convert_run
from tests.support.forked_runs import ForkedRuns

pytestmark = [pytest.mark.slow, pytest.mark.downstream]

TOLERANCE = 1e-4
SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
GROUPED = SIZES | {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8}
BASE = {"rope_type": "default", "rope_theta": 5e4}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": GROUPED | {"rope_parameters": LLAMA_3},
    "mistral": GROUPED | {"rope_parameters": BASE},
    "qwen3": GROUPED | {"rope_parameters": BASE, "tie_word_embeddings": True},
    "gemma": GROUPED | {"rope_parameters": BASE},
    "gpt_neox": SIZES | {"intermediate_size": 48, "rope_parameters": BASE | {"partial_rotary_factor": 0.5}},
    "gpt2": SIZES,
    "mixtral": GROUPED | {"rope_parameters": BASE, "num_local_experts": 4},
}


@pytest.fixture(scope="module")
def transformers_4() -> Path:
    """Python with the last release of transformers 4."""
    return downstream_environment("transformers4")


def test_pipeline_continues_text_and_ends_its_reply(used: ModelOutputs, smollm2_dir: Path, checked: Checked) -> None:
    assert used.text.strip()
    assert used.reply.strip()
    assert used.ended
    assert used.template == (smollm2_dir / "chat_template.jinja").read_text(encoding="utf-8")
    what = "`pipeline` continues a text, answers a chat and stops; the chat template is the base model's"
    checked("transformers", used.version, what)


def test_transformers_4_makes_the_same_of_it(
    transformers_4: Path, export: Path, used: ModelOutputs, checked: Checked
) -> None:
    found = use_in_transformers(transformers_4, export)
    assert found.version.startswith("4.")
    assert_same(found, used, TOLERANCE)
    checked(
        "transformers", found.version, f"`pipeline`: logits within {TOLERANCE:g} of transformers 5; same text and reply"
    )


@pytest.fixture(scope="module")
def families(
    tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path, forked_runs: ForkedRuns
) -> dict[str, Path]:
    """Exports in fp32 of a tiny random model of each family, by family."""
    folder = tmp_path_factory.mktemp("families")
    checkpoints = {}
    for step, (family, settings) in enumerate(FAMILIES.items(), 1):
        torch.manual_seed(step)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings)).float()
        for parameter in model.parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)  # so that positions matter
        base = folder / family
        model.save_pretrained(base)
        for name in TOKENIZER_FILES:
            (base / name).write_bytes((tiny_model_dir / name).read_bytes())
        tied = tied_weight_names(model)
        weights = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
        checkpoints[family] = write_full(folder / "run" / "checkpoints" / f"step-{step:08}", base, weights, step)
    convert_run(forked_runs, folder / "out", "--checkpoint", *checkpoints.values(), "--dtype", "float32")
    return {family: folder / "out" / checkpoint.name for family, checkpoint in checkpoints.items()}


def test_transformers_4_computes_the_same_in_every_family(
    transformers_4: Path, families: dict[str, Path], checked: Checked
) -> None:
    new, old = (run_inside(python, "logits.py", *families.values()) for python in (sys.executable, transformers_4))
    for family, folder in families.items():
        found, expected = (np.load(folder / f"logits-{version}.npy") for version in (old, new))
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE, err_msg=family)
    names = ", ".join(families)
    checked("transformers", old, f"tiny random models of {names}: logits within {TOLERANCE:g} of transformers 5")
