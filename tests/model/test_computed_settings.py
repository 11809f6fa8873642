"""Models whose config.json asks for something that is not computed are refused, and tensors left out are named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fabric_train.arguments import TrainArguments, parse
from fabric_train.cli.errors import InputError
from fabric_train.evaluation.models import find_model
from fabric_train.inference.load_model import load_for_inference
from fabric_train.merge_models.models import find_folder
from fabric_train.model.computed_settings import bidirectional_setting, describe_unknown
from fabric_train.model.hf_model import read_shape
from fabric_train.preflight.prepare import prepare
from fabric_train.tokenization.tokenizers.tokenizer import load_tokenizer
from fabric_train.vocabulary.extend import Extension
from tests.support.short_runs import argv

QUANTIZED = {
    "bitsandbytes, 4 bits": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "bitsandbytes, 8 bits": {"quant_method": "bitsandbytes", "_load_in_8bit": True, "_load_in_4bit": False},
    "gptq, 4 bits": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "awq, 4 bits": {"quant_method": "awq", "bits": 4, "zero_point": True},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "method_of_tomorrow": {"quant_method": "method_of_tomorrow"},
    "an unnamed method": {},
}


def with_settings(model: Path, folder: Path, **settings: object) -> Path:
    """Copy a model, with other settings in its config.json."""
    shutil.copytree(model, folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return folder


def plan(model: Path, tokens: Path, run: Path, *options: str) -> None:
    prepare(parse(TrainArguments, [*argv(model, tokens, run), "--plan", "check", *options]))


@pytest.mark.parametrize("method", QUANTIZED)
def test_a_quantized_model_is_refused_in_one_line(
    tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path, method: str
) -> None:
    model = with_settings(tiny_model_dir, tmp_path / "model", quantization_config=QUANTIZED[method])
    opens: list[Callable[[], Any]] = [
        lambda: plan(model, tiny_tokens_dir, tmp_path / "run"),
        lambda: plan(model, tiny_tokens_dir, tmp_path / "run", "--lora_rank", "2", "--base_weights", "nf4"),
        lambda: load_for_inference(str(model)),
        lambda: find_model(str(model)),
        lambda: find_folder(str(model)),
        lambda: Extension(str(model), tmp_path / "extended"),
    ]
    for open_model in opens:
        with pytest.raises(InputError) as refused:
            open_model()
        (line,) = refused.value.faults
        assert f"{model}: its weights are quantized" in line
        assert f"config.json: {method})" in line
        assert "dequantize()" in line


def test_settings_of_quantization_are_found_under_other_names_too(tmp_path: Path, tiny_model_dir: Path) -> None:
    older = {"compression_config": {"quant_method": "sparseml"}, "quantization": {"group_size": 64, "bits": 4}}
    for name, value in older.items():
        model = with_settings(tiny_model_dir, tmp_path / name, **{name: value})
        with pytest.raises(InputError, match=f"quantized .{name} in config.json"):
            load_for_inference(str(model))


def write_mixtral(model: Path, folder: Path, **settings: object) -> Path:
    """Write a mixture of experts with the tokenizer of another model."""
    from transformers import MixtralConfig, MixtralForCausalLM

    shutil.copytree(model, folder)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "num_local_experts": 2, "num_experts_per_tok": 1, "vocab_size": 1000}
    mixtral: Any = MixtralForCausalLM(MixtralConfig(**sizes, **settings))  # type: ignore[arg-type]
    mixtral.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("wants_router", "factor", "is_refused"), [(True, 10.0, True), (True, 0.0, False), (False, 10.0, False)]
)
def test_the_loss_of_a_router_is_refused_unless_it_is_off(
    tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path, wants_router: bool, factor: float, is_refused: bool
) -> None:
    settings = {"output_router_logits": wants_router, "router_aux_loss_coef": factor}
    model = write_mixtral(tiny_model_dir, tmp_path / "model", **settings)
    load_for_inference(str(model))  # the term is of training alone
    if is_refused:
        with pytest.raises(InputError, match="output_router_logits with router_aux_loss_coef 10; set output_router"):
            plan(model, tiny_tokens_dir, tmp_path / "run")
    else:
        plan(model, tiny_tokens_dir, tmp_path / "run")


BIDIRECTIONAL: list[tuple[dict[str, object], str]] = [
    ({"is_causal": False}, "is_causal false"),
    ({"model_type": "gemma", "use_bidirectional_attention": True, "head_dim": 16}, "use_bidirectional_attention true"),
    ({"model_type": "bert", "max_position_embeddings": 256}, "is_decoder false"),
]


@pytest.mark.parametrize(("settings", "shown"), BIDIRECTIONAL)
@pytest.mark.parametrize("isolates", ["true", "false"])
def test_a_model_whose_tokens_see_those_after_them_is_refused(
    tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path, settings: dict[str, object], shown: str, isolates: str
) -> None:
    model = with_settings(tiny_model_dir, tmp_path / "model", **settings)
    with pytest.raises(InputError, match=rf"attend to later tokens.*\({shown} in config.json\)"):
        plan(model, tiny_tokens_dir, tmp_path / "run", "--isolate_documents", isolates)


@pytest.mark.parametrize("form", ["safetensors", "pickle"])
def test_tensors_that_a_model_does_not_take_are_named_with_their_sizes(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    model = Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))
    tensors = load_file(model / "model.safetensors")
    tensors["score.weight"] = torch.zeros(2, 64)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)  # computed
    tensors |= {f"vision_tower.layers.{layer}.weight": torch.zeros(256, 1024) for layer in range(9)}
    if form == "safetensors":
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    else:
        (model / "model.safetensors").unlink()
        torch.save(tensors, model / "pytorch_model.bin")
    for _ in range(2):
        load_for_inference(str(model))
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert notes == [
        f"note: {model}: the model does not use 10 tensors in its files; they are not trained, computed or saved: "
        "vision_tower (9 tensors, 9.4 MB), score (512 bytes)"
    ]


def test_settings_that_transformers_does_not_have_are_named_once(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"logit_softcap": 30.0, "sliding_window": 64, "qk_norm": False, "sep_token_id": 3, "unsloth_fixed": True}
    model = with_settings(tiny_model_dir, tmp_path / "model", **settings)
    shape = read_shape(str(model))
    read_shape(str(model))
    read_shape(str(tiny_model_dir))
    assert capsys.readouterr().err.splitlines() == [
        f"note: --model_name {model}: its config.json has settings that transformers' LlamaConfig does not have, so "
        "they have no effect: logit_softcap 30.0, sliding_window 64"
    ]
    assert [layers.window for layers in shape.flops.attention] == [None]  # a Llama's layers do not slide


def test_many_unknown_settings_are_one_short_line(tmp_path: Path, tiny_model_dir: Path) -> None:
    settings = {f"setting_{index}": "x" * 10_000 for index in range(1000)}
    described = describe_unknown(read_shape(str(with_settings(tiny_model_dir, tmp_path / "m", **settings))).config)
    assert described is not None
    assert described.endswith(" and 990 more")
    assert len(described) < 1000


def test_names_of_python_code_are_noted_and_not_copied(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"AutoModelForCausalLM": "modeling_own.OwnModel"}
    model = with_settings(tiny_model_dir, tmp_path / "model", auto_map=names)
    tokenizer_file = model / "tokenizer_config.json"
    settings = json.loads(tokenizer_file.read_text())
    tokenizer_file.write_text(json.dumps(settings | {"auto_map": {"AutoTokenizer": ["code.Own", None]}}))

    read_shape(str(model)).config.save_pretrained(tmp_path / "copy")
    load_tokenizer(str(model)).save(tmp_path / "copy")

    assert capsys.readouterr().err.splitlines() == [
        f"note: --model_name {model}: its config.json names Python code (auto_map), which is never run; "
        "transformers' own llama is used instead",
        f"note: --tokenizer_name {model}: its tokenizer_config.json names Python code (auto_map), which is never run",
    ]
    for name in ("config.json", "tokenizer_config.json"):
        assert "auto_map" not in (tmp_path / "copy" / name).read_text()


def test_setting_of_xlm_is_read_though_its_models_are_refused_otherwise() -> None:
    from transformers import XLMConfig

    assert bidirectional_setting(XLMConfig(causal=False)) == "causal false"
    assert bidirectional_setting(XLMConfig(causal=True)) is None
