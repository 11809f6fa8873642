"""Write token datasets of preference pairs, and a tiny model with a chat template that they are made with."""

import json
from collections.abc import Sequence
from pathlib import Path

from fabric_train.programs import tokenize_dataset
from tests.support.tiny_model import write_tiny_model

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
ROW_LENGTH = 192
_WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def write_model(folder: Path) -> Path:
    """Write a Llama of two small layers whose tokenizer has a chat template."""
    write_tiny_model(folder, [" ".join(_WORDS), "user assistant: Count to the number of words."])
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def write_source(path: Path, numbers: Sequence[int]) -> Path:
    """Write a JSON Lines file of pairs: an answer counts on from a number, the rejected one backwards, and longer."""
    with path.open("w") as file:
        for number in numbers:
            start = number % 5
            length = 1 + number % 4
            prompt = f"Count {'on ' * (number % 3)}from {_WORDS[start]}, {number}."
            rejected = _WORDS[start : start + length + number % 2][::-1]
            answers = {"chosen": _WORDS[start : start + length], "rejected": [*rejected, "no"]}
            row = {name: [{"role": "assistant", "content": " ".join(words)}] for name, words in answers.items()}
            file.write(json.dumps({"prompt": [{"role": "user", "content": prompt}], **row}) + "\n")
    return path


def tokenize(folder: Path, model: Path, sources: Sequence[Path], **options: object) -> Path:
    """Make a token dataset of pairs in rows of ``ROW_LENGTH`` tokens."""
    given = {"max_length": ROW_LENGTH, "num_proc": 1, "validation_split": 0.25, **options}
    flags = [part for name, value in given.items() for part in (f"--{name}", value)]
    argv = ["--dataset", *sources, "--tokenizer_name", model, "--output_dir", folder, *flags]
    tokenize_dataset.main([str(part) for part in argv])
    return folder
