"""tokenize_dataset.py on preference pairs: forms of rows, tokens, labels, rows, counts, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

import tokenize_dataset
from tests.support.token_datasets import manifest_of

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def pair_of(number: int) -> dict[str, Any]:
    """Return a pair whose prompts have one, two or three turns."""
    turns = [turn for n in range(number % 3) for turn in (("user", f"Question {n}?"), ("assistant", f"Answer {n}."))]
    prompt = [{"role": role, "content": content} for role, content in (*turns, ("user", f"And {number}?"))]
    chosen, rejected = f"It is {number}." + " Really." * (number % 5), f"I do not know {number}." * (1 + number % 2)
    answers = {"chosen": chosen, "rejected": rejected}
    return {name: [*prompt, {"role": "assistant", "content": text}] for name, text in answers.items()}


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory, chatml_dir: Path) -> Path:
    """The small tokenizer with a template that adds no system message."""
    folder = Path(shutil.copytree(chatml_dir, tmp_path_factory.mktemp("pairs") / "tokenizer"))
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(folder: Path, tokenizer: Path, *sources: object, **options: object) -> datasets.DatasetDict:
    flags = [
        part for name, value in {"max_length": 256, "num_proc": 1, **options}.items() for part in (f"--{name}", value)
    ]
    argv = ["--dataset", *sources, "--tokenizer_name", tokenizer, "--output_dir", folder, *flags]
    tokenize_dataset.main([str(part) for part in argv])
    return datasets.load_from_disk(folder)


def sequences_of(split: datasets.Dataset) -> list[tuple[list[int], list[bool]]]:
    """Return the tokens of each sequence in order, without padding, and which are supervised."""
    found = []
    for ids, labels, starts in zip(split["input_ids"][:], split["labels"][:], split["document_starts"][:], strict=True):
        ends = [*starts[1:], max(np.flatnonzero(np.array(labels) != -100)) + 2]  # a line break ends a turn
        found += [(ids[a:b], [label != -100 for label in labels[a:b]]) for a, b in zip(starts, ends, strict=True)]
    return found


def test_a_pair_has_the_tokens_and_labels_of_two_chats(tmp_path: Path, tokenizer_dir: Path) -> None:
    source = write(tmp_path / "a.jsonl", [pair_of(n) for n in range(30)])
    rows = run(tmp_path / "out", tokenizer_dir, source, validation_split=0)
    sft = [{"messages": pair_of(n)[name]} for n in range(30) for name in ("chosen", "rejected")]
    alone = run(
        tmp_path / "sft",
        tokenizer_dir,
        write(tmp_path / "b.jsonl", sft),
        validation_split=0,
        packing="none",
        train_on="last",
    )
    assert sorted(sequences_of(rows["train"])) == sorted(sequences_of(alone["train"]))
    assert manifest_of(tmp_path / "out").has_pairs
