"""Claims about convert_to_hf.py: what it writes is the checkpoint and plain transformers reads it, or nothing stays."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import convert_to_hf
from fabric_train.cli.errors import InputError
from fabric_train.export.convert import write_export
from fabric_train.export.model_card import write_model_card
from fabric_train.export.verification import VerificationError, compare, verify_in_fresh_process
from fabric_train.files.atomic_folder import complete_folder
from tests.support.checkpoint_examples import CHAT_TEMPLATE, run_with_two_checkpoints, trained_weights, write_full

SHARD_SIZE = "100KB"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    return run_with_two_checkpoints(tmp_path_factory.getbasetemp(), tiny_model_dir)


@pytest.fixture(scope="module")
def weights(tiny_model_dir: Path) -> dict[str, torch.Tensor]:
    return trained_weights(tiny_model_dir)


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory, run: Path) -> dict[str, Path]:
    """Both checkpoints through one call of the program, verified, in shards of bfloat16."""
    folder = tmp_path_factory.mktemp("exports") / "out"
    checkpoints = sorted(map(str, (run / "checkpoints").iterdir()))
    with pytest.MonkeyPatch.context() as patch:
        argv = ["--checkpoint", *checkpoints, "--output_dir", str(folder), "--max_shard_size", SHARD_SIZE]
        patch.setattr("sys.argv", ["convert_to_hf.py", *argv])
        convert_to_hf.main()
    return {"full": folder / "step-00000001", "sharded": folder / "step-00000002"}


@pytest.fixture
def unverified(tmp_path: Path, run: Path) -> tuple[Path, Path]:
    """An export in one file, not verified, and the checkpoint it was made from."""
    checkpoint = run / "checkpoints" / "step-00000001"
    folder = tmp_path / "export"
    folder.mkdir()
    write_export(checkpoint, folder, "tiny", torch.float32, "5GB")
    return folder, checkpoint


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_plain_transformers_loads_the_export_with_the_checkpoints_weights(
    exports: dict[str, Path], weights: dict[str, torch.Tensor], kind: str
) -> None:
    loaded: Any = AutoModelForCausalLM.from_pretrained(exports[kind], dtype="auto", output_loading_info=True)
    model, loading = loaded
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    loaded = model.state_dict()
    assert loaded.keys() == {*weights, "lm_head.weight"}
    assert all(torch.equal(loaded[name], weights[name].to(torch.bfloat16)) for name in weights)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_files_are_no_larger_than_max_shard_size_and_have_an_index(exports: dict[str, Path]) -> None:
    index = json.loads((exports["sharded"] / "model.safetensors.index.json").read_text())
    files = {file.name: load_file(file) for file in exports["sharded"].glob("*.safetensors")}
    assert len(files) > 1
    assert index["weight_map"] == {name: file for file, tensors in files.items() for name in tensors}
    for tensors in files.values():
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= 100_000 or len(tensors) == 1
        assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def test_config_says_the_exported_type_and_architecture(exports: dict[str, Path]) -> None:
    config = json.loads((exports["full"] / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (exports["full"] / "generation_config.json").is_file()


def test_tokenizer_and_chat_template_come_along(exports: dict[str, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(exports["full"])
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<user>hi\n"


def test_report_of_the_fresh_process_lies_in_the_folder(
    exports: dict[str, Path], weights: dict[str, torch.Tensor]
) -> None:
    report = json.loads((exports["sharded"] / "verification.json").read_text())
    assert report["tensors"]["compared"] == len(weights)
    assert report["tensors"]["max_difference"] == 0
    assert report["logits"]["max_difference"] == pytest.approx(0, abs=1e-4)
    assert report["tokenizer"] == "equal"
    assert report["faults"] == []


def test_model_card_tells_the_training_and_nothing_of_the_machine(exports: dict[str, Path], run: Path) -> None:
    card = (exports["full"] / "README.md").read_text()
    for fact in ("`tiny-llama`", "| optimizer steps | 1 |", "| `lr` | 0.001 |", "| validation perplexity | 33.12 |"):
        assert fact in card
    for file in exports["full"].glob("*.[jm][sd]*"):
        text = file.read_text(encoding="utf-8")
        assert not any(
            private in text for private in ("/home/someone", "someone", str(run), str(exports["full"].parent))
        )


def test_model_card_counts_the_training_data_of_the_manifest(tmp_path: Path, run: Path, tiny_tokens_dir: Path) -> None:
    checkpoint = shutil.copytree(run / "checkpoints" / "step-00000001", tmp_path / "step-00000001")
    shutil.copyfile(tiny_tokens_dir / "manifest.json", checkpoint / "manifest.json")
    write_model_card(checkpoint, tmp_path, "tiny")
    card = (tmp_path / "README.md").read_text()
    for name, split in json.loads((checkpoint / "manifest.json").read_text())["ledger"].items():
        if isinstance(split, dict) and "rows" in split:
            counts = (split[count] for count in ("documents", "characters", "tokens_in_rows", "rows"))
            assert f"| {name} | " + " | ".join(f"{count:,}" for count in counts) + " |" in card
    assert "Sources: `slice.jsonl`." in card
    assert str(tiny_tokens_dir.parent) not in card


def _flip_a_value(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] += 0.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _drop_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _add_a_tensor(folder: Path) -> None:
    tensors = {**load_file(folder / "model.safetensors"), "model.layers.7.mlp.down_proj.weight": torch.ones(2)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _store_in_another_type(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor.half() for name, tensor in tensors.items()}, folder / "model.safetensors")


def _change_the_rotary_base(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 100.0
    (folder / "config.json").write_text(json.dumps(config))


def _untie(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))


def _change_the_tokenizer(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")


@pytest.mark.parametrize(
    "damage, fault",
    [
        (_flip_a_value, "tensors different in shape, type or value: model.norm.weight"),
        (_drop_a_tensor, "tensors missing: model.layers.1.mlp.down_proj.weight"),
        (_add_a_tensor, "tensors not in the checkpoint: model.layers.7.mlp.down_proj.weight"),
        (_store_in_another_type, "tensors different in shape, type or value"),
        (_change_the_rotary_base, "logits differ by"),
        (_untie, "ties other weights"),
        (_change_the_tokenizer, "the tokenizer gives other tokens"),
    ],
)
def test_comparison_sees_every_kind_of_damage(
    unverified: tuple[Path, Path], damage: Callable[[Path], None], fault: str
) -> None:
    folder, checkpoint = unverified
    damage(folder)
    assert any(fault in found for found in compare(folder, checkpoint, torch.float32).faults)


def test_an_undamaged_export_has_no_fault(unverified: tuple[Path, Path]) -> None:
    assert compare(*unverified, torch.float32).faults == []


def test_an_export_with_one_flipped_value_never_gets_its_name(tmp_path: Path, run: Path) -> None:
    checkpoint, target = run / "checkpoints" / "step-00000001", tmp_path / "out"
    with pytest.raises(VerificationError, match=r"model\.norm\.weight"), complete_folder(target) as folder:  # noqa: PT012
        write_export(checkpoint, folder, "tiny", torch.float32, "5GB")
        _flip_a_value(folder)
        verify_in_fresh_process(folder, checkpoint, torch.float32)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_weights_too_large_for_the_type_fail_the_program_and_leave_nothing(
    tmp_path: Path, tiny_model_dir: Path, weights: dict[str, torch.Tensor], run_program: Callable
) -> None:
    large = {**weights, "model.embed_tokens.weight": weights["model.embed_tokens.weight"] * 1e7}
    checkpoint = write_full(tmp_path / "step-00000001", tiny_model_dir, large, step=1)
    target = tmp_path / "out"
    finished = run_program("convert_to_hf.py", "--checkpoint", checkpoint, "--output_dir", target, "--dtype", "float16")
    assert finished.returncode == 1
    assert "logits in float16 are not finite" in finished.stderr
    assert "Traceback" not in finished.stderr
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["cwd", "step-00000001"]


def _refusal(monkeypatch: pytest.MonkeyPatch, *argv: object) -> str:
    monkeypatch.setattr("sys.argv", ["convert_to_hf.py", *map(str, argv)])
    with pytest.raises(InputError) as refused:
        convert_to_hf.main()
    return str(refused.value)


def test_push_without_a_token_is_refused_before_any_work(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch, run_program: Callable
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    target = tmp_path / "out"
    argv = ["--checkpoint", run, "--output_dir", target, "--push_to_hub", "someone/model"]
    finished = run_program("convert_to_hf.py", *argv)
    assert finished.returncode == 2
    assert "hf auth login" in finished.stderr
    assert "HF_TOKEN" in finished.stderr
    assert not target.exists()


@pytest.mark.slow
def test_failed_push_keeps_the_verified_folder_and_never_shows_the_token(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch, run_program: Callable
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_notatokenatall")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody answers there
    target = tmp_path / "out"
    argv = ["--checkpoint", run, "--output_dir", target, "--dtype", "float32", "--push_to_hub", "someone/model"]
    finished = run_program("convert_to_hf.py", *argv)
    assert finished.returncode == 1
    assert "is complete, but pushing it to someone/model failed" in finished.stderr
    assert "hf_notatokenatall" not in finished.stdout + finished.stderr
    assert json.loads((target / "verification.json").read_text())["faults"] == []


def test_an_existing_folder_is_never_written_into(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert "not empty" in _refusal(monkeypatch, "--checkpoint", run, "--output_dir", tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes.txt"]


def test_every_path_that_is_no_checkpoint_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "nothing-here", tmp_path / "empty"
    second.mkdir()
    refusal = _refusal(monkeypatch, "--checkpoint", first, second, "--output_dir", tmp_path / "out")
    assert str(first) in refusal
    assert str(second) in refusal
    assert not (tmp_path / "out").exists()


def test_two_checkpoints_of_one_name_are_refused(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(run, tmp_path / "other")
    assert "same name" in _refusal(
        monkeypatch, "--checkpoint", run, tmp_path / "other", "--output_dir", tmp_path / "out"
    )


def test_run_folder_means_its_newest_checkpoint(tmp_path: Path, run: Path) -> None:
    plan = convert_to_hf.plan_targets([run], tmp_path / "out")
    assert plan == {tmp_path / "out": run / "checkpoints" / "step-00000002"}
