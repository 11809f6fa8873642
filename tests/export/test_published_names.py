"""An export has its weights in the form in which models of the family are published, which other software reads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from fabric_train.export import hub_format, model_comparison
from fabric_train.export.convert import write_export
from fabric_train.export.model_card import CardFacts
from fabric_train.export.model_comparison import compare
from fabric_train.export.source import ExportSource
from tests.support.checkpoint_examples import TOKENIZER_FILES, write_full

FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 3},
    "gpt_neox": {},
}
NAMES = {"mixtral": "model.layers.1.block_sparse_moe.experts.2.w3.weight", "gpt_neox": "embed_out.weight"}
POSITIONS = 48  # fewer than the text that logits are compared on has tokens


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path: Path, tiny_model_dir: Path) -> Path:
    """A random model, as ``save_pretrained`` writes it, with a tokenizer; its checkpoint is beside it."""
    sizes = {"vocab_size": 1000, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": POSITIONS}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "bos_token_id": 0, "eos_token_id": 1}
    torch.manual_seed(0)
    built = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(request.param, **sizes, **FAMILIES[request.param], dtype="float32")
    )
    folder = tmp_path / request.param
    built.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        (folder / name).write_bytes((tiny_model_dir / name).read_bytes())
    write_full(tmp_path / "step-00000001", folder, built.state_dict(), step=1)
    return folder


@pytest.mark.parametrize("in_parts", [False, True], ids=["whole", "in parts"])
def test_export_has_the_tensors_that_save_pretrained_writes(
    tmp_path: Path, model: Path, in_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ExportSource(tmp_path / "step-00000001")
    export = tmp_path / "export"
    export.mkdir()
    write_export(source, export, torch.float32, "20KB", CardFacts(model.name))
    expected = load_file(model / "model.safetensors")
    found = {name: tensor for file in export.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert NAMES[model.name] in found
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    if in_parts:
        monkeypatch.setattr(model_comparison, "available_memory", lambda: 0)
    report = compare(export, source, torch.float32)
    assert report.faults == []
    assert report.tensors.compared == len(expected)
    assert report.method == ("layer by layer" if in_parts else "whole model")


def test_a_family_that_cannot_be_converted_is_noted(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def convert(*_: Any) -> None:
        raise ValueError("several tensors make one")

    monkeypatch.setattr(hub_format, "revert_weight_conversion", convert)
    export = tmp_path / "export"
    export.mkdir()
    write_export(ExportSource(tmp_path / "step-00000001"), export, torch.float32, "20KB", CardFacts(model.name))
    assert f"note: {model.name}: weights keep transformers' names" in capsys.readouterr().err
