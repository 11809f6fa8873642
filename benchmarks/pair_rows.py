"""Write token datasets of preference pairs of chosen lengths, from made-up words that are one token each."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

from tests.support.pair_datasets import TEMPLATE, tokenize
from tests.support.tiny_model import write_tokenizer

TEMPLATE_TOKENS = 16
"""At most so many tokens of a prompt with its answer are not words of them."""
_WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def write_chat_tokenizer(folder: Path) -> Path:
    """Write a tokenizer with a chat template, and return its folder."""
    write_tokenizer(folder, [" ".join((*_WORDS, *_WORDS)), "user: assistant:"])
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def write_pairs(
    folder: Path, tokenizer: Path, pairs: Sequence[tuple[int, int, int]], length: int, num_sources: int = 1
) -> None:
    """Write a token dataset of rows of ``length`` tokens, without a validation split.

    Args:
        folder: of the token dataset; the texts lie beside it.
        tokenizer: of ``write_chat_tokenizer``.
        pairs: for each pair, the words of the prompt, the chosen and the rejected answer.
        length: of a row.
        num_sources: over which the pairs are spread.
    """
    draw = random.Random(0)
    sources = []
    for number in range(num_sources):
        sources.append(folder.with_name(f"{folder.name}-{number}.jsonl"))
        with sources[-1].open("w", encoding="utf-8") as file:
            for lengths in pairs[number::num_sources]:
                prompt, chosen, rejected = (" ".join(draw.choices(_WORDS, k=words)) for words in lengths)
                row = {"prompt": [{"role": "user", "content": prompt}]}
                row["chosen"] = [{"role": "assistant", "content": f"one {chosen}"}]
                row["rejected"] = [{"role": "assistant", "content": f"two {rejected}"}]  # never the same answer
                file.write(json.dumps(row) + "\n")
    tokenize(folder, tokenizer, sources, max_length=length, validation_split=0)
