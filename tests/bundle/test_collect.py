"""python -m fabric_train.bundle refuses what cannot become a run elsewhere, before it fetches or writes anything."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from fabric_train.arguments import TrainArguments, parse
from fabric_train.bundle import collect
from fabric_train.bundle.__main__ import main
from fabric_train.bundle.recipe import Target, pip_download, reason_in, requirements_with
from fabric_train.cli.errors import InputError
from fabric_train.data.token_dataset import open_dataset
from fabric_train.preflight.prepare import prepare
from fabric_train.tokenization import merge
from tests.support.forked_commands import run_in_fork
from tests.support.forked_runs import ForkedRuns
from tests.support.short_runs import argv

MIXTURE = """
model_name: model
train_data_dir: [other/tokens, second]
shares: [other/tokens=1, second=0.5]
phases: phases.yaml
sample_prompts: prompts.txt
devices: auto
precision: bf16-true
max_step: 20
micro_batch_size: 1
total_batch_size: 4
"""


@pytest.fixture
def place(tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model, token datasets and recipes."""
    shutil.copytree(tiny_model_dir, tmp_path / "model")
    shutil.copytree(tiny_model_dir, tmp_path / "pickles")
    (tmp_path / "pickles" / "model.safetensors").rename(tmp_path / "pickles" / "pytorch_model.bin")
    shutil.copytree(tiny_tokens_dir, tmp_path / "tokens")
    shutil.copytree(tiny_tokens_dir, tmp_path / "other" / "tokens")
    (tmp_path / "recipe.yaml").write_text("learning_rate: 1e-4\n")
    (tmp_path / "stream.yaml").write_text("streaming_dataset: [a.txt]\nmax_step: 3\n")
    shutil.copytree(tiny_tokens_dir, tmp_path / "second")
    (tmp_path / "mixture.yaml").write_text(MIXTURE)
    (tmp_path / "phases.yaml").write_text("- {from: 0.5, shares: [{./second: 1}, {other/tokens: 0.1}]}\n")
    (tmp_path / "prompts.txt").write_text("once\n")
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
        ("model", "--recipe mixture.yaml", "mixture.yaml mixes 2 token datasets, and --data gives 1; give as many"),
        ("model", "--recipe stream.yaml", "streaming_dataset ['a.txt'] is not in a bundle; tokenize its texts"),
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
    assert "[1/5]" not in capsys.readouterr().err


def test_a_disk_that_is_too_small_is_named_before_the_download(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "free_bytes", lambda _: 600_000_000)  # the model is larger than the rest
    with pytest.raises(InputError, match=r"the bundle takes about 600\.8 MB, and .* has 600\.0 MB left"):
        main(["--model", "model", "--data", "tokens", "--cuda", "none", "--output", "bundle"])
    assert not os.path.exists("bundle")


def without_wheels(*given: object) -> None:
    """Make the folder of the wheels; tests/launchers/test_bundle.py downloads them (400 MB) and installs them."""
    next(folder for folder in given if isinstance(folder, Path) and folder.name == "wheels").mkdir()


def check_in_this_process(_target: object, folder: Path) -> None:
    """Check the run as the bundle's process does, without its start; a test below has a process."""
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        prepare(parse(TrainArguments, ["--config", collect.CONFIGURATION, "--accelerator", "cpu"]))


def test_what_a_recipe_names_is_in_the_bundle(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "download_wheels", without_wheels)
    monkeypatch.setattr(collect, "_check_inside", check_in_this_process)
    main(["--recipe", "mixture.yaml", "--cuda", "none", "--output", "bundle"])
    given = yaml.safe_load((place / "bundle" / "train.yaml").read_text())
    assert given == yaml.safe_load(MIXTURE) | {
        "train_data_dir": ["data/tokens", "data/second"],
        "shares": [{"data/tokens": 1.0}, {"data/second": 0.5}],
        "phases": "recipe/phases.yaml",
        "sample_prompts": "recipe/sample_prompts.txt",
        "output_dir": "runs/1",
    }
    phases = yaml.safe_load((place / "bundle" / "recipe" / "phases.yaml").read_text())
    assert phases == [{"from": 0.5, "shares": [{"data/second": 1.0}, {"data/tokens": 0.1}]}]
    assert (place / "bundle" / "recipe" / "sample_prompts.txt").read_text() == "once\n"
    for name in ("tokens", "second"):
        assert (place / "bundle" / "data" / name / "dataset_dict.json").is_file()
    listed = (place / "bundle" / "SHA256SUMS").read_text()
    assert "  recipe/phases.yaml\n" in listed
    assert ".pyc" not in listed


def test_parts_lie_inside_of_the_bundled_dataset(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "download_wheels", without_wheels)
    monkeypatch.setattr(collect, "_check_inside", check_in_this_process)
    merge.main(["tokens", "second", "--parts", "true", "--output_dir", "joined"])
    rows = [ids.tolist() for ids, *_ in open_dataset("joined").train.read(range(50))]
    recipe = MIXTURE.replace("[other/tokens, second]", "joined").replace("phases: phases.yaml\n", "")
    (place / "parts.yaml").write_text("".join(line for line in recipe.splitlines(True) if "shares" not in line))
    main(["--recipe", "parts.yaml", "--cuda", "none", "--output", "bundle"])
    for name in ("tokens", "second", "joined"):
        shutil.rmtree(place / name)
    bundled = open_dataset(str(place / "bundle" / "data" / "joined"))
    assert [ids.tolist() for ids, *_ in bundled.train.read(range(50))] == rows
    assert "  data/joined/parts/00002/train/index/rows.npy\n" in (place / "bundle" / "SHA256SUMS").read_text()


def test_a_run_with_an_adapter_is_bundled_with_its_base(
    place: Path, forked_runs: ForkedRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"lora_rank": 2, "lora_targets": "q_proj", "base_weights": "nf4", "max_step": 1, "parallelism": "single"}
    forked_runs.start(argv(place / "model", place / "tokens", place / "run", **given), 1).finish()
    extras: list[str] = []

    def fetch(*words: Any) -> None:
        extras.extend(words[-1])
        without_wheels(*words)

    monkeypatch.setattr(collect, "download_wheels", fetch)
    monkeypatch.setattr(collect, "_check_inside", check_in_this_process)
    words = ["--data", "tokens", "--recipe", "run/config.yaml", "--cuda", "none", "--output"]
    main(["--model", "run", *words, "bundle"])
    written = yaml.safe_load((place / "bundle" / "train.yaml").read_text())
    expected = {
        "model_name": "model",
        "init_adapter": "adapter",
        "base_weights": "nf4",
        "train_data_dir": "data/tokens",
    }
    assert {name: written[name] for name in expected} == expected
    assert extras == ["peft", "bitsandbytes"]
    assert "\nsource=source[peft,bitsandbytes]\n" in (place / "bundle" / "install.sh").read_text()
    for file, original in {
        "model/model.safetensors": place / "model",
        "adapter/adapter_model.safetensors": place / "run" / "checkpoints" / "step-00000001",
    }.items():
        assert (place / "bundle" / file).read_bytes() == (original / Path(file).name).read_bytes()
    assert (
        json.loads((place / "bundle" / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
        == "model"
    )
    line = ["--config", "train.yaml", "--output_dir", place / "again", "--accelerator", "cpu"]
    forked_runs.start(line, 1, before=f"import os; os.chdir({str(place / 'bundle')!r})").finish()
    assert (place / "again" / "checkpoints" / "step-00000001" / "adapter_model.safetensors").is_file()
    save_file({"weight": torch.zeros(1)}, place / "model" / "model.safetensors")
    with pytest.raises(InputError, match=r"step-00000001: its base .* has other weights; put back the weights"):
        main(["--model", "run", *words, "other"])


def test_tasks_lie_in_the_bundle_as_here(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "evaluation").mkdir()
    tasks, quiz, data = (place / name for name in ("evaluation/tasks.yaml", "evaluation/quiz.yaml", "quiz.jsonl"))
    tasks.write_text("languages: {es: [xnli_es, quiz.yaml]}\n")
    quiz.write_text("task: quiz\ndataset_path: json\ndataset_kwargs: {data_files: {test: quiz.jsonl}}\n")
    data.write_text("{}\n")  # data is named from the current folder
    files = list(collect.files_of_tasks("evaluation/tasks.yaml"))
    assert files == [(path, str(path.relative_to(place))) for path in (tasks, quiz, data)]
    monkeypatch.chdir(place / "evaluation")
    quiz.write_text(quiz.read_text().replace("quiz.jsonl", "../quiz.jsonl"))
    with pytest.raises(InputError, match=r"--tasks tasks.yaml: .*/quiz.jsonl is not in this folder; "):
        list(collect.files_of_tasks("tasks.yaml"))


def test_extras_add_their_requirements() -> None:
    own = requirements_with([])
    assert [one for one in requirements_with(["eval"]) if one not in own] == ["lm-eval[hf]==0.4.13"]
    assert any(one.startswith("lightning") for one in own)


@pytest.mark.parametrize(
    "file, content, fault",
    [
        ("phases.yaml", "- {from: 0.5, shares: [{elsewhere: 1}]}\n", "elsewhere is neither a folder of"),
        ("phases.yaml", "- {from: 0.5, train_data_dir: long}\n", "phase 1 has a train_data_dir of its own"),
        ("prompts.txt", "once " * 2000, "a run of the bundle would not begin: recipe/sample_prompts.txt"),
    ],
)
def test_a_bundle_whose_run_would_not_begin_is_not_written(
    place: Path, file: str, content: str, fault: str, monkeypatch: pytest.MonkeyPatch, forked_runs: ForkedRuns
) -> None:
    def run(command: list[str], **given: Any) -> "subprocess.CompletedProcess[str]":
        # the bundle's own source is what Python finds there; the fork has this one's, which is the same
        which = [sys.executable, "-c", "import fabric_train; print(fabric_train.__file__)"]
        found = subprocess.run(which, **given)
        assert Path(given["cwd"], found.stdout.strip()) == Path(given["cwd"], "source", "fabric_train", "__init__.py")
        return run_in_fork(forked_runs)(command, **given)

    monkeypatch.setattr(collect, "subprocess", SimpleNamespace(run=run))
    (place / file).write_text(content)
    with pytest.raises(InputError) as refused:
        main(["--recipe", "mixture.yaml", "--output", "bundle"])  # for GPUs that are not here
    assert fault in str(refused.value)
    assert not (place / "bundle").exists()


def test_the_reason_of_pip_is_named_and_not_what_it_ignored(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"cannot be downloaded: Could not find a version that satisfies .*no-such-name"
    ):
        pip_download(Target(None, "none"), tmp_path, ["--no-index", "no-such-name"], print)
    lines = ["ERROR: Ignored the following versions: 3.7", "ERROR: Could not find one", "ERROR: No matching one"]
    assert reason_in(lines) == "Could not find one"
