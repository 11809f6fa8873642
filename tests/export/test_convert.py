"""convert_to_hf.py writes an export that plain transformers loads as the checkpoint, or nothing."""

import errno
import hashlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from fabric_train.checkpoint import read_trainer_json
from fabric_train.cli.errors import FAILURE, InputError
from fabric_train.export import convert, verification
from fabric_train.export.card_facts import read_exports, read_record
from fabric_train.export.convert import write_export
from fabric_train.export.model_card import CardFacts, write_model_card
from fabric_train.export.plan import plan_targets
from fabric_train.export.source import ExportSource
from fabric_train.export.verification import VerificationError, verify_in_fresh_process
from fabric_train.programs import convert_to_hf
from tests.support.checkpoint_examples import CHAT_TEMPLATE, run_with_two_checkpoints, trained_weights, write_full
from tests.support.exports import verify_in_this_process
from tests.support.forked_commands import run_in_fork
from tests.support.forked_runs import ForkedRuns

SHARD_SIZE = "100KB"
FACTS = CardFacts("tiny")


@pytest.fixture(scope="module", autouse=True)
def no_fresh_process() -> Iterator[None]:
    with verify_in_this_process():
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path, forked_runs: ForkedRuns) -> Path:
    return run_with_two_checkpoints(tmp_path_factory.getbasetemp(), tiny_model_dir, forked_runs)


@pytest.fixture(scope="module")
def weights(tiny_model_dir: Path) -> dict[str, torch.Tensor]:
    return trained_weights(tiny_model_dir)


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory, run: Path) -> dict[str, Path]:
    """Both checkpoints converted by one call of the program, in shards of bfloat16."""
    folder = tmp_path_factory.mktemp("exports") / "out"
    checkpoints = sorted(map(str, (run / "checkpoints").iterdir()))
    with pytest.MonkeyPatch.context() as patch:
        argv = ["--checkpoint", *checkpoints, "--output_dir", str(folder), "--max_shard_size", SHARD_SIZE]
        patch.setattr("sys.argv", ["convert_to_hf.py", *argv])
        convert_to_hf.main()
    return {"full": folder / "step-00000001", "sharded": folder / "step-00000002"}


def first(run: Path) -> ExportSource:
    return ExportSource(run / "checkpoints" / "step-00000001")


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_plain_transformers_loads_the_checkpoints_weights(
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
        if len(tensors) > 1:  # a larger tensor has a file of its own
            assert sum(tensor.nbytes for tensor in tensors.values()) <= 100_000
        assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def test_config_has_the_exported_type_and_architecture(exports: dict[str, Path]) -> None:
    config = json.loads((exports["full"] / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (exports["full"] / "generation_config.json").is_file()


def test_an_export_generates_with_a_cache_although_training_turned_it_off(
    tmp_path: Path, tiny_model_dir: Path, weights: dict[str, torch.Tensor]
) -> None:
    checkpoint = write_full(tmp_path / "step-00000001", tiny_model_dir, weights, step=1)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"use_cache": False}))
    (tmp_path / "export").mkdir()
    write_export(ExportSource(checkpoint), tmp_path / "export", torch.float32, "5GB", FACTS)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "export").config.use_cache is True


def test_tokenizer_and_chat_template_are_copied(exports: dict[str, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(exports["full"])
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<user>hi\n"
    settings = json.loads((exports["full"] / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"  # a class that transformers 4 has too


def test_a_process_of_its_own_leaves_its_report_in_the_folder(
    exports: dict[str, Path],
    run: Path,
    weights: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    forked_runs: ForkedRuns,
) -> None:
    # the Slurm jobs of make test-launchers start a Python for it
    monkeypatch.setattr(verification, "subprocess", SimpleNamespace(run=run_in_fork(forked_runs)))
    folder = exports["sharded"]
    source = ExportSource(run / "checkpoints" / "step-00000002")
    report_file = folder / "verification.json"
    assert json.loads(report_file.read_text())["faults"] == []  # as the program has written it
    report_file.unlink()
    report = verify_in_fresh_process(folder, source, torch.bfloat16)
    assert json.loads(report_file.read_text()) == asdict(report)
    assert report.tensors.compared == len(weights)
    assert report.tensors.max_difference == 0
    assert report.method == "whole model"
    assert report.logits is not None
    assert report.logits.max_difference == pytest.approx(0, abs=1e-4)
    assert report.tokenizer == "equal"
    assert report.faults == []


def test_the_run_knows_its_exports(exports: dict[str, Path], run: Path, weights: dict[str, torch.Tensor]) -> None:
    records = {record.folder: record for record in read_exports(run) if not record.faults}
    assert [record.source for record in records.values()] == ["step 1", "step 2"]
    for folder in exports.values():
        record = records[folder.name]
        hashes = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.glob("*.safetensors")}
        assert record.weights == hashes
        assert record.num_tensors == len(weights)
        assert record.dtype == "bfloat16"
        assert record.logit_difference == pytest.approx(0, abs=1e-4)
    assert str(run) not in (run / "exports.jsonl").read_text()


def test_a_verification_that_dies_is_reported(
    exports: dict[str, Path], run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    killed = SimpleNamespace(run=lambda command, env, check: subprocess.CompletedProcess(command, -9))
    monkeypatch.setattr(verification, "subprocess", killed)
    with pytest.raises(VerificationError, match=r"could not be verified: .* ended with signal 9"):
        convert.convert(first(run), tmp_path / "out", torch.bfloat16, "5GB", FACTS)
    assert list(tmp_path.iterdir()) == []


def test_model_card_describes_the_training_and_not_the_machine(exports: dict[str, Path], run: Path) -> None:
    card = (exports["full"] / "README.md").read_text()
    for fact in ("`tiny-llama`", "64 tokens in 1 optimizer step", "| `lr` | 0.001 |", "perplexity 33.12."):
        assert fact in card
    for pattern in ("*.json", "*.md"):
        for file in exports["full"].glob(pattern):
            text = file.read_text(encoding="utf-8")
            for private_text in ("someone", str(run), str(exports["full"].parent)):  # someone's home is in trainer.json
                assert private_text not in text


def test_model_card_counts_the_training_data(tmp_path: Path, run: Path, tiny_tokens_dir: Path) -> None:
    checkpoint = shutil.copytree(run / "checkpoints" / "step-00000001", tmp_path / "step-00000001")
    shutil.copyfile(tiny_tokens_dir / "manifest.json", checkpoint / "manifest.json")
    write_model_card(read_record(read_trainer_json(checkpoint)), tmp_path, FACTS)
    card = (tmp_path / "README.md").read_text()
    ledger = json.loads((checkpoint / "manifest.json").read_text())["ledger"]
    for name in ("train", "validation"):
        counts = [ledger[name][column] for column in ("documents", "characters", "tokens_in_rows", "rows")]
        cells = " | ".join([name, *(f"{count:,}" for count in counts)])
        assert f"| {cells} |" in card
    assert "| `slice.jsonl` | 100.00% |" in card
    assert str(tiny_tokens_dir.parent) not in card


def _flip_a_value(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] += 0.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_an_export_with_one_wrong_value_never_gets_its_name(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_wrong_export(source: ExportSource, folder: Path, *settings: Any) -> None:
        write_export(source, folder, *settings)
        _flip_a_value(folder)

    monkeypatch.setattr(convert, "write_export", write_wrong_export)
    with pytest.raises(VerificationError, match=r"model\.norm\.weight"):
        convert.convert(first(run), tmp_path / "out", torch.float32, "5GB", FACTS)
    assert list(tmp_path.iterdir()) == []


def _failure(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *argv: object) -> str:
    """Return what the program prints before it ends with exit code 1."""
    monkeypatch.setattr("sys.argv", ["convert_to_hf.py", *map(str, argv)])
    with pytest.raises(SystemExit) as end:
        convert_to_hf.main()
    assert end.value.code == FAILURE
    printed = capfd.readouterr()
    return printed.out + printed.err


def _refusal(monkeypatch: pytest.MonkeyPatch, *argv: object) -> str:
    """Return the fault that the program finds in its arguments."""
    monkeypatch.setattr("sys.argv", ["convert_to_hf.py", *map(str, argv)])
    with pytest.raises(InputError) as refused:
        convert_to_hf.main()
    return str(refused.value)


def test_weights_too_large_for_the_type_fail_and_leave_nothing(
    tmp_path: Path,
    tiny_model_dir: Path,
    weights: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    large = {**weights, "model.embed_tokens.weight": weights["model.embed_tokens.weight"] * 1e7}
    checkpoint = write_full(tmp_path / "step-00000001", tiny_model_dir, large, step=1)
    argv = ["--checkpoint", checkpoint, "--output_dir", tmp_path / "out", "--dtype", "float16"]
    assert "logits in float16 are not finite" in _failure(monkeypatch, capfd, *argv)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001"]


def test_an_existing_folder_is_never_written_into(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert "not empty" in _refusal(monkeypatch, "--checkpoint", run, "--output_dir", tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes.txt"]

    # nor a folder in a checkpoint
    checkpoint = run / "checkpoints" / "step-00000001"
    files = sorted(checkpoint.rglob("*"))
    refusal = _refusal(monkeypatch, "--checkpoint", checkpoint, "--output_dir", checkpoint / "hf")
    assert f"{checkpoint} is complete and is never changed" in refusal
    assert sorted(checkpoint.rglob("*")) == files


def test_every_path_without_a_checkpoint_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tmp_path / "nothing-here"
    second = tmp_path / "empty"
    second.mkdir()
    refusal = _refusal(monkeypatch, "--checkpoint", first, second, "--output_dir", tmp_path / "out")
    assert str(first) in refusal
    assert str(second) in refusal
    assert not (tmp_path / "out").exists()


def test_checkpoints_with_the_same_name_are_refused(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_copy = shutil.copytree(run, tmp_path / "run")
    words = ("--checkpoint", run, run_copy, "--output_dir", tmp_path / "out")
    assert "same name" in _refusal(monkeypatch, *words)


def test_all_checkpoints_are_exported_although_one_fails(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fill_the_disk(source: ExportSource, folder: Path, *settings: Any) -> None:
        if source == first(run):
            raise OSError(errno.ENOSPC, "No space left on device")
        write_export(source, folder, *settings)

    target = tmp_path / "out"
    argv = ["--checkpoint", run / "all", "--output_dir", target]
    with monkeypatch.context() as patch:
        patch.setattr(convert, "write_export", fill_the_disk)
        printed = _failure(patch, capfd, *argv)
    assert "error: No space left on device" in printed
    assert "1 of 2 checkpoints exported" in printed
    assert "error: not exported: step-00000001; run the same command again to retry" in printed
    assert [entry.name for entry in target.iterdir()] == ["step-00000002"]

    # the same command keeps the export that succeeded
    kept_file = target / "step-00000002" / "model.safetensors"
    time_written = kept_file.stat().st_mtime_ns
    monkeypatch.setattr("sys.argv", ["convert_to_hf.py", *map(str, argv)])
    convert_to_hf.main()
    assert f"note: {target / 'step-00000002'} is already a verified export of this checkpoint" in capfd.readouterr().err
    assert sorted(entry.name for entry in target.iterdir()) == ["step-00000001", "step-00000002"]
    assert kept_file.stat().st_mtime_ns == time_written
    assert f"{target / 'step-00000001'} already exists" in _refusal(monkeypatch, *argv, "--dtype", "float16")


def test_a_damaged_checkpoint_of_a_run_is_counted_as_not_exported(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    (copy / "checkpoints" / "step-00000002" / "trainer.json").write_text("{")
    printed = _failure(monkeypatch, capfd, "--checkpoint", copy / "all", "--output_dir", tmp_path / "out")
    assert "1 of 2 checkpoints exported" in printed
    assert "error: not exported because they are damaged: step-00000002; remove them, or restore their files" in printed
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == ["step-00000001"]


def test_run_folder_means_its_newest_checkpoint(tmp_path: Path, run: Path) -> None:
    plan = plan_targets([run], tmp_path / "out", torch.bfloat16)
    assert plan == ({tmp_path / "out": ExportSource(run / "checkpoints" / "step-00000002")}, [])
