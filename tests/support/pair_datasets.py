"""Write token datasets of preference pairs and of unpaired answers, and a tiny model that they are made with."""

import csv
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from fabric_train.data.token_dataset import open_dataset
from fabric_train.programs import tokenize_dataset
from tests.support import short_runs
from tests.support.programs import option_words
from tests.support.tiny_model import write_tiny_model

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
ROW_LENGTH = 192
_WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]

LARGEST_LOG_PROBABILITY = 60.0
"""Nats that an answer of the sources has at most before the model has learned."""


def write_model(folder: Path) -> Path:
    """Write a Llama of two small layers whose tokenizer has a chat template; return its folder."""
    write_tiny_model(folder, [" ".join(_WORDS), "user assistant: Count to the number of words."])
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def write_source(path: Path, pair_numbers: Iterable[int]) -> Path:
    """Write a JSON Lines file of pairs, and return its path.

    The prompt asks to count on from a word. The chosen answer does so. The rejected answer counts backwards, says "no"
    at the end, and is longer.

    Args:
        path: of the file.
        pair_numbers: decide first word, length and prompt of each pair.
    """
    with path.open("w") as file:
        for pair_number in pair_numbers:
            start = pair_number % 5
            chosen_stop = start + 1 + pair_number % 4
            rejected_stop = chosen_stop + pair_number % 2
            prompt = f"Count {'on ' * (pair_number % 3)}from {_WORDS[start]}, {pair_number}."
            chosen = _WORDS[start:chosen_stop]
            rejected = [*_WORDS[start:rejected_stop][::-1], "no"]
            pair = {
                "prompt": [{"role": "user", "content": prompt}],
                "chosen": [{"role": "assistant", "content": " ".join(chosen)}],
                "rejected": [{"role": "assistant", "content": " ".join(rejected)}],
            }
            file.write(json.dumps(pair) + "\n")
    return path


def write_unpaired_source(path: Path, numbers: Iterable[int]) -> Path:
    """Write a JSON Lines file of unpaired answers, and return its path.

    Desirable answers count on from a word, undesirable ones backwards. Every third number gives an undesirable one.
    Some rows are a prompt and a completion, and some are messages.
    """
    with path.open("w") as file:
        for number in numbers:
            start = number % 5
            words = _WORDS[start : start + 1 + number % 4]
            is_desirable = number % 3 > 0
            if not is_desirable:
                words = [*words[::-1], "no"]
            prompt = f"Count {'on ' * (number % 3)}from {_WORDS[start]}, {number}."
            row: dict[str, object] = {"prompt": prompt, "completion": " ".join(words)}
            if number % 2:
                messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": " ".join(words)}]
                row = {"messages": messages}
            file.write(json.dumps(row | {"label": is_desirable}) + "\n")
    return path


def tokenize(folder: Path, model: Path, sources: Sequence[Path], **options: object) -> Path:
    """Make a token dataset of pairs or unpaired answers in rows of ``ROW_LENGTH`` tokens; return its folder."""
    arguments = {
        "dataset": list(sources),
        "tokenizer_name": model,
        "output_dir": folder,
        "max_length": ROW_LENGTH,
        "num_proc": 1,
        "validation_split": 0.25,
        **options,
    }
    tokenize_dataset.main(option_words(arguments))
    return folder


def whole_windows(tokens: Path, num_data_ranks: int, micro_batch_size: int) -> dict[str, object]:
    """Return the options with which a window has all rows, so that it has the same answers however they are packed."""
    num_rows = len(open_dataset(str(tokens)).train)
    return {
        "micro_batch_size": micro_batch_size,
        "gradient_accumulation_steps": math.ceil(num_rows / (num_data_ranks * micro_batch_size)),
        "eval_batch_size": micro_batch_size,
    }


def training_argv(model: Path, tokens: Path, run: Path, **options: object) -> list[str]:
    """Return the words of a run of three steps on answers; ``options`` has its objective."""
    settings: dict[str, object] = {
        "eval_at_start": "true",
        "eval_iters": None,
        "max_step": 3,
        "number_epochs": 9,
        "total_batch_size": None,
        "save_step_interval": 2,
        "eval_step_interval": 3,
        "lr": 3e-3,
    }
    return short_runs.argv(model, tokens, run, **{**settings, **options})


def read_table(run: Path) -> list[dict[str, str]]:
    """Return the rows of a run's metrics.csv by column."""
    with (run / "metrics.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
