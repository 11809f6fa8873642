"""Checkpoints of many ranks: what all ranks read does not grow with ranks times tensors, and a rank opens few files."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fabric_train.checkpoint.discovery import lowest_loss, prune, replace_checkpoint, saved_checkpoints
from fabric_train.checkpoint.files import CHECKSUMS, find_damage
from fabric_train.checkpoint.rank_writer import join_rank_hashes
from fabric_train.cli.errors import InputError
from fabric_train.model.shard_index import SHARD_INDEX
from fabric_train.model.weight_files import CheckpointTensors
from tests.support.sparse_checkpoints import entries, link_checkpoint, write_parts

NUM_LAYERS = 15
NUM_RANKS = 32
SHAPES = {"embed.weight": torch.Size([1000, 8]), "head.bias": torch.Size([3])}
for _layer in range(NUM_LAYERS):
    SHAPES[f"layers.{_layer}.q_proj.weight"] = torch.Size([256, 8])
    SHAPES[f"layers.{_layer}.k_proj.weight"] = torch.Size([96, 8])
    SHAPES[f"layers.{_layer}.up_proj.weight"] = torch.Size([640, 8])
    SHAPES[f"layers.{_layer}.norm.weight"] = torch.Size([256])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete checkpoint of 62 weights and their states that 32 ranks saved; the tensors have only zeros."""
    run = tmp_path_factory.mktemp("shards")
    target = run / "checkpoints" / "step-00000006"
    temporary = target.with_name(".unfinished")
    write_parts(temporary, SHAPES, NUM_RANKS, 6)
    join_rank_hashes(temporary, entries(SHAPES))
    replace_checkpoint(temporary, target)
    return target


def test_what_all_ranks_read_is_a_megabyte_per_thousand_tensors(checkpoint: Path) -> None:
    num_tensors = sum(len(part_entries) for part_entries in entries(SHAPES).values())
    read_by_all_ranks = [checkpoint / CHECKSUMS, checkpoint / "model" / SHARD_INDEX]
    read_by_all_ranks.append(checkpoint / "optimizer" / SHARD_INDEX)
    num_bytes = sum(file.stat().st_size for file in read_by_all_ranks)
    assert num_bytes < 250 * num_tensors  # 10 bytes for each of 32 ranks would be 320


def test_a_rank_needs_only_the_files_that_have_its_rows(checkpoint: Path, tmp_path: Path) -> None:
    # given the files of two ranks: a rank has 8 rows of 256, 32 of 1,000, 3 of 96
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    (model_dir / SHARD_INDEX).write_bytes((checkpoint / "model" / SHARD_INDEX).read_bytes())
    for shard in (2, 3):
        name = f"shard-{shard:05d}-model-00001-of-00001.safetensors"
        (model_dir / name).symlink_to(checkpoint / "model" / name)
    # then their rows, from the second rank's first row on, can be read, and no others
    tensors = CheckpointTensors(sorted(model_dir.glob("*.safetensors")))
    assert {name: tensors.shape(name) for name in tensors} == SHAPES
    assert tensors.read_block("layers.7.q_proj.weight", (8, 0), (16, 8)).shape == (16, 8)
    assert tensors.read_block("layers.7.norm.weight", (8,), (16,)).tolist() == [0] * 16
    assert tensors.read_block("layers.9.k_proj.weight", (3, 2), (3, 4)).shape == (3, 4)
    with pytest.raises(InputError, match=r"shard-00004-.*: the file is missing; use another checkpoint"):
        tensors.read_block("layers.7.q_proj.weight", (8, 0), (17, 8))


def test_the_index_says_what_the_headers_say(checkpoint: Path, tmp_path: Path) -> None:
    for part in ("model", "optimizer"):
        # without the index, the tensors are known by the headers of the files
        without_index = tmp_path / part
        without_index.mkdir()
        for file in (checkpoint / part).glob("*.safetensors"):
            (without_index / file.name).symlink_to(file)
        by_headers = CheckpointTensors(sorted(without_index.glob("shard-*")))
        by_index = CheckpointTensors(sorted((checkpoint / part).glob("shard-*")))
        for name in by_headers:
            assert by_index.shape(name) == by_headers.shape(name)
            assert by_index.dtype(name) == by_headers.dtype(name)
        assert by_index._sharded.keys() == by_headers._pieces.keys()
        for name, pieces in by_headers._pieces.items():
            pieces_in_checkpoint = [replace(piece, file=checkpoint / part / piece.file.name) for piece in pieces]
            assert by_index._sharded[name].pieces() == pieces_in_checkpoint


def test_an_index_of_other_files_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    for file in (checkpoint / "model").glob("*.safetensors"):
        (model_dir / file.name).symlink_to(file)
    index = json.loads((checkpoint / "model" / SHARD_INDEX).read_text())
    division = index["tensors"]["layers.7.q_proj.weight"]["division"]
    first_rows = index["divisions"][division]["first_rows"]

    # an index that says that a rank begins one row later
    first_rows[1] += 1
    (model_dir / SHARD_INDEX).write_text(json.dumps(index))
    tensors = CheckpointTensors(sorted(model_dir.glob("shard-*")))
    with pytest.raises(InputError, match=f"layers.7.q_proj.weight does not match {SHARD_INDEX}; use another"):
        tensors.read("layers.7.q_proj.weight")

    # an index that lacks a rank
    del first_rows[0]
    (model_dir / SHARD_INDEX).write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"shards.json: damaged .* use another checkpoint"):
        CheckpointTensors(sorted(model_dir.glob("shard-*")))


def test_pruning_and_the_lowest_loss_check_only_what_they_choose_from(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoints"
    checked: list[str] = []
    for step in range(1, 11):
        link_checkpoint(checkpoint, folder / f"step-{step:08d}", step)

    def note_and_find_damage(checked_checkpoint: Path) -> str | None:
        checked.append(checked_checkpoint.name)
        return find_damage(checked_checkpoint)

    monkeypatch.setattr("fabric_train.checkpoint.files.find_damage", note_and_find_damage)
    (folder / "step-00000009" / "trainer.json").unlink()  # a damaged one is neither counted nor removed
    assert lowest_loss(tmp_path, "all", 9) == 1 / 8
    assert checked == ["step-00000008"]
    undamaged = set[Path]()  # which pruning fills, and does not check again
    prune(folder / "step-00000010", None, undamaged)
    assert checked == ["step-00000008"]
    prune(folder / "step-00000010", 8, undamaged)
    assert sorted(saved_checkpoints(tmp_path)) == [2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert len(checked) == 1 + 7 + 1 + 1  # the kept ones without the newest, the best, the removed one
    link_checkpoint(checkpoint, folder / "step-00000011", 11)
    prune(folder / "step-00000011", 8, undamaged)
    assert sorted(saved_checkpoints(tmp_path)) == [3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert len(checked) == 10 + 1 + 1
