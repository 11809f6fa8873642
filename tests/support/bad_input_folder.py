"""A folder with inputs for every program: a good one of each kind, and damaged, empty and forged ones."""

import gzip
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets

from fabric_train.checkpoint.trainer_json import FORMAT
from tests.support.checkpoint_examples import trained_weights, write_checksums, write_full

MODULES = {
    "train": "fabric_train.__main__",
    "tokenize": "fabric_train.programs.tokenize_dataset",
    "convert": "fabric_train.programs.convert_to_hf",
    "generate": "fabric_train.programs.generate",
    "inspect": "fabric_train.inspection.__main__",
    "merge": "fabric_train.tokenization.merge",
}
TEXTS = [
    f"Document {index} says that {index} and one are {index + 1}, and then it says so again." for index in range(40)
]


class Payload:
    """An object that runs code when it is unpickled: it creates the file ``mark``."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable, tuple]:
        return os.system, (f"touch {self.mark}",)


def make_folder(folder: Path, model: Path, tokens: Path) -> Path:
    """Create ``folder`` from a tiny model and a token dataset of its tokenizer."""
    shutil.copytree(model, folder / "model")
    shutil.copytree(tokens, folder / "tokens")
    _write_documents(folder)
    _break_arguments(folder)
    _break_documents(folder)
    _break_models(folder)
    _break_tokenizers(folder)
    _break_token_datasets(folder)
    _break_runs(folder)
    (folder / "full").mkdir()
    (folder / "full" / "letter.txt").write_text("keep me")
    (folder / "file").write_text("keep me too")
    (folder / "read-only").mkdir(mode=0o555)
    shutil.copyfile(folder / "texts.jsonl", folder / "secret.jsonl")
    (folder / "secret.jsonl").chmod(0o000)
    (folder / "broken-link").symlink_to("nowhere")
    (folder / "circle").symlink_to("circle")
    return folder


def write_rows(folder: Path, **splits: dict[str, list]) -> None:
    """Write a token dataset without a manifest, from the columns of each split."""
    dataset = {name: datasets.Dataset.from_dict(columns) for name, columns in splits.items()}
    datasets.DatasetDict(dataset).save_to_disk(str(folder))


def edit_json(file: Path, change: Callable[[Any], Any]) -> None:
    """Change the content of a JSON file in place."""
    content = json.loads(file.read_text(encoding="utf-8"))
    change(content)
    file.write_text(json.dumps(content), encoding="utf-8")


def cut(file: Path, share: float = 0.5) -> None:
    """Keep the first ``share`` of a file."""
    content = file.read_bytes()
    file.unlink()  # it may be a link to a file that others use
    file.write_bytes(content[: int(len(content) * share)])


def _write_documents(folder: Path) -> None:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (folder / "texts.jsonl").write_text(lines, encoding="utf-8")
    (folder / "plain.txt").write_text("\n".join(TEXTS), encoding="utf-8")


def _break_arguments(folder: Path) -> None:
    configs = folder / "configs"
    configs.mkdir()
    for name, content in {
        "list": "- lr: 1\n",
        "text": "lr\n",
        "twice": "lr: 1e-4\nlr: 1e-5\n",
        "unknown": "learning_rate: 1e-4\nmicro_batch_sise: 2\n",
        "types": "lr: fast\nmicro_batch_size: [1, 2]\nresume: maybe\noutput_dir: 7\n",
        "code": f"lr: !!python/object/apply:os.system ['touch {folder}/ran-yaml']\n",
        "broken": "lr: [1\n",
        "nested": "training:\n  lr: 1e-4\n",
        "null-byte": 'model_name: "a\\0b"\n',
        "bomb": "a: &a [x, x]\nb: &b [*a, *a]\nlr: *b\n",
        "deep": f"architecture: {'[' * 3000}{']' * 3000}\n",
        "digits": f"lr: 1\nseed: {'9' * 5000}\n",
        "huge": "# nothing\n" * 100_000,
    }.items():
        (configs / f"{name}.yaml").write_text(content)
    os.mkfifo(configs / "pipe")
    (configs / "latin-1.yaml").write_bytes("project: Müller\n".encode("latin-1"))


def _break_documents(folder: Path) -> None:
    texts = folder / "texts"
    texts.mkdir()
    lines = (folder / "texts.jsonl").read_bytes()
    for name, content in {
        "empty.jsonl": b"",
        "blank.txt": b" \n\n",
        "bad-line.jsonl": lines + b'{"text": "no end\n',
        "numbers.jsonl": b'{"text": 7}\n',
        "other-column.jsonl": b'{"body": "x"}\n',
        "array-in-line.jsonl": b"[1, 2]\n",
        "latin-1.jsonl": b'{"text": "M\xfcller"}\n',
        "latin-1.txt": b"M\xfcller",
        "binary.txt": b"a\0b",
        "utf-16.txt": "text".encode("utf-16"),
        "zip.jsonl": b"PK\x03\x04" + bytes(64),
        "cut.jsonl.gz": gzip.compress(lines * 50)[:-40],
        "no-gzip.jsonl.gz": lines,
        "garbage.parquet": b"PAR1" + bytes(100),
        "no-parquet.parquet": lines,
        "ragged.csv": b"text,title\na,b\nc\n",
        "twice.csv": b"text,text\na,b\n",
        "quotes.csv": b'text\n"no end\n',
        "bad.json": b'{"text": ',
        "short.txt": b"one",
        "a.docx": b"x",
        "deep.jsonl": b'{"text": ' + b"[" * 100_000 + b"\n",
    }.items():
        (texts / name).write_bytes(content)
    datasets.Dataset.from_dict({"text": ["a"]}).to_parquet(str(texts / "cut.parquet"))
    cut(texts / "cut.parquet")
    datasets.Dataset.from_dict({"text": [1.5]}).to_parquet(str(texts / "numbers.parquet"))
    (folder / "no-texts").mkdir()
    (folder / "piped").mkdir()
    os.mkfifo(folder / "piped" / "a.jsonl")
    (folder / "script").mkdir()
    (folder / "script" / "script.py").write_text(f"import os\nos.system('touch {folder}/ran-script')\n")
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(folder / "saved"))
    shutil.copytree(folder / "saved", folder / "saved-cut")
    for file in (folder / "saved-cut").glob("*.arrow"):
        cut(file)


def _break_models(folder: Path) -> None:
    # each call makes a copy of the good model, in which one thing is damaged
    def model(name: str, *removed: str) -> Path:
        shutil.copytree(folder / "model", folder / "models" / name)
        for file in removed:
            (folder / "models" / name / file).unlink()
        return folder / "models" / name

    (model("no-config") / "config.json").unlink()
    (model("empty-config") / "config.json").write_text("")
    (model("cut-config") / "config.json").write_text("{")
    (model("list-config") / "config.json").write_text("[]")
    (model("binary-config") / "config.json").write_bytes(b"\xff\xfe\x00")
    (model("vision") / "config.json").write_text('{"model_type": "vit"}')
    (model("unknown") / "config.json").write_text('{"model_type": "x"}')
    edit_json(model("untyped") / "config.json", lambda config: config.pop("model_type"))
    edit_json(model("text-for-number") / "config.json", lambda config: config.update(hidden_size="wide"))
    edit_json(model("negative-layers") / "config.json", lambda config: config.update(num_hidden_layers=-1))
    edit_json(model("heads") / "config.json", lambda config: config.update(num_attention_heads=7, head_dim=None))
    edit_json(model("wider") / "config.json", lambda config: config.update(hidden_size=128))
    edit_json(model("deeper") / "config.json", lambda config: config.update(num_hidden_layers=3))
    model("no-weights", "model.safetensors")
    cut(model("cut-weights") / "model.safetensors")
    (model("empty-weights") / "model.safetensors").write_bytes(b"")
    (model("garbage-weights") / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    (model("pointer-weights") / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid x\n")
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (model("lost-shard", "model.safetensors") / "model.safetensors.index.json").write_text(json.dumps(index))
    edit_json(
        model("renamed-token") / "tokenizer.json",
        lambda content: content["model"]["vocab"].update(hen=content["model"]["vocab"].pop("he")),
    )
    edit_json(model("swapped-tokens") / "tokenizer.json", _swap_last_tokens)
    (model("bad-index", "model.safetensors") / "model.safetensors.index.json").write_text("{")


def _swap_last_tokens(content: dict[str, Any]) -> None:
    """Swap the ids of the last two tokens of a tokenizer."""
    vocabulary = content["model"]["vocab"]
    last, second_last = sorted(vocabulary, key=vocabulary.get)[:-3:-1]
    vocabulary[last], vocabulary[second_last] = vocabulary[second_last], vocabulary[last]


def _break_tokenizers(folder: Path) -> None:
    def tokenizer(name: str) -> Path:
        tokenizer_dir = folder / "tokenizers" / name
        tokenizer_dir.mkdir(parents=True)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(folder / "model" / file, tokenizer_dir / file)
        return tokenizer_dir

    (tokenizer("empty-json") / "tokenizer.json").write_text("")
    cut(tokenizer("cut-json") / "tokenizer.json")
    (tokenizer("other-json") / "tokenizer.json").write_text('{"a": 1}')
    (tokenizer("pointer") / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid x\n")
    (tokenizer("config-list") / "tokenizer_config.json").write_text("[]")
    edit_json(tokenizer("no-eos") / "tokenizer_config.json", lambda config: config.pop("eos_token"))
    (folder / "tokenizers" / "empty").mkdir()
    (folder / "tokenizers" / "garbage.model").write_bytes(b"\x00garbage")


def _break_token_datasets(folder: Path) -> None:
    def dataset(name: str) -> Path:
        shutil.copytree(folder / "tokens", folder / "datasets" / name)
        return folder / "datasets" / name

    rows = [[1, 2, 3]] * 8
    datasets_dir = folder / "datasets"
    write_rows(datasets_dir / "no-validation", train={"input_ids": rows})
    write_rows(datasets_dir / "no-train", test={"input_ids": rows})
    beyond_vocabulary = {"train": {"input_ids": [[1, 5000, 3]]}, "validation": {"input_ids": [[1, 2, 1000]]}}
    write_rows(datasets_dir / "other-vocabulary", **beyond_vocabulary)
    write_rows(datasets_dir / "other-labels", train={"input_ids": rows, "labels": [[1, 2, 5000]] * 8})
    write_rows(datasets_dir / "negative-labels", train={"input_ids": rows, "labels": [[1, 2, -7]] * 8})
    write_rows(datasets_dir / "negative", train={"input_ids": [[1, 2], [3, -100]]})
    write_rows(datasets_dir / "long", train={"input_ids": [[1] * 300]}, validation={"input_ids": [[1] * 256]})
    write_rows(datasets_dir / "texts", train={"text": ["a"]})
    write_rows(datasets_dir / "strings", train={"input_ids": ["a"]})
    write_rows(datasets_dir / "no-rows", train={"input_ids": rows[:0]})
    write_rows(datasets_dir / "empty-rows", train={"input_ids": [[], []]})
    write_rows(datasets_dir / "short-rows", train={"input_ids": [[1], [2]]})
    write_rows(datasets_dir / "nulls", train={"input_ids": [[1, None, 2], [1, 2, 3]]})
    write_rows(datasets_dir / "fewer-labels", train={"input_ids": rows, "labels": [[1, 2]] * 8})
    write_rows(datasets_dir / "starts-beyond", train={"input_ids": rows, "document_starts": [[0, 9]] * 8})
    cut(next((dataset("cut-arrow") / "train").glob("*.arrow")))
    next((dataset("lost-arrow") / "train").glob("*.arrow")).unlink()
    (dataset("empty-listing") / "dataset_dict.json").write_text("")
    (dataset("bad-state") / "train" / "state.json").write_text("{")
    (dataset("list-info") / "train" / "dataset_info.json").write_text("[]")
    (dataset("no-info") / "train" / "dataset_info.json").unlink()
    (dataset("bad-manifest") / "manifest.json").write_text("{")
    edit_json(dataset("old-manifest") / "manifest.json", lambda content: content.update(format=1))
    edit_json(dataset("unbalanced") / "manifest.json", lambda content: content["ledger"]["train"].update(rows=1))
    (dataset("no-manifest") / "manifest.json").unlink()
    with (dataset("edited-tokenizer") / "tokenizer" / "tokenizer.json").open("a") as file:
        file.write(" ")
    (dataset("no-tokenizer") / "tokenizer" / "tokenizer.json").unlink()


def _break_runs(folder: Path) -> None:
    weights = trained_weights(folder / "model")

    def checkpoint(name: str) -> Path:
        return write_full(folder / "runs" / name / "checkpoints" / "step-00000007", folder / "model", weights, step=7)

    checkpoint("good")
    (folder / "runs" / "good" / "metrics.csv").write_text("step,epoch\n7,0\n")
    (checkpoint("no-trainer") / "trainer.json").unlink()
    (checkpoint("cut-trainer") / "trainer.json").write_text('{"format": ')
    (checkpoint("list-trainer") / "trainer.json").write_text("[]")
    (checkpoint("bare-trainer") / "trainer.json").write_text(json.dumps({"format": FORMAT}))
    edit_json(checkpoint("format") / "trainer.json", lambda content: content.update(format=99))
    cut(checkpoint("cut-weights") / "model.safetensors")
    (checkpoint("no-weights") / "model.safetensors").unlink()
    (checkpoint("no-config") / "config.json").unlink()
    (checkpoint("cut-config") / "config.json").write_text("{")
    for name in ("list-trainer", "bare-trainer", "cut-config"):  # as if they had been written like this
        write_checksums(folder / "runs" / name / "checkpoints" / "step-00000007")
    trainer_json = checkpoint("folder-trainer") / "trainer.json"
    trainer_json.unlink()
    trainer_json.mkdir()
    (folder / "runs" / "file-checkpoints").mkdir()
    (folder / "runs" / "file-checkpoints" / "checkpoints").touch()
    (folder / "runs" / "folder-metrics" / "metrics.csv").mkdir(parents=True)
    (folder / "runs" / "unsaved").mkdir()
    (folder / "runs" / "unsaved" / "metrics.csv").write_text("step,epoch\n1,0\n")
    for name in ("pickled.pt", "pickled.ckpt"):
        (folder / name).write_bytes(pickle.dumps(Payload(folder / f"ran-{name}")))
