"""The recipes in configs/recipes/ fit on the GPUs that they are for, as their comments say."""

import json
import re
import shutil
from pathlib import Path

import datasets
import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from fabric_train.__main__ import main
from fabric_train.programs import tokenize_dataset
from tests.support.programs import ROOT

RECIPES = ROOT / "configs" / "recipes"
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "bos_token_id": 128_000,
    "eos_token_id": 128_001,
}
PUBLISHED = {  # sizes in the config.json files of the models on the hub
    "llama-3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "max_position_embeddings": 8192,
    },
    "llama-3.2-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
    },
}
PUBLISHED["llama-3.1-8b"] = PUBLISHED["llama-3-8b"] | {"max_position_embeddings": 131_072}
EXTENDED = "llama-3.1-8b-el"  # with Krikri's 20,992 tokens
SERVED = ("llama-3-8b", "llama-3.2-1b")
TASKS = ("pretraining", "chat")


def devices_of(recipe: Path) -> list[int]:
    """Return the numbers of GPUs that a recipe's first line says it is for."""
    first = recipe.read_text(encoding="utf-8").splitlines()[0].replace("one GPU", "1 GPU")
    return [int(number) for number in re.findall(r"\b[148]\b", first.split(" on ")[1].split(" GPU")[0])]


OF_TEAMS = ("hitz-galician", "krikri", "sea-lion-v3")
CASES = [(path.stem, number) for path in sorted(RECIPES.glob("*.yaml")) for number in devices_of(path)]
# one on the fewest GPUs, which have the least room, and recipes of teams; others by make test-cuda-rehearsal
FEWEST = {"llama-3.2-1b-pretraining": 1, "llama-3.1-8b-rl": 8, **dict.fromkeys(OF_TEAMS, 8)}
PLANNED = [
    pytest.param(recipe, number, marks=() if FEWEST.get(recipe) == number else pytest.mark.cuda_rehearsal)
    for recipe, number in CASES
]


def write_model(folder: Path, recipe: str) -> Path:
    named = yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text(encoding="utf-8"))["model_name"]
    name = named.rpartition("/")[2].lower().removeprefix("meta-")
    sizes = next(sizes for model, sizes in PUBLISHED.items() if f"{name}-".startswith(f"{model}-"))
    extended = {"vocab_size": 128_256 + 20_992} if name == EXTENDED else {}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_LLAMA | sizes | extended))
    save_file({"a tensor": np.zeros(1)}, folder / "model.safetensors")  # a plan reads no weights
    return folder


def write_rows(folder: Path, recipe: str) -> Path:
    """Write a token dataset of a few rows of the length that the recipe's comments tokenize to; answers have labels."""
    length = int(re.search(r"--max_length (\d+)k", (RECIPES / f"{recipe}.yaml").read_text())[1]) * 1024  # type: ignore[index]
    ids = np.random.default_rng(0).integers(0, 128_000, (256, length), dtype=np.int32)
    columns = {"input_ids": ids, "document_starts": [[0, length // 2]] * len(ids)}
    if "chat" in recipe or "lora" in recipe:
        columns["labels"] = np.where(np.arange(length) % 3, ids, -100)
    rows = datasets.Dataset.from_dict(columns)
    datasets.DatasetDict({"train": rows, "validation": rows.select(range(8))}).save_to_disk(folder)
    return folder


def write_prompts(file: Path, model: Path, tokenizer: Path) -> Path:
    """Write prompts of all lengths, of which the longest ones do not fit, and give the model a tokenizer."""
    shutil.copytree(tokenizer, model, dirs_exist_ok=True, ignore=shutil.ignore_patterns("config.json", "*.safetensors"))
    rows = [json.dumps({"prompt": "1 " * num_words, "answer": "1"}) for num_words in range(1, 2048, 4)]
    file.write_text("\n".join(rows))
    return file


def tokenize_sources(folder: Path, names: list[str], request: pytest.FixtureRequest) -> list[Path]:
    """Tokenize a text for each source of a mixture, in rows of 8,192 tokens; a mixture needs manifests."""
    tokenizer = request.getfixturevalue("tiny_model_dir")
    text = request.getfixturevalue("shakespeare_jsonl")
    for name in names:
        words = f"--dataset {text} --tokenizer_name {tokenizer} --max_length 8k --validation_split 0.1 --num_proc 1"
        tokenize_dataset.main([*words.split(), "--output_dir", str(folder / name)])
    return [folder / name for name in names]


def test_each_model_task_and_number_of_gpus_has_one_recipe() -> None:
    assert FEWEST.items() <= set(CASES)
    served = [
        (model, task, number)
        for recipe, number in CASES
        for model in SERVED
        for task in TASKS
        if recipe.startswith(f"{model}-{task}")
    ]
    assert sorted(served) == sorted((model, task, number) for model in SERVED for task in TASKS for number in (1, 4, 8))


@pytest.mark.parametrize("recipe, num_devices", PLANNED)
def test_a_recipe_fits_on_its_gpus(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
    recipe: str,
    num_devices: int,
) -> None:
    model = write_model(tmp_path / "model", recipe)
    text = (RECIPES / f"{recipe}.yaml").read_text(encoding="utf-8")
    named = yaml.safe_load(text).get("train_data_dir")
    rows = []
    option = "--train_data_dir"
    if named is None:
        option = "--prompts"
        rows = [write_prompts(tmp_path / "prompts.jsonl", model, request.getfixturevalue("tiny_model_dir"))]
    elif isinstance(named, str):
        rows = [write_rows(tmp_path / "tokens", recipe)]
    else:
        rows = tokenize_sources(tmp_path, [name.rpartition("/")[2] for name in named], request)
    data = " ".join(map(str, rows))
    given = f"--model_name {model} {option} {data} --output_dir {tmp_path / 'run'} --devices {num_devices}"
    given += "" if len(rows) == 1 else " --number_epochs 1000000"  # so that the text is enough for max_step
    memory = re.findall(r"of (\d+) GB", text)[0] + "GB"
    plan = f"--accelerator cuda --plan true --device_memory {memory} --interconnect 450GB/s"
    main(["--config", str(RECIPES / f"{recipe}.yaml"), *given.split(), *plan.split()])
    printed = capsys.readouterr().out
    assert "it fits" in printed
    if "lora" in recipe and named is not None:
        assert "--compile auto: true" in printed
    planned = re.search(r"at most +([\d.]+) GB", printed)
    told = re.search(rf"\b{num_devices} GPUs? ([\d.]+) GB", text)
    assert planned is not None
    assert told is not None
    assert float(told[1]) == pytest.approx(float(planned[1]), rel=0.02)
