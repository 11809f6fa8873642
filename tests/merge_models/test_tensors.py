"""The formulas of the merge methods give the numbers that one finds by hand."""

import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fabric_train.cli.errors import InputError
from fabric_train.merge_models.models import AlignedTensors, ModelTensors, _align, note_on_rounding, open_models
from fabric_train.merge_models.tensors import add_agreeing, add_differences, draw_kept, find_largest, slerp_factors


def test_slerp_keeps_the_length_of_vectors_and_goes_the_same_angle_each_time() -> None:
    first = torch.tensor([2.0, 0.0])
    second = torch.tensor([0.0, 2.0])
    for share in (0.0, 0.25, 0.5, 1.0):
        factors = slerp_factors(2.0, 2.0, 0.0, share)
        merged = factors[0] * first + factors[1] * second
        assert merged.norm().item() == pytest.approx(2.0)
        assert math.atan2(merged[1], merged[0]) == pytest.approx(share * math.pi / 2)


@pytest.mark.parametrize("norms, dot", [((1.0, 2.0), 2.0), ((1.0, 1.0), -1.0), ((0.0, 3.0), 0.0), ((1.0, 1.0), 0.9996)])
def test_slerp_of_parallel_vectors_is_straight(norms: tuple[float, float], dot: float) -> None:
    factors = slerp_factors(*norms, dot, 0.25)
    if norms[0]:
        assert factors == pytest.approx((0.75, 0.25))
    assert sum(factors) == pytest.approx(1.0 if norms[0] else sum(slerp_factors(1, 1, 0, 0.25)))
    assert all(map(math.isfinite, factors))


def test_any_block_of_aligned_rows_is_that_of_the_whole_tensor(tiny_model_dir: Path) -> None:
    own = ModelTensors(tiny_model_dir)
    first = ModelTensors(tiny_model_dir)
    (name,) = own.rows_by_token
    num_rows, num_columns = own.shape(name)
    rows = torch.arange(num_rows).flip(0)
    rows[::3] = -1  # tokens that the model does not have
    aligned = AlignedTensors(own, first, rows)
    whole = aligned.read_block(name, (0, 0), (num_rows, num_columns))
    assert torch.equal(whole[1], own.read(name)[num_rows - 2])
    assert torch.equal(whole[3], first.read(name)[3])
    for offsets, shape in (((5, 0), (9, num_columns)), ((0, 7), (num_rows, 4)), ((11, 3), (20, 6))):
        block = tuple(slice(begin, begin + size) for begin, size in zip(offsets, shape, strict=True))
        assert torch.equal(aligned.read_block(name, offsets, shape), whole[block])


def test_a_padded_embedding_of_the_same_tokens_gets_the_rows_of_the_first_model(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_model_dir, tmp_path / "padded")
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    num_rows = model.config.vocab_size
    model.resize_token_embeddings(num_rows + 8)
    model.save_pretrained(tmp_path / "padded")
    first, second = open_models([tiny_model_dir, tmp_path / "padded"]).tensors
    for name in first:
        assert second.shape(name) == first.shape(name)
        assert torch.equal(second.read(name), first.read(name)), name


def test_a_share_of_tokens_that_fit_is_of_the_first_models() -> None:
    """The other model may have many tokens more."""
    first, other = (
        SimpleNamespace(folder=name, read=dict.get, shape_of_model=SimpleNamespace(vocab_size=num_rows))
        for name, num_rows in (("first", 4), ("other", 20))
    )
    models: tuple[Any, Any] = (other, first)
    own = {f"token {number}": 19 - number for number in range(20)}
    aligned, matched = _align(*models, own, {"token 0": 0, "token 2": 1, "mine": 2, "alone": 3})
    assert aligned._row_indices.tolist() == [19, 17, -1, -1]
    assert (matched.common, matched.missing, matched.left_out) == (2, 2, 18)
    with pytest.raises(InputError, match="only 1 of the 4 tokens are in both vocabularies"):
        _align(*models, own, {"token 0": 0, "mine": 1, "alone": 2, "ours": 3})


def test_a_model_of_two_types_is_rounded_if_its_wider_one_is(tiny_model_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model_dir, tmp_path / "mixed")
    file = tmp_path / "mixed" / "model.safetensors"
    tensors = load_file(file)
    norm = next(name for name in tensors if name.endswith("norm.weight"))
    save_file(
        {name: tensor if name == norm else tensor.bfloat16() for name, tensor in tensors.items()},
        file,
        {"format": "pt"},
    )
    note = note_on_rounding([tmp_path / "mixed"], torch.bfloat16)
    assert note is not None
    assert f"those of {tmp_path / 'mixed'} are float32" in note
    assert note_on_rounding([tmp_path / "mixed"], torch.float32) is None


def test_task_arithmetic_adds_weighted_differences() -> None:
    base = torch.tensor([1.0, 1.0])
    differences = [torch.tensor([1.0, 2.0]), torch.tensor([4.0, 0.0])]
    assert add_differences(base, differences, [1.0, -0.5]).tolist() == [0.0, 3.0]
    assert base.tolist() == [1.0, 1.0]


def test_ties_takes_the_mean_of_the_differences_with_the_elected_sign() -> None:
    differences = [torch.tensor([3.0, -1.0, 0.0, 2.0, -2.0]), torch.tensor([1.0, 3.0, 0.0, 0.0, 2.0])]
    # by hand: both agree, (3 + 1) / 2; + is elected, so the second alone; nothing; the first alone; a sum of 0 is +
    agreed = add_agreeing(torch.zeros(5), differences, [1.0, 1.0])
    assert agreed.merged.tolist() == [2.0, 3.0, 0.0, 2.0, 2.0]
    assert (agreed.num_shared, agreed.num_in_conflict) == (3, 2)
    # with the weights 1 and 3: (3 + 3) / 4; 9 / 3; nothing; 2 / 1; 6 / 3
    assert add_agreeing(torch.zeros(5), differences, [1.0, 3.0]).merged.tolist() == [1.5, 3.0, 0.0, 2.0, 2.0]


@pytest.mark.parametrize("density, count", [(0.5, 50), (0.019, 1), (0.001, 1), (1.0, 100)])
def test_a_share_of_the_values_is_kept_exactly_although_many_are_equal(density: float, count: int) -> None:
    values = torch.randint(-4, 5, (10, 10), generator=torch.Generator().manual_seed(0)).bfloat16().float() + 0.5
    kept = find_largest(values, density)
    assert kept.shape == values.shape
    assert int(kept.sum()) == count
    assert values[kept].abs().min() >= (values[~kept].abs().max() if count < 100 else 0)


def test_where_most_values_are_zero_no_zero_is_kept() -> None:
    kept = find_largest(torch.tensor([0.0, -2.0, 0.0, 0.0]), 0.5)
    assert kept.tolist() == [False, True, False, False]


def test_a_draw_depends_on_seed_tensor_and_model_alone() -> None:
    mask = draw_kept((200, 300), 0.3, 7, "weight", 0)
    assert torch.equal(mask, draw_kept((200, 300), 0.3, 7, "weight", 0))
    assert mask.float().mean().item() == pytest.approx(0.3, abs=0.01)  # five standard deviations of a share
    for other in (draw_kept((200, 300), 0.3, 8, "weight", 0), draw_kept((200, 300), 0.3, 7, "bias", 0)):
        assert (mask & other).float().mean().item() == pytest.approx(0.09, abs=0.006)
    assert (mask & draw_kept((200, 300), 0.3, 7, "weight", 1)).float().mean().item() == pytest.approx(0.09, abs=0.006)


def test_what_is_dropped_by_chance_is_made_up_for_on_average() -> None:
    base = torch.zeros(100, 100)
    difference = torch.ones(100, 100)
    density = 0.4
    masks = [draw_kept(base.shape, density, seed, "weight", 0) for seed in range(20)]
    merged = [add_differences(base, [difference * mask], [1 / density]) for mask in masks]
    assert torch.stack(merged).mean().item() == pytest.approx(1.0, abs=0.014)  # five standard deviations of the mean
