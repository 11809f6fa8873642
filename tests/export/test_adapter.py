"""Adapters leave a run in two ways, verified: as a folder of peft, and merged into the weights of their base."""

import json
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any, cast

import peft
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from huggingface_hub import metadata_load
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from fabric_train.checkpoint.adapter_folder import AdapterTensors, read_adapter
from fabric_train.cli.errors import InputError
from fabric_train.cli.parser import parse_arguments
from fabric_train.evaluation.arguments import EvaluateArguments
from fabric_train.evaluation.compare_models import compare_models
from fabric_train.evaluation.models import find_model
from fabric_train.export.convert import convert
from fabric_train.export.merged_adapter import MergeInto, open_unmerged, open_whole
from fabric_train.export.model_card import CardFacts
from fabric_train.export.model_comparison import compare
from fabric_train.export.plan import plan_average, plan_targets
from fabric_train.export.source import ExportSource
from fabric_train.files import requirements
from fabric_train.inference import load_model, models_in_turn
from fabric_train.inference.devices import load_onto_devices
from fabric_train.inference.load_model import load_for_inference
from fabric_train.merge_models.__main__ import main as merge_models
from fabric_train.model.layered_forward import layered_forward
from fabric_train.model.nf4 import NF4Linear
from fabric_train.pages import drawing_process
from fabric_train.programs import convert_to_hf
from tests.support.checkpoint_examples import trained_weights, write_full
from tests.support.exports import verify_in_this_process
from tests.support.forked_runs import ForkedRuns
from tests.support.short_runs import argv
from tests.support.stand_in_hub import StandInHub
from tests.support.token_datasets import write_jsonl

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model_dir: Path,
    tiny_tokens_dir: Path,
    forked_runs: ForkedRuns,
) -> Path:
    """A checkpoint of an adapter that has changed much; DoRA's merge is LoRA's, and scales the rows."""
    run = tmp_path_factory.mktemp("adapter") / "run"
    options = {"adapter": "dora", "lora_rank": 4, "lr": 3e-2, "max_step": 4, "save_step_interval": 2}
    forked_runs.start(argv(tiny_model_dir, tiny_tokens_dir, run, parallelism="single", **options), 1).finish()
    return run / "checkpoints" / "step-00000004"


@pytest.fixture(scope="module")
def whole_module(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model_dir: Path,
    tiny_tokens_dir: Path,
    forked_runs: ForkedRuns,
) -> Path:
    """A checkpoint of LoRA beside a tied embedding that trains whole."""
    run = tmp_path_factory.mktemp("whole") / "run"
    options = {"lora_rank": 2, "lora_targets": "q_proj", "train_also": "embed_tokens", "lr": 3e-2, "max_step": 2}
    forked_runs.start(argv(tiny_model_dir, tiny_tokens_dir, run, parallelism="single", **options), 1).finish()
    return run / "checkpoints" / "step-00000002"


@pytest.fixture(scope="module")
def in_4_bits(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model_dir: Path,
    tiny_tokens_dir: Path,
    forked_runs_in_4_bits: ForkedRuns,
) -> Path:
    """A checkpoint of LoRA that was trained in bf16 beside weights in 4 bits."""
    run = tmp_path_factory.mktemp("nf4") / "run"
    options = {"lora_rank": 4, "base_weights": "nf4", "precision": "bf16-true", "lr": 3e-2, "max_step": 3}
    forked_runs_in_4_bits.start(argv(tiny_model_dir, tiny_tokens_dir, run, parallelism="single", **options), 1).finish()
    return run / "checkpoints" / "step-00000003"


@pytest.fixture(scope="module")
def head_apart(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model_dir: Path,
    tiny_tokens_dir: Path,
    forked_runs: ForkedRuns,
) -> Path:
    """A checkpoint of LoRA beside a head that trains apart from the embedding, to which the base ties it."""
    folder = tmp_path_factory.mktemp("head")
    options: dict[str, Any] = {"lora_rank": 2, "lora_targets": "q_proj", "train_also": "lm_head", "lr": 3e-2}
    options |= {"parallelism": "single", "max_step": 2, "save_step_interval": 1}
    forked_runs.start(argv(tiny_model_dir, tiny_tokens_dir, folder / "1", **options), 1).finish()

    # a second run goes on from the first step
    options["checkpoint"] = folder / "1" / "checkpoints" / "step-00000001"
    forked_runs.start(argv(tiny_model_dir, tiny_tokens_dir, folder / "2", **options), 1).finish()
    return folder / "2" / "checkpoints" / "step-00000002"


def base_in_4_bits(model: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return what transformers and bitsandbytes make of a model in 4 bits."""
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    return AutoModelForCausalLM.from_pretrained(model, dtype=dtype, quantization_config=nf4, device_map="cpu")


def exported(source: ExportSource, target: Path, dtype: torch.dtype = torch.float32) -> Any:
    with verify_in_this_process():
        return convert(source, target, dtype, "5GB", CardFacts("owner/name"))


def base_with_adapter(model: Path, adapter: Path) -> Any:
    """Return what peft makes of a base model and an adapter, in fp32."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(base, str(adapter))


def merged_weights(model: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a base model into which peft has merged an adapter, in fp32."""
    weights: dict[str, torch.Tensor] = base_with_adapter(model, adapter).merge_and_unload().state_dict()
    return weights


def test_what_an_export_lacks_is_one_line_before_it_begins(
    tmp_path: Path, checkpoint: Path, in_4_bits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "export"
    for source, merges, package in ((checkpoint, None, "peft"), (in_4_bits, "original", "bitsandbytes")):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with pytest.raises(
                InputError, match=f"needs {package}; run pip install 'fabric-train.{package}.'"
            ) as refused:
                plan_targets([source], target, torch.float32, merges=cast(MergeInto | None, merges))
            assert len(refused.value.faults) == 1
    monkeypatch.setattr(requirements, "free_bytes", lambda folder: 1000)
    with pytest.raises(InputError, match=r"the export needs .* left; choose a folder on another disk"):
        plan_targets([checkpoint], target, torch.float32)
    assert not target.exists()


def test_what_the_process_that_verifies_cannot_open_is_said_once(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(InputError, match="needs peft; run pip install"):
        exported(ExportSource(checkpoint), tmp_path / "export")
    assert "error" not in capfd.readouterr().err
    assert not (tmp_path / "export").exists()


def test_a_picture_that_cannot_be_drawn_ends_no_export(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawing_process._drawing_process.cache_clear()
    monkeypatch.setattr(sys, "executable", "/bin/false")  # the process that draws ends at once
    exported(ExportSource(checkpoint), tmp_path / "export")
    assert "![" not in (tmp_path / "export" / "README.md").read_text()
    assert not [*(tmp_path / "export").glob("*.png")]
    assert capsys.readouterr().err.count("note: no pictures and charts: ") == 1


def test_an_exported_adapter_stops_where_the_run_said(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base's own settings do not have the token that ends a turn of the run's chats."""
    model, tokenizer = load_for_inference(str(checkpoint))
    prompt = tokenizer("Once upon a time", return_tensors="pt")
    prompt_length = prompt["input_ids"].shape[1]
    new_ids = model.generate(**prompt, max_new_tokens=50)[0, prompt_length:].tolist()
    assert len(new_ids) > 1

    # the same checkpoint, whose run says that the first of these tokens ends a turn
    end_id = new_ids[0]
    checkpoint_copy = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))
    settings_file = checkpoint_copy / "generation_config.json"
    settings = json.loads(settings_file.read_text())
    settings_file.write_text(json.dumps(settings | {"eos_token_id": [1, end_id]}))
    monkeypatch.chdir(tmp_path)
    with verify_in_this_process():
        convert(ExportSource(checkpoint_copy), Path("exported"), torch.float32, "5GB", CardFacts("exported"))

    # the code of the card, as a user would run it, and this project's own loading
    snippet = (tmp_path / "exported" / "README.md").read_text().split("```python\n")[1].partition("```")[0]
    values: dict[str, Any] = {}
    exec(snippet, values)
    adapted, _ = load_for_inference("exported")
    for output in (values["output"], adapted.generate(**prompt, max_new_tokens=50)):
        assert output[0, prompt_length:].tolist() == [end_id]


def test_an_adapter_is_exported_as_a_folder_of_peft(tmp_path: Path, tiny_model_dir: Path, checkpoint: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # would be among the program's lines
        report = exported(ExportSource(checkpoint), tmp_path / "export")
    assert report.faults == []
    assert report.tensors.compared == len(load_file(checkpoint / "adapter_model.safetensors"))
    assert report.logits.max_difference <= 1e-4 * report.logits.max_value
    assert (metadata_load(tmp_path / "export" / "README.md") or {})["library_name"] == "peft"

    # peft computes what this project does, which is not what the base does
    peft_model = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    adapted, _ = load_for_inference(str(checkpoint))
    base, _ = load_for_inference(str(tiny_model_dir))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    ids = tokenizer("To be, or not to be", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        logits = adapted(ids).logits
        torch.testing.assert_close(logits, peft_model(ids).logits, rtol=0, atol=1e-5)
        assert (logits - base(ids).logits).abs().max() > 1e-2

    # a tensor that differs is a fault, and so are the logits
    weights_file = tmp_path / "export" / "adapter_model.safetensors"
    stored = load_file(weights_file)
    name = min(stored)
    save_file(stored | {name: stored[name] + 1}, weights_file)
    damaged_report = compare(tmp_path / "export", ExportSource(checkpoint), torch.float32)
    assert damaged_report.tensors.different == [name.removeprefix("base_model.model.")]
    assert len(damaged_report.faults) == 2


def test_models_are_merged_with_an_adapter_that_is_in_its_base(
    tmp_path: Path, tiny_model_dir: Path, checkpoint: Path
) -> None:
    words = ["--method", "linear", "--models", str(checkpoint), str(tiny_model_dir), "--dtype", "float32"]
    with verify_in_this_process():
        merge_models([*words, "--output_dir", str(tmp_path / "merged")])
    adapted = open_whole(checkpoint)
    base = load_file(tiny_model_dir / "model.safetensors")
    for name, tensor in load_file(tmp_path / "merged" / "model.safetensors").items():
        torch.testing.assert_close(tensor, (adapted.read(name) + base[name]) / 2, rtol=0, atol=1e-6)


def test_a_merged_model_is_base_and_adapter(tmp_path: Path, tiny_model_dir: Path, checkpoint: Path) -> None:
    # in fp32, the weights are those of peft
    source = ExportSource(checkpoint, merges="original")
    report = exported(source, tmp_path / "float32")
    expected = merged_weights(tiny_model_dir, checkpoint)
    weights = load_file(tmp_path / "float32" / "model.safetensors")
    assert weights.keys() == expected.keys() - {"lm_head.weight"}  # tied, as in the base
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=2e-6)
    assert report.adapted.max_difference <= 1e-4 * report.adapted.max_value

    # in bf16, they are rounded once, and the report has what that changes
    rounded_report = exported(source, tmp_path / "bfloat16", torch.bfloat16)
    rounded_weights = load_file(tmp_path / "bfloat16" / "model.safetensors")
    for name, weight in weights.items():
        assert torch.equal(rounded_weights[name], weight.bfloat16())
    adapted = rounded_report.adapted
    assert adapted.max_difference <= 1e-4 * adapted.max_value < rounded_report.rounded.max_value
    assert rounded_report.rounded.max_difference > 10 * report.rounded.max_difference


def test_an_average_is_of_merged_models(tmp_path: Path, tiny_model_dir: Path, checkpoint: Path) -> None:
    run = checkpoint.parents[1]
    target = tmp_path / "out"
    with pytest.raises(InputError, match="average full models with --merge true"):
        plan_average([run], target, average="last:2", decay=1.0, dtype=torch.float32)
    plan = plan_average([run], target, average="last:2", decay=1.0, dtype=torch.float32, merges="original")
    exported(plan[target], target)
    first, second = (merged_weights(tiny_model_dir, path) for path in run.glob("checkpoints/*"))
    for name, weight in load_file(target / "model.safetensors").items():
        torch.testing.assert_close(weight, (first[name] + second[name]) / 2, rtol=0, atol=2e-6)


def test_a_whole_model_is_not_merged(tmp_path: Path, tiny_model_dir: Path) -> None:
    whole = write_full(tmp_path / "step-00000001", tiny_model_dir, trained_weights(tiny_model_dir), step=1)
    with pytest.raises(InputError, match="step-00000001 is a full model without an adapter; leave out --merge"):
        plan_targets([whole], tmp_path / "out", torch.float32, merges="original")


def test_checkpoints_of_an_adapter_are_models_of_their_own(checkpoint: Path) -> None:
    assert find_model(str(checkpoint)).identity != find_model(str(checkpoint.with_name("step-00000002"))).identity


def test_models_of_one_base_read_it_once_and_have_the_losses_that_they_have_alone(
    tmp_path: Path, tiny_model_dir: Path, checkpoint: Path, whole_module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported(ExportSource(checkpoint), tmp_path / "export")
    text = write_jsonl(tmp_path / "texts.jsonl", ["To be, or not to be, that is the question.", "Words, words."])
    models = [whole_module, tiny_model_dir, checkpoint, tmp_path / "export", checkpoint.with_name("step-00000002")]
    num_loaded = 0

    def load_and_count(*arguments: Any) -> Any:
        nonlocal num_loaded
        num_loaded += 1
        return load_onto_devices(*arguments)

    for module in (load_model, models_in_turn):
        monkeypatch.setattr(module, "load_onto_devices", load_and_count)

    def evaluated_losses(name: str, *models: object) -> dict[str, bytes]:
        """Return the content of the files with the losses by their names, which identify the model."""
        words = ["--models", *models, "--texts", f"text={text}", "--output_dir", tmp_path / name]
        compare_models(parse_arguments(EvaluateArguments, [*map(str, words)]))
        return {file.name: file.read_bytes() for file in (tmp_path / name / "token_losses").iterdir()}

    losses = evaluated_losses("together", *models)
    assert num_loaded == 1
    losses_alone: dict[str, bytes] = {}
    for index, model in enumerate(models):
        losses_alone |= evaluated_losses(f"alone-{index}", model)
    assert num_loaded == 1 + len(models)
    assert losses == losses_alone
    assert len(losses) == len(set(losses.values())) == len(models)  # no two models have the same
    assert list(json.loads((tmp_path / "together" / "evaluation.json").read_text())) == [*map(str, models)]


def test_a_model_in_4_bits_generates_and_is_evaluated_in_4_bits(
    tmp_path: Path, tiny_model_dir: Path, in_4_bits: Path
) -> None:
    # two values in a byte
    model, tokenizer = load_for_inference(str(in_4_bits))
    layers = [module for module in model.modules() if isinstance(module, NF4Linear)]
    assert len(layers) == 14
    for layer in layers:
        assert layer.weight.nbytes * 2 == layer.in_features * layer.out_features

    # it generates what peft does on the base of bitsandbytes
    peft_model = peft.PeftModel.from_pretrained(base_in_4_bits(tiny_model_dir), str(in_4_bits))
    ids = tokenizer("To be, or not to be", return_tensors="pt")["input_ids"]
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    assert model.generate(ids, **options).tolist() == peft_model.generate(input_ids=ids, **options).tolist()

    # it is evaluated with the dequantized weights, but the embedding is in bf16, as in training
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, peft_model(ids).logits, rtol=0, atol=0.02)  # of about 1, in bf16
        scored = models_in_turn.ModelsInTurn().load(str(in_4_bits))(ids).logits
        dequantized = layered(open_unmerged(in_4_bits, torch.float32, "dequantized"), ids)
        original = layered(open_unmerged(in_4_bits, torch.float32), ids)
    assert 20 * (scored - dequantized).abs().max() < (original - dequantized).abs().max()


def layered(opened: Any, ids: torch.Tensor) -> torch.Tensor:
    model, shape = opened
    return layered_forward(model, shape.layer_classes, ids, lambda: None).logits


def test_an_adapter_of_4_bits_is_merged_into_original_or_dequantized_weights(
    tmp_path: Path, tiny_model_dir: Path, in_4_bits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # the program and the card say how far the merged model is from the trained one
    trained: dict[str, Any] = {}  # the report on this, by the weights that are merged into
    weights: dict[str, dict[str, torch.Tensor]] = {}
    into: MergeInto
    for into in ("original", "dequantized"):
        target = tmp_path / into
        plan, _ = plan_targets([in_4_bits], target, torch.float32, merges=into)
        report = exported(plan[target], target)
        convert_to_hf.print_report(report, into)
        difference = report.trained.max_difference
        assert f"{difference:g} from base in 4 bits + adapter" in capsys.readouterr().out
        card = (target / "README.md").read_text()
        assert f"differ by at most {difference:.3g} from the model as trained" in card
        assert ("merged into the dequantized weights" in card) == (into == "dequantized")
        assert "| `base_weights` | nf4 |" in card
        trained[into] = report.trained
        weights[into] = load_file(target / "model.safetensors")
    assert trained["dequantized"].max_difference <= 1e-5 * trained["dequantized"].max_value < 1e-3
    assert trained["original"].max_difference > 1e-3
    assert trained["dequantized"].compared == trained["original"].compared

    # the original weights are merged as peft does, and the dequantized ones differ by what 4 bits change in the base
    expected = merged_weights(tiny_model_dir, in_4_bits)
    base = load_file(tiny_model_dir / "model.safetensors")
    for name, weight in weights["original"].items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=2e-6)
        dequantized_weight = weights["dequantized"][name]
        if name.endswith("_proj.weight"):
            packed, state = quantize_4bit(base[name].bfloat16(), blocksize=64, quant_type="nf4")
            state.dtype = torch.float32
            change_of_base = dequantize_4bit(packed, state) - base[name]
            torch.testing.assert_close(dequantized_weight - weight, change_of_base, rtol=0, atol=2e-6)
        else:
            assert torch.equal(dequantized_weight, weight)


def test_merge_into_is_for_merging_and_for_weights_in_4_bits(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(InputError, match="--merge_into dequantized needs --merge true"):
        parse_arguments(
            convert_to_hf.ConvertArguments, ["--checkpoint", "x", "--output_dir", "y", "--merge_into", "dequantized"]
        )
    with pytest.raises(InputError, match="step-00000004 was not in 4 bits; leave out --merge_into"):
        plan_targets([checkpoint], tmp_path / "out", torch.float32, merges="dequantized")


def test_a_tied_embedding_that_trained_whole_stays_tied(
    tmp_path: Path, tiny_model_dir: Path, whole_module: Path
) -> None:
    report = exported(ExportSource(whole_module), tmp_path / "export")  # fails if the logits of plain peft differ
    assert report.logits.max_difference <= 1e-6 < report.logits.max_value
    config = json.loads((tmp_path / "export" / "adapter_config.json").read_text())
    assert config["modules_to_save"] == ["embed_tokens", "lm_head"]
    assert read_adapter(tmp_path / "export").train_also == read_adapter(whole_module).train_also
    assert set(AdapterTensors(tmp_path / "export")) == set(AdapterTensors(whole_module))

    # merged, the head is still the embedding
    exported(ExportSource(whole_module, merges="original"), tmp_path / "whole")
    assert "lm_head.weight" not in load_file(tmp_path / "whole" / "model.safetensors")
    assert AutoConfig.from_pretrained(tmp_path / "whole").tie_word_embeddings
    ids = torch.arange(20)[None]
    peft_model = base_with_adapter(tiny_model_dir, tmp_path / "export")
    merged_model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    with torch.inference_mode():
        torch.testing.assert_close(merged_model(ids).logits, peft_model(ids).logits, rtol=0, atol=1e-5)


def test_a_head_that_trained_apart_from_the_embedding_is_untied(
    tmp_path: Path, tiny_model_dir: Path, head_apart: Path
) -> None:
    base = load_file(tiny_model_dir / "model.safetensors")["model.embed_tokens.weight"]
    head = load_file(head_apart / "adapter_model.safetensors")["base_model.model.lm_head.weight"]
    assert 1e-3 < (head - base).abs().max() < 0.2  # it began with the embedding's weights

    # merged, both weights are in the file
    exported(ExportSource(head_apart, merges="original"), tmp_path / "whole")
    assert not AutoConfig.from_pretrained(tmp_path / "whole").tie_word_embeddings
    weights = load_file(tmp_path / "whole" / "model.safetensors")
    assert torch.equal(weights["lm_head.weight"], head)
    assert torch.equal(weights["model.embed_tokens.weight"], base)

    # the adapter in peft, the merged model and this project's own loading compute the same
    exported(ExportSource(head_apart), tmp_path / "export")
    peft_model = base_with_adapter(tiny_model_dir, tmp_path / "export")
    merged_model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    model, _ = load_for_inference(str(head_apart))
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        expected = peft_model(ids).logits
        torch.testing.assert_close(merged_model(ids).logits, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-5)


def test_an_adapter_is_pushed_with_a_card_that_names_base_and_quantization(
    tmp_path: Path, in_4_bits: Path, hub: StandInHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ["convert_to_hf.py", "--checkpoint", str(in_4_bits), "--output_dir", str(tmp_path / "out")]
    with verify_in_this_process():
        monkeypatch.setattr("sys.argv", line)
        convert_to_hf.main()
        monkeypatch.setattr("sys.argv", [*line, "--push_to_hub", "alice/adapter", "--base_model", "meta/base"])
        convert_to_hf.main()
    files = hub.repositories["models/alice/adapter"].files("main")
    assert {*files} - {".gitattributes"} == {file.name for file in (tmp_path / "out").iterdir()}
    assert files["adapter_model.safetensors"] == (in_4_bits / "adapter_model.safetensors").read_bytes()
    config = json.loads(files["adapter_config.json"])
    assert config["base_model_name_or_path"] == "meta/base"
    card = metadata_load(tmp_path / "out" / "README.md") or {}
    expected = {"library_name": "peft", "base_model": "meta/base", "base_model_relation": "adapter"}
    assert {name: card[name] for name in expected} == expected
    text = files["README.md"].decode()
    assert "trained on the base model's weights in 4 bits (NF4, bitsandbytes)" in text
    assert "bnb_4bit_quant_type=" in text
    assert "| `base_weights` | nf4 |" in text
