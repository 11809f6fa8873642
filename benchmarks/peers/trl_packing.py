"""Tokenize with TRL: ``datasets.map`` to tokenize, ``pack_dataset``, ``save_to_disk``.

The strategy "wrapped" joins the documents and splits them into rows, as in continued pretraining. The default strategy
would truncate documents that are longer than a row.
"""

import argparse
from typing import Any

from datasets import load_dataset
from transformers import AutoTokenizer
from trl import pack_dataset


def tokenize(batch: dict[str, list[Any]], tokenizer: Any) -> dict[str, list[list[int]]]:
    """Return the documents' ids with EOS; the tokenizer adds BOS."""
    ended = [text + tokenizer.eos_token for text in batch["text"]]
    return {"input_ids": tokenizer(ended, return_attention_mask=False)["input_ids"]}


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
    rows = pack_dataset(tokenized, arguments.max_length, "wrapped", {"num_proc": arguments.num_proc})
    rows.save_to_disk(arguments.output_dir)


if __name__ == "__main__":
    main()
