"""A token dataset is trained on only with the model it was made for, and only as it was made."""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import AutoConfig

from fabric_train.cli.errors import InputError
from fabric_train.data.token_dataset import Rows, TokenDataset, open_dataset
from fabric_train.model.hf_model import ModelShape, read_shape, shape_from_config
from fabric_train.preflight.dataset_check import DatasetCheck, check_dataset
from tests.support.checkpoint_examples import trained_weights, write_full
from tests.support.token_datasets import tokenize, write_jsonl

Change = Callable[[dict[str, Any]], None]
SILENT = DatasetCheck((), ())


@pytest.fixture
def tokens(tmp_path: Path, tiny_tokens_dir: Path) -> Path:
    return Path(shutil.copytree(tiny_tokens_dir, tmp_path / "tokens"))


@pytest.fixture
def model(tmp_path: Path, tiny_model_dir: Path) -> Path:
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


def change(file: Path, how: Change) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    how(content)
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def compare(tokens: Path, model: Path | ModelShape, isolate_documents: bool = True) -> DatasetCheck:
    shape = model if isinstance(model, ModelShape) else read_shape(str(model))
    return check_dataset(open_dataset(str(tokens)), shape, isolate_documents)


def fault(tokens: Path, model: Path | ModelShape) -> str:
    verdict = compare(tokens, model)
    (line,) = verdict.faults
    assert "\n" not in line
    return line


def note(tokens: Path, model: Path | ModelShape) -> str:
    verdict = compare(tokens, model)
    assert not verdict.faults
    (line,) = verdict.notes
    assert "\n" not in line
    return line


# --------------------------------------------------------------------------------------------------------- agreement


def test_matching_dataset_and_model_pass_without_reading_every_id(
    tokens: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Rows, "id_range")
    assert compare(tokens, model) == SILENT


def test_the_same_tokenizer_in_other_words_is_the_same(tokens: Path, model: Path) -> None:
    def rewrite(content: dict[str, Any]) -> None:
        content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]  # as it once was written
        content["model"]["vocab"] = dict(reversed(content["model"]["vocab"].items()))
        content["post_processor"] = None  # BOS and EOS are put by tokenize_dataset.py itself
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [content["pre_tokenizer"]]}

    before = (model / "tokenizer.json").read_bytes()
    change(model / "tokenizer.json", rewrite)
    assert (model / "tokenizer.json").read_bytes() != before
    assert compare(tokens, model) == SILENT


def test_a_checkpoint_is_compared_by_the_tokenizer_attached_to_it(tokens: Path, model: Path, tmp_path: Path) -> None:
    checkpoint = write_full(tmp_path / "step-00000001", model, trained_weights(model), step=1)
    assert compare(tokens, checkpoint) == SILENT
    change(checkpoint / "tokenizer" / "tokenizer.json", swap_two_tokens)
    assert f"there: {checkpoint}/tokenizer/tokenizer.json" in fault(tokens, checkpoint)


# -------------------------------------------------------------------------------------------------- the folder itself


def save_changed(tokens: Path, how: Callable[[datasets.Dataset], datasets.Dataset], *names: str) -> None:
    """Replace the rows of a token dataset and leave its manifest and tokenizer."""
    splits = datasets.load_from_disk(str(tokens))
    changed = datasets.DatasetDict({name: how(split) if name in names else split for name, split in splits.items()})
    changed.save_to_disk(str(tokens) + "-new")
    for name in ("manifest.json", "tokenizer"):
        (tokens / name).rename(Path(f"{tokens}-new", name))
    shutil.rmtree(tokens)
    Path(f"{tokens}-new").rename(tokens)


def test_rows_that_were_added_or_taken_away_are_refused(tokens: Path, model: Path) -> None:
    num_rows = len(open_dataset(str(tokens)).train)
    save_changed(tokens, lambda split: split.select(range(5)), "train")
    assert fault(tokens, model) == (
        f"{tokens}: manifest.json says ledger.train.rows {num_rows:,}, but there are 5; the folder was changed after "
        "it was written; tokenize again"
    )


def test_a_split_that_was_taken_away_is_refused(tokens: Path, model: Path) -> None:
    shutil.rmtree(tokens / "validation")
    (tokens / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert ": manifest.json says ledger.validation.rows " in fault(tokens, model)


def test_rows_of_another_length_are_refused(tokens: Path, model: Path) -> None:
    def halve(split: datasets.Dataset) -> datasets.Dataset:
        return datasets.Dataset.from_dict(
            {"input_ids": [row[: 32 + i % 2] for i, row in enumerate(split["input_ids"])]}
        )

    save_changed(tokens, halve, "validation")
    assert fault(tokens, model) == (
        f"{tokens}: manifest.json says settings.max_length 64, but rows of validation have 32 to 33 tokens; the "
        "folder was changed after it was written; tokenize again"
    )


def test_a_tokenizer_that_was_edited_or_lost_is_refused(tokens: Path, model: Path) -> None:
    file = tokens / "tokenizer" / "tokenizer_config.json"
    file.write_text(file.read_text(encoding="utf-8") + "\n")
    assert fault(tokens, model).startswith(f"{file} does not match tokenizer.sha256 in manifest.json: ")
    file.unlink()
    assert fault(tokens, model) == f"{file} is missing, but manifest.json lists it in tokenizer.sha256; tokenize again"


def test_a_damaged_manifest_is_refused(tokens: Path, model: Path) -> None:
    change(tokens / "manifest.json", lambda content: content["ledger"]["train"].update(tokens_in=1))
    with pytest.raises(InputError, match=r"manifest.json is damaged: tokens into train: 1 is not"):
        compare(tokens, model)


@pytest.mark.parametrize("isolate_documents", [True, False])
def test_an_older_folder_is_taken_with_one_note(tmp_path: Path, model: Path, isolate_documents: bool) -> None:
    rows = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]], "labels": [[-100, 2, 3]]})
    datasets.DatasetDict({"train": rows, "valid": rows}).save_to_disk(str(tmp_path / "old"))
    verdict = compare(tmp_path / "old", model, isolate_documents)
    borders = (
        " and where documents begin, so documents in the same row attend to each other" if isolate_documents else ""
    )
    assert not verdict.faults
    assert verdict.notes == (
        f"{tmp_path}/old has no manifest.json because an older version wrote it, so it is unknown which tokenizer "
        f"was used{borders}",
    )


# ---------------------------------------------------------------------------------------------------------- the model


def with_vocabulary(model: Path, size: int) -> ModelShape:
    return replace(read_shape(str(model)), vocab_size=size)


def test_ids_beyond_the_models_vocabulary_are_refused(tokens: Path, model: Path) -> None:
    faults = compare(tokens, with_vocabulary(model, 300)).faults
    assert [line.split(" holds ")[0] for line in faults] == [f"{tokens}: train", f"{tokens}: validation"]
    resized = "its own tokenizer has 1000; resize the model in transformers with model.resize_token_embeddings(1000), "
    assert all(f"{model} has 300 tokens; {resized}" in line for line in faults)
    new = replace(with_vocabulary(model, 300), is_new=True)
    more = "give --vocab_size 1000 or more (docs/reference/errors.md#vocabulary)"
    assert all(line.endswith(more) for line in compare(tokens, new).faults)
    change(model / "tokenizer.json", swap_two_tokens)
    assert (
        compare(tokens, with_vocabulary(model, 300))
        .faults[-1]
        .endswith("; tokenize with the model's own tokenizer (docs/reference/errors.md#vocabulary)")
    )


def test_tokenizer_may_have_more_tokens_where_the_rows_hold_none(tokens: Path, model: Path) -> None:
    change(tokens / "manifest.json", lambda content: content["tokenizer"].update(vocab_size=1001))
    assert compare(tokens, model) == SILENT


def test_rows_beyond_the_models_positions_are_refused(tokens: Path, model: Path) -> None:
    change(model / "config.json", lambda config: config.update(max_position_embeddings=63))
    shape = read_shape(str(model))
    assert {line.rpartition("; ")[2] for line in compare(tokens, shape).faults} == {
        "tokenize with --max_length 63 or less, or extend the positions: --rope_scaling llama3:2 (docs/long_rows.md)"
    }


def swap_two_tokens(content: dict[str, Any]) -> None:
    vocabulary = content["model"]["vocab"]
    vocabulary["the"], vocabulary["and"] = vocabulary["and"], vocabulary["the"]


def rename_token(content: dict[str, Any]) -> None:
    content["model"]["vocab"]["no such word"] = content["model"]["vocab"].pop("the")


def lowercase(content: dict[str, Any]) -> None:
    content["normalizer"] = {"type": "Lowercase"}


def begin_with_a_blank(content: dict[str, Any]) -> None:
    content["pre_tokenizer"]["add_prefix_space"] = True


def drop_merge(content: dict[str, Any]) -> None:
    merges = content["model"]["merges"]
    merges.remove(next(pair for pair in merges if "".join(pair) == "the"))


def move_eos(content: dict[str, Any]) -> None:
    content["model"]["vocab"]["<|end_of_text|>"] = 1000
    content["added_tokens"][1]["id"] = 1000


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (swap_two_tokens, "token 'and' is id {and} here and {the} there"),
        (rename_token, "token 'the' is id {the} here and missing there"),
        (lowercase, "normalizer differ: \"We'll see: DON'T you"),
        (begin_with_a_blank, "pre_tokenizer differ: "),
        (drop_merge, "merges differ: 'the' is [{the}] here and ["),
        (move_eos, "token '<|end_of_text|>' is id 1 here and 1000 there"),
    ],
)
def test_other_tokenizer_than_the_models_is_refused_with_the_difference(
    tokens: Path, model: Path, how: Change, words: str
) -> None:
    ids = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    change(model / "tokenizer.json", how)
    line = fault(tokens, model)
    assert line.startswith(f"{tokens}: not tokenized with the tokenizer of {model}: {words.format_map(ids)}")
    assert f"; tokenize with --tokenizer_name {model}, or train a model that uses " in line


def test_a_model_from_the_hub_is_compared_by_its_cached_tokenizer(
    tokens: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = {"tokenizer.json": str(model / "tokenizer.json")}
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda repository, file: cache.get(file))
    shape = replace(read_shape(str(model)), source="owner/name")
    assert compare(tokens, shape) == SILENT
    change(model / "tokenizer.json", rename_token)
    assert ": not tokenized with the tokenizer of owner/name: " in fault(tokens, shape)
    cache.clear()
    assert note(tokens, shape).startswith("owner/name has no tokenizer.json, so it is unknown whether it fits ")


def test_a_damaged_tokenizer_of_the_model_is_refused(tokens: Path, model: Path) -> None:
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer.json is not a tokenizer \(KeyError"):
        compare(tokens, model)


def test_a_tokenizer_that_an_export_would_read_as_another_is_refused(
    tmp_path: Path, tiny_model_dir: Path, model: Path
) -> None:
    """Beside the config.json of a Qwen 2, transformers takes the class of its tokenizers, which adds a token."""
    alone = Path(shutil.copytree(tiny_model_dir, tmp_path / "alone", ignore=shutil.ignore_patterns("config.json")))
    tokenize(tmp_path / "tokens", alone, write_jsonl(tmp_path / "texts.jsonl"))
    assert not compare(tmp_path / "tokens", model).faults
    sizes = {"vocab_size": 1001, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    qwen = AutoConfig.for_model("qwen2", **sizes, num_attention_heads=2, num_key_value_heads=1)
    shape = shape_from_config(qwen, "model", "LlamaDecoderLayer", None, is_new=True)
    line = fault(tmp_path / "tokens", replace(shape, is_new=False))
    assert "next to the config.json of a qwen2, transformers loads the tokenizer" in line
    assert "could not be exported" in line


def test_an_added_token_that_no_row_holds_is_a_note(tokens: Path, model: Path) -> None:
    added = {"id": 1000, "content": "<|tool|>", "special": True, "normalized": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    change(model / "tokenizer.json", lambda content: content["added_tokens"].append(added | flags))
    assert note(tokens, model).startswith(
        "the tokenizers only differ in added tokens: token '<|tool|>' is id 1000 there and missing here (here: "
    )


def test_other_document_borders_in_a_configuration_are_a_note(tokens: Path, model: Path) -> None:
    change(model / "config.json", lambda content: content.update(eos_token_id=[7, 1]))
    assert compare(tokens, model) == SILENT
    change(model / "config.json", lambda content: content.update(eos_token_id=[7, 8]))
    assert note(tokens, model) == (
        f"{tokens}: documents end with '<|end_of_text|>' (id 1), but config.json of {model} has eos_token_id 7 or 8"
    )
    change(model / "config.json", lambda content: content.update(eos_token_id=None, bos_token_id=None))
    assert compare(tokens, model) == SILENT


def test_another_chat_template_than_the_models_is_a_note(tokens: Path, model: Path) -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    sha256 = hashlib.sha256(template.encode()).hexdigest()
    change(tokens / "manifest.json", lambda content: content["tokenizer"].update(chat_template_sha256=sha256))
    assert compare(tokens, model) == SILENT  # the model has none
    (model / "chat_template.jinja").write_text(template)
    assert compare(tokens, model) == SILENT
    (model / "chat_template.jinja").write_text(template + " ")
    assert ": its chats were rendered with a different chat template than " in note(tokens, model)
    (model / "chat_template.jinja").unlink()
    change(model / "tokenizer_config.json", lambda content: content.update(chat_template=template + "\n"))
    assert ": its chats were rendered with a different chat template than " in note(tokens, model)


def test_a_token_of_the_chat_template_counts_as_one_of_the_rows(tokens: Path, model: Path) -> None:
    added = {"id": 1000, "content": "<|turn|>", "special": True, "normalized": False}
    added |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    change(model / "tokenizer.json", lambda content: content["added_tokens"].append(added))
    template = tokens / "tokenizer" / "chat_template.jinja"
    template.write_text("<|turn|>")
    assert (
        fault(tokens, model)
        .partition(": not tokenized ")[2]
        .startswith(f"with the tokenizer of {model}: token '<|turn|>' is id 1000 there and missing here")
    )


def test_the_manifest_is_read_when_it_is_asked_for(tokens: Path) -> None:
    dataset = open_dataset(str(tokens))
    assert isinstance(dataset, TokenDataset)
    assert dataset.manifest is not None
    assert dataset.manifest.ledger.splits["train"].rows == len(dataset.train)
    (tokens / "manifest.json").unlink()
    assert open_dataset(str(tokens)).manifest is None
