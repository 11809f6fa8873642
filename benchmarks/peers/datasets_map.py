"""Tokenize with the usual recipe: ``datasets.map`` to tokenize, ``datasets.map`` to group, ``save_to_disk``.

This follows transformers' examples/pytorch/language-modeling/run_clm.py, without the columns that continued pretraining
does not need (attention mask, labels), and with an EOS after every document.
"""

import argparse
from itertools import chain
from typing import Any

from datasets import load_dataset
from transformers import AutoTokenizer


def tokenize(batch: dict[str, list[Any]], tokenizer: Any) -> dict[str, list[list[int]]]:
    """Return the documents' ids with EOS; the tokenizer adds BOS."""
    ended = [text + tokenizer.eos_token for text in batch["text"]]
    return {"input_ids": tokenizer(ended, return_attention_mask=False)["input_ids"]}


def group_texts(batch: dict[str, list[list[int]]], max_length: int) -> dict[str, list[list[int]]]:
    """Join a batch's documents and split them into rows; drop the batch's last, incomplete row."""
    joined = list(chain.from_iterable(batch["input_ids"]))
    whole = len(joined) // max_length * max_length
    return {"input_ids": [joined[start : start + max_length] for start in range(0, whole, max_length)]}


def main() -> None:
    """Tokenize the documents given on the command line."""
    parser = argparse.ArgumentParser()
    for name in ("--dataset", "--tokenizer_name", "--output_dir"):
        parser.add_argument(name, required=True)
    for name in ("--max_length", "--num_proc"):
        parser.add_argument(name, type=int, required=True)
    arguments = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer_name)
    documents = load_dataset("json", data_files=arguments.dataset, split="train")
    tokenized = documents.map(
        tokenize,
        batched=True,
        num_proc=arguments.num_proc,
        remove_columns=documents.column_names,
        fn_kwargs={"tokenizer": tokenizer},
    )
    rows = tokenized.map(
        group_texts, batched=True, num_proc=arguments.num_proc, fn_kwargs={"max_length": arguments.max_length}
    )
    rows.save_to_disk(arguments.output_dir)


if __name__ == "__main__":
    main()
