"""tokenize_dataset.py on chats and instructions: labels, rows and counts."""

import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

import tokenize_dataset
from fabric_train.cli.errors import InputError
from fabric_train.data.token_dataset import open_dataset
from tests.support.token_datasets import manifest_of, write_jsonl

QUESTIONS = [f"What is {number} plus {number}?" for number in range(30)]
ANSWERS = [f"It is {2 * number}." + " Really." * (number % 5) for number in range(30)]
FORMATS: dict[str, Any] = {
    "messages": lambda q, a: {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]},
    "conversations": lambda q, a: {"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]},
    "alpaca": lambda q, a: {"instruction": q, "input": "", "output": a},
    "prompt_completion": lambda q, a: {"prompt": q, "completion": a},
}


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory, chatml_dir: Path) -> Path:
    """The small tokenizer with a template that adds no system message."""
    folder = Path(shutil.copytree(chatml_dir, tmp_path_factory.mktemp("chats") / "tokenizer"))
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(folder: Path, tokenizer: Path, *sources: Path, **options: object) -> datasets.DatasetDict:
    flags = [
        part for name, value in {"max_length": 128, "num_proc": 1, **options}.items() for part in (f"--{name}", value)
    ]
    argv = ["--dataset", *sources, "--tokenizer_name", tokenizer, "--output_dir", folder, *flags]
    tokenize_dataset.main([str(part) for part in argv])
    return datasets.load_from_disk(folder)


def supervised_texts(split: datasets.Dataset, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Return the texts of supervised runs of tokens, with control tokens."""
    texts = []
    for labels in np.array(split["labels"][:]):
        for run_ in np.split(labels, np.flatnonzero(np.diff(labels != -100)) + 1):
            if run_[0] != -100:
                texts.append(str(tokenizer.decode(run_)))
    return texts


@pytest.mark.parametrize("data_format", FORMATS)
def test_only_answers_are_supervised_in_every_row_format(tmp_path: Path, tokenizer_dir: Path, data_format: str) -> None:
    source = write(tmp_path / "a.jsonl", [FORMATS[data_format](q, a) for q, a in zip(QUESTIONS, ANSWERS, strict=True)])
    rows = run(tmp_path / "out", tokenizer_dir, source, packing="best_fit", validation_split=0)["train"]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "out" / "tokenizer")
    assert sorted(supervised_texts(rows, tokenizer)) == sorted(f"{answer}<|im_end|>" for answer in ANSWERS)
    manifest = manifest_of(tmp_path / "out")
    assert manifest.tokenizer.end_of_turn_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    split = manifest.ledger.splits["train"]
    assert split.tokens_supervised == sum(label != -100 for labels in rows["labels"][:] for label in labels)
    assert split.tokens_padding / (split.rows * 128) < 0.1


def test_rows_of_llama3_chats_load_as_batches_with_labels_and_borders(tmp_path: Path, llama3_dir: Path) -> None:
    source = write(tmp_path / "a.jsonl", [FORMATS["messages"](q, a) for q, a in zip(QUESTIONS, ANSWERS, strict=True)])
    run(tmp_path / "out", llama3_dir, source, packing="best_fit")
    batch = open_dataset(str(tmp_path / "out")).train.__getitems__([0, 1])
    assert batch.documents is not None
    assert 0 < (batch.labels != -100).sum() < batch.labels.numel() / 2
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "out" / "tokenizer")
    assert tokenizer.chat_template  # Llama-3's, which exports need
    manifest = manifest_of(tmp_path / "out")
    assert manifest.tokenizer.end_of_turn_token_id == tokenizer.convert_tokens_to_ids("<|eot_id|>")


def test_text_and_chats_are_tokenized_together(tmp_path: Path, tokenizer_dir: Path) -> None:
    chats = write(tmp_path / "a.jsonl", [FORMATS["messages"](q, a) for q, a in zip(QUESTIONS, ANSWERS, strict=True)])
    texts = write_jsonl(tmp_path / "b.jsonl", ["Plain text, all of which is supervised."] * 20)
    rows = run(tmp_path / "out", tokenizer_dir, chats, texts, packing="none", validation_split=0)["train"]
    manifest = manifest_of(tmp_path / "out")
    assert [source.documents for source in manifest.sources] == [30, 20]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "out" / "tokenizer")
    whole = "<|im_start|>Plain text, all of which is supervised.<|im_end|>"
    assert supervised_texts(rows, tokenizer).count(whole) == 20


def test_long_chats_are_cut_at_turns_or_dropped_and_counted(tmp_path: Path, tokenizer_dir: Path) -> None:
    turns = [{"role": role, "content": f"{role} speaks, turn {n}"} for n in range(20) for role in ("user", "assistant")]
    source = write(tmp_path / "a.jsonl", [{"messages": turns}, *[FORMATS["messages"]("Hi", "Ho")] * 9])
    run(tmp_path / "cut", tokenizer_dir, source, packing="none", validation_split=0)
    ledger = manifest_of(tmp_path / "cut").ledger
    assert (ledger.documents_kept, ledger.documents_skipped) == (10, {})
    assert ledger.tokens_cut["too_long"] > 100
    run(tmp_path / "dropped", tokenizer_dir, source, packing="none", too_long="drop", validation_split=0)
    ledger = manifest_of(tmp_path / "dropped").ledger
    assert (ledger.documents_kept, ledger.documents_skipped, ledger.tokens_cut) == (9, {"too_long": 1}, {})


def test_row_of_unknown_format_is_shown_with_file_line_and_formats(tmp_path: Path, tokenizer_dir: Path) -> None:
    source = write(tmp_path / "a.jsonl", [FORMATS["messages"]("Hi", "Ho"), {"messages": "Hello"}])
    with pytest.raises(InputError, match=r"line 2: .*accepted: messages \[.*Hello.*--on_bad_rows skip"):
        run(tmp_path / "out", tokenizer_dir, source, packing="none")
    with pytest.raises(InputError, match=r"no column 'text'; there are: question; .*conversations .*the row: \{"):
        run(tmp_path / "out", tokenizer_dir, write(tmp_path / "b.jsonl", [{"question": "Hi"}]))


def test_tokenizer_without_chat_template_is_refused_for_chats(tmp_path: Path, tiny_model_dir: Path) -> None:
    source = write(tmp_path / "a.jsonl", [FORMATS["messages"]("Hi", "Ho")])
    with pytest.raises(InputError, match="no chat template"):
        run(tmp_path / "out", tiny_model_dir, source)
    assert not (tmp_path / "out").exists()
