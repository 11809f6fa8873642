"""An adapter's checkpoint has no copy of its base: a base that is gone, or has changed anywhere, is found first."""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fabric_train.arguments import TrainArguments, parse
from fabric_train.checkpoint import base_weights
from fabric_train.checkpoint.adapter_base import find_base
from fabric_train.checkpoint.base_weights import fingerprint, hashed, open_base_weights, same_weights
from fabric_train.checkpoint.trainer_json import read_trainer_json
from fabric_train.cli.errors import InputError
from fabric_train.evaluation.models import find_model
from fabric_train.inference.load_model import load_for_inference
from fabric_train.model.origin import AdapterBase
from fabric_train.preflight.prepare import prepare
from fabric_train.programs import convert_to_hf
from tests.support.exports import verify_in_this_process
from tests.support.forked_runs import ForkedRuns
from tests.support.short_runs import argv

pytestmark = pytest.mark.slow

GIVEN = {"lora_rank": 2, "lora_targets": "q_proj", "max_step": 1, "parallelism": "single"}
LAYER = "model.layers.1.mlp.down_proj.weight"


def train(forked_runs: ForkedRuns, base: Path, tokens: Path, run: Path) -> Path:
    forked_runs.start(argv(base, tokens, run, **GIVEN), 1).finish()
    return run / "checkpoints" / "step-00000001"


def change_a_middle_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    position = len(content) // 2
    content[position] ^= 1
    with file.open("r+b") as opened:
        opened.write(content)


def convert(checkpoint: Path, target: Path) -> None:
    words = ["convert_to_hf.py", "--checkpoint", str(checkpoint), "--output_dir", str(target)]
    with verify_in_this_process(), patch.object(sys, "argv", words):
        convert_to_hf.main()


@pytest.fixture
def base(tmp_path: Path, tiny_model_dir: Path) -> Path:
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "base"))


def uses(checkpoint: Path, base: Path, tokens: Path) -> list[Callable[[], Any]]:
    """Return everything that reads the base of a checkpoint's adapter."""
    run = checkpoint.parents[1]
    resumed = argv(base, tokens, run, **GIVEN | {"max_step": 2, "resume": "true"})
    return [
        lambda: prepare(parse(TrainArguments, resumed)),
        lambda: convert(checkpoint, run.with_name("exported")),
        lambda: load_for_inference(str(checkpoint)),
        lambda: find_model(str(checkpoint)),
    ]


def test_changed_or_missing_base_is_one_line_before_anything_is_written(
    tmp_path: Path, base: Path, tiny_tokens_dir: Path, forked_runs: ForkedRuns
) -> None:
    checkpoint = train(forked_runs, base, tiny_tokens_dir, tmp_path / "run")
    weights = base / "model.safetensors"
    before = weights.stat()
    change_a_middle_byte(weights)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))  # as cp -p and rsync do
    for use in uses(checkpoint, base, tiny_tokens_dir):
        with pytest.raises(InputError) as refused:
            use()
        assert [fault.count(f"the weights of its base {base} have changed") for fault in refused.value.faults] == [1]
    change_a_middle_byte(weights)  # it is as it was
    uses(checkpoint, base, tiny_tokens_dir)[0]()
    moved = base.rename(tmp_path / "moved")
    for use in uses(checkpoint, base, tiny_tokens_dir):
        with pytest.raises(InputError) as refused:
            use()
        assert [fault.count(f"its base {base} no longer exists") for fault in refused.value.faults] == [1]
    assert prepare(
        parse(TrainArguments, [*argv(moved, tiny_tokens_dir, tmp_path / "run", **GIVEN), "--resume", "true"])
    )
    assert load_for_inference(str(checkpoint), base_model=str(moved))
    assert not (tmp_path / "exported").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["moved", "run"]


def test_adapter_of_a_pickled_base_survives_that_the_base_is_saved_again(
    tmp_path: Path, base: Path, tiny_tokens_dir: Path, forked_runs: ForkedRuns
) -> None:
    tensors = load_file(base / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()  # as torch.save(model.state_dict()) has it
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    (base / "model.safetensors").unlink()
    torch.save(tensors, base / "pytorch_model.bin")
    checkpoint = train(forked_runs, base, tiny_tokens_dir, tmp_path / "run")
    convert(checkpoint, tmp_path / "export")
    assert (tmp_path / "export" / "adapter_model.safetensors").is_file()
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(base)
    (base / "pytorch_model.bin").unlink()
    for use in uses(checkpoint, base, tiny_tokens_dir):
        use()


def test_a_checkpoint_without_a_hash_of_its_base_is_read_with_a_note(
    tmp_path: Path, base: Path, tiny_tokens_dir: Path, forked_runs: ForkedRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = train(forked_runs, base, tiny_tokens_dir, tmp_path / "run")
    content = json.loads((checkpoint / "trainer.json").read_text())
    rows = base_weights._fingerprint_of_rows(open_base_weights(str(base)))
    for saved, is_noted in ((None, True), (rows, False)):  # what earlier versions saved of pickles, and of others
        content["adapter_base"] = {"place": str(base), "fingerprint": saved}
        (checkpoint / "trainer.json").write_text(json.dumps(content))
        assert hashed(find_base(None, checkpoint)).fingerprint == fingerprint(open_base_weights(str(base)))
        printed = capsys.readouterr()  # a note is a line of the log if a run in this process has started one
        assert ("saved it without a hash of its base" in printed.out + printed.err) == is_noted


def test_an_adapter_that_begins_on_another_base_is_noted(
    tmp_path: Path, base: Path, tiny_tokens_dir: Path, forked_runs: ForkedRuns
) -> None:
    checkpoint = train(forked_runs, base, tiny_tokens_dir, tmp_path / "run")
    other = Path(shutil.copytree(base, tmp_path / "other"))
    of_peft = tmp_path / "peft"
    of_peft.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(checkpoint / name, of_peft)

    def notes(adapter: Path, model: Path) -> list[str]:
        given = {"max_step": 1, "parallelism": "single", "init_adapter": adapter}
        run = prepare(parse(TrainArguments, argv(model, tiny_tokens_dir, tmp_path / "next", **given)))
        return [line for line in run.notes if line.startswith("--init_adapter")]

    assert notes(checkpoint, base) == notes(of_peft, base) == []
    assert notes(checkpoint, other) == []  # a copy
    assert f"it names {base} as its base, but this run uses it with {other}" in notes(of_peft, other)[0]
    change_a_middle_byte(other / "model.safetensors")
    assert f"it was trained on the weights of {base}, not on those of {other}" in notes(checkpoint, other)[0]
    change_a_middle_byte(base / "model.safetensors")
    assert f"the weights of {base} have changed since the adapter was trained on them" in notes(checkpoint, base)[0]


def test_a_fingerprint_is_of_all_bytes_and_not_of_the_files(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_base = fingerprint(open_base_weights(str(base)))
    monkeypatch.setattr(base_weights, "_BLOCK_BYTES", 5000)  # bytes that are read at once
    assert fingerprint(open_base_weights(str(base))) == of_base
    model = AutoModelForCausalLM.from_pretrained(base)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len([*(tmp_path / "sharded").glob("*.safetensors")]) > 1
    assert fingerprint(open_base_weights(str(tmp_path / "sharded"))) == of_base
    tensors = load_file(base / "model.safetensors")
    for row, column in ((0, 0), (31, 64), (63, 127)):
        changed = tensors[LAYER].clone()
        changed[row, column] += 1
        save_file({**tensors, LAYER: changed}, base / "model.safetensors")
        assert fingerprint(open_base_weights(str(base))) != of_base
    save_file({**tensors, LAYER: tensors[LAYER].half()}, base / "model.safetensors")
    assert fingerprint(open_base_weights(str(base))) != of_base


def test_a_fingerprint_tells_names_shapes_and_heads_apart(tmp_path: Path) -> None:
    embedding = torch.arange(12.0).view(3, 4)
    tensors = {"lm_head.weight": embedding + 1, "model.embed_tokens.weight": embedding}

    def fingerprint_of(changed: dict[str, torch.Tensor]) -> str:
        save_file(changed, tmp_path / "model.safetensors")
        return fingerprint(open_base_weights(str(tmp_path)))

    found = [
        fingerprint_of(tensors),
        fingerprint_of(tensors | {"lm_head.weight": embedding + 2}),
        fingerprint_of(tensors | {"lm_head.weight": (embedding + 1).view(4, 3)}),
        fingerprint_of({"lm_head.weight": embedding + 1, "model.other_tokens.weight": embedding}),
        fingerprint_of({"model.embed_tokens.weight": embedding}),
    ]
    assert len(set(found)) == len(found)
    assert fingerprint_of(tensors | {"lm_head.weight": embedding.clone()}) == found[-1]  # a tied head


def test_a_file_that_was_changed_just_now_is_hashed_again(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program can set the time at which a file was modified, and not that at which it was changed."""
    file = base / "model.safetensors"
    status = file.stat()
    os.utime(file, (0, 0))
    assert hashed(AdapterBase(str(base))).files == ()
    os.utime(file, (1, 1))  # other times, so that it is hashed again
    monkeypatch.setattr(base_weights, "_SETTLED_SECONDS", 0.0)
    saved = hashed(AdapterBase(str(base)))
    assert len(saved.files) == 1
    time.sleep(0.01)  # a tick of the clock of files
    change_a_middle_byte(file)
    os.utime(file, (1, 1))
    assert file.stat().st_size == status.st_size
    assert same_weights(AdapterBase(str(base)), saved) is None


def test_unchanged_files_are_not_read_again(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_weights, "_SETTLED_SECONDS", 0.0)
    saved = hashed(AdapterBase(str(base)))
    assert [file.name for file in saved.files] == ["model.safetensors"]
    monkeypatch.setattr(base_weights, "start_hashing", lambda base: pytest.fail("it is read again"))
    assert same_weights(AdapterBase(str(base)), saved) == saved
    monkeypatch.undo()
    time.sleep(0.01)  # a tick of the clock of files
    change_a_middle_byte(base / "model.safetensors")
    assert same_weights(AdapterBase(str(base)), saved) is None
    assert same_weights(AdapterBase(str(base)), replace(saved, files=())) is None


def test_the_hash_of_a_new_runs_base_is_in_its_checkpoint(
    tmp_path: Path, base: Path, tiny_tokens_dir: Path, forked_runs: ForkedRuns
) -> None:
    saved = read_trainer_json(train(forked_runs, base, tiny_tokens_dir, tmp_path / "run")).adapter_base
    assert saved is not None
    assert saved.fingerprint == fingerprint(open_base_weights(str(base)))
