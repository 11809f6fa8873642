"""Claims about reading the tensors of checkpoints."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fabric_train.cli.errors import InputError
from fabric_train.model.hf_model import read_shape
from fabric_train.model.load_weights import build_model
from fabric_train.model.weight_files import CheckpointTensors, open_weights
from tests.support.checkpoint_examples import run_with_two_checkpoints, trained_weights
from tests.support.forked_runs import ForkedRuns


@pytest.fixture(scope="module")
def weights(tiny_model_dir: Path) -> dict[str, torch.Tensor]:
    return trained_weights(tiny_model_dir)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path, forked_runs: ForkedRuns) -> Path:
    return run_with_two_checkpoints(tmp_path_factory.getbasetemp(), tiny_model_dir, forked_runs)


def read_all(checkpoint: Path) -> dict[str, torch.Tensor]:
    tensors = open_weights(checkpoint)
    return {name: tensors.read(name) for name in tensors}


def test_shards_of_two_ranks_and_a_full_file_give_the_same_tensors(weights: dict[str, torch.Tensor], run: Path) -> None:
    full, sharded = sorted((run / "checkpoints").iterdir())
    assert len(list((sharded / "model").glob("*.safetensors"))) == 2
    for checkpoint in (full, sharded):
        loaded = read_all(checkpoint)
        assert loaded.keys() == weights.keys()
        assert all(torch.equal(loaded[name], weights[name]) for name in weights)


def test_a_block_across_two_shards_is_the_block_of_the_full_tensor(weights: dict[str, torch.Tensor], run: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"  # [128, 64], cut at row 64
    block = open_weights(run / "checkpoints" / "step-00000002").read_block(name, (60, 5), (9, 7))
    assert torch.equal(block, weights[name][60:69, 5:12])


def test_a_lost_shard_is_noticed_whichever_it_is(tmp_path: Path, tiny_model_dir: Path, run: Path) -> None:
    sharded = shutil.copytree(run / "checkpoints" / "step-00000002", tmp_path / "step-00000002")
    first, last = sorted((sharded / "model").glob("*.safetensors"))
    last = last.rename(last.with_suffix(".lost"))
    with pytest.raises(InputError, match=r"config\.json"):
        build_model(read_shape(str(tiny_model_dir)), read_all(sharded), torch.float32)
    last.rename(last.with_suffix(".safetensors"))
    first.unlink()
    with pytest.raises(InputError, match="because a file was lost"):
        read_all(sharded)


def test_a_tensor_without_dimensions_is_read(tmp_path: Path) -> None:
    save_file({"step": torch.tensor(7.0)}, tmp_path / "optimizer.safetensors")
    assert CheckpointTensors([tmp_path / "optimizer.safetensors"]).read("step").item() == 7


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(64, 64)}, file)
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(InputError, match=r"model\.safetensors: not a complete safetensors file"):
        open_weights(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="it has no weights"):
        open_weights(tmp_path)
