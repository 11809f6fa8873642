"""Test the table and the picture of the benchmark scale, and the files that stand for large weights."""

from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks.report import Report
from benchmarks.scale import measure as scale
from benchmarks.scale import weights
from benchmarks.scale.series import Point, Series
from fabric_train.model.hf_model import read_shape
from fabric_train.model.load_weights import open_in_parts


def test_scale_shows_each_quantity_and_what_is_above_its_limit(tmp_path: Path) -> None:
    grown = Series(
        "watch", "packets of all ranks", "files", "ranks", (Point(16, 24), Point(1024, 1032)), "ranks", "watch", 100
    )
    flat = Series(
        "watch", "private memory of rank 0", "MB", "ranks", (Point(16, 3), Point(1024, 0)), "ranks", "watch", 5
    )
    assert scale.above_limits([grown, flat]) == ["watch: packets of all ranks"]
    shown = scale.table(
        Report("scale", {}, {}, {"watch": [grown, flat]}, scale.ScaleSummary(["watch: packets of all ranks"]))
    )
    console = Console(width=200)
    with console.capture() as captured:
        console.print(shown)
    expected = ("1,032 files at 1,024", "3 MB at 16", "above its limit: watch: packets of all ranks")
    assert all(text in captured.get() for text in expected)
    scale.draw([grown, flat], tmp_path / "scale.png")
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")


def test_sparse_weights_have_the_shapes_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(weights.SHAPES, 8, weights.Shape(64, 128, 2, 8))
    monkeypatch.setattr(weights, "SHARD_SIZE", "20MB")
    weights.write_sparse(tmp_path / "model", 8)
    files = list((tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 1
    assert sum(file.stat().st_blocks * 512 for file in files) < sum(file.stat().st_size for file in files) / 10
    opened = open_in_parts(read_shape(str(tmp_path / "model")), torch.bfloat16)
    assert opened is not None
    assert not opened.read_rows("model.embed_tokens.weight", 7, 9).any()
