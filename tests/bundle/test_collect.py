"""python -m fabric_train.bundle refuses what cannot become a run elsewhere, before it fetches or writes anything."""

import os
import shutil
from pathlib import Path

import pytest

from fabric_train.bundle import collect
from fabric_train.bundle.__main__ import main
from fabric_train.cli.errors import InputError


@pytest.fixture
def place(tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model, token datasets and recipes."""
    shutil.copytree(tiny_model_dir, tmp_path / "model")
    shutil.copytree(tiny_model_dir, tmp_path / "pickles")
    (tmp_path / "pickles" / "model.safetensors").rename(tmp_path / "pickles" / "pytorch_model.bin")
    shutil.copytree(tiny_tokens_dir, tmp_path / "tokens")
    shutil.copytree(tiny_tokens_dir, tmp_path / "other" / "tokens")
    (tmp_path / "recipe.yaml").write_text("learning_rate: 1e-4\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "model, words, fault",
    [
        ("nowhere/at/all", "", "--model nowhere/at/all: no such folder"),
        ("pickles", "", "--model pickles: no model.safetensors in it"),
        ("model", "--data nowhere", "--data nowhere: no such folder; make one with tokenize_dataset.py"),
        ("model", "--data model", "--data model: the folder has no dataset_dict.json"),
        ("model", "--data tokens other/tokens", "--data: two of the folders have the same name"),
        ("model", "--output model", "model already exists and is not empty"),
        ("model", "--output tokens/bundle", "cannot write to tokens/bundle: tokens is complete"),
        ("model", "--recipe nowhere.yaml", "--recipe nowhere.yaml: No such file"),
        ("model", "--recipe recipe.yaml", "recipe.yaml: learning_rate: no such argument"),
        ("model", "--cuda twelve", "--cuda: expected a version such as 13.0, or none; got 'twelve'"),
        ("model", "--python 2.7", "--python: expected one of 3.10, 3.11, 3.12, 3.13, 3.14"),
    ],
)
def test_wrong_input_is_one_line_and_nothing_is_written(
    place: Path, capsys: pytest.CaptureFixture[str], model: str, words: str, fault: str
) -> None:
    before = sorted(place.rglob("*"))
    given = {"--data": ["tokens"], "--output": ["bundle"]}
    for part in f" {words}".split(" --")[1:]:
        name, *values = part.split()
        given[f"--{name}"] = values
    with pytest.raises(InputError) as refused:
        main(["--model", model, *(word for name, values in given.items() for word in (name, *values))])
    (line,) = refused.value.faults
    assert fault in line
    assert sorted(place.rglob("*")) == before
    assert "[1/4]" not in capsys.readouterr().err


def test_a_disk_that_is_too_small_is_named_before_the_download(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "free_bytes", lambda _: 600_000_000)  # the model is larger than the rest
    with pytest.raises(InputError, match=r"the bundle takes about 600\.8 MB, and .* has 600\.0 MB left"):
        main(["--model", "model", "--data", "tokens", "--cuda", "none", "--output", "bundle"])
    assert not os.path.exists("bundle")
