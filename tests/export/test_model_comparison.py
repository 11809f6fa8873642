"""The comparison of an export with its checkpoint finds every planted defect, whole and layer by layer."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from fabric_train.export import model_comparison
from fabric_train.export.convert import write_export
from fabric_train.export.model_card import CardFacts
from fabric_train.export.model_comparison import compare
from fabric_train.export.source import ExportSource
from fabric_train.export.verification_report import OutputReport, TensorReport, VerificationReport, find_faults
from tests.model.test_families import FAMILIES
from tests.support.checkpoint_examples import trained_weights, write_full

Tensors = dict[str, torch.Tensor]
Planted = Callable[[Path], None]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> ExportSource:
    folder = tmp_path_factory.mktemp("compared") / "step-00000001"
    return ExportSource(write_full(folder, tiny_model_dir, trained_weights(tiny_model_dir), step=1))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, source: ExportSource) -> dict[str, Path]:
    """Unverified exports in one file and in several."""
    return {size: export(source, tmp_path_factory.mktemp("good"), size=size) for size in ("5GB", "100KB")}


def export(source: ExportSource, folder: Path, dtype: torch.dtype = torch.float32, size: str = "5GB") -> Path:
    write_export(source, folder, dtype, size, CardFacts("tiny"))
    return folder


def need_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no model fit into memory."""
    monkeypatch.setattr(model_comparison, "available_memory", lambda: 0)


def in_weights(change: Callable[[Tensors], Any]) -> Planted:
    """Return a defect in ``model.safetensors``."""

    def plant(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        save_file(change(tensors) or tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return plant


def in_json(name: str, change: Callable[[dict[str, Any]], Any]) -> Planted:
    """Return a defect in a JSON file."""

    def plant(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return plant


def flip_a_bit(tensors: Tensors) -> None:
    tensors["model.layers.1.mlp.up_proj.weight"].view(torch.int32)[7, 9] ^= 1


def swap(tensors: Tensors) -> None:
    one, other = (f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1))
    tensors[one], tensors[other] = tensors[other], tensors[one]


def untie(folder: Path) -> None:
    in_weights(lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})(folder)
    in_json("config.json", lambda config: config.update(tie_word_embeddings=False))(folder)


def second_shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[1]


def other_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")


def truncate(folder: Path) -> None:
    with second_shard(folder).open("r+b") as file:
        file.truncate(file.seek(0, 2) - 1)


def exchange_files(index: dict[str, Any]) -> None:
    files = index["weight_map"]
    one = "model.norm.weight"
    other = "model.embed_tokens.weight"
    files[one], files[other] = files[other], files[one]


def other_token(tokenizer: dict[str, Any]) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


NORM = "model.norm.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
DIFFERENT = "tensors different in shape, type or value: "
OTHER = "different from the checkpoint's: "
DEFECTS: dict[str, tuple[Planted, str]] = {
    "missing key": (in_weights(lambda tensors: {} if tensors.pop(DOWN) is None else None), f"tensors missing: {DOWN}"),
    "extra key": (
        in_weights(lambda tensors: tensors | {"model.extra": torch.ones(2)}),
        "tensors not in the checkpoint: model.extra",
    ),
    "one flipped bit": (in_weights(flip_a_bit), DIFFERENT + "model.layers.1.mlp.up_proj.weight"),
    "swapped pair": (in_weights(swap), DIFFERENT + "model.layers.0.self_attn.q_proj.weight, model.layers.1"),
    "wrong dtype": (in_weights(lambda tensors: tensors | {NORM: tensors[NORM].half()}), DIFFERENT + NORM),
    "wrong dtype, same values": (
        in_weights(lambda tensors: tensors | {NORM: tensors[NORM].double()}),
        DIFFERENT + NORM,
    ),
    "wrong shape": (in_weights(lambda tensors: tensors | {DOWN: tensors[DOWN].T.contiguous()}), DIFFERENT + DOWN),
    "untied": (untie, "tensors not in the checkpoint: lm_head.weight"),
    "truncated shard": (truncate, ".safetensors: not a complete safetensors file"),
    "lost shard": (lambda folder: second_shard(folder).unlink(), ".safetensors: the file is missing"),
    "wrong index": (
        in_json("model.safetensors.index.json", exchange_files),
        OTHER + "model.safetensors.index.json does not say which file has which tensor",
    ),
    "rotary base": (
        in_json("config.json", lambda config: config["rope_parameters"].update(rope_theta=100.0)),
        OTHER + "rope_parameters in config.json",
    ),
    "norm's epsilon": (
        in_json("config.json", lambda config: config.update(rms_norm_eps=1e-5)),
        OTHER + "rms_norm_eps in config.json",
    ),
    "activation": (
        in_json("config.json", lambda config: config.update(hidden_act="gelu")),
        OTHER + "hidden_act in config.json",
    ),
    "dtype in config": (
        in_json("config.json", lambda config: config.update(dtype="float16", torch_dtype="float16")),
        OTHER + "dtype in config.json",
    ),
    "EOS in config": (
        in_json("config.json", lambda config: config.update(eos_token_id=0)),
        OTHER + "eos_token_id in config.json",
    ),
    "EOS of generation": (
        in_json("generation_config.json", lambda config: config.update(eos_token_id=[0])),
        OTHER + "eos_token_id in generation_config.json",
    ),
    "no generation config": (
        lambda folder: (folder / "generation_config.json").unlink(),
        OTHER + "generation_config.json",
    ),
    "EOS of tokenizer": (
        in_json("tokenizer_config.json", lambda config: config.update(eos_token="<|begin_of_text|>")),
        OTHER + "special tokens of the tokenizer",
    ),
    "template": (other_template, OTHER + "chat template of the tokenizer"),
    "vocabulary": (in_json("tokenizer.json", other_token), "vocabulary of the tokenizer"),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_every_planted_defect_is_found(name: str, tmp_path: Path, good: dict[str, Path], source: ExportSource) -> None:
    plant, fault = DEFECTS[name]
    in_shards = "shard" in name or "index" in name
    folder = shutil.copytree(good["100KB" if in_shards else "5GB"], tmp_path / "export")
    plant(folder)
    faults = compare(folder, source, torch.float32).faults
    assert any(fault in found for found in faults), faults


def test_the_first_layer_that_computes_something_else_is_named(
    tmp_path: Path, good: dict[str, Path], source: ExportSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(good["5GB"], tmp_path / "export")
    in_weights(lambda tensors: tensors | {DOWN: -tensors[DOWN]})(folder)
    need_layers(monkeypatch)
    report = compare(folder, source, torch.float32)
    assert [layer.max_difference > 0 for layer in report.layers] == [False, True]
    in_tensors, in_layer, in_logits = report.faults
    assert in_tensors == DIFFERENT + DOWN
    assert in_layer.startswith("the output of decoder layer 1 differs by ")
    assert in_logits.startswith("logits differ by ")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_good_export_has_no_faults_layer_by_layer(
    dtype: torch.dtype, tmp_path: Path, source: ExportSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = export(source, tmp_path, dtype, size="100KB")
    whole = compare(folder, source, dtype)
    need_layers(monkeypatch)
    layered = compare(folder, source, dtype)
    assert whole.faults == layered.faults == []
    assert (whole.method, layered.method) == ("whole model", "layer by layer")
    assert whole.tensors == layered.tensors
    assert len(layered.layers) == 2
    assert layered.logits is not None
    assert whole.logits is not None
    assert layered.logits.max_value == pytest.approx(whole.logits.max_value, rel=1e-6)
    assert layered.logits.max_difference == 0


@pytest.mark.parametrize("family", [*FAMILIES, "mamba"])
def test_every_family_is_exported_and_computes_the_same_layer_by_layer(
    family: str, tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = json.loads((tiny_model_dir / "tokenizer.json").read_text())
    sizes = FAMILIES.get(family, {"hidden_size": 32, "num_hidden_layers": 2})
    sizes = sizes | {"vocab_size": len(tokenizer["model"]["vocab"]), "max_position_embeddings": 256}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).eval()
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    model_dir = tmp_path / family
    shutil.copytree(tiny_model_dir, model_dir, ignore=shutil.ignore_patterns("*.safetensors"))
    model.config.save_pretrained(model_dir)
    weights = {name: parameter.detach().contiguous() for name, parameter in model.named_parameters()}
    weights |= {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}
    source = ExportSource(write_full(tmp_path / "step-00000001", model_dir, weights, step=1))
    (tmp_path / "export").mkdir()
    folder = export(source, tmp_path / "export", torch.float32, size="20KB")
    whole = compare(folder, source, torch.float32)
    need_layers(monkeypatch)
    layered = compare(folder, source, torch.float32)
    assert whole.faults == layered.faults == []
    assert (whole.method, layered.method) == ("whole model", "layer by layer")
    with torch.inference_mode():
        shape = model_comparison._open(folder, source, torch.float32)
        logits = model(input_ids=shape.input_ids, use_cache=False).logits
    assert layered.logits is not None
    assert layered.logits.max_value == pytest.approx(logits.abs().max().item(), rel=1e-6)


def test_a_dtype_within_text_config_is_written_by_the_export() -> None:
    stored = {"text_config": {"dtype": "bfloat16", "hidden_size": 8}}
    assert model_comparison._different_settings(stored, {"text_config": {"dtype": "float32", "hidden_size": 8}}) == []
    wider = {"text_config": {"dtype": "bfloat16", "hidden_size": 16}}
    assert model_comparison._different_settings(stored, wider) == ["text_config"]


@pytest.fixture
def renamed(tmp_path: Path, tiny_model_dir: Path) -> tuple[ExportSource, Path]:
    """A checkpoint of GPT-NeoX and its export, where most tensors have other names."""
    sizes = FAMILIES["gpt_neox"] | {"vocab_size": 1000, "max_position_embeddings": 256}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_neox", **sizes))
    shutil.copytree(tiny_model_dir, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    model.config.save_pretrained(tmp_path / "model")
    weights = {name: parameter.detach().contiguous() for name, parameter in model.named_parameters()}
    source = ExportSource(write_full(tmp_path / "step-00000001", tmp_path / "model", weights, step=1))
    (tmp_path / "export").mkdir()
    return source, export(source, tmp_path / "export")


def test_a_bit_of_a_renamed_weight_is_compared(renamed: tuple[ExportSource, Path]) -> None:
    source, folder = renamed
    good = compare(folder, source, torch.float32)
    assert good.faults == []
    assert good.tensors.compared == len(load_file(folder / "model.safetensors"))
    tensors = load_file(folder / "model.safetensors")
    tensors["embed_out.weight"].flatten().view(torch.int32)[0] ^= 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    different = compare(folder, source, torch.float32).tensors.different
    assert different == ["embed_out.weight", "lm_head.weight"]  # in the file, and in the model that is loaded


def test_a_renamed_weight_that_is_loaded_wrongly_is_named(
    renamed: tuple[ExportSource, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, folder = renamed
    load: Any = AutoModelForCausalLM.from_pretrained

    def load_wrongly(*arguments: Any, **options: Any) -> Any:
        model, loading = load(*arguments, **options)
        model.lm_head.weight.data.view(torch.int32).flatten()[0] ^= 1
        return model, loading

    monkeypatch.setattr(model_comparison.AutoModelForCausalLM, "from_pretrained", load_wrongly)
    assert compare(folder, source, torch.float32).tensors.different == ["lm_head.weight"]


def test_a_family_that_cannot_run_by_layers_is_compared_by_tensors_with_a_note(
    good: dict[str, Path], source: ExportSource, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("Tensor on device meta is not on the expected device cpu!")

    need_layers(monkeypatch)
    monkeypatch.setattr(model_comparison, "layered_forward", fail)
    report = compare(good["5GB"], source, torch.float32)
    assert (report.method, report.logits, report.faults) == ("tensors only", None, [])
    assert report.tensors.compared == 20
    assert "note: llama does not fit in memory and cannot run layer by layer" in capfd.readouterr().err


@pytest.mark.parametrize(("layer", "logit"), [(0.5, 0.0), (0.0, 0.5), (float("nan"), 0.0), (0.0, float("nan"))])
def test_outputs_that_differ_or_are_not_finite_are_faults(layer: float, logit: float) -> None:
    tensors = TensorReport(1, 1, [], [], [], 0.0)
    layers = [OutputReport(1, 2.0, 0.0), OutputReport(1, 2.0, layer)]
    logits = OutputReport(1, 2.0, logit)
    report = VerificationReport("float32", "layer by layer", tensors, layers, logits, [], "equal", [])
    (fault,) = find_faults(report, torch.float32)
    assert ("the output of decoder layer 1" if layer else "logits") in fault
