"""mergekit makes the same of the same models, up to the last bits of fp32."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from fabric_train.merge_models.__main__ import main
from fabric_train.merge_models.tensors import draw_kept
from tests.support.downstream_uses import Checked
from tests.support.environments import downstream_environment, run_inside
from tests.support.exports import verify_in_this_process

pytestmark = [pytest.mark.slow, pytest.mark.downstream]

TOLERANCE = 1e-6
EMBEDDING = "model.embed_tokens.weight"
WEIGHTS = {"a": 1.0, "b": 0.5, "c": -0.3}
KINDS = {
    "linear": "linear",
    "slerp": "slerp",
    "ties": "ties",
    "dare": "dare_linear",
    "task_arithmetic": "task_arithmetic",
}
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def python() -> Path:
    """Python with mergekit, on top of the project's own packages."""
    return downstream_environment("mergekit")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """A base and three models that differ from it, a few of whose values are equal, as in bfloat16."""
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(tiny_model_dir, folder / "base")
    noise = torch.Generator().manual_seed(1)
    for name in WEIGHTS:
        tensors = load_file(shutil.copytree(tiny_model_dir, folder / name) / "model.safetensors")
        for tensor in tensors.values():
            tensor += 0.02 * torch.randn(tensor.shape, generator=noise)
        save_file(tensors, folder / name / "model.safetensors", metadata={"format": "pt"})
    return folder


def by_mergekit(python: Path, output: Path, recipe: dict[str, Any]) -> tuple[Tensors, str]:
    """Return the tensors of mergekit's result and its version."""
    file = output.with_suffix(".yaml")
    file.write_text(yaml.safe_dump({**recipe, "dtype": "float32"}), encoding="utf-8")
    version = run_inside(python, "merge.py", file, output)
    return load_file(output / "model.safetensors"), version


def by_us(output: Path, *words: object) -> Tensors:
    with verify_in_this_process():
        main([*map(str, words), "--output_dir", str(output), "--dtype", "float32"])
    return load_file(output / "model.safetensors")


def assert_equal(ours: Tensors, theirs: Tensors, num_rows: int | None = None) -> None:
    """Check that all tensors are equal, of the embedding only the first rows."""
    assert ours.keys() == theirs.keys() - {"lm_head.weight"}
    for name, tensor in ours.items():
        rows = slice(num_rows if name == EMBEDDING else None)
        torch.testing.assert_close(tensor[rows], theirs[name][rows], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("method", ["linear", "slerp", "ties", "task_arithmetic", "dare"])
def test_each_method_gives_the_weights_of_mergekit(
    tmp_path: Path, models: Path, python: Path, checked: Checked, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    names = list(WEIGHTS)[: 2 if method == "slerp" else 3]
    paths = {name: str(models / name) for name in names}
    weights = {name: abs(weight) if method in ("linear", "slerp") else weight for name, weight in WEIGHTS.items()}
    settings = {name: {"weight": weights[name]} for name in names}
    recipe: dict[str, Any] = {"merge_method": KINDS[method]}
    words: list[object] = ["--method", method, "--models", *paths.values()]
    words += ["--weights", *(weights[name] for name in names)]
    if method == "slerp":
        recipe |= {"base_model": paths["a"], "parameters": {"t": weights["b"] / (weights["a"] + weights["b"])}}
    elif method != "linear":
        recipe["base_model"] = str(models / "base")
        words += ["--base", models / "base"]
    if method in ("ties", "dare"):
        density = 0.3 if method == "ties" else 1.0  # mergekit draws other values than we do
        settings = {name: {**one, "density": density} for name, one in settings.items()}
        words += ["--density", density]
    recipe["models"] = [{"model": paths[name], "parameters": settings[name]} for name in names]
    theirs, version = by_mergekit(python, tmp_path / "theirs", recipe)
    assert_equal(by_us(tmp_path / "ours", *words), theirs)
    checked("mergekit", version, f"`{KINDS[method]}`: all weights agree within {TOLERANCE:g}")


def test_rows_of_an_extended_vocabulary_are_those_of_mergekit(
    tmp_path: Path, models: Path, tiny_model_dir: Path, python: Path, checked: Checked
) -> None:
    extended = shutil.copytree(tiny_model_dir, tmp_path / "extended")
    tokenizer = AutoTokenizer.from_pretrained(extended)
    tokenizer.add_tokens(["llengua", "dona"])
    tokenizer.save_pretrained(extended)
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig.from_pretrained(extended, vocab_size=len(tokenizer)))
    model.save_pretrained(extended)
    base = str(models / "base")
    chat = str(models / "a")
    recipe = {
        "merge_method": "task_arithmetic",
        "base_model": base,
        "tokenizer": {"source": str(extended)},
        "models": [{"model": one, "parameters": {"weight": 1.0}} for one in (str(extended), chat)],
    }
    theirs, version = by_mergekit(python, tmp_path / "theirs", recipe)
    words = ["--method", "task_arithmetic", "--models", extended, chat, "--base", base]
    assert_equal(by_us(tmp_path / "ours", *words), theirs, len(tokenizer))
    what = f"a chat vector added to a model with two extra tokens: all weights agree within {TOLERANCE:g}"
    checked("mergekit", version, what)


def test_dare_with_the_same_draws_gives_the_weights_of_mergekit(
    tmp_path: Path, models: Path, python: Path, checked: Checked
) -> None:
    density = 0.4
    kept = tmp_path / "kept"  # models without the differences that our draws drop
    base = load_file(models / "base" / "model.safetensors")
    for number, name in enumerate(WEIGHTS):
        folder = shutil.copytree(models / name, kept / name)
        tensors = load_file(folder / "model.safetensors")
        masks = {one: draw_kept(tensors[one].shape, density, 0, one, number) for one in tensors}
        only = {one: torch.where(masks[one], tensors[one], base[one]) for one in tensors}
        save_file(only, folder / "model.safetensors", metadata={"format": "pt"})
    # mergekit scales by the norm of the kept values; here the paper's scale is in the weights
    recipe = {
        "merge_method": "task_arithmetic",
        "base_model": str(models / "base"),
        "models": [
            {"model": str(kept / name), "parameters": {"weight": weight / density}} for name, weight in WEIGHTS.items()
        ],
    }
    theirs, version = by_mergekit(python, tmp_path / "theirs", recipe)
    words = ["--method", "dare", "--models", *(models / name for name in WEIGHTS), "--weights", *WEIGHTS.values()]
    assert_equal(by_us(tmp_path / "ours", *words, "--base", models / "base", "--density", density), theirs)
    what = f"DARE's random draws and scaling, reproduced with `task_arithmetic`: all weights agree within {TOLERANCE:g}"
    checked("mergekit", version, what)
